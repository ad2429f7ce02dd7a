"""Reading prompts, writing answers, the run record and the progress display."""

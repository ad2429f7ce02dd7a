"""`tinyvllm chat`: a talk with a model, line by line, and how its answers are shown."""

"""Model files and the Llama forward pass."""

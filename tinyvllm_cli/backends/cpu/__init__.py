"""The NumPy backend: the meaning of every kernel, and the fallback where no GPU is."""

"""The CUDA backend: the only part of the package that may import CuPy."""

"""Calls of the CUDA driver that CuPy does not offer: launch attributes and tensor maps."""

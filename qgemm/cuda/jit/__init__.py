"""Composing, compiling and caching kernels."""

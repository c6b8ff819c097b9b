"""The CPU backend: products by Tensors, by compiled code (native/) or by NumPy (reference.py), the reference.

A call goes from backend.py to fast_path.py, which repeats a product by the same tensor, else to products.py, which
checks the arguments and takes the arrays in; from there on to the code that multiplies.
"""

from .backend import BACKEND as BACKEND
from .backend import CpuBackend as CpuBackend

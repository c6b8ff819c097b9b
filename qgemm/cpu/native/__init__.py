"""Products by C code that is compiled for this CPU at first use: kernels/cpu/. NumPy is the reference, and serves where
no compiler is.
"""

from .libraries import serves
from .library import reason
from .products import multiply_a8, multiply_a16, preparation, quantize

__all__ = ["multiply_a8", "multiply_a16", "preparation", "quantize", "reason", "serves"]

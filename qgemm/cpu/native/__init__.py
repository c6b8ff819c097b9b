"""Products by C code, kernels/cpu/: prebuilt for this kind of CPU, or compiled for this CPU at first use. NumPy is the
reference, and serves where neither can be.
"""

from .libraries import serves
from .library import origin, reason
from .products import multiply_a8, multiply_a16, preparation, quantize

__all__ = ["multiply_a8", "multiply_a16", "origin", "preparation", "quantize", "reason", "serves"]

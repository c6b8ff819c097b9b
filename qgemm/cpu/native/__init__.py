"""Products by C code, kernels/cpu/: prebuilt for this kind of CPU, or compiled for this CPU at first use. NumPy is the
reference, and serves where neither can be.
"""

from .libraries import serves
from .library import origin, reason
from .products import Weights, multiply, preparation, quantize

__all__ = ["Weights", "multiply", "origin", "preparation", "quantize", "reason", "serves"]

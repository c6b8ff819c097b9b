"""Products by C code, kernels/cpu/: prebuilt for this kind of CPU, or compiled for this CPU at first use. NumPy is the
reference, and serves where neither can be.
"""

from .calls import GATES
from .interleave import interleaved
from .libraries import serves
from .library import origin, reason
from .products import decode, preparation, quantize, quantize_groups

__all__ = [
    "GATES", "decode", "interleaved", "origin", "preparation", "quantize", "quantize_groups", "reason", "serves",
]  # fmt: skip

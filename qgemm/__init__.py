"""Matrix products on the packed tensors of .gguf files: quantize, open, matmul.

Importing qgemm touches no device, no folder and no environment variable.
"""

from .backends import Backend, backends
from .block import Format
from .errors import GGUFError, GGUFNotFoundError, QgemmError, QuantizeError, UnsupportedError
from .formats import FORMATS
from .matmul import matmul, quantize_activations
from .tensor import Tensor, quantize

__all__ = [
    "FORMATS",
    "Backend",
    "Format",
    "GGUFError",
    "GGUFNotFoundError",
    "QgemmError",
    "QuantizeError",
    "Tensor",
    "UnsupportedError",
    "backends",
    "matmul",
    "quantize",
    "quantize_activations",
]
__version__ = "0.1.0"

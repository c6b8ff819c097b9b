"""Matrix products on the packed tensors of .gguf files: quantize, open, matmul.

Importing qgemm touches no device, no folder and no environment variable.
"""

from .backends import Backend, backends
from .block import Format
from .errors import (
    CheckpointError,
    CodebookError,
    GGUFAccessError,
    GGUFError,
    GGUFNotFoundError,
    QgemmError,
    QuantizeError,
    UnsupportedError,
)
from .formats import FORMATS
from .formats.e4m4 import decode_e4m4, encode_e4m4
from .gguf import GGUFFile, open
from .matmul import matmul, matmul_many, quantize_activations
from .tensor import Tensor, quantize
from .write import write

__all__ = [
    "FORMATS",
    "Backend",
    "CheckpointError",
    "CodebookError",
    "Format",
    "GGUFAccessError",
    "GGUFError",
    "GGUFFile",
    "GGUFNotFoundError",
    "QgemmError",
    "QuantizeError",
    "Tensor",
    "UnsupportedError",
    "backends",
    "decode_e4m4",
    "encode_e4m4",
    "matmul",
    "matmul_many",
    "open",
    "quantize",
    "quantize_activations",
    "write",
]
__version__ = "0.1.0"

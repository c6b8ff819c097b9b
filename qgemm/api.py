"""All that `import qgemm` offers: `qgemm.NAME` is looked up here at its first use (qgemm/__init__.py)."""

from qgemm.codec.e4m4 import decode_e4m4, encode_e4m4
from qgemm.codec.format import Format
from qgemm.files.gguf.reader import GGUFFile, open
from qgemm.files.gguf.writer import write

from .backend import Status, Tuned, backends
from .converter import Checkpoint, Conversion, convert, load, set_metadata
from .errors import (
    CheckpointError,
    CodebookError,
    GGUFAccessError,
    GGUFError,
    GGUFNotFoundError,
    NameNotFoundError,
    QgemmError,
    QuantizeError,
    RankError,
    ShapeError,
    UnsupportedError,
)
from .experts import moe, moe_matmul
from .formats import FORMATS
from .ops import gated, matmul, matmul_many, quantize, quantize_activations
from .parallel import threads
from .preparation import Prepared, prepare
from .tensor import Tensor
from .tuning import tune
from .version import __version__
from .views import Reordered, Scaled

__all__ = [
    "FORMATS",
    "Checkpoint",
    "CheckpointError",
    "CodebookError",
    "Conversion",
    "Format",
    "GGUFAccessError",
    "GGUFError",
    "GGUFFile",
    "GGUFNotFoundError",
    "NameNotFoundError",
    "Prepared",
    "QgemmError",
    "QuantizeError",
    "RankError",
    "Reordered",
    "Scaled",
    "ShapeError",
    "Status",
    "Tensor",
    "Tuned",
    "UnsupportedError",
    "__version__",
    "backends",
    "convert",
    "decode_e4m4",
    "encode_e4m4",
    "gated",
    "load",
    "matmul",
    "matmul_many",
    "moe",
    "moe_matmul",
    "open",
    "prepare",
    "quantize",
    "quantize_activations",
    "set_metadata",
    "threads",
    "tune",
    "write",
]

"""PyTorch layers whose weights stay packed: `QLinear`, `QEmbedding`, `QExperts`.

`replace_linear` puts them into a model, `fuse` lets those with one input share calls, `parallelize` cuts those of a
model over several GPUs. Needs torch 2.4 or later, the extra `torch`; `import qgemm` alone never imports it.
"""

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    message = "qgemm.torch needs PyTorch 2.4 or later, which is not installed"
    raise ImportError(f"{message}: pip install 'torch>=2.4', or this project with its extra [torch]") from None

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 4):
    raise ImportError(f"qgemm.torch needs PyTorch 2.4 or later, this is {torch.__version__}: pip install -U torch")

from .embedding import QEmbedding
from .experts import QExperts
from .fusion import Fused, fuse, unfuse
from .linear import LoRA, QLinear
from .parallel import ColumnParallelLinear, RowParallelLinear
from .parallel_experts import ParallelExperts
from .parallelize import Parallelized, parallelize
from .replace import Replaced, replace_linear

__all__ = [
    "ColumnParallelLinear",
    "Fused",
    "LoRA",
    "ParallelExperts",
    "Parallelized",
    "QEmbedding",
    "QExperts",
    "QLinear",
    "Replaced",
    "RowParallelLinear",
    "fuse",
    "parallelize",
    "replace_linear",
    "unfuse",
]

"""Products by mma.sync, prefill_mma and prefill_a8: what sm_80 to sm_89 have, on a GPU whose routes have others."""

from __future__ import annotations

from typing import Any

from qgemm.cuda.kernels import prefill_sm80 as prefill_mma
from qgemm.cuda.kernels.activations import quantize_launch, workspace
from qgemm.cuda.kernels.routes import PREPARED, c_type
from qgemm.cuda.tensor import DeviceTensor

from .results import Row

KERNELS = {"a16": prefill_mma.A16, "a8": prefill_mma.A8}  # by activation
LEAST = 16  # rows of x: of fewer another kernel makes products


def product(x: Any, w: DeviceTensor, activation: str, y: Any) -> None:
    """y [M, N] = x [M, K] of half or bf16 times w, on the current stream; "a8" quantizes x first."""
    import cupy

    stream, source = cupy.cuda.get_current_stream().ptr, c_type(x.dtype)
    if activation == "a8":
        m, k = x.shape
        blocks = workspace(stream, k, m)
        quantize_launch(w.device, source, k, m)(stream, x.data.ptr, blocks.data.ptr)
        x, source = blocks, PREPARED
    prefill_mma.multiply(x, w, y, source, c_type(y.dtype), stream)


def row(activation: str, us: float, cublas_fp16_us: float) -> Row:
    """What a row of the list says besides its key."""
    return {"kernel": KERNELS[activation], "us": us, "cublas_fp16_us": cublas_fp16_us}

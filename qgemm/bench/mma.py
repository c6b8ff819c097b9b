"""Products by mma.sync, the kernels of sm_80 to sm_89, on a GPU whose routes have others."""

from __future__ import annotations

from typing import Any

from qgemm.arguments import NO_EPILOGUE
from qgemm.arrays import current_stream
from qgemm.cuda.kernels.activations import quantize_launch, workspace
from qgemm.cuda.kernels.prefill_sm80 import PREFILL_SM80, PREFILL_SM80_A8
from qgemm.cuda.kernels.routes import launch
from qgemm.cuda.problem import Q8_1, c_type
from qgemm.cuda.products import Product, pointers_of, problem_of
from qgemm.cuda.tensor import DeviceTensor

from .results import Row

KERNELS = {"a16": PREFILL_SM80, "a8": PREFILL_SM80_A8}  # by activation
LEAST = 16  # rows of x: of fewer another kernel makes products


def product(x: Any, w: DeviceTensor, activation: str, y: Any) -> None:
    """y [M, N] = x [M, K] of half or bf16 times w, on the current stream; "a8" quantizes x first."""
    (m, k), stream, source = x.shape, current_stream(), c_type(x.dtype)
    if activation == "a8":
        blocks = workspace(stream, k, m)
        quantize_launch(w.device, source, k, m)(stream, x.data.ptr, blocks.data.ptr)
        x, source = blocks, Q8_1
    kernel, products = KERNELS[activation], [Product(w, y, NO_EPILOGUE)]
    launch(kernel, problem_of(kernel, products, source, k, m, activation))(stream, x.data.ptr, *pointers_of(products))


def row(activation: str, us: float, cublas_fp16_us: float) -> Row:
    """What a row of the list says besides its key."""
    return {"kernel": KERNELS[activation].name, "us": us, "cublas_fp16_us": cublas_fp16_us}

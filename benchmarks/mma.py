"""Products by mma.sync, the kernels of sm_80 to sm_89, on a GPU whose routes choose other kernels."""

from __future__ import annotations

from typing import Any

from qgemm.cuda.call.plan import Source, problem, problem_of_launch
from qgemm.cuda.driver.workspace import workspace
from qgemm.cuda.kernels.activations import quantize_launch, scale_launch
from qgemm.cuda.kernels.prefill_sm80 import PREFILL_SM80, PREFILL_SM80_A8
from qgemm.cuda.kernels.routes import launch
from qgemm.cuda.layout import scaled_rows
from qgemm.cuda.layout.q8_1_k_blocks import nbytes
from qgemm.cuda.problem import C_TYPES, Q8_1, SCALED_ROWS, Output
from qgemm.cuda.tensor import DeviceTensor

from .results import DENSE_US, Row

KERNELS = {"a16": PREFILL_SM80, "a8": PREFILL_SM80_A8}  # by activation
MIN_M = 16  # rows of x; fewer are served by another kernel


def product(x: Any, w: DeviceTensor, activation: str, y: Any) -> None:
    """y [M, N] = x [M, K] of half or bf16 times w, on the current stream: bf16 is scaled to half, "a8" quantizes x."""
    (m, k), stream = x.shape, w.library.stream(w.device)
    source = Source(m, k, x.dtype.name)
    kernel, kind, pointer = KERNELS[activation], C_TYPES[source.dtype], x.data.ptr
    if activation == "a8":
        kind, pointer = Q8_1, workspace(w.device, stream, "activations", nbytes(m, k)).pointer
        quantize_launch(w.device, C_TYPES[source.dtype], k, m)(stream, x.data.ptr, pointer)
    elif kind != "half":
        kind, pointer = SCALED_ROWS, workspace(w.device, stream, "scaled rows", scaled_rows.nbytes(m, k)).pointer
        scale_launch(w.device, k, m)(stream, x.data.ptr, pointer)
    outputs = [Output(w.shape[0], y.dtype.name)]
    launch_problem = problem_of_launch(kernel, [problem(w, source, activation)], outputs, kind)
    launch(kernel, launch_problem)(stream, pointer, w.pointer, y.data.ptr, 0, 0)


def row(activation: str, x: str, us: float, dense_us: float) -> Row:
    """The fields of a row of the list besides its key. x: its type, in which cuBLAS multiplied too."""
    return {"kernel": KERNELS[activation].name, "us": us, DENSE_US[x]: dense_us}

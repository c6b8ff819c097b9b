"""Timing of products: on the GPU by qgemm/cuda/timing.py, on the CPU by calls that alternate; cuBLAS beside them."""

from __future__ import annotations

import ctypes
import time
from statistics import median
from typing import Any

from qgemm.cuda import toolkit
from qgemm.cuda.timing import (
    BYTES_A_US,
    LOOP_US,
    MAX_CALLS,
    OPERATIONS_A_US,
    REPEATS,
    ROTATE,
    Call,
    Loop,
    Times,
    capture,
    compare,
    copies_of,
    quantiles,
    replay_us,
    rotation,
)

__all__ = [
    "BYTES_A_US",
    "LOOP_US",
    "MAX_CALLS",
    "OPERATIONS_A_US",
    "REPEATS",
    "ROTATE",
    "Call",
    "Cublas",
    "Loop",
    "Times",
    "alternate",
    "capture",
    "compare",
    "copies_of",
    "quantiles",
    "replay_us",
    "rotation",
]

OP_N, OP_T, COMPUTE_32F, DEFAULT = 0, 1, 68, -1  # from cublas_api.h
CUDA_TYPES = {"float16": 2, "bfloat16": 14}  # cudaDataType, from library_types.h
WORKSPACE = 32 << 20  # bytes; torch reserves the same for cuBLAS on Hopper


def alternate(*calls: Call, repeats: int) -> list[float]:
    """The median time of each call in milliseconds; the calls alternate, and a first round warms up."""
    times: list[list[float]] = [[] for _ in calls]
    for repeat in range(repeats + 1):
        for call, samples in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            if repeat:
                samples.append(1e3 * (time.perf_counter() - start))
    return [median(samples) for samples in times]


class Cublas:
    """cublasGemmEx through ctypes, on its own handle and workspace: CuPy's handle refuses to be captured."""

    def __init__(self, stream: Any) -> None:
        import cupy

        self._library, _ = toolkit.library("cublas")
        self._handle = ctypes.c_void_p()
        self._workspace = cupy.empty(WORKSPACE, cupy.uint8)
        self._call("cublasCreate_v2", ctypes.byref(self._handle))
        self._call("cublasSetStream_v2", self._handle, ctypes.c_void_p(stream.ptr))
        self._call(
            "cublasSetWorkspace_v2", self._handle, ctypes.c_void_p(self._workspace.data.ptr), ctypes.c_size_t(WORKSPACE)
        )
        self._alpha, self._beta = ctypes.c_float(1), ctypes.c_float(0)

    def __call__(self, x: Any, w: Any, y: Any) -> None:
        """y [M, N] = x [M, K] @ w [N, K].T, all contiguous and of x's type, float16 or bfloat16; sums in float32.

        w: may be an array of 16-bit integers that hold the bits of its numbers.
        """
        (m, k), n, kind = x.shape, len(w), CUDA_TYPES[x.dtype.name]
        x_pointer, w_pointer, y_pointer = (ctypes.c_void_p(array.data.ptr) for array in (x, w, y))
        self._call(
            "cublasGemmEx", self._handle, OP_T, OP_N, n, m, k, ctypes.byref(self._alpha), w_pointer, kind, k,
            x_pointer, kind, k, ctypes.byref(self._beta), y_pointer, kind, n, COMPUTE_32F, DEFAULT,
        )  # fmt: skip

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise RuntimeError(f"{name} failed with status {status}")

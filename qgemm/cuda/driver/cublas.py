"""cublasGemmEx through ctypes, by a handle for each device: CuPy's handle refuses to be captured in a graph.

Sums are float32: the handle's mode excludes TF32 and reductions in 16 bits, whatever mode other code has chosen for its
own handles.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

from qgemm.cuda import toolkit
from qgemm.locks import new_lock

from .workspace import workspace

TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # cudaDataType
OP_N, OP_T, COMPUTE_32F, DEFAULT = 0, 1, 68, -1  # from cublas_api.h
NO_REDUCED_PRECISION = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION; without the bits of TF32
WORKSPACE = 32 << 20  # bytes of a stream: graphs that were captured on two streams may run at a time


class Matrix(NamedTuple):
    """A matrix in C order by its address. dtype: NumPy's name. pitch: elements from row to row, 0 for `columns`."""

    pointer: int
    rows: int
    columns: int
    dtype: str
    pitch: int = 0


class Cublas:
    """A handle of cuBLAS on the current device. lock: held while the handle or the scratch of a stream is in use."""

    def __init__(self, device: int) -> None:
        self.device, self.lock = device, new_lock()
        self._library, _ = toolkit.library("cublas")
        self._handle = ctypes.c_void_p()
        self._call("cublasCreate_v2", ctypes.byref(self._handle))
        self._call("cublasSetMathMode", self._handle, NO_REDUCED_PRECISION)

    def multiply(self, stream: int, x: Matrix, w: Matrix, y: Matrix, alpha: float) -> None:
        """y [M, N] (rows may lie apart) = alpha * x [M, K] @ w [N, K].T; x and w of one type, y of it or float32."""
        m, n, k = x.rows, w.rows, x.columns
        space = ctypes.c_void_p(workspace(self.device, stream, "cublas", WORKSPACE).pointer)
        factors = ctypes.c_float(alpha), ctypes.c_float(0)
        x_pointer, w_pointer, y_pointer = (ctypes.c_void_p(matrix.pointer) for matrix in (x, w, y))
        x_type, w_type, y_type = (TYPES[matrix.dtype] for matrix in (x, w, y))
        self._call("cublasSetStream_v2", self._handle, ctypes.c_void_p(stream))  # resets the workspace
        self._call("cublasSetWorkspace_v2", self._handle, space, ctypes.c_size_t(WORKSPACE))
        self._call(
            "cublasGemmEx", self._handle, OP_T, OP_N, n, m, k, ctypes.byref(factors[0]), w_pointer, w_type, k,
            x_pointer, x_type, k, ctypes.byref(factors[1]), y_pointer, y_type, y.pitch or y.columns,
            COMPUTE_32F, DEFAULT,
        )  # fmt: skip

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise RuntimeError(f"{name} failed with status {status}")


@cache
def cublas(device: int) -> Cublas:
    """The handle of a device, which is the current one."""
    return Cublas(device)

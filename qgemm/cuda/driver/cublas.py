"""cublasGemmEx through ctypes, by a handle for each device: CuPy's handle refuses to be captured in a graph.

Sums are float32: the handle's mode excludes TF32 and reductions in 16 bits, whatever mode other code has chosen for its
own handles.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np

from qgemm.locks import new_lock

from .workspace import workspace

TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # cudaDataType
OP_N, OP_T, COMPUTE_32F, DEFAULT = 0, 1, 68, -1  # from cublas_api.h
NO_REDUCED_PRECISION = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION; without the bits of TF32
WORKSPACE = 32 << 20  # bytes of a stream: graphs that were captured on two streams may run at a time


class Cublas:
    """A handle of cuBLAS on the current device. lock: held while the handle or the scratch of a stream is in use."""

    def __init__(self, device: int) -> None:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        self.device, self.lock = device, new_lock()
        self._library = ctypes.CDLL(load_nvidia_dynamic_lib("cublas").abs_path)
        self._handle = ctypes.c_void_p()
        self._call("cublasCreate_v2", ctypes.byref(self._handle))
        self._call("cublasSetMathMode", self._handle, NO_REDUCED_PRECISION)

    def multiply(self, stream: int, x: Any, w: Any, y: Any, alpha: float) -> None:
        """y [M, N] (rows may be strided) = alpha * x [M, K] @ w [N, K].T; x and w of one type, y of it or float32."""
        (m, k), n = x.shape, len(w)
        space = ctypes.c_void_p(workspace(self.device, stream, "cublas", WORKSPACE).pointer)
        factors = ctypes.c_float(alpha), ctypes.c_float(0)
        x_pointer, w_pointer, y_pointer = (ctypes.c_void_p(array.data.ptr) for array in (x, w, y))
        x_type, w_type, y_type = (TYPES[array.dtype.name] for array in (x, w, y))
        self._call("cublasSetStream_v2", self._handle, ctypes.c_void_p(stream))  # which resets the workspace
        self._call("cublasSetWorkspace_v2", self._handle, space, ctypes.c_size_t(WORKSPACE))
        self._call(
            "cublasGemmEx", self._handle, OP_T, OP_N, n, m, k, ctypes.byref(factors[0]), w_pointer, w_type, k,
            x_pointer, x_type, k, ctypes.byref(factors[1]), y_pointer, y_type, y.strides[0] // y.itemsize,
            COMPUTE_32F, DEFAULT,
        )  # fmt: skip

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise RuntimeError(f"{name} failed with status {status}")


@cache
def cublas(device: int) -> Cublas:
    """The handle of a device, which is the current one."""
    return Cublas(device)


def array_at(pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """A contiguous CuPy array over memory that the caller owns."""
    import cupy

    size = int(np.prod(shape)) * dtype.itemsize
    memory = cupy.cuda.UnownedMemory(pointer, size, None)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))

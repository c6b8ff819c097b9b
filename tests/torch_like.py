"""The part of torch that host arrays use, over NumPy and ml_dtypes: supported calls and refusals.

tests/test_torch.py runs with this in the place of torch, and with torch itself where it is installed.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
from ml_dtypes import bfloat16 as BFLOAT16

KINDS = {"float16": np.float16, "float32": np.float32, "float64": np.float64, "int32": np.int32, "bfloat16": BFLOAT16}


class dtype:
    """torch.float16 and its like: no types of NumPy."""

    __module__ = "torch"

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"torch.{self.name}"


DTYPES = {name: dtype(name) for name in KINDS}


class Tensor:
    """A tensor of the host, which shares its memory with the array that it is made of."""

    __module__ = "torch"

    def __init__(self, array: np.ndarray, requires_grad: bool = False) -> None:
        self.array, self.requires_grad = array, requires_grad

    @property
    def dtype(self) -> dtype:
        return DTYPES[self.array.dtype.name]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor(self.array[index], self.requires_grad)

    def detach(self) -> Tensor:
        return Tensor(self.array)

    def clone(self) -> Tensor:
        return Tensor(self.array.copy(), self.requires_grad)

    def to(self, kind: dtype) -> Tensor:
        return Tensor(self.array.astype(KINDS[kind.name]))

    def float(self) -> Tensor:
        return self.to(DTYPES["float32"])

    def double(self) -> Tensor:
        return self.to(DTYPES["float64"])

    def requires_grad_(self) -> Tensor:
        self.requires_grad = True
        return self

    def copy_(self, other: Tensor) -> Tensor:
        if self.requires_grad:
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        self.array[...] = other.array
        return self

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def numpy(self) -> np.ndarray:
        if self.requires_grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        if self.array.dtype == BFLOAT16:
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.array

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.numpy()

    is_cuda = is_cpu = False  # products on the CPU take the slow path

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **options: Any) -> Any:
        if self.requires_grad:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        if self.array.dtype == BFLOAT16:
            raise RuntimeError("Unsupported dtype in DLTensor.")
        return self.array.__dlpack__(**options)

    def __matmul__(self, other: Any) -> Any:
        return NotImplemented if not isinstance(other, Tensor) else Tensor(self.array @ other.array)


class Parameter(Tensor):
    """torch.nn.Parameter: requires grad, and is of another module than a Tensor."""

    __module__ = "torch.nn.parameter"

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.array, requires_grad=True)


def install(monkeypatch: Any) -> ModuleType:
    """Put the module in torch's place, for a test -> the module."""
    torch, nn, parameter = ModuleType("torch"), ModuleType("torch.nn"), ModuleType("torch.nn.parameter")
    vars(torch).update(DTYPES, Tensor=Tensor, dtype=dtype, nn=nn, from_numpy=Tensor, from_dlpack=Tensor)
    torch.equal = lambda a, b: bool(np.array_equal(a.array, b.array))
    nn.Parameter = parameter.Parameter = Parameter
    for module in (torch, nn, parameter):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return torch

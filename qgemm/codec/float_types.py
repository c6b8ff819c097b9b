"""The float types of values, decoded weights and activations: their names and dtypes."""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray


class TorchDType(Protocol):
    """A dtype of torch, as a type checker sees it."""

    @property
    def is_floating_point(self) -> bool:
        """Whether it is a type of floats."""


DType = DTypeLike | TorchDType  # a dtype as callers give it: NumPy's, torch's, or a name
FLOATS = ("float16", "float32", "float64", "bfloat16")
LISTED = f"{', '.join(FLOATS[:-1])} or {FLOATS[-1]}"  # for messages


@cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """NumPy's name of a dtype, which NumPy composes anew in 3 us at each access."""
    name: str = dtype.name
    return name


def not_floats(who: str, dtype: object) -> TypeError:
    """The error for an argument that is an array of another type."""
    return TypeError(f"{who} must be of {LISTED}, got {dtype}")


def floats(x: Any, who: str = "x") -> NDArray[Any]:
    """An array of float16, float32, float64 or bfloat16 as NumPy; TypeError, which names `who`, for other types."""
    array: NDArray[Any] = np.asarray(x)
    if array.dtype.name not in FLOATS:
        raise not_floats(who, array.dtype)
    return array


def float_name(dtype: DType) -> str:
    """float16, float32, float64 or bfloat16 for a dtype of NumPy, ml_dtypes or torch, or a name; else TypeError."""
    if type(dtype).__module__ == "torch":
        name = str(dtype).removeprefix("torch.")
    elif isinstance(dtype, str) and dtype.lower() in ("bfloat16", "bf16"):
        name = "bfloat16"
    else:
        try:
            name = np.dtype(dtype).name  # type: ignore[arg-type]  # TypeError for others
        except TypeError:
            name = ""
    if name not in FLOATS:
        raise TypeError(f"dtype must be {LISTED}, got {name or repr(dtype)}")
    return name


def float_dtype(dtype: DType) -> np.dtype[Any]:
    """NumPy's dtype for float16, float32, float64 or (with ml_dtypes) bfloat16; TypeError for anything else."""
    name = float_name(dtype)
    if name != "bfloat16":
        return np.dtype(name)
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        raise TypeError("bfloat16 arrays need the package ml_dtypes") from None
    resolved: np.dtype[Any] = np.dtype(bfloat16)
    return resolved

"""Uses of a CuPy array that raise, and uses that work: for CuPy on a GPU and for its stand-in (tests/cupy_like.py)."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

HOST = np.arange(6, dtype=np.float32).reshape(2, 3)
REFUSED_WITH = TypeError, ValueError, AttributeError, BufferError

# name -> a call with a CuPy array [2, 3] of float32, which raises one of REFUSED_WITH
REFUSALS: dict[str, Callable[[Any], Any]] = {
    "asarray": np.asarray,
    "array": np.array,
    "ascontiguousarray": np.ascontiguousarray,
    "__array__": lambda x: x.__array__(),
    "memoryview": memoryview,
    "frombuffer": np.frombuffer,
    "__array_interface__": lambda x: x.__array_interface__,
    "ctypes": lambda x: x.ctypes,
    "device + host": lambda x: x + HOST,
    "host + device": lambda x: HOST + x,
    "device @ host": lambda x: x @ HOST.T,
    "host @ device": lambda x: HOST.T @ x,
    "host *= device": lambda x: operator.imul(HOST.copy(), x),
    "ufunc of both": lambda x: np.maximum(x, HOST),
    "ufunc into the host": lambda x: np.add(x, x, out=HOST.copy()),
    "device[...] = host": lambda x: operator.setitem(x, ..., HOST),
    "device[1:] = host": lambda x: operator.setitem(x, slice(1, None), HOST[1:]),
    "host[...] = device": lambda x: operator.setitem(HOST.copy(), ..., x),
    "concatenate": lambda x: np.concatenate([HOST, x]),
    "float": float,
    "int": int,
    "bool": bool,
    "iter of a scalar": lambda x: iter(x[0, 0]),
    "len of a scalar": lambda x: len(x[0, 0]),
}

# name -> a call with such an array, and the same with HOST: a Python value or an array, on the device or the host
ALLOWED: dict[str, Callable[[Any], Any]] = {
    "scalars": lambda x: (x + 1) * np.float32(2) - x / 4,
    "ufunc": np.square,
    "both on the device": lambda x: x + x * x,
    "product": lambda x: x @ x.T,
    "comparison": lambda x: (x == x).all(),
    "float of one": lambda x: float(x[1, 2]),
    "int of one": lambda x: int(x[1, 2]),
    "bool of one": lambda x: bool(x[1, 2] == 5),
    "item": lambda x: x[1, 2].item(),
    "tolist": lambda x: x.tolist(),
    "len": len,
    "rows": lambda x: [row.shape for row in x],
    "view": lambda x: x.reshape(-1).view(np.uint32),
    "columns": lambda x: x[:, ::2],
    "astype": lambda x: x.astype(np.float16),
    "sums": lambda x: x.sum(axis=1),
    "facts": lambda x: (x.shape, x.ndim, x.size, x.nbytes, x.itemsize, x.strides, x.flags.c_contiguous, x.dtype),
}


def assert_refuses(x: Any) -> None:
    """Every entry of REFUSALS raises for this array, which is no NumPy array and keeps its values."""
    assert not isinstance(x, np.ndarray)
    accepted = []
    for name, call in REFUSALS.items():
        try:
            with warnings.catch_warnings():  # NumPy warns that CuPy's __array__ has no `copy`, before CuPy refuses
                warnings.simplefilter("ignore", DeprecationWarning)
                call(x)
        except REFUSED_WITH:
            continue
        accepted.append(name)
    assert accepted == []
    assert (x.get() == HOST).all()


def assert_allows(x: Any) -> None:
    """Every entry of ALLOWED gives what NumPy gives; views of the device share its memory."""
    for name, call in ALLOWED.items():
        result, want = call(x), call(HOST)
        result = result.get() if hasattr(result, "get") else result
        assert np.asarray(result == want).all(), name
    x[:, ::2][...] = 7
    assert (x.get()[:, ::2] == 7).all()

"""Calls as users write them, with the types that mypy must find; tests/test_types.py runs it, nothing imports this."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

import qgemm

if TYPE_CHECKING:
    from qgemm.codec.float_types import TorchDType

x: NDArray[np.float16] = np.ones((2, 64), np.float16)
w = qgemm.quantize(np.ones((5, 64)), "q4_0")
prepared = qgemm.quantize_activations(x)
anything: Any = x
out: NDArray[np.float16] = np.empty((2, 5), np.float16)
halves: np.dtype[np.float16] = np.dtype(np.float16)

assert_type(w, qgemm.Tensor)
assert_type(qgemm.FORMATS["Q4_0"], qgemm.Format)
assert_type(qgemm.matmul(x, w), NDArray[np.float32])
assert_type(qgemm.matmul(w, w, "a8", bias=x), NDArray[np.float32])
assert_type(qgemm.matmul(x, w, dtype=np.float16), NDArray[np.float16])
assert_type(qgemm.matmul(x, w, dtype=halves), NDArray[np.float16])
assert_type(qgemm.matmul(x, w, "a16", dtype="bfloat16"), NDArray[Any])
assert_type(qgemm.matmul(x, w, out=out), NDArray[np.float16])
assert_type(qgemm.matmul(anything, w, out=out), NDArray[np.float16])
assert_type(qgemm.matmul(anything, w.to_device()), Any)
assert_type(qgemm.matmul([[1.0] * 64], w), Any)
assert_type(qgemm.matmul(prepared, w), Any)
assert_type(qgemm.matmul_many(x, [w, w], "a8"), list[Any])
assert_type(x[0] @ w.T, Any)


def calls_with_dtypes_of_torch(dtype: TorchDType) -> None:
    assert_type(qgemm.matmul_many(x, [w], dtype=dtype), list[Any])
    assert_type(qgemm.gated(x, w, w, dtype=dtype), Any)
    assert_type(qgemm.moe_matmul(x, w, x, dtype=dtype), Any)
    assert_type(qgemm.moe(x, [w, w], w, x, x, dtype=dtype), Any)


# Each of these is an error, without which mypy would complain of the comment.
qgemm.matmul(x, w, "w4a8")  # type: ignore[call-overload]
qgemm.matmul_many(x, [w], "w4a8")  # type: ignore[arg-type]
qgemm.matmul(x, w, None, x)  # type: ignore[call-overload]

"""The short way of a product like many: float32 rows of NumPy, few enough to be packed at once, by one tensor.

A plan holds all that depends on the tensor alone, so that a call checks its arrays, fills in two addresses and calls C.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.tensor import Tensor

from .calls import TOKENS, Target
from .libraries import loaded, source
from .library import reason
from .pool import ready
from .products import scratch, scratch_bytes, template

FLOAT32 = np.dtype(np.float32)


class Plan(NamedTuple):
    """What is the same of all products by a tensor: its size, what C is told of it, the blocks if they lie still."""

    n: int
    k: int
    target: Target
    blocks: NDArray[Any] | None


def again(w: Tensor, x: Any, activation: str | None, out: Any) -> Any:
    """y [..., N] as NumPy for x [..., K], in `out` if it is given; None where the long way must check and convert."""
    if type(x) is not np.ndarray or x.dtype is not FLOAT32 or reason():
        return None
    plan = w.plans.get(activation) or _plan(w, activation)
    *leading, k = x.shape or (0,)
    if plan is None or k != plan.k or not k <= x.size <= TOKENS * k or not (x.flags.c_contiguous and x.flags.aligned):
        return None
    shape = (*leading, plan.n)
    if out is None:
        out = np.empty(shape, FLOAT32)
    elif type(out) is not np.ndarray or out.dtype is not FLOAT32 or out.shape != shape or not _takes(out, x):
        return None
    m = x.size // k
    target = Target.from_buffer_copy(plan.target)
    blocks = plan.blocks
    if blocks is None:  # of a file, which is checked first
        blocks = w.blocks
        target.w, target.w_row = blocks.__array_interface__["data"][0], blocks.strides[0]
    target.y = out.__array_interface__["data"][0]
    ready().qgemm_multiply(
        ctypes.addressof(target), 1, x.__array_interface__["data"][0], m, scratch(scratch_bytes(target, m)), None
    )
    return out


def _takes(out: NDArray[Any], x: NDArray[Any]) -> bool:
    """Whether y can be written to `out` while x is read."""
    flags = out.flags
    return flags.c_contiguous and flags.writeable and flags.aligned and not np.may_share_memory(out, x)


def _plan(w: Tensor, activation: str | None) -> Plan | None:
    """The plan of a tensor, which keeps it; None for products that go another way."""
    a8 = activation == "a8"
    fmt = w.format
    if activation not in (None, "a8", "a16") or w.ndim != 2 or 0 in w.shape or source(fmt) is None:
        return None
    engine = loaded(fmt) if fmt.integer or not a8 else None
    blocks = w.blocks
    if engine is None or blocks.strides[-1] != fmt.block_bytes or blocks.strides[0] < 0:
        return None
    target = Target.from_buffer_copy(template(engine, fmt, w.shape, activation or "a16"))
    if a8 and not target.quantize:
        return None
    target.w, target.w_row = blocks.ctypes.data, blocks.strides[0]
    target.x_row, target.y_row = FLOAT32.itemsize * w.shape[1], FLOAT32.itemsize * w.shape[0]
    plan = w.plans[activation] = Plan(w.shape[0], w.shape[1], target, blocks if w.in_memory else None)
    return plan

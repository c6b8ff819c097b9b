"""The fast path of a product: float32 rows of NumPy, few enough to be packed at once, by one tensor.

A tensor keeps a plan, which holds all that depends on the tensor alone, so that a call checks its arrays, fills in two
addresses and calls C. Every other call goes on to products.py.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.arguments import Array, Gated, one_product
from qgemm.codec.float_types import DType
from qgemm.tensor import Tensor

from .native.calls import PACKED_TOKENS, Target
from .native.libraries import loaded, source
from .native.library import reason
from .native.pool import ready
from .native.products import has_library, scratch, scratch_bytes, template
from .products import multiply

FLOAT32 = np.dtype(np.float32)


class Plan(NamedTuple):
    """The constant part of all products by a tensor: its size, the arguments of C, and blocks that do not move."""

    n: int
    k: int
    target: Target
    blocks: NDArray[Any] | None


def product(
    w: Tensor, x: Array, activation: str | None, bias: Array | None, residual: Array | None, out: Array | None,
    dtype: DType | None, gated: Gated | None = None,
) -> Any:  # fmt: skip
    """y of `qgemm.matmul`, or of `gated`: by the plan of w if it serves x, else with all checks and conversions."""
    alone = bias is None and residual is None and dtype is None and gated is None
    if alone and type(x) is np.ndarray and x.dtype is FLOAT32 and not reason():
        plan = w.plans.get(activation) or _plan(w, activation)
        if plan is not None:
            y = _planned(plan, w, x, out)
            if y is not None:
                return y
    return multiply(x, one_product(w, bias, residual, out, gated), activation, dtype)[0]


def _planned(plan: Plan, w: Tensor, x: NDArray[Any], out: Any) -> NDArray[Any] | None:
    """y [..., N] for x [..., K], in `out` if there is one; None if arrays must be checked or converted first."""
    *leading, k = x.shape or (0,)
    if k != plan.k or not k <= x.size <= PACKED_TOKENS * k or not (x.flags.c_contiguous and x.flags.aligned):
        return None
    shape = (*leading, plan.n)
    if out is None:
        out = np.empty(shape, FLOAT32)
    elif type(out) is not np.ndarray or out.dtype is not FLOAT32 or out.shape != shape or not _writable(out, x):
        return None
    m = x.size // k
    target = Target.from_buffer_copy(plan.target)
    blocks = plan.blocks
    if blocks is None:  # a file is checked at each access
        blocks = w.blocks
        target.w, target.w_row = blocks.__array_interface__["data"][0], blocks.strides[0]
    target.y = out.__array_interface__["data"][0]
    ready().qgemm_multiply(
        ctypes.addressof(target), 1, x.__array_interface__["data"][0], m, scratch(scratch_bytes(target, m)), None
    )
    y: NDArray[Any] = out
    return y


def _writable(out: NDArray[Any], x: NDArray[Any]) -> bool:
    """Whether y can be written to `out` while x is read."""
    flags = out.flags
    return flags.c_contiguous and flags.writeable and flags.aligned and not np.may_share_memory(out, x)


def _plan(w: Tensor, activation: str | None) -> Plan | None:
    """The plan of a tensor, which keeps it; None for products that only products.py can make."""
    a8 = activation == "a8"
    fmt = w.format
    if activation not in (None, "a8", "a16") or w.ndim != 2 or 0 in w.shape or source(fmt) is None:
        return None
    engine = loaded(fmt) if fmt.integer or not a8 else None
    if engine is None or (a8 and not has_library("a8")):
        return None
    blocks = w.blocks
    if blocks.strides[-1] != fmt.block_bytes or blocks.strides[0] < 0:
        return None
    target = Target.from_buffer_copy(template(engine, fmt, w.shape, activation or "a16"))
    target.w, target.w_row = blocks.ctypes.data, blocks.strides[0]
    target.x_row, target.y_row = FLOAT32.itemsize * w.shape[1], FLOAT32.itemsize * w.shape[0]
    plan = w.plans[activation] = Plan(w.shape[0], w.shape[1], target, blocks if w.in_memory else None)
    return plan

"""The public products of a mixture of experts: weights [E, N, K], a few of which multiply each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .arguments import Activation
from .backend import PRODUCTS, backend_for
from .codec.float_types import DType
from .packed import Packed
from .placement import misplaced
from .routing import Function, layer_of


def moe_matmul(
    x: Any,
    w: Packed,
    ids: Any,
    activation: Activation | None = None,
    *,
    bias: Any = None,
    out: Any = None,
    dtype: DType | None = None,
    check_ids: bool = False,
) -> Any:
    """Multiply each token by the weights of its experts: y [T, top_k, N], y[t, j] = x[t] @ w[ids[t, j]].T + bias.

    x: [T, K], where every expert of a token reads the same row, or [T, top_k, K]; floats, as for `matmul`.
    w: experts [E, N, K] of one format, a Tensor or what its `to_device()` gives. ids: [T, top_k], int32 or int64, where
    x is. bias: [E, N] or None. activation, out, dtype: as of `matmul`; on a GPU "a16" alone.

    IndexError for an id that is no expert. On a GPU nothing waits for the ids, and y is zero at such an id, unless
    check_ids: then the call waits for the ids and checks them. This is ggml's mul_mat_id.
    """
    products = PRODUCTS.get(type(w)) or backend_for(w)
    if products is None:
        raise misplaced(x, w)
    return products.moe_matmul(x, w, ids, activation, bias, out, dtype, check_ids)


def moe(
    x: Any,
    gate_up: Packed | Sequence[Packed],
    down: Packed,
    ids: Any,
    weights: Any,
    activation: Function = "swiglu",
    *,
    biases: Sequence[Any] | None = None,
    out: Any = None,
    dtype: DType | None = None,
    check_ids: bool = False,
) -> Any:
    """The feed-forward layer of a mixture of experts: y [T, K], the sum over a token's experts e = ids[t, j] of

        weights[t, j] * (g(x @ gate[e].T, x @ up[e].T) @ down[e].T)

    added in the order of j, in float32.

    x [T, K]: floats, as of `matmul`. gate_up: experts [E, F, K] of gate and up as a pair, or one tensor [E, 2 F, K]
    whose first F rows are the gate's. down: experts [E, K, F]. ids [T, top_k]: int32 or int64. weights [T, top_k]: of
    the router, floats.
    activation: g, "swiglu", "swiglu_oai" (clamped, of gpt-oss), "geglu" or "geglu_tanh"; `gated` has their formulas.
    biases: of gate, up and down (or gate_up and down), each [E, N] or None, added to their products.
    out, dtype: as of `matmul`. ids that are no expert, check_ids: as of `moe_matmul`; on a GPU such an expert adds
    nothing.

    Values between the products are rounded to x's type on a GPU, to float32 on the CPU.
    """
    products = PRODUCTS.get(type(down)) or backend_for(down)
    if products is None:
        layer_of(gate_up, down, biases, activation)  # says which of the weights is none
        raise misplaced(x, down)
    return products.moe(x, gate_up, down, ids, weights, activation, biases, out, dtype, check_ids)

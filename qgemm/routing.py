"""Arguments of products by experts and their checks, shared by all backends.

A mixture of experts is weights [E, N, K]; ids [T, top_k] name the experts among the E that multiply each of T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from .arguments import Array, Weights, check_activation
from .codec.float_types import FLOATS, not_floats
from .errors import ShapeError, UnsupportedError
from .packed import Packed
from .placement import check_together, described

Function = Literal["swiglu", "swiglu_oai", "geglu", "geglu_tanh"]
GATE_OF = {"swiglu": "silu", "swiglu_oai": "swiglu_oai", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}
INTEGERS = ("int32", "int64")


class Layer(NamedTuple):
    """The feed-forward layer of a mixture of experts.

    gate_up: weights [E, F, K] of the gate and of the product that it gates, or one tensor [E, 2 F, K] with the rows of
    the gate first. down: weights [E, K, F]. biases: one [E, N] or None for each in gate_up, then for down. gate: a name
    in GATES (qgemm/gating.py).
    """

    gate_up: tuple[Any, ...]
    down: Any
    biases: tuple[Any, ...]
    gate: str

    @property
    def width(self) -> int:
        """F, the values of a token and expert between the products."""
        return int(self.down.shape[2])


def layer_of(gate_up: object, down: object, biases: Sequence[Array | None] | None, activation: str) -> Layer:
    """The layer, once its weights fit together; ShapeError, UnsupportedError or TypeError says why they do not."""
    weights: tuple[Any, ...] = (gate_up,) if isinstance(gate_up, Packed) else tuple(gate_up)  # type: ignore[arg-type]
    if len(weights) not in (1, 2):
        raise ShapeError(f"gate_up is one tensor [E, 2 F, K] or two [E, F, K], got {len(weights)}")
    for w in (*weights, down):
        if not isinstance(w, Packed):
            raise TypeError(f"experts are a Tensor or what its to_device() gives, got {described(w)}")
        check_experts(w)
    if not isinstance(activation, str) or activation not in GATE_OF:
        raise UnsupportedError(f"activation is {', '.join(map(repr, GATE_OF))}, got {activation!r}")
    terms = (None,) * (len(weights) + 1) if biases is None else tuple(biases)
    if len(terms) != len(weights) + 1:
        raise ShapeError(f"biases has {len(terms)} entries for {len(weights) + 1} weights")
    assert isinstance(down, Packed)
    e, k, f = down.shape
    rows = 2 * f if len(weights) == 1 else f
    for w in weights:
        if tuple(w.shape) != (e, rows, k):
            raise ShapeError(f"{w!r} and {down!r} are no layer: down [E, K, F] goes with [E, {rows}, {k}]")
    return Layer(weights, down, terms, GATE_OF[activation])


def check_product(x: Array, w: Weights, ids: Array, activation: str | None, check_ids: bool) -> str:
    """The kind of activations of `qgemm.moe_matmul`, once its weights are experts that lie where x does."""
    kind = check_activation(activation)
    check_experts(w)
    if check_ids:
        check_ids_of(ids, w)
    check_together(x, w)
    return kind


def check_layer(
    x: Array, gate_up: Weights | Sequence[Weights], down: Weights, ids: Array, activation: str,
    biases: Sequence[Array | None] | None, check_ids: bool,
) -> Layer:  # fmt: skip
    """The layer of `qgemm.moe`, once all its weights lie where x does."""
    layer = layer_of(gate_up, down, biases, activation)
    if check_ids:
        check_ids_of(ids, down)
    check_together(x, *layer.gate_up, down)
    return layer


def check_experts(w: Weights) -> None:
    """ShapeError unless w is a matrix for each expert, UnsupportedError unless its format can be decoded."""
    if w.ndim != 3:
        raise ShapeError(f"experts are weights (E, N, K), got {w!r}")
    if w.format.levels is None:
        raise UnsupportedError(f"{w!r}: {w.format} has no decoder, so it cannot be multiplied")


def check_routing(x: Array, w: Weights, ids: Array, shared: bool = False) -> None:
    """ShapeError or TypeError unless arrays x and ids say which rows the experts w multiply.

    x: [T, K], where all experts of a token read the same row; [T, top_k, K] as well, unless `shared`. ids: [T, top_k].
    """
    shape = tuple(x.shape)
    fitting = "(T, K)" if shared else "(T, K) or (T, top_k, K)"
    if len(shape) not in (2, 3)[: 2 - shared] or shape[-1] != w.shape[2]:
        raise ShapeError(f"x is {fitting} with K = {w.shape[2]} of {w!r}, got shape {shape}")
    name = str(ids.dtype).removeprefix("torch.")
    if name not in INTEGERS:
        raise TypeError(f"ids are of {' or '.join(INTEGERS)}, got {name}")
    if len(ids.shape) != 2 or tuple(ids.shape)[: len(shape) - 1] != shape[:-1]:
        raise ShapeError(f"ids are (T, top_k) of x {shape}, got shape {tuple(ids.shape)}")


def check_ids_of(ids: Any, w: Weights) -> None:
    """IndexError for an id that is no expert of w; waits for an array on a GPU."""
    if 0 in ids.shape:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= w.shape[0]:
        raise IndexError(f"ids are {low} to {high}, there are experts 0 to {w.shape[0] - 1}")


def check_of_experts(bias: Array, w: Weights) -> None:
    """ShapeError or TypeError unless an array is a bias for each row of each expert."""
    if tuple(bias.shape) != tuple(w.shape[:2]):
        raise ShapeError(f"a bias of {w!r} has shape {tuple(w.shape[:2])}, got {tuple(bias.shape)}")
    check_floats(bias, "bias")


def check_weights_of(weights: Array, ids: Array) -> None:
    """ShapeError or TypeError unless an array has a factor for each expert of each token."""
    if tuple(weights.shape) != tuple(ids.shape):
        raise ShapeError(f"weights are of the shape of ids, {tuple(ids.shape)}, got {tuple(weights.shape)}")
    check_floats(weights, "weights")


def check_floats(array: Array, who: str) -> None:
    """TypeError unless an array is of floats."""
    name = str(array.dtype).removeprefix("torch.")
    if name not in FLOATS:
        raise not_floats(who, name)

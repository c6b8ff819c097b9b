"""Products by experts: their arguments and the checks of these, shared by all backends.

A mixture of experts is weights [E, N, K]; ids [T, top_k] say by which of the E each of T tokens is multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from .arguments import described
from .codec.format import FLOATS
from .errors import UnsupportedError
from .packed import Packed

Function = Literal["swiglu", "swiglu_oai", "geglu", "geglu_tanh"]
GATE_OF = {"swiglu": "silu", "swiglu_oai": "swiglu_oai", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}
INTEGERS = ("int32", "int64")


class Layer(NamedTuple):
    """The feed-forward layer of a mixture of experts.

    gate_up: weights [E, F, K] of the gate and of what it gates, or one tensor [E, 2 F, K] with the rows of the gate
    first. down: weights [E, K, F]. biases: of each in gate_up, then of down, [E, N] or None. gate: a name in GATES
    (qgemm/gating.py).
    """

    gate_up: tuple[Any, ...]
    down: Any
    biases: tuple[Any, ...]
    gate: str

    @property
    def width(self) -> int:
        """F, the values of a token and expert between the products."""
        return int(self.down.shape[2])


def layer_of(gate_up: Any, down: Any, biases: Sequence[Any] | None, activation: str) -> Layer:
    """The layer, once its weights fit together; UnsupportedError or TypeError says what does not."""
    weights = (gate_up,) if isinstance(gate_up, Packed) else tuple(gate_up)
    if len(weights) not in (1, 2):
        raise UnsupportedError(f"gate_up is one tensor [E, 2 F, K] or two [E, F, K], got {len(weights)}")
    for w in (*weights, down):
        if not isinstance(w, Packed):
            raise TypeError(f"experts are a Tensor or what its to_device() gives, got {described(w)}")
        check_experts(w)
    if activation not in GATE_OF:
        raise UnsupportedError(f"activation is {', '.join(map(repr, GATE_OF))}, got {activation!r}")
    given = (None,) * (len(weights) + 1) if biases is None else tuple(biases)
    if len(given) != len(weights) + 1:
        raise UnsupportedError(f"biases has {len(given)} entries for {len(weights) + 1} weights")
    e, k, f = down.shape
    rows = 2 * f if len(weights) == 1 else f
    for w in weights:
        if tuple(w.shape) != (e, rows, k):
            raise UnsupportedError(f"{w!r} and {down!r} are no layer: down [E, K, F] goes with [E, {rows}, {k}]")
    return Layer(weights, down, given, GATE_OF[activation])


def check_experts(w: Any) -> None:
    """UnsupportedError unless w is a matrix for each expert, of a format that can be decoded."""
    if w.ndim != 3:
        raise UnsupportedError(f"experts are weights (E, N, K), got {w!r}")
    if w.format.levels is None:
        raise UnsupportedError(f"{w!r}: {w.format} has no decoder, so it cannot be multiplied")


def check_routing(x: Any, w: Any, ids: Any, shared: bool = False) -> None:
    """UnsupportedError or TypeError unless arrays x and ids say which rows the experts w multiply.

    x [T, K], of which all experts of a token read the same row, or unless `shared` [T, top_k, K]; ids [T, top_k].
    """
    shape = tuple(x.shape)
    fitting = "(T, K)" if shared else "(T, K) or (T, top_k, K)"
    if len(shape) not in (2, 3)[: 2 - shared] or shape[-1] != w.shape[2]:
        raise UnsupportedError(f"x is {fitting} with K = {w.shape[2]} of {w!r}, got shape {shape}")
    name = str(ids.dtype).removeprefix("torch.")
    if name not in INTEGERS:
        raise TypeError(f"ids are of {' or '.join(INTEGERS)}, got {name}")
    if len(ids.shape) != 2 or tuple(ids.shape)[: len(shape) - 1] != shape[:-1]:
        raise UnsupportedError(f"ids are (T, top_k) of x {shape}, got shape {tuple(ids.shape)}")


def check_ids_of(ids: Any, w: Any) -> None:
    """IndexError for an id that is no expert of w; waits for an array on a GPU."""
    if 0 in ids.shape:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= w.shape[0]:
        raise IndexError(f"ids are {low} to {high}, there are experts 0 to {w.shape[0] - 1}")


def check_of_experts(bias: Any, w: Any) -> None:
    """UnsupportedError or TypeError unless an array is a bias for each row of each expert."""
    if tuple(bias.shape) != tuple(w.shape[:2]):
        raise UnsupportedError(f"a bias of {w!r} has shape {tuple(w.shape[:2])}, got {tuple(bias.shape)}")
    check_floats(bias, "bias")


def check_weights_of(weights: Any, ids: Any) -> None:
    """UnsupportedError or TypeError unless an array has a factor for each expert of each token."""
    if tuple(weights.shape) != tuple(ids.shape):
        raise UnsupportedError(f"weights are of the shape of ids, {tuple(ids.shape)}, got {tuple(weights.shape)}")
    check_floats(weights, "weights")


def check_floats(array: Any, who: str) -> None:
    """TypeError for what is not an array of floats."""
    name = str(array.dtype).removeprefix("torch.")
    if name not in FLOATS:
        raise TypeError(f"{who} must be of float16, float32, float64 or bfloat16, got {name}")

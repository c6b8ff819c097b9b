"""Joint products: several weights with one x, and a gated pair; eager, and as ops in traced graphs.

    qgemm::linear_many(x [..., K], bytes of the weights, biases, formats, Ns, K, activation) -> a y [..., N] for each
    qgemm::gated(x [..., K], bytes of gate and up, biases, formats, N, K, function, activation) -> y [..., N]

Neither has a gradient: where one is needed, layers compute their products one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qgemm import ops as products
from qgemm.gating import Gate
from qgemm.packed import Packed

from .gradients import differentiated
from .linear import QLinear
from .ops import PLAIN, traced, tracing
from .storage import packed_of

Biases = Sequence[torch.Tensor | None]

_library = torch.library.Library("qgemm", "FRAGMENT")
_library.define(
    "linear_many(Tensor x, Tensor[] weights, Tensor?[] biases, str[] formats, int[] ns, int k, str activation) "
    "-> Tensor[]"
)
_library.define(
    "gated(Tensor x, Tensor[] weights, Tensor?[] biases, str[] formats, int n, int k, str function, str activation) "
    "-> Tensor"
)
traced_linear_many = torch.ops.qgemm.linear_many.default
traced_gated = torch.ops.qgemm.gated.default


def can_join(layer: Any, x: torch.Tensor) -> bool:
    """Whether a layer's product is that of a plain QLinear whose weight is beside x now, and needs no gradient."""
    if not is_plain(layer) or type(x) not in PLAIN or _is_moved(layer):
        return False
    weight, bias = layer._parameters["weight"], layer._parameters["bias"]
    if weight.device != x.device:
        return False
    if torch.compiler.is_compiling():
        return not differentiated(x, bias)
    return not (differentiated(x, bias) or tracing() or hasattr(weight, "device_mesh"))  # DTensor: a rank's share


def _is_moved(layer: Any) -> bool:
    """Whether other code may bring the weight for each forward: by a hook before it, or a forward of the instance.

    accelerate's hook says whether it does.
    """
    if "forward" in vars(layer):
        return getattr(vars(layer).get("_hf_hook"), "offload", True) is not False
    return bool(layer._forward_pre_hooks)


def is_plain(layer: Any) -> bool:
    """Whether a layer computes its product as QLinear does, without a view."""
    kind = type(layer)
    own = isinstance(layer, QLinear) and kind.forward is QLinear.forward and kind._linear is QLinear._linear
    return own and not layer._buffers


def many(layers: Sequence[QLinear], x: torch.Tensor) -> list[torch.Tensor]:
    """The product of each layer, bias included, with the same x; the layers share K, activation and device."""
    biases, first = [layer._parameters["bias"] for layer in layers], layers[0]
    if traced(x):
        weights, formats = [layer.weight for layer in layers], [layer._format for layer in layers]
        ns = [layer.out_features for layer in layers]
        ys: list[torch.Tensor] = traced_linear_many(
            x, weights, biases, formats, ns, first.in_features, first.activation
        )
        return ys
    return _many(x, [layer.packed for layer in layers], biases, first.activation)


def gated(gate: QLinear, up: QLinear, x: torch.Tensor, function: Gate) -> torch.Tensor:
    """function(gate(x)) * up(x), rounded once; the layers share their shape, activation and device."""
    biases = [layer._parameters["bias"] for layer in (gate, up)]
    if traced(x):
        weights, formats = [gate.weight, up.weight], [gate._format, up._format]
        y: torch.Tensor = traced_gated(x, weights, biases, formats, *gate._shape, function, gate.activation)
        return y
    return _gated(x, [gate.packed, up.packed], biases, function, gate.activation)


def _many(x: torch.Tensor, weights: Sequence[Packed], biases: Biases, activation: Any) -> list[torch.Tensor]:
    return products.matmul_many(x, weights, activation, biases=_detached(biases), dtype=x.dtype)


def _gated(x: torch.Tensor, weights: Sequence[Packed], biases: Biases, function: Gate, activation: Any) -> torch.Tensor:
    gate, up = weights
    y: torch.Tensor = products.gated(
        x, gate, up, function, activation, biases=_detached(biases), dtype=x.dtype
    )  # fmt: skip
    return y


def _detached(biases: Biases) -> Biases | None:
    """Biases that NumPy does not pin (see `ops.product`); None if all are absent."""
    if all(bias is None for bias in biases):
        return None
    return [bias if bias is None or bias.device.type != "cpu" else bias.detach().clone() for bias in biases]


# ---------------------------------------------------------------- the ops


def _linear_many(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Biases, formats: Sequence[str], ns: Sequence[int],
    k: int, activation: str,
) -> list[torch.Tensor]:  # fmt: skip
    packed = [packed_of(w, fmt, (n, k)) for w, fmt, n in zip(weights, formats, ns, strict=True)]
    return _many(x, packed, biases, activation)


def _fake_linear_many(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Biases, formats: Sequence[str], ns: Sequence[int],
    k: int, activation: str,
) -> list[torch.Tensor]:  # fmt: skip
    return [_fake_gated(x, weights, biases, formats, n, k, "", activation) for n in ns]


def _gated_op(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Biases, formats: Sequence[str], n: int, k: int,
    function: Gate, activation: str,
) -> torch.Tensor:  # fmt: skip
    packed = [packed_of(w, fmt, (n, k)) for w, fmt in zip(weights, formats, strict=True)]
    return _gated(x, packed, biases, function, activation)


def _fake_gated(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Biases, formats: Sequence[str], n: int, k: int,
    function: str, activation: str,
) -> torch.Tensor:  # fmt: skip
    torch._check(x.dim() > 0 and x.shape[-1] == k, lambda: f"x has shape {tuple(x.shape)}, the weight needs K = {k}")
    return x.new_empty((*x.shape[:-1], n))


for _name, _function, _fake in (
    ("linear_many", _linear_many, _fake_linear_many),
    ("gated", _gated_op, _fake_gated),
):
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _function, _device)
    torch.library.register_fake(f"qgemm::{_name}", _fake, lib=_library)

"""Products of a mixture of experts on the host: the tokens of an expert are multiplied together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.arguments import Array, Gated, Weights
from qgemm.arrays import as_numpy
from qgemm.codec.float_types import DType
from qgemm.codec.format import floats
from qgemm.routing import Layer, check_layer, check_of_experts, check_product, check_routing, check_weights_of
from qgemm.tensor import Tensor

from . import reference
from .fast_path import product
from .products import handed_back, target_of

FEW_IDS = 64  # ids that Python groups in less time than NumPy
Bias = NDArray[Any] | None  # [E, N]


def matmul(
    x: Array, w: Tensor, ids: Array, activation: str | None, bias: Array | None, out: Array | None,
    dtype: DType | None, check_ids: bool,
) -> Any:  # fmt: skip
    """y [T, top_k, N] of `qgemm.moe_matmul`; x is quantized once."""
    kind = check_product(x, w, ids, activation, check_ids)
    values, routes = floats(as_numpy(x, "x")), as_numpy(ids, "ids")
    check_routing(values, w, routes)
    target = None if out is None else target_of(out, (*routes.shape, w.shape[1]), dtype)
    (added,) = _biases([bias], [w])
    rows = values if kind == "a16" else reference.prepared(values, kind)
    y = np.empty((routes.size, w.shape[1]), np.float32)
    for expert, places in by_expert(routes, w.shape[0]):
        tokens, rank = np.divmod(places, routes.shape[1])
        _multiply(y, places, rows[tokens] if values.ndim == 2 else rows[tokens, rank], w, kind, added, expert)
    y = y.reshape(*routes.shape, -1) if y.size else np.zeros((*routes.shape, w.shape[1]), np.float32)
    return handed_back(x, y, out, target, dtype)


def feed_forward(
    x: Array, gate_up: Weights | Sequence[Weights], down: Tensor, ids: Array, weights: Array, activation: str,
    biases: Sequence[Array | None] | None, out: Array | None, dtype: DType | None, check_ids: bool,
) -> Any:  # fmt: skip
    """y [T, K] of `qgemm.moe`."""
    layer = check_layer(x, gate_up, down, ids, activation, biases, check_ids)
    values, routes, factors = floats(as_numpy(x, "x")), as_numpy(ids, "ids"), as_numpy(weights, "weights")
    check_routing(values, layer.gate_up[0], routes, shared=True)
    check_weights_of(factors, routes)
    target = None if out is None else target_of(out, values.shape, dtype)
    added = _biases(layer.biases, [*layer.gate_up, layer.down])
    parts, top_k = np.empty((routes.size, down.shape[1]), np.float32), routes.shape[1]
    for expert, places in by_expert(routes, down.shape[0]):
        rows = values[places // top_k] if len(places) > 1 else values[places[0] // top_k][None]
        (gate, gate_bias), (up, up_bias) = _gate_and_up(layer, added, expert)
        gated = Gated(layer.gate, up, up_bias)
        between = product(gate, rows, "a16", gate_bias, None, None, None, gated)
        _multiply(parts, places, between, down, "a16", added[-1], expert)
    y = _weighted(parts.reshape(*routes.shape, down.shape[1]), factors)
    return handed_back(x, y, out, target, dtype)


def by_expert(ids: NDArray[Any], experts: int) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Each expert that a token is routed to, with its places in ids, flat and in their order.

    IndexError for an id that is no expert.
    """
    flat = ids.reshape(-1)
    if 0 < flat.size <= FEW_IDS:
        return _few_by_expert(flat.tolist(), experts)
    if flat.size and not 0 <= flat.min() <= flat.max() < experts:
        raise _no_expert(int(flat.min()), int(flat.max()), experts)
    order = np.argsort(flat, kind="stable")
    present, starts = np.unique(flat[order], return_index=True)
    return zip(present.tolist(), np.split(order, starts[1:]), strict=False)


def _few_by_expert(ids: Sequence[int], experts: int) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """`by_expert` of some ids in Python: NumPy's sort, unique and split cost 50 us and more for any number."""
    places: dict[int, list[int]] = {}
    for place, expert in enumerate(ids):
        places.setdefault(expert, []).append(place)
    present = sorted(places)
    if present[0] < 0 or present[-1] >= experts:
        raise _no_expert(present[0], present[-1], experts)
    return ((expert, np.array(places[expert], np.intp)) for expert in present)


def _no_expert(low: int, high: int, experts: int) -> IndexError:
    return IndexError(f"ids are {low} to {high}, there are experts 0 to {experts - 1}")


def _weighted(parts: NDArray[np.float32], weights: NDArray[Any]) -> NDArray[np.float32]:
    """The sum of parts [T, top_k, K] over top_k, in order, by the weights [T, top_k] of the router."""
    y = np.zeros((len(parts), parts.shape[-1]), np.float32)
    factors = weights.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinity are data
        for j in range(parts.shape[1]):
            y += factors[:, j, None] * parts[:, j]
    return y


def _multiply(
    y: NDArray[np.float32], places: NDArray[np.intp], x: Array, w: Tensor, activation: str, bias: Bias, expert: int
) -> None:
    """y[places] = x @ w[expert].T + bias[expert]; a single row is not copied."""
    added, out = None if bias is None else bias[expert], y[places[0]][None] if len(places) == 1 else None
    rows = product(_expert(w, expert), x, activation, added, None, out, None)
    if out is None:
        y[places] = rows


def _expert(w: Tensor, expert: int, rows: slice = slice(None)) -> Tensor:
    """Rows of an expert's matrix: the same object each time, since it keeps the plans of its calls.

    Weights of a file are checked at each access, as other products check them.
    """
    if not w.in_memory:
        _ = w.blocks
    key = expert, rows.start, rows.stop
    matrix: Tensor | None = w.plans.get(key)
    if matrix is None:
        matrix = w.plans[key] = w[expert] if rows == slice(None) else w[expert][rows]
    return matrix


def _gate_and_up(layer: Layer, biases: Sequence[Bias], expert: int) -> list[tuple[Tensor, Bias]]:
    """Weights [F, K] and bias [F] of the gate and of the product that it gates."""
    rows = [None if bias is None else bias[expert] for bias in biases[:-1]]
    if len(layer.gate_up) == 2:
        return [(_expert(w, expert), bias) for w, bias in zip(layer.gate_up, rows, strict=True)]
    halves = slice(layer.width), slice(layer.width, None)
    both, bias = layer.gate_up[0], rows[0]
    return [(_expert(both, expert, half), None if bias is None else bias[half]) for half in halves]


def _biases(biases: Sequence[Array | None], weights: Sequence[Tensor]) -> list[Bias]:
    """Biases [E, N] of weights [E, N, K] as NumPy arrays."""
    arrays = [None if bias is None else as_numpy(bias, "bias") for bias in biases]
    for bias, w in zip(arrays, weights, strict=True):
        if bias is not None:
            check_of_experts(bias, w)
    return arrays

"""Products of a mixture of experts on the host: the tokens of an expert are multiplied together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qgemm.arguments import NO_EPILOGUE, Epilogue, Gated
from qgemm.routing import Layer
from qgemm.tensor import Tensor

if TYPE_CHECKING:
    from . import CpuBackend


def by_expert(ids: NDArray[Any], experts: int) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Each expert that a token takes, with its places in ids, flat and in their order.

    IndexError for an id that is no expert.
    """
    flat = ids.reshape(-1)
    if flat.size and not 0 <= flat.min() <= flat.max() < experts:
        raise IndexError(f"ids are {flat.min()} to {flat.max()}, there are experts 0 to {experts - 1}")
    order = np.argsort(flat, kind="stable")
    found, starts = np.unique(flat[order], return_index=True)
    return zip(found.tolist(), np.split(order, starts[1:]), strict=False)


def multiply(
    backend: CpuBackend, x: NDArray[Any] | Tensor, w: Tensor, ids: NDArray[Any], activation: str, bias: Any
) -> NDArray[np.float32]:
    """y [T, top_k, N] of x [T, K] or [T, top_k, K], values or their Q8_1 blocks."""
    y = np.empty((ids.size, w.shape[1]), np.float32)
    for expert, places in by_expert(ids, w.shape[0]):
        tokens, of_token = np.divmod(places, ids.shape[1])
        rows = x[tokens] if len(x.shape) == 2 else x[tokens, of_token]
        y[places] = _product(backend, rows, w[expert], activation, bias, expert)
    return y.reshape(*ids.shape, -1) if y.size else np.zeros((*ids.shape, w.shape[1]), np.float32)


def feed_forward(
    backend: CpuBackend,
    x: NDArray[Any],
    layer: Layer,
    ids: NDArray[Any],
    weights: NDArray[Any],
    biases: Sequence[Any],
) -> NDArray[np.float32]:
    """y [T, K] of x [T, K] by a layer; biases: arrays of the host or None."""
    made = np.empty((ids.size, layer.down.shape[1]), np.float32)
    for expert, places in by_expert(ids, layer.down.shape[0]):
        rows = x[places // ids.shape[1]]
        (gate, gate_bias), (up, up_bias) = _gate_and_up(layer, biases, expert)
        gated = Gated(layer.gate, up, up_bias)
        between = backend.gated(rows, gate, gated, "a16", gate_bias, None, np.float32)
        made[places] = _product(backend, between, layer.down[expert], "a16", biases[-1], expert)
    y = np.zeros((len(ids), layer.down.shape[1]), np.float32)
    factors, parts = weights.astype(np.float32), made.reshape(*ids.shape, layer.down.shape[1])
    with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinity are data
        for j in range(ids.shape[1]):
            y += factors[:, j, None] * parts[:, j]
    return y


def _product(backend: CpuBackend, rows: Any, w: Tensor, activation: str, bias: Any, expert: int) -> Any:
    added = NO_EPILOGUE if bias is None else Epilogue(bias[expert])
    return backend.matmul(rows, w, activation, added, None, np.float32)


def _gate_and_up(layer: Layer, biases: Sequence[Any], expert: int) -> list[tuple[Tensor, Any]]:
    """Weights [F, K] and bias [F] of the gate and of what it gates."""
    some = [None if bias is None else bias[expert] for bias in biases[:-1]]
    if len(layer.gate_up) == 2:
        return [(w[expert], bias) for w, bias in zip(layer.gate_up, some, strict=True)]
    halves = slice(layer.width), slice(layer.width, None)
    both, bias = layer.gate_up[0][expert], some[0]
    return [(both[half], None if bias is None else bias[half]) for half in halves]

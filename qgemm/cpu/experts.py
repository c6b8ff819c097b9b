"""Products of a mixture of experts on the host: by one call of C, which sorts the tokens by expert, or by NumPy.

C multiplies rows of x of one expert as it multiplies them by the expert's matrix alone, with the same bits. Calls like
an earlier one replay its plan, as other products do (fast_path.py). NumPy serves formats and activations that C does
not multiply in place: each expert's tokens are multiplied together, by a product of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.arguments import Array, Gated, Weights
from qgemm.arrays import as_numpy
from qgemm.codec.float_types import DType
from qgemm.codec.format import floats
from qgemm.packed import Packed
from qgemm.routing import Layer, check_layer, check_of_experts, check_product, check_routing, check_weights_of
from qgemm.tensor import Tensor

from . import reference
from .fast_path import SIZES, array_library, call_of, likeness, planned, product, read_rows, remember
from .native.calls import GATES, TYPES, Experts, Matrix, Target
from .native.libraries import loaded
from .native.pool import ready
from .native.products import Operand, in_place, template
from .plan import Argument, Plan
from .products import handed_back, target_of

FEW_IDS = 64  # ids that Python groups in less time than NumPy
ID_BYTES = {"int32": 4, "int64": 8}
Bias = NDArray[Any] | None  # [E, N]


def matmul(
    x: Array, w: Tensor, ids: Array, activation: str | None, bias: Array | None, out: Array | None,
    dtype: DType | None, check_ids: bool,
) -> Any:  # fmt: skip
    """y [T, top_k, N] of `qgemm.moe_matmul`; x is quantized once."""
    scalars, arrays = call_of(x, (out,), (ids, None, bias), ("moe_matmul", activation, dtype))
    ys = planned(w, scalars, arrays)
    if ys is not None:
        return ys[0]
    kind = check_product(x, w, ids, activation, check_ids)
    values, routes = floats(as_numpy(x, "x")), as_numpy(ids, "ids")
    check_routing(values, w, routes)
    target = None if out is None else target_of(out, (*routes.shape, w.shape[1]), dtype)
    added = _biases([bias], [w])
    call = Call((w,), "", kind)
    y = _by_c(call, (*routes.shape, w.shape[1]), values, routes, None, added)
    if y is None:
        y = _product_by_numpy(values, w, routes, kind, added[0])
    y = handed_back(x, y, out, target, dtype)
    remember(w, scalars, arrays, lambda: _plan(call, arrays, x, y, out is None, ids, None, [bias]))
    return y


def feed_forward(
    x: Array, gate_up: Weights | Sequence[Weights], down: Tensor, ids: Array, weights: Array, activation: str,
    biases: Sequence[Array | None] | None, out: Array | None, dtype: DType | None, check_ids: bool,
) -> Any:  # fmt: skip
    """y [T, K] of `qgemm.moe`."""
    pair = (gate_up,) if isinstance(gate_up, Packed) else tuple(gate_up)  # type: ignore[arg-type]
    terms = () if biases is None else tuple(biases)
    scalars, arrays = call_of(x, (out,), (ids, weights, *terms), ("moe", activation, dtype, *map(id, pair)))
    ys = planned(down, scalars, arrays)
    if ys is not None:
        return ys[0]
    layer = check_layer(x, pair[0] if len(pair) == 1 else pair, down, ids, activation, biases, check_ids)
    values, routes, factors = floats(as_numpy(x, "x")), as_numpy(ids, "ids"), as_numpy(weights, "weights")
    check_routing(values, layer.gate_up[0], routes, shared=True)
    check_weights_of(factors, routes)
    target = None if out is None else target_of(out, values.shape, dtype)
    added = _biases(layer.biases, [*layer.gate_up, layer.down])
    call = Call((*layer.gate_up, down), layer.gate, "a16")
    y = _by_c(call, values.shape, values, routes, factors, added)
    if y is None:
        y = _layer_by_numpy(values, layer, routes, factors, added)
    y = handed_back(x, y, out, target, dtype)
    remember(down, scalars, arrays, lambda: _plan(call, arrays, x, y, out is None, ids, weights, layer.biases))
    return y


def replay(
    x: Array, pair: Sequence[Tensor], down: Tensor, ids: Array, weights: Array, activation: str,
    biases: Sequence[Array | None], dtype: DType,
) -> Plan | None:  # fmt: skip
    """The plan of the latest `feed_forward` with such arguments; None without one."""
    added = (ids, weights, *biases)
    plan: Plan | None = down.plans.get(call_of(x, (None,), added, ("moe", activation, dtype, *map(id, pair)))[0])
    return plan


# ---------------------------------------------------------------- one call of C


class Call(NamedTuple):
    """weights: gate and up [E, F, K] or both [E, 2 F, K], then down, which are gated by a function; or one alone."""

    weights: tuple[Tensor, ...]
    function: str
    activation: str


def _by_c(
    call: Call, shape: tuple[int, ...], x: NDArray[Any], ids: NDArray[Any], weights: NDArray[Any] | None,
    biases: Sequence[Bias],
) -> NDArray[np.float32] | None:  # fmt: skip
    """A new float32 y; None where NumPy must compute it, or refuse an id."""
    y = np.empty(shape, np.float32)
    x, ids = _plain(x), _plain(ids)
    weights, *biases = (None if array is None else _plain(array) for array in (weights, *biases))
    arrays = [array for array in (x, y, ids, weights, *biases) if array is not None]
    plan = _plan(call, arrays, x, y, False, ids, weights, biases)
    return y if plan is not None and plan.outputs(arrays) is not None else None


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    """The array in C order, aligned and in the byte order of this machine."""
    return np.require(array, array.dtype.newbyteorder("="), ["C", "A"])


def _plan(
    call: Call, arrays: Sequence[Any], x: Any, y: Any, is_new: bool, ids: Any, weights: Any, biases: Sequence[Any]
) -> Plan | None:
    """The plan of a call on these arrays; None where C would need anything but them and their conversions.

    is_new: whether later calls make y. arrays: of a call, in which y is missing then.
    """
    if not prod(ids.shape) or not in_place(call.weights, call.activation, 3):
        return None
    record = Experts(tokens=ids.shape[0], top_k=ids.shape[1], count=call.weights[0].shape[0])
    record.slots_of_row = ids.shape[1] if len(x.shape) == 2 else 1
    operand_of_x, use_of_x = read_rows(x, x.shape[-1])
    operand_of_y, use_of_y = read_rows(y, y.shape[-1])
    id_bytes, use_of_ids = _read_table(ids, ID_BYTES, Experts.ids.offset)
    uses = [use_of_x._replace(offset=Experts.x.offset), use_of_y._replace(offset=Experts.y.offset), use_of_ids]
    if operand_of_x is None or operand_of_y is None or use_of_y.convert is not None or id_bytes is None:
        return None
    record.y_row, record.y_type, record.id_bytes = operand_of_y.row, operand_of_y.type, id_bytes
    if weights is not None:
        weights_type, use = _read_table(weights, TYPES, Experts.weights.offset)
        if weights_type is None:
            return None
        record.weights_type = weights_type
        uses.append(use)
    names, files = ("gate", "up", "down") if len(call.weights) == 3 else ("gate", "down")[-len(call.weights) :], []
    for name, w, bias in zip(names, call.weights, biases, strict=True):
        matrix, offset = getattr(record, name), getattr(Experts, name).offset + Matrix.target.offset
        _describe(matrix, w, call.activation, operand_of_x)
        if not w.in_memory:
            files.append((w, offset + Target.w.offset))
        if bias is not None:
            operand, use = read_rows(bias, bias.shape[-1])
            if operand is None:
                return None
            matrix.bias_row, matrix.bias_type = operand.row, operand.type
            uses.append(use._replace(offset=offset + Target.bias.offset))
    if call.function:
        gate, up = record.gate.target, record.up.target
        gate.gate = GATES[call.function]
        record.merged = len(call.weights) == 2
        gate.n //= 1 + record.merged
        up.packed_by = int((gate.pack, gate.digits) != (up.pack, up.digits))
        record.down.target.x_type = TYPES["float32"]
    memory = ready().qgemm_experts_bytes(ctypes.addressof(record))
    new, outs = ([array_library(y).new(y)], 0) if is_new else ([], 1)
    like = likeness(arrays)
    return Plan(record, "qgemm_replay_experts", memory, uses, outs, new, call.weights, files, like, {})


def _describe(matrix: Matrix, w: Tensor, activation: str, x: Operand) -> None:
    """Fill in the weights of experts, whose x may have another type only where they read that of the call."""
    _, n, k = w.shape
    matrix.target = template(loaded(w.format), w.format, (n, k), activation)
    matrix.expert_bytes, matrix.target.w_row, _ = w.blocks.strides
    matrix.target.w, matrix.target.x_row, matrix.target.x_type = w.blocks.ctypes.data, x.row, x.type


def _read_table(array: Any, codes: Mapping[str, int], offset: int) -> tuple[int | None, Argument]:
    """The code of the type of an array [T, top_k], which C reads without gaps; None for another type."""
    library = array_library(array)
    name = library.type(array)
    size = SIZES.get(name) or ID_BYTES.get(name, 1)
    steps = zip(array.shape, library.strides(array), (array.shape[1] * size, size), strict=True)
    gaps = any(stride != step for length, stride, step in steps if length > 1)
    return codes.get(name), Argument(
        library.pointer, prod(array.shape) * size, size, library.copy if gaps else None, offset
    )


# ---------------------------------------------------------------- NumPy


def _product_by_numpy(
    x: NDArray[Any], w: Tensor, ids: NDArray[Any], kind: str, bias: Bias
) -> NDArray[np.float32]:  # fmt: skip
    """y [T, top_k, N] of a product."""
    rows = x if kind == "a16" else reference.prepared(x, kind)
    y = np.empty((ids.size, w.shape[1]), np.float32)
    for expert, places in by_expert(ids, w.shape[0]):
        tokens, rank = np.divmod(places, ids.shape[1])
        _multiply(y, places, rows[tokens] if x.ndim == 2 else rows[tokens, rank], w, kind, bias, expert)
    return y.reshape(*ids.shape, -1) if y.size else np.zeros((*ids.shape, w.shape[1]), np.float32)


def _layer_by_numpy(
    x: NDArray[Any], layer: Layer, ids: NDArray[Any], weights: NDArray[Any], biases: Sequence[Bias]
) -> NDArray[np.float32]:  # fmt: skip
    """y [T, K] of a layer."""
    down = layer.down
    parts, top_k = np.empty((ids.size, down.shape[1]), np.float32), ids.shape[1]
    for expert, places in by_expert(ids, down.shape[0]):
        rows = x[places // top_k] if len(places) > 1 else x[places[0] // top_k][None]
        (gate, gate_bias), (up, up_bias) = _gate_and_up(layer, biases, expert)
        gated = Gated(layer.gate, up, up_bias)
        between = product(gate, rows, "a16", gate_bias, None, None, None, gated)
        _multiply(parts, places, between, down, "a16", biases[-1], expert)
    return _weighted(parts.reshape(*ids.shape, down.shape[1]), weights)


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

"""The CPU backend: arrays of the host, checked and shaped, multiplied by the NumPy kernels (qgemm/cpu/numpy.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from qgemm.arguments import (
    NO_EPILOGUE,
    Activation,
    Epilogue,
    Gated,
    PreparedActivations,
    check_activation,
    check_apart,
    check_elements,
    check_epilogue,
    check_gated,
    check_not_scalar,
    check_out,
    check_prepared,
    check_shapes,
    check_weights,
    misplaced,
    output_dtype,
    prepared_for,
)
from qgemm.arguments import epilogues as epilogues_of
from qgemm.arrays import as_numpy, as_target, like, on_cuda, rounds_itself, torch_of, written
from qgemm.backend import Status
from qgemm.codec import group_activations, q8_1_f32, search
from qgemm.codec.format import Blocks, Format, float_name, floats
from qgemm.codec.group_activations import E4M3, GROUPS
from qgemm.errors import UnsupportedError
from qgemm.formats.q8_1 import FORMAT as Q8_1
from qgemm.gating import gated_by
from qgemm.parallel import threads
from qgemm.routing import check_of_experts, check_routing, check_weights_of, layer_of
from qgemm.tensor import Tensor

from . import e4m3, eight_bits, experts, native
from . import numpy as kernels
from .decode import dequantize as dequantize
from .decode import gather as gather
from .native import encoders
from .native.again import again as again

encoders.install()


class Product(NamedTuple):
    """One product of a call: its weights, the memory of its output, what is added to it and what it gates."""

    w: Tensor
    y: NDArray[Any]
    epilogue: Epilogue
    gated: Gated | None = None  # its bias an array of the host


class CpuBackend:
    """`qgemm.backend.Backend` on the host."""

    def matmul(self, x: Any, w: Tensor, activation: str, epilogue: Epilogue, out: Any, dtype: DTypeLike | None) -> Any:
        """y in `out`, or as an array of x's library."""
        return self.matmul_many(x, [w], activation, [epilogue], [out], dtype)[0]

    def matmul_many(
        self,
        x: Any,
        weights: Sequence[Tensor],
        activation: str,
        epilogues: Sequence[Epilogue],
        outs: Sequence[Any],
        dtype: DTypeLike | None,
    ) -> list[Any]:
        """`matmul` by each of the weights, once all arguments are checked; "a8" quantizes x once."""
        values = x if isinstance(x, Tensor) else check_not_scalar(floats(as_numpy(x, "x")))
        name = float_name(np.float32 if dtype is None else dtype)
        made = np.float32 if rounds_itself(x, name) else name
        products = []
        for w, epilogue, out in zip(weights, epilogues, outs, strict=True):
            _check(values, w, activation)
            shape = (*values.shape[:-1], w.shape[0])
            y = np.empty(shape, output_dtype(made)) if out is None else _target(out, shape, dtype)
            products.append(Product(w, y, _added(epilogue, shape)))
        given = [p.y for p, out in zip(products, outs, strict=True) if out is not None]
        check_apart(given)
        if not isinstance(values, Tensor) and any(np.may_share_memory(values, y) for y in given):
            values = values.copy()
        _multiply(values, [_apart(p, given) for p in products], activation)
        ys = zip(products, outs, strict=True)
        return [like(x, p.y, rounds_itself(x, name)) if out is None else written(out, p.y) for p, out in ys]

    def gated(
        self, x: Any, gate: Tensor, gated: Gated, activation: str, bias: Any, out: Any, dtype: DTypeLike | None
    ) -> Any:
        """function(x @ gate.T + bias) * (x @ up.T + its bias), in `out` or as an array of x's library."""
        for w in (gate, gated.up):
            check_weights(w, activation)
        check_gated(gate, gated.up)
        values = x if isinstance(x, Tensor) else check_not_scalar(floats(as_numpy(x, "x")))
        name = float_name(np.float32 if dtype is None else dtype)
        shape = (*values.shape[:-1], gate.shape[0])
        target = None if out is None else _target(out, shape, dtype)
        added = [NO_EPILOGUE if one is None else Epilogue(as_numpy(one, "bias")) for one in (bias, gated.bias)]
        made = np.float32 if rounds_itself(x, name) else name
        y = np.empty(shape, output_dtype(made)) if target is None else target
        p = Product(gate, y, _added(added[0], shape), gated._replace(bias=_added(added[1], shape).bias))
        for w in (gate, gated.up):
            _check(values, w, activation)
        if target is not None and not isinstance(values, Tensor) and np.may_share_memory(values, target):
            values = values.copy()
        if activation in GROUPS and not isinstance(values, Tensor):
            values = eight_bits.quantize(values, activation)
        if _compiled(_rows(values), [p], activation):
            return like(x, y, rounds_itself(x, name)) if target is None else written(out, y)
        products = self.matmul_many(values, [gate, gated.up], activation, added, [None, None], np.float32)
        return _handed_back(x, gated_by(gated.function, *products), out, target, name)

    def moe_matmul(
        self, x: Any, w: Tensor, ids: Any, activation: str, bias: Any, out: Any, dtype: DTypeLike | None
    ) -> Any:
        """y [T, top_k, N], in `out` or as an array of x's library; x is quantized once."""
        values, places = floats(as_numpy(x, "x")), as_numpy(ids, "ids")
        check_routing(values, w, places)
        name, shape = float_name(np.float32 if dtype is None else dtype), (*places.shape, w.shape[1])
        target = None if out is None else _target(out, shape, dtype)
        (added,) = _of_experts([bias], [w])
        rows = values if activation == "a16" else self._prepared(values, activation)
        y = experts.multiply(self, rows, w, places, activation, added)
        return _handed_back(x, y, out, target, name)

    def moe(
        self, x: Any, gate_up: Any, down: Any, ids: Any, weights: Any, activation: str, biases: Sequence[Any] | None,
        out: Any, dtype: DTypeLike | None,
    ) -> Any:  # fmt: skip
        """y [T, K], in `out` or as an array of x's library."""
        layer = layer_of(gate_up, down, biases, activation)
        values, places, factors = floats(as_numpy(x, "x")), as_numpy(ids, "ids"), as_numpy(weights, "weights")
        check_routing(values, layer.gate_up[0], places, shared=True)
        check_weights_of(factors, places)
        name = float_name(np.float32 if dtype is None else dtype)
        target = None if out is None else _target(out, values.shape, dtype)
        added = _of_experts(layer.biases, [*layer.gate_up, layer.down])
        y = experts.feed_forward(self, values, layer, places, factors, added)
        return _handed_back(x, y, out, target, name)

    def quantize_activations(self, x: Any, activation: Activation) -> Tensor:
        """x [..., K] -> a Tensor of activations."""
        return self._prepared(check_not_scalar(floats(as_numpy(x, "x"))), activation)

    @staticmethod
    def _prepared(x: NDArray[Any], activation: str) -> Tensor:
        return eight_bits.quantize(x, activation) if activation in GROUPS else kernels.quantize_activations(x)

    def quantize(self, x: Any, fmt: Format, importance: Any = None) -> Tensor:
        """Values [..., K] -> a Tensor."""
        values = floats(as_numpy(x, "x"))
        blocks = fmt.quantize(values) if importance is None else search.quantize(fmt, values, importance)
        return Tensor(fmt, values.shape, blocks)

    def preparation(
        self, tensors: Sequence[Any], rows: Sequence[int] | None, activations: Sequence[str], dtypes: Sequence[str]
    ) -> list[Callable[[], bool]]:
        """A library for each format, and that which quantizes activations; none where NumPy multiplies."""
        formats = {each.format: None for each in tensors if each.ndim > 1}
        return native.preparation(list(formats), activations)

    def check_upload(self, fmt: Format, shape: tuple[int, ...], who: str) -> None:
        """Nothing: the host holds any."""

    def upload(self, tensor: Tensor, blocks: Blocks) -> Tensor:
        """The Tensor itself: the host multiplies blocks as they are."""
        return tensor

    def status(self) -> Status:
        """Always available."""
        why = native.reason()
        by = f"NumPy alone: {why}" if why else native.origin()
        facts = {"numpy": np.__version__, "threads": threads(), "compiled": not why}
        return Status(True, f"NumPy {np.__version__}, {threads()} threads, {by}", facts)


BACKEND = CpuBackend()


def product(
    w: Tensor, x: Any, activation: str | None, bias: Any, residual: Any, out: Any, dtype: DTypeLike | None,
    gated: Gated | None = None,
) -> Any:  # fmt: skip
    """y of `qgemm.matmul`, or of `gated`, where all arguments are checked."""
    kind = check_activation(activation, prepared_for(x))
    _check_here(x, [w] if gated is None else [w, gated.up])
    if gated is not None:
        return BACKEND.gated(x, w, gated, kind, bias, out, dtype)
    added = NO_EPILOGUE if bias is None and residual is None else Epilogue(bias, residual)
    return BACKEND.matmul(x, w, kind, added, out, dtype)


def products(
    x: Any,
    weights: Sequence[Any],
    activation: str | None,
    epilogues: Sequence[Epilogue] | None,
    outs: Sequence[Any] | None,
    dtype: DTypeLike | None,
) -> list[Any] | None:
    """The list of `qgemm.matmul_many`; None if some weights are no Tensors."""
    if not all(isinstance(w, Tensor) for w in weights):
        return None
    kind = check_activation(activation, prepared_for(x))
    _check_here(x, weights)
    added = epilogues or epilogues_of(len(weights), None, None, outs)
    return BACKEND.matmul_many(x, weights, kind, added, [None] * len(weights) if outs is None else outs, dtype)


def _check_here(x: Any, weights: Sequence[Any]) -> None:
    """The error about x or weights that are not on the host."""
    elsewhere = isinstance(x, PreparedActivations) or on_cuda(x)
    for w in weights:
        if elsewhere or not isinstance(w, Tensor):
            raise misplaced(x, w)


def _check(x: NDArray[Any] | Tensor, w: Tensor, activation: str) -> None:
    check_weights(w, activation)
    check_prepared(prepared_for(x), activation)
    if isinstance(x, Tensor) and x.format not in (q8_1_f32.FORMAT, Q8_1, *group_activations.FORMATS.values()):
        raise UnsupportedError(f"prepared activations are Q8_1 for activation 'a8', got {x!r} for {activation!r}")
    check_shapes(x.shape, w)


def _target(out: Any, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """The memory of `out`, if it fits."""
    memory = as_target(out)
    check_out(memory if torch_of(out) is None else out, shape, dtype)
    check_elements(memory)
    return memory


def _of_experts(biases: Sequence[Any], weights: Sequence[Tensor]) -> list[NDArray[Any] | None]:
    """Biases [E, N] of weights [E, N, K] as NumPy arrays."""
    arrays = [None if bias is None else as_numpy(bias, "bias") for bias in biases]
    for bias, w in zip(arrays, weights, strict=True):
        if bias is not None:
            check_of_experts(bias, w)
    return arrays


def _handed_back(x: Any, y: NDArray[Any], out: Any, target: NDArray[Any] | None, name: str) -> Any:
    """y, float32 that is new, in the memory of `out`, or as an array of x's library and a type by name."""
    rounds = rounds_itself(x, name)
    with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinity are data
        if target is not None:
            target[...] = y
            return written(out, target)
        return like(x, y if rounds else y.astype(output_dtype(name), copy=False), rounds)


def _added(epilogue: Epilogue, shape: tuple[int, ...]) -> Epilogue:
    """Bias and residual as NumPy arrays that fit y of this shape."""
    if not epilogue.given:
        return epilogue
    names = zip(epilogue, Epilogue._fields, strict=True)
    arrays = Epilogue(*(None if array is None else as_numpy(array, name) for array, name in names))
    check_epilogue(arrays, shape)
    return arrays


def _apart(p: Product, outs: Sequence[NDArray[Any]]) -> Product:
    """The product with copies of what other outputs are written over; its own is written once all is added."""
    others = [y for y in outs if y is not p.y]
    kept = (
        None if added is None else added.copy() if any(np.may_share_memory(added, y) for y in others) else added
        for added in p.epilogue
    )
    return p._replace(epilogue=Epilogue(*kept)) if others and p.epilogue.given else p


def _multiply(x: NDArray[Any] | Tensor, products: Sequence[Product], activation: str) -> None:
    """y = x @ w.T + epilogue of each; but for "a16" with x as blocks of activations, which values are quantized to."""
    if activation in GROUPS and not isinstance(x, Tensor):
        x = eight_bits.quantize(x, activation)
    rows = _rows(x)
    if _compiled(rows, products, activation):
        return
    if activation == "a8" and not isinstance(x, Tensor) and len(rows):
        rows = kernels.quantize_activations(rows).blocks
    found = {"a16": kernels.multiply_a16, "a8": kernels.multiply_a8, E4M3: e4m3.multiply}
    by_numpy = found.get(activation, eight_bits.multiply)
    for p in products:
        if len(products) == 1 or not _compiled(rows, [p], activation):
            _finish(p, by_numpy, rows)


def _rows(x: NDArray[Any] | Tensor) -> NDArray[Any]:
    """x as [M, K], or as blocks of activations [M, K / 32]."""
    m = prod(x.shape[:-1])
    if not isinstance(x, Tensor):
        return _native(x).reshape(m, x.shape[-1])
    blocks = x.blocks.reshape(m, x.blocks.shape[-1])
    return q8_1_f32.of_q8_1(blocks) if x.format == Q8_1 else blocks


def _compiled(rows: NDArray[Any], products: Sequence[Product], activation: str) -> bool:
    """All of it by compiled code; False where there is none: then nothing is written."""
    m = len(rows)
    if not m or any(0 in p.w.shape for p in products):
        return False
    todo, late = [], []
    for p in products:
        n = p.w.shape[0]
        direct = p.y.flags.c_contiguous and p.y.flags.aligned and p.y.dtype.isnative
        y = p.y.reshape(m, n) if direct else np.empty((m, n), p.y.dtype.newbyteorder("="))
        if not direct:
            late.append((p.y, y))
        residual = p.epilogue.residual
        todo.append(
            native.Weights(
                p.w,
                y,
                _bias(p.epilogue.bias, p.y),
                None if residual is None else _apart_from(residual.reshape(m, n), y),
                0 if p.gated is None else native.GATES[p.gated.function],
            )
        )
        if p.gated is not None:
            todo.append(native.Weights(p.gated.up, None, _bias(p.gated.bias, p.y)))
    if not native.multiply(rows, todo, activation):
        return False
    for out, y in late:
        out[...] = y.reshape(out.shape)
    return True


def _native(array: NDArray[Any]) -> NDArray[Any]:
    """The array in the byte order of this machine."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _bias(bias: NDArray[Any] | None, y: NDArray[Any]) -> NDArray[np.float32] | None:
    """A bias as contiguous float32 in memory that y is not written to."""
    if bias is None:
        return None
    with np.errstate(over="ignore", invalid="ignore"):  # a float64 beyond float32 is infinite
        plain = np.ascontiguousarray(bias, np.float32)
    return plain.copy() if np.may_share_memory(plain, y) else plain


def _apart_from(residual: NDArray[Any], y: NDArray[Any]) -> NDArray[Any]:
    """A residual [M, N] with contiguous rows, each number of which is read before y is written to its memory."""
    plain = _native(residual)
    if plain.strides[-1] != plain.itemsize:
        plain = np.ascontiguousarray(plain)
    same = plain.__array_interface__["data"] == y.__array_interface__["data"] and plain.strides == y.strides
    same = same and plain.dtype == y.dtype
    return plain if same or not np.may_share_memory(plain, y) else plain.copy()


def _finish(p: Product, multiply: Callable[[Any, Tensor, NDArray[Any]], None], rows: NDArray[Any]) -> None:
    """y of one product by a function of NumPy that writes x @ w.T, and its epilogue."""
    m, n = len(rows), p.w.shape[0]
    direct = p.y.flags.c_contiguous and not p.epilogue.given
    flat = p.y.reshape(m, n) if direct else np.empty((m, n), np.float32 if p.epilogue.given else p.y.dtype)
    if p.w.shape[1] == 0:
        flat[...] = 0  # an empty sum
    elif flat.size:
        multiply(rows, p.w, flat)
    if direct:
        return
    total = flat.reshape(p.y.shape)
    with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinity are data
        for added in p.epilogue:
            if added is not None:
                total += added.astype(np.float32, copy=False)
        p.y[...] = total

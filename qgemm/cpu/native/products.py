"""Products of packed weights by kernels/cpu/: a library for each format (libraries.py)."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.codec import group_activations, q8_1_f32
from qgemm.codec.float_types import dtype_name
from qgemm.codec.format import Blocks, Format
from qgemm.codec.packing import Floats
from qgemm.tensor import Tensor

from .calls import A8, A16, FLOATS, LEAST_TILED, PACKED_TOKENS, ROWS, TABLE, TARGETS, TYPES, Decoding, Target, fields
from .interleave import copy_of, read_interleaved
from .libraries import loaded, multiplied_as, serves, sized, source
from .library import Loader, compiles, library, reason
from .pool import pool, pooled, ready, run
from .sources import source_of

UNFUSED = ("-ffp-contract=off",)  # for rounding that NumPy does in two steps
ALIGNED = 64  # bytes: a cache line, and a vector
KEPT_BYTES = 1 << 26  # scratch memory that a thread keeps between calls
PANEL_WEIGHTS = 1 << 22  # weights decoded at a time, for a format without a library of its own


class Quantization(ctypes.Structure):
    """x [n, 32] float32 and its blocks, for kernels/cpu/activations.c."""

    _fields_ = (("x", ctypes.c_void_p), ("blocks", ctypes.c_void_p))


class RowsOfX(ctypes.Structure):
    """x [n, k] float32 and its blocks [n, k / 32], a scale for `group` columns, for kernels/cpu/activations.c."""

    _fields_ = (("x", ctypes.c_void_p), ("blocks", ctypes.c_void_p), ("k", ctypes.c_int64), ("group", ctypes.c_int64))


QUANTIZER = source_of(
    "activations",
    {
        "UNIT": f"{q8_1_f32.UNIT}f",
        "QUANTIZATION_FIELDS": fields(Quantization),
        "ACTIVATION_BYTES": str(q8_1_f32.DTYPE.itemsize),
        "ROWS_FIELDS": fields(RowsOfX),
        "GROUPED_BYTES": str(group_activations.DTYPE.itemsize),
        "LEAST_EIGHT_BITS": f"{group_activations.MIN_MAGNITUDE}f",
    },
    UNFUSED,
)
EIGHT_BITS = source_of(
    "products_eight_bits",
    {"ACTIVATION_BYTES": str(group_activations.DTYPE.itemsize), "MOST_TOKENS": str(PACKED_TOKENS)},
    UNFUSED,
)


def quantize(x: Floats) -> Blocks | None:
    """Values [n, 32] -> blocks of activations [n], as `qgemm.codec.activations.encode` makes them; None: NumPy must."""
    engine = None if reason() else _quantizer()
    if engine is None:
        return None
    values = np.require(x, np.float32, ["C", "A"])
    blocks = np.empty(len(values), q8_1_f32.DTYPE)
    run(engine.qgemm_quantize, Quantization(values.ctypes.data, blocks.ctypes.data), len(values), 8 * ROWS)
    return blocks


def quantize_groups(x: Floats, group: int) -> Blocks | None:
    """Values [n, K] -> blocks [n, K / 32], as `qgemm.codec.group_activations.encode_rows` makes them; None: NumPy."""
    engine = None if reason() else _quantizer()
    if engine is None:
        return None
    values = np.require(x, np.float32, ["C", "A"])
    n, k = values.shape
    blocks = np.empty((n, k // group_activations.FORMAT.weights), group_activations.DTYPE)
    run(engine.qgemm_quantize_groups, RowsOfX(values.ctypes.data, blocks.ctypes.data, k, group), n, 1)
    return blocks


@Loader
def _quantizer() -> ctypes.CDLL | None:
    return pooled(QUANTIZER)


def preparation(formats: Sequence[Format], kinds: Sequence[str]) -> list[Callable[[], bool]]:
    """A call for each library of products by weights of these formats; kinds: of activations."""
    libraries = dict.fromkeys(multiplied_as(fmt) for fmt in formats if serves(fmt))
    loads: list[Callable[[], object]] = [partial(loaded, fmt) for fmt in libraries]
    if loads:
        loads += [
            pool,
            *[_quantizer] * (set(kinds) != {"a16"}),
            *[eight_bit_library] * (not group_activations.INTEGER.keys().isdisjoint(kinds)),
        ]
    return [partial(compiles, load) for load in loads]


class Product(NamedTuple):
    """One product of a call: weights [N, K], y [M, N] of any float dtype and with contiguous rows, and its epilogue.

    bias: [N] float32. residual: [M, N] of any float dtype. gate: of GATES; this product then gates the next one of the
    call, whose y is None.
    """

    w: Tensor
    y: NDArray[Any] | None
    bias: Floats | None = None
    residual: NDArray[Any] | None = None
    gate: int = 0

    @property
    def finishes(self) -> bool:
        """Whether y is more than the sums in float32."""
        return self.y is None or bool(self.gate) or self.y.dtype != np.float32 or not self.sums_alone

    @property
    def sums_alone(self) -> bool:
        """Whether nothing is added."""
        return self.bias is None and self.residual is None


def multiplies(products: Sequence[Product], activation: str) -> bool:
    """Whether compiled code makes all of these products; NumPy must where it does not, and where one is empty."""
    activation = _as_multiplied(activation)
    if any(p.y is not None and not p.y.size for p in products) or any(0 in p.w.shape for p in products):
        return False
    if None in [_digits(p.w.format, activation) for p in products]:
        return False
    engines = [loaded(multiplied_as(p.w.format)) for p in products]
    decoded = [p for p in products if multiplied_as(p.w.format) != p.w.format]
    return None not in engines and has_library(activation) and not any(p.finishes for p in decoded)


def has_kernel(fmt: Format, activation: str) -> bool:
    """Whether compiled code multiplies weights of a format by a kind of activations; nothing is compiled for it."""
    return _digits(fmt, _as_multiplied(activation)) is not None


def multiply(x: NDArray[Any], products: Sequence[Product], activation: str) -> None:
    """y = x [M, K] @ w.T + bias + residual of each, gated; x of any float dtype; all of which `multiplies`.

    activation: "a16"; "a8" and "a8_g256" with values, which are quantized, or with blocks of activations
    [M, K / 32] of that kind; "e4m3_g256" with blocks of its kind, which are decoded and multiplied by exact weights.

    x is packed once for all weights of a format, and the rows of all weights are shared out together.
    """
    if activation == group_activations.E4M3:
        x = group_activations.FORMATS[activation].dequantize(x)
    elif activation in group_activations.INTEGER and not x.dtype.names:
        with np.errstate(over="ignore"):  # a float64 beyond float32 is infinite
            blocks = quantize_groups(x, group_activations.INTEGER[activation])
        assert blocks is not None, "`multiplies` says so"
        x = blocks
    activation = _as_multiplied(activation)
    whole = [p for p in products if multiplied_as(p.w.format) == p.w.format]
    decoded = [p for p in products if multiplied_as(p.w.format) != p.w.format]
    x = np.require(x, requirements=["C", "A"])
    for start in range(0, len(whole), TARGETS):  # a product that gates comes in a call with only the one it gates
        _multiply(x, whole[start : start + TARGETS], activation)
    for p in decoded:
        height = max(1, PANEL_WEIGHTS // max(1, p.w.shape[1]))
        for start in range(0, len(p.w.blocks), height):
            values = p.w.format.dequantize(p.w.blocks[start : start + height])
            panel = Tensor(multiplied_as(p.w.format), values.shape, values)
            assert p.y is not None, "a product of its own"
            _multiply(x, [Product(panel, p.y[:, start : start + height])], activation)


def _as_multiplied(activation: str) -> str:
    """The activation whose library multiplies: e4m3 activations are decoded, so "a16" for them."""
    return "a16" if activation == group_activations.E4M3 else activation


def has_library(activation: str) -> bool:
    """Whether there is the library, of no format, that a kind of activations needs."""
    if activation == "a8_g256":
        return eight_bit_library() is not None
    return activation != "a8" or _quantizer() is not None


def _digits(fmt: Format, activation: str) -> int | None:
    """Digits of x for the library that multiplies; None where there is none."""
    whole = activation != "a16"
    if not serves(fmt) or (whole and (not fmt.integer or source(fmt) is None)):
        return None
    if activation == "a8_g256" and _rounds_otherwise(fmt):
        return None
    return A8 if whole else A16 if multiplied_as(fmt).integer else FLOATS


def _multiply(x: NDArray[Any], products: Sequence[Product], activation: str) -> None:
    """All products in one call; x contiguous."""
    operands = [_operands(p) for p in products]
    kind = None if activation != "a16" and x.dtype.names else TYPES[dtype_name(x.dtype)]
    k = products[0].w.shape[1]
    targets, packed, converted = targets_of(operands, Operand(0, x.strides[0], kind), len(x), k, activation)
    memory = scratch(packed + converted)
    ready().qgemm_multiply(targets, len(products), x.ctypes.data, len(x), memory, memory + packed)


def _operands(p: Product) -> Operands:
    """The operands of a product, whose blocks are copied if a row has gaps."""
    blocks, bias = p.w.blocks, 0 if p.bias is None else p.bias.ctypes.data
    if blocks.strides[-1] != p.w.format.block_bytes:
        blocks = np.ascontiguousarray(blocks)
    y, residual = (
        None if array is None else Operand(array.ctypes.data, array.strides[0], TYPES[dtype_name(array.dtype)])
        for array in (p.y, p.residual)
    )
    return Operands(p.w, blocks, y, bias, residual, p.gate)


class Operand(NamedTuple):
    """Rows of numbers as C reads or writes them.

    row: bytes from a row to the next. type: a code of TYPES, None for blocks of activations.
    """

    address: int
    row: int
    type: int | None


class Operands(NamedTuple):
    """One product of a call for C: weights with their blocks, y unless another product gates it, terms to add."""

    w: Tensor
    blocks: Blocks
    y: Operand | None
    bias: int
    residual: Operand | None
    gate: int


def in_place(weights: Sequence[Tensor], activation: str, ndim: int = 2) -> bool:
    """Whether C multiplies by the blocks of all these weights where they lie, in one call.

    ndim: 2 for matrices, 3 for experts.
    """
    for w in weights:
        if activation not in ("a16", "a8") or w.ndim != ndim or 0 in w.shape or not serves(w.format):
            return False
        if source(w.format) is None or _digits(w.format, activation) is None or loaded(w.format) is None:
            return False
        *strides, step = w.blocks.strides
        if step != w.format.block_bytes or min(strides) < 0:
            return False
    return has_library(activation)


def targets_of(products: Sequence[Operands], x: Operand, m: int, k: int, activation: str) -> tuple[Any, int, int]:
    """The arguments of C for products of x [m, k]; the bytes for x packed, and for x converted to float32."""
    targets = (Target * len(products))()
    packers: dict[tuple[Any, ...], int] = {}
    nbytes = 0
    for i, p in enumerate(products):
        targets[i] = template(loaded(p.w.format), p.w.format, p.w.shape, activation)
        target = targets[i]  # the copy in the array of C
        target.w, target.w_row, target.x_row = p.blocks.ctypes.data, p.blocks.strides[0], x.row
        if p.y is not None:
            target.y, target.y_row, target.y_type = p.y
        target.bias = p.bias or None
        if p.residual is not None:
            target.residual, target.residual_row, target.residual_type = p.residual
        target.gate = p.gate
        if x.type is None:
            target.quantize = None
        target.x_type = x.type or 0
        copy = None if target.eight else copy_of(p.w, p.blocks)
        if copy is not None:
            read_interleaved(target, copy)
        target.packed_by = packers.setdefault((target.pack, target.digits, bool(target.interleaved)), i)
        if target.packed_by == i:
            nbytes += scratch_bytes(target, m)
    converted = min(m, tokens(targets[0])) * k * np.dtype(np.float32).itemsize if targets[0].x_type else 0
    return targets, nbytes, converted


def tokens(target: Target) -> int:
    """Rows of x that are packed at a time."""
    return PACKED_TOKENS if target.digits == A8 else PACKED_TOKENS // 2


def scratch_bytes(target: Target, m: int) -> int:
    """The bytes of m rows of x, packed for a format."""
    tile_bytes = target.tile_bytes if m >= LEAST_TILED or target.interleaved else 0
    return int(min(m, tokens(target)) * max(target.row_bytes, tile_bytes))


@lru_cache(maxsize=1024)
def template(engine: ctypes.CDLL | None, fmt: Format, shape: tuple[int, int], activation: str) -> Target:
    """The arguments that all products by weights of a format and shape share; engine: the library of the format."""
    digits = _digits(fmt, activation)
    assert engine is not None, "`multiplies` says so"
    assert digits is not None, "`multiplies` says so"
    table, quantizer, eight = _table(fmt), _quantizer() if activation == "a8" else None, None
    if activation == "a8_g256":
        eight, engine = engine.qgemm_eight_bits, eight_bit_library()
        assert engine is not None, "`multiplies` says so"
    of_tiles = FLOATS if digits == A16 else digits
    sizes = (engine.qgemm_packed_bytes(*kind, shape[1]) for kind in ((digits, 0), (of_tiles, 1)))
    return Target(
        pack=_address(engine.qgemm_pack), rows=_address(engine.qgemm_rows),
        quantize=None if quantizer is None else _address(quantizer.qgemm_quantize_blocks),
        eight=None if eight is None else _address(eight),
        table=None if table is None else table.ctypes.data, n=shape[0], k=shape[1], digits=digits,
        unit=q8_1_f32.UNIT if activation == "a8" else 1.0,
        **dict(zip(("row_bytes", "tile_bytes"), sizes, strict=True)),
    )  # fmt: skip


@Loader
def eight_bit_library() -> ctypes.CDLL | None:
    """The library that multiplies codes of eight bits of any format."""
    code = None if _quantizer() is None else library(EIGHT_BITS)
    return code if code is None else sized(code)


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


@cache
def _table(fmt: Format) -> Floats | None:
    """The levels of a codebook of floats, padded with zeros."""
    if not fmt.needs_table:
        return None
    assert fmt.codebook is not None
    return np.pad(fmt.codebook, (0, TABLE - len(fmt.codebook)))


def decode(
    fmt: Format, blocks: Blocks, index: NDArray[np.int64] | None, values: NDArray[Any], alone: bool = False
) -> bool:
    """Rows of blocks [N, b] as values [n, K], contiguous, of a float dtype: all rows, or rows by an index [n].

    alone: on the calling thread, where the caller has others.

    Bit for bit as `Format.dequantize`. False where NumPy must do it: then nothing is written.
    """
    engine = loaded(fmt) if serves(fmt) and source(fmt) is not None else None
    if engine is None or _rounds_otherwise(fmt):
        return False
    if blocks.strides[-1] != fmt.block_bytes:
        blocks = np.ascontiguousarray(blocks)
    table = _table(fmt)
    job = Decoding(
        w=blocks.ctypes.data, w_row=blocks.strides[0], index=None if index is None else index.ctypes.data,
        to=values.ctypes.data, to_row=values.strides[0], k=values.shape[1], type=TYPES[dtype_name(values.dtype)],
        table=None if table is None else table.ctypes.data,
    )  # fmt: skip
    if alone:
        engine.qgemm_decode(ctypes.byref(job), ctypes.c_int64(0), ctypes.c_int64(len(values)))
    else:
        run(engine.qgemm_decode, job, len(values), 1)
    return True


def _rounds_otherwise(fmt: Format) -> bool:
    """Whether d * q - d * z differs from d * (q - z), the latter rounded twice: not where z is an integer."""
    return bool(fmt.zero_field) and fmt.dtype[fmt.zero_field].kind == "f"


class _Scratch(threading.local):
    """Scratch memory of a thread: its size, its address, a multiple of ALIGNED, and the array that owns it."""

    memory: tuple[int, int, Any] = (0, 0, None)


_scratch = _Scratch()


def scratch(size: int) -> int:
    """The address of `size` bytes, valid until the thread's next call, which frees more than KEPT_BYTES."""
    available, address, _ = _scratch.memory
    if size <= available <= KEPT_BYTES:
        return address
    owner = np.empty(size + ALIGNED, np.uint8)
    address = owner.ctypes.data + -owner.ctypes.data % ALIGNED
    _scratch.memory = size, address, owner
    return address

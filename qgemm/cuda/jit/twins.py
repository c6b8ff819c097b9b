"""Structs and numbers that host and device share, declared once: here, in ctypes. Their C++ is generated.

The C++ is the virtual header host.cuh. Pointers are void* on both sides; a kernel casts them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

from qgemm.gating import GATES

MAX_PRODUCTS = 4  # in a launch: Q, K and V, or gate and up

# Types of arrays, which kernels branch on at run time; 0: there is no array.
TYPE_CODES = {"float32": 1, "float16": 2, "bfloat16": 3}
GATE_CODES = {name: code for code, name in enumerate(GATES, 1)}  # 0: there is no gate
ENUMERATORS = {"float32": "FLOAT32", "float16": "FLOAT16", "bfloat16": "BFLOAT16"}


class Types(ctypes.Structure):
    """TYPE_CODES of a product's arrays and the GATE_CODES code of its gate."""

    _fields_ = [(name, ctypes.c_int32) for name in ("y", "bias", "residual", "gate")]

    @classmethod
    def from_names(cls, y: str, bias: str, residual: str, gate: str = "") -> Types:
        """From the names of NumPy types and of a gate; "" where there is none."""
        return cls(*(TYPE_CODES.get(name, 0) for name in (y, bias, residual)), GATE_CODES.get(gate, 0))


class Outputs(ctypes.Structure):
    """The arrays of a product's epilogue: y [m, n], bias [n] or null, residual [m, n] or null."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("y", "bias", "residual")]


class EpilogueArguments(ctypes.Structure):
    """The epilogue of a launch of one product."""

    _fields_ = [("arrays", Outputs), ("types", Types)]


class Arrays(ctypes.Structure):
    """The arrays of one product y [m, n] = x @ w [n, k].T."""

    _fields_ = [("tiles", ctypes.c_void_p), ("outputs", Outputs)]


class ProductSize(ctypes.Structure):
    """N of a product, the number after that of its last CTA, and the types of its arrays."""

    _fields_ = [("n", ctypes.c_int64), ("end", ctypes.c_int64), ("types", Types)]


class Products(ctypes.Structure):
    """Products that share x [m, k] and a launch. Pointers come first: they alone change from call to call."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("arrays", Arrays * MAX_PRODUCTS),
        ("of", ProductSize * MAX_PRODUCTS),
        ("k", ctypes.c_int64),
        ("m", ctypes.c_int64),
    ]


class ExpertProducts(ctypes.Structure):
    """Products by experts that a router chose, ids [T, top_k] of int32 or, wide, int64; pointers come first.

    products: one, or a gate and the product that it gates, with the tiles of expert 0. weights: the router's
    [T, top_k], with a type of TYPE_CODES, or null. expert_bytes, expert_rows: strides of experts' tiles and biases.
    x_of_slots: whether x has a row for each expert of a token. ids_are_known: whether ids may be read before
    griddepcontrol.wait.
    """

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("ids", "weights")),
        ("products", Products),
        *((name, ctypes.c_int64) for name in ("expert_bytes", "expert_rows")),
        *((name, ctypes.c_int32) for name in ("experts", "top_k", "wide_ids", "weights_type", "x_of_slots")),
        ("ids_are_known", ctypes.c_int32),
    ]


class ExpertTileProducts(ctypes.Structure):
    """Products of sorted rows by the experts of their token tiles: one, or a gate and the product that it gates.

    Pointers come first. counts: a TokenTiles. token_tiles: an array of TokenTile. products: see ExpertProducts; x has
    the sorted rows. expert_bytes, expert_rows: see ExpertProducts. tiles_are_known: whether counts and token_tiles may
    be read before griddepcontrol.wait.
    """

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("counts", "token_tiles")),
        ("products", Products),
        *((name, ctypes.c_int64) for name in ("expert_bytes", "expert_rows")),
        ("tiles_are_known", ctypes.c_int32),
    ]


class Divisor(ctypes.Structure):
    """Division of 0 .. 2^31 - 1 by a number of the host: factor is 2^(31 + shift) / number, rounded up."""

    _fields_ = [(name, ctypes.c_uint32) for name in ("factor", "shift")]

    @classmethod
    def by(cls, number: int) -> Divisor:
        """For a number from 1 to 2^31."""
        shift = (number - 1).bit_length()
        return cls(factor=-(-(1 << 31 + shift) // number), shift=shift)


class StreamK(ctypes.Structure):
    """The schedule of a persistent grid: kernels/gemm/schedule.cuh says how its CTAs follow it.

    Tiles from `whole_tiles` on are laid end to end and split, one segment for each CTA. cluster_split_k: CTAs that
    share such a tile equally, an even number, in clusters of two; 0: no clusters. units_per_cta, remainder: work units
    along K of all split tiles, divided by the number of CTAs. Divisors: CTAs; work units of a tile; tiles of y along N.
    """

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("whole_tiles", "cluster_split_k")),
        *((name, ctypes.c_uint32) for name in ("units_per_cta", "remainder")),
        *((name, Divisor) for name in ("ctas", "work_units", "row_tiles")),
    ]


class DenseProduct(ctypes.Structure):
    """One product y [m, n] = x [m, k] @ W [n, k].T of prefill_sm90; pointers come first.

    partials: the workspace of stream-K. tiles: packed W, followed by the absmax of its rows. x: ScaledRows, null if
    rows of x have no factors.
    """

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("partials", "tiles", "x")),
        ("epilogue", EpilogueArguments),
        *((name, ctypes.c_int64) for name in ("n", "k")),
        ("m", ctypes.c_int32),
        ("stream_k", StreamK),
    ]


class TokenTile(ctypes.Structure):
    """Sorted rows `row` .. `row + rows - 1` of one expert, whose `count` token tiles begin with number `first`."""

    _fields_ = [(name, ctypes.c_int32) for name in ("expert", "row", "rows", "first", "count")]


class TokenTiles(ctypes.Structure):
    """The number of token tiles and of sorted rows."""

    _fields_ = [(name, ctypes.c_int32) for name in ("count", "rows")]


class ExpertSort(ctypes.Structure):
    """Arguments of moe_sort: ids [T, top_k] with `slots` places -> sorted rows, up to `tokens` in a token tile.

    counts: a TokenTiles. token_tiles: an array of TokenTile. rows: the sorted row of a slot, -1 where its id is no
    expert. x, sorted: rows of `chunks` times 16 bytes, also as the divisor chunks_of_row. slots_of_row: slots that
    share a row of x. segment: slots of a CTA.
    """

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("ids", "counts", "token_tiles", "rows", "x", "sorted")),
        *((name, ctypes.c_int32) for name in ("slots", "experts", "wide_ids", "tokens")),
        *((name, ctypes.c_int32) for name in ("segment", "chunks")),
        *((name, Divisor) for name in ("chunks_of_row", "slots_of_row")),
    ]


class GroupedProducts(ctypes.Structure):
    """Products by experts of sorted rows: one, or a gate and the product that it gates; pointers come first.

    tiles, row_absmax: of both products, for expert 0. biases: of both products, of bias_types, where one gates the
    other. partials: the workspace of stream-K. expert_bytes, expert_rows: see ExpertProducts. n, k: of a product.
    rows_of_x: rows of the buffer of sorted rows. tiles_are_known: whether the preceding kernel has waited for the sort.
    stream_k: its divisors; the rest follows from the number of token tiles. x: the sorted rows. x_pitch: of one, other
    than k if x is ScaledRows. factor, unit: for mma.sync, the factor that brings weights into the range of half and its
    inverse.
    """

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("counts", "token_tiles", "partials", "x")),
        *((name, ctypes.c_void_p * 2) for name in ("tiles", "row_absmax", "biases")),
        ("epilogue", EpilogueArguments),
        *((name, ctypes.c_int64) for name in ("expert_bytes", "expert_rows", "n", "k")),
        *((name, ctypes.c_int32) for name in ("rows_of_x", "x_pitch", "tiles_are_known")),
        ("bias_types", ctypes.c_int32 * 2),
        ("stream_k", StreamK),
        *((name, ctypes.c_float) for name in ("factor", "unit")),
    ]


class ExpertSums(ctypes.Structure):
    """y [T, n], sums over the `top_k` experts of a token of weight * (product + bias); pointers come first.

    products: [rows, n], sorted. rows: the sorted row of each slot. weights, biases: of these types, or null.
    """

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("products", "rows", "ids", "weights", "biases", "y")),
        ("n", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("top_k", "wide_ids", "weights_type", "biases_type")),
    ]


class S8Sizes(ctypes.Structure):
    """The sizes of a launch of gemm_sm90_s8, y [m, n], for rows of W whose bytes fit into a workspace.

    stages: pipeline stages along K. tiles_along_k: tiles of packed W. x_rows: rows of x's bytes in memory. x_type: the
    TYPE_CODES code of an x that the kernel quantizes. first_row_block, row_blocks: the row blocks of W in the
    workspace. row_tiles, token_tiles: tiles of y, for clusters; tiles from `whole` on are cut in two along tokens.
    first_row_tiles: row tiles that all clusters together begin with.
    """

    ROW_TILES_TOGETHER = 8  # row tiles whose token tiles are all scheduled before the next ones
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("n", "workspace_bytes", "k")),
        *((name, ctypes.c_int32) for name in ("m", "stages", "tiles_along_k", "x_rows", "x_type", "first_row_block")),
        *((name, ctypes.c_int32) for name in ("row_blocks", "row_tiles", "token_tiles", "whole", "first_row_tiles")),
    ]


class TensorMap(ctypes.Structure):
    """CUtensorMap: opaque, encoded by the driver, which requires this ALIGNMENT."""

    ALIGNMENT = 64
    _fields_ = [("opaque", ctypes.c_uint64 * 16)]


class EncodeStats(ctypes.Structure):
    """Results of a CTA of an encoder: sums of squared errors and squared values, the first refused block."""

    _fields_ = [("error", ctypes.c_double), ("power", ctypes.c_double), ("refused", ctypes.c_int64)]


STRUCTS = (
    Types, Outputs, EpilogueArguments, Arrays, ProductSize, Products, ExpertProducts, ExpertTileProducts, Divisor,
    StreamK, DenseProduct, TokenTile, TokenTiles, ExpertSort, GroupedProducts, ExpertSums, TensorMap, EncodeStats,
)  # fmt: skip
SCALARS = {
    ctypes.c_void_p: "void*",
    ctypes.c_int32: "int",
    ctypes.c_uint32: "u32",
    ctypes.c_int64: "i64",
    ctypes.c_uint64: "unsigned long long",
    ctypes.c_float: "float",
    ctypes.c_double: "double",
}


def declarations() -> str:
    """C++ of all structs, in namespace qgemm; each asserts its size and where its fields lie."""
    codes = ", ".join(f"{ENUMERATORS[name]} = {code}" for name, code in TYPE_CODES.items())
    gates = ", ".join(f"{name.upper()} = {code}" for name, code in GATE_CODES.items())
    lines = [
        f"enum TypeCode : int {{ NO_ARRAY = 0, {codes} }};",
        f"enum GateCode : int {{ NO_GATE = 0, {gates} }};",
        f"constexpr int MAX_PRODUCTS = {MAX_PRODUCTS};",
    ]
    return "\n".join([*lines, *map(declaration, STRUCTS)]) + "\n"


def declaration(struct: type[ctypes.Structure]) -> str:
    """C++ of one struct."""
    return "\n".join(_declaration(struct))


def _declaration(struct: type[ctypes.Structure]) -> Iterator[str]:
    name, align = struct.__name__, getattr(struct, "ALIGNMENT", 0)
    members = " ".join(_member(field, kind) for field, kind in _fields(struct))
    yield f"struct {f'alignas({align}) ' * bool(align)}{name} {{ {members} }};"
    yield f'static_assert(sizeof({name}) == {ctypes.sizeof(struct)}, "{name} differs from the host\'s");'
    for field, _ in _fields(struct):
        offset = getattr(struct, field).offset
        yield f'static_assert(OFFSET_OF({name}, {field}) == {offset}, "{name}.{field}: elsewhere on the host");'


def _fields(struct: type[ctypes.Structure]) -> list[tuple[str, Any]]:
    return [(field[0], field[1]) for field in struct._fields_]


def _member(field: str, kind: Any) -> str:
    dimensions = ""
    while issubclass(kind, ctypes.Array):
        dimensions += f"[{kind._length_}]"
        kind = kind._type_
    return f"{SCALARS.get(kind) or kind.__name__} {field}{dimensions};"

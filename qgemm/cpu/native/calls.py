"""The arguments of kernels/cpu/multiply.h, and its library: the pool of threads."""

from __future__ import annotations

import ctypes

from qgemm import gating

from .sources import source_of

A8, A16, FLOATS = 1, 3, 0  # digits of x: one int8, three of 8 bits; none where x stays as floats
PACKED_TOKENS = 512  # rows of x that are packed at a time as one digit; half of that in float32, for the caches
OF_TILE = 8  # rows of x in a tile
LEAST_TILED = 16  # rows of x: fewer are multiplied one by one
LANES = 16  # rows of W that are interleaved (kernels/cpu/interleaved.h)
ROWS = 32  # rows of W of a thread at least: two tiles
TARGETS = 16  # weights of a call at most
CHUNKS = 8  # chunks a thread: the last ones even out threads that were interrupted
CHUNKS_OF_TILES = 32  # chunks a thread for products by tiles, whose chunks need longer
TABLE = 32  # levels at most, of a codebook of floats

TYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "float64": 3}  # codes of types, by NumPy's names
GATES = {name: i for i, name in enumerate(gating.GATES, 1)}  # 0: none

C_TYPES: dict[type, str] = {
    ctypes.c_int64: "int64_t", ctypes.c_int32: "int32_t", ctypes.c_float: "float", ctypes.c_void_p: "void*",
}  # fmt: skip


class Target(ctypes.Structure):
    """Weights W [n, k] and y [m, n] = x @ W.T; kernels/cpu/multiply.h gets its fields from here.

    pack, rows: functions of the library that multiplies, the format's own except for "a8_g256". eight: the function of
    the format's library that converts W to codes of eight bits for "a8_g256", or none. quantize: the function that
    quantizes x to blocks of activations, or none. x_row, w_row, y_row, residual_row: bytes from a row to the next.
    row_bytes, tile_bytes: bytes of a packed row of x. packed_by: index of the weights in the call that pack x for
    these. interleaved: W interleaved by 16 rows, or none; interleaved_row: a sixteenth of the bytes of 16 rows.
    table: the levels of a codebook of floats, padded to TABLE. unit: factor of all sums. x_type, y_type,
    residual_type: codes of TYPES; blocks have the x_type of float32. bias: n float32, or none. residual: [m, n]
    numbers, or none. gate: a code of GATES; these weights then gate the next ones, which have no y of their own.
    """

    _fields_ = (
        ("pack", ctypes.c_void_p), ("rows", ctypes.c_void_p), ("quantize", ctypes.c_void_p),
        ("eight", ctypes.c_void_p), ("w", ctypes.c_void_p), ("w_row", ctypes.c_int64), ("table", ctypes.c_void_p),
        ("interleaved", ctypes.c_void_p), ("interleaved_row", ctypes.c_int64),
        ("n", ctypes.c_int64), ("k", ctypes.c_int64), ("x_row", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64), ("tile_bytes", ctypes.c_int64),
        ("unit", ctypes.c_float), ("digits", ctypes.c_int32), ("packed_by", ctypes.c_int64),
        ("y", ctypes.c_void_p), ("y_row", ctypes.c_int64), ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p), ("residual_row", ctypes.c_int64), ("residual_type", ctypes.c_int32),
        ("x_type", ctypes.c_int32), ("y_type", ctypes.c_int32), ("gate", ctypes.c_int32),
    )  # fmt: skip


C_TYPES[Target] = "target"


class Guard(ctypes.Structure):
    """Two arrays of a call, an output and another, that must not share memory; `guard` of kernels/cpu/replay.h."""

    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("y", "other", "y_nbytes", "other_nbytes", "may_be_same")
    )  # fmt: skip


class Replay(ctypes.Structure):
    """A call like earlier ones, for kernels/cpu/replay.h, which gets its fields from here.

    record: the arguments of C, `size` bytes, which lack the addresses of arrays: `count` Targets, or one Experts.
    masks: the size of a number less one, for each of the arrays. offsets: of each array's address in the record, but
    negative for the x of Targets. guards: `guard_count` Guards. m: rows of x; packed: bytes for x packed, both for
    Targets alone.
    """

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("record", "masks", "offsets", "guards")),
        *((name, ctypes.c_int64) for name in ("size", "count", "m", "packed", "arrays", "guard_count")),
    )  # fmt: skip


class Matrix(ctypes.Structure):
    """Weights [E, n, k] of experts: `target` describes one of them, for kernels/cpu/experts.h.

    expert_bytes: bytes from an expert's W to the next. bias_row: bytes from an expert's bias to the next. bias_type: a
    code of TYPES.
    """

    _fields_ = ("target", Target), *((name, ctypes.c_int64) for name in ("expert_bytes", "bias_row", "bias_type"))


C_TYPES[Matrix] = "matrix"


class Experts(ctypes.Structure):
    """A product of each token by its experts, or their feed-forward layer, for kernels/cpu/experts.h.

    gate, up: zeros for a product, which is that by down. merged: the rows of up follow those of the gate in its weights
    and bias, and `up` is zeros. ids [tokens, top_k]: integers of `id_bytes`. weights
    [tokens, top_k]: numbers of a type, of a layer alone. count: of experts. slots_of_row: places of ids that read the
    same row of x, top_k or 1. y: [tokens, n], of a product [tokens * top_k, n]; y_row: bytes from a row to the next.
    """

    _fields_ = (
        *((name, Matrix) for name in ("gate", "up", "down")),
        *((name, ctypes.c_void_p) for name in ("x", "y", "ids", "weights")),
        *((name, ctypes.c_int64) for name in ("tokens", "top_k", "count", "slots_of_row", "id_bytes", "y_row")),
        *((name, ctypes.c_int64) for name in ("weights_type", "y_type", "merged")),
    )  # fmt: skip


class Decoding(ctypes.Structure):
    """Rows of W [n, k] as numbers, for kernels/cpu/decode.h: all rows, or rows by an index of int64."""

    _fields_ = (
        ("w", ctypes.c_void_p), ("w_row", ctypes.c_int64), ("index", ctypes.c_void_p), ("to", ctypes.c_void_p),
        ("to_row", ctypes.c_int64), ("k", ctypes.c_int64), ("table", ctypes.c_void_p), ("type", ctypes.c_int32),
    )  # fmt: skip


def fields(struct: type[ctypes.Structure]) -> str:
    """The members of a struct in C."""
    return " ".join(f"{C_TYPES[kind]} {name};" for name, kind, *_ in struct._fields_)


OF_TYPES = {f"TYPE_{name.upper()}": str(code) for name, code in TYPES.items()}  # macros

POOL = source_of(  # the library that all others need
    "pool",
    {
        "TARGET_FIELDS": fields(Target),
        "REPLAY_FIELDS": fields(Replay),
        "MATRIX_FIELDS": fields(Matrix),
        "EXPERTS_FIELDS": fields(Experts),
        "MOST_TOKENS": str(PACKED_TOKENS),
        "ONE_DIGIT": str(A8),
        "TOKENS_OF_TILE": str(OF_TILE),
        "LEAST_TILED": str(LEAST_TILED),
        "LEAST_ROWS": str(ROWS),
        "CHUNKS": str(CHUNKS),
        "CHUNKS_OF_TILES": str(CHUNKS_OF_TILES),
        "EXACT_DIGITS": str(A16),
        "MOST_TARGETS": str(TARGETS),
        **OF_TYPES,
        **{f"GATE_{name.upper()}": str(code) for name, code in GATES.items()},
        "GATE_SLOPE": f"{gating.SLOPE}f",
        "GATE_LIMIT": f"{gating.LIMIT}f",
        "ERF_P": f"{gating.P}f",
        "ERF_C": f"{{{','.join(f'{c}f' for c in gating.C)}}}",
    },
)

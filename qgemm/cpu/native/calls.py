"""What Python tells kernels/cpu/multiply.h of a call, and the library that it is part of: the pool of threads."""

from __future__ import annotations

import ctypes

from qgemm import gating

from .sources import source_of

A8, A16, FLOATS = 1, 3, 0  # digits of x: int8 codes, three of 8 bits; none where x stays as it is
TOKENS = 512  # rows of x that are packed at a time as one digit; half as many in float32, of which caches hold fewer
OF_TILE = 8  # rows of x that tiles take together
LEAST_TILED = 16  # rows of x: fewer are multiplied one by one
ROWS = 32  # of W that a thread takes at least: two tiles
TARGETS = 16  # weights of a call
CHUNKS = 8  # of a thread: the last ones even out what threads lose to others
CHUNKS_OF_TILES = 32  # of many rows of x, which take longer
TABLE = 32  # levels at most, of a codebook of floats

TYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "float64": 3}  # of numbers, by NumPy's names
GATES = {name: i for i, name in enumerate(gating.GATES, 1)}  # 0: none

C_TYPES = {
    ctypes.c_int64: "int64_t", ctypes.c_int32: "int32_t", ctypes.c_float: "float", ctypes.c_void_p: "void*",
}  # fmt: skip


class Target(ctypes.Structure):
    """Weights W [n, k] and y [m, n] = x @ W.T, for kernels/cpu/multiply.h, which takes its fields from here.

    pack, rows: functions of the library that multiplies, the format's own but for "a8_g256"; eight: that of the
    format's library which makes codes of eight bits of W for it, or none. quantize: of x to blocks of activations, or
    none. x_row, w_row, y_row, residual_row: bytes from a row to the next. row_bytes, tile_bytes: of a packed row of x.
    packed_by: which of the weights of a call packs x for this one. table: levels of a codebook of floats, TABLE of
    them. unit: what all sums are multiplied by. x_type, y_type, residual_type: of TYPES, x_type of blocks that of
    float32. bias: n float32, or none. residual: [m, n] numbers, or none. gate: of GATES, by which sums and bias of
    these weights gate those of the next ones, which have no y of their own.
    """

    _fields_ = (
        ("pack", ctypes.c_void_p), ("rows", ctypes.c_void_p), ("quantize", ctypes.c_void_p),
        ("eight", ctypes.c_void_p), ("w", ctypes.c_void_p), ("w_row", ctypes.c_int64), ("table", ctypes.c_void_p),
        ("n", ctypes.c_int64), ("k", ctypes.c_int64), ("x_row", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64), ("tile_bytes", ctypes.c_int64),
        ("unit", ctypes.c_float), ("digits", ctypes.c_int32), ("packed_by", ctypes.c_int64),
        ("y", ctypes.c_void_p), ("y_row", ctypes.c_int64), ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p), ("residual_row", ctypes.c_int64), ("residual_type", ctypes.c_int32),
        ("x_type", ctypes.c_int32), ("y_type", ctypes.c_int32), ("gate", ctypes.c_int32),
    )  # fmt: skip


class Decoding(ctypes.Structure):
    """Rows of W [n, k] as numbers, for kernels/cpu/decode.h: all of them, or those of an index of int64."""

    _fields_ = (
        ("w", ctypes.c_void_p), ("w_row", ctypes.c_int64), ("index", ctypes.c_void_p), ("to", ctypes.c_void_p),
        ("to_row", ctypes.c_int64), ("k", ctypes.c_int64), ("table", ctypes.c_void_p), ("type", ctypes.c_int32),
    )  # fmt: skip


def fields(struct: type[ctypes.Structure]) -> str:
    """C for the members of a struct."""
    return " ".join(f"{C_TYPES[kind]} {name};" for name, kind, *_ in struct._fields_)


OF_TYPES = {f"TYPE_{name.upper()}": str(code) for name, code in TYPES.items()}  # macros

POOL = source_of(  # the library without which there is no other
    "pool",
    {
        "TARGET_FIELDS": fields(Target),
        "MOST_TOKENS": str(TOKENS),
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

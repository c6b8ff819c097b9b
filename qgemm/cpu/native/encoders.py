"""Fits of the encoders by kernels/cpu/encode/: those of qgemm/codec/ and of iq4_nl and iq4_xs, with the same bytes.

COMPILED is the table for qgemm/codec/compiled.py. Many threads call a function at once, each with a range of blocks.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from math import gcd
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.codec import codebook, grids, lattice, search, super_blocks, ternary_grid
from qgemm.codec.format import Format, Levels
from qgemm.codec.packing import Bytes, Floats, to_float16
from qgemm.codec.super_blocks import WEIGHTS, Affine, FitAffine, FitSymmetric, Symmetric
from qgemm.formats import iq4_nl, iq4_xs

from .calls import TABLE, fields
from .library import at_hand, library, reason
from .pool import pooled, run
from .products import UNFUSED, decode
from .sources import Source, source_of

LEAST_DECODED = 1 << 16  # weights: NumPy decodes fewer before a compiler has started
ROW_OF_BLOCKS = 256  # blocks that are decoded as one row
OF_THREAD = 64  # blocks that a thread encodes at a time, at least
LANES = 16  # words after the end of a table from which vectors are read
FIELD = 4  # bits of a level in a word of levels
POINTERS, NUMBERS, REALS = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float
TABLES = ("point_of", "starts", "counts", "neighbours", "near", "levels")  # fields of a grid
Arrays = Mapping[str, NDArray[Any] | None]  # by the names of fields


class Fit(ctypes.Structure):
    """Blocks or super-blocks to fit, for kernels/cpu/encode/fit.c, which gets its fields from here."""

    _fields_ = (
        ("n", ctypes.c_int64),
        *((name, POINTERS) for name in ("x", "importance", "d", "dmin", "sc", "m", "codes")),
        *((name, NUMBERS) for name in ("groups", "most", "most_scale", "tries", "absolute")),
        *((name, NUMBERS) for name in ("rooted", "spills", "moved", "with_means", "empty")),
        *((name, REALS) for name in ("first", "step", "means", "least")),
    )  # fmt: skip


class Grid(ctypes.Structure):
    """Super-blocks to fit by points of a grid, for kernels/cpu/encode/lattice.c, which gets its fields from here."""

    _fields_ = (
        ("n", ctypes.c_int64),
        *((name, POINTERS) for name in (*TABLES, "x", "importance", "scale", "points", "signs", "empty")),
        *((name, NUMBERS) for name in ("dims", "base", "size", "steps", "paired", "all_again", "first_fit")),
        *((name, REALS) for name in ("step", "least", "means", "flat")),
    )  # fmt: skip


class Ternary(ctypes.Structure):
    """Super-blocks of three levels, for kernels/cpu/encode/ternary_grid.c, which gets its fields from here."""

    _fields_ = (
        ("n", ctypes.c_int64),
        *((name, POINTERS) for name in (*TABLES, "x", "importance", "d", "sc", "points", "minus")),
        *((name, NUMBERS) for name in ("base", "groups", "parts", "refit")),
        ("least", REALS),
    )  # fmt: skip


class Codebook(ctypes.Structure):
    """Blocks of iq4_nl or iq4_xs, for kernels/cpu/encode/codebook.c, which gets its fields from here."""

    _fields_ = (
        ("n", ctypes.c_int64),
        *((name, POINTERS) for name in ("x", "importance", "d", "sc", "codes")),
        ("groups", NUMBERS),
    )  # fmt: skip


class Blocks(ctypes.Structure):
    """Blocks of types without a search, for kernels/cpu/encode/blocks.c, which gets its fields from here.

    refused: set to 1 where a block may have to be refused. For kbit alone: TABLE edges, those between its distinct
    levels and infinities; the code of each level, none where that is its number; bit planes, bytes of an absmax and the
    largest magnitude. For groups alone: bits and weights, whether each has a zero, whether scales are bfloat16,
    block_bytes, and the same limit.
    """

    _fields_ = (
        *((name, POINTERS) for name in ("x", "blocks", "refused", "edges", "codes")),
        *((name, NUMBERS) for name in ("planes", "absmax_bytes")),
        *((name, NUMBERS) for name in ("group_bits", "group_weights", "group_zero", "group_bf16", "block_bytes")),
        ("limit", REALS),
    )  # fmt: skip


# Types whose encoder is in that file, besides kbit.
OF_BLOCKS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q1_0", "q2_0", "tq1_0", "tq2_0", "mxfp4", "nvfp4")
KBIT = "kbit"
VALUES = ",".join(f"{value}f" for value in iq4_nl.CODEBOOK)
FIT = source_of("encode/fit", {"FIT_FIELDS": fields(Fit)}, UNFUSED)
LATTICE = source_of("encode/lattice", {"LATTICE_FIELDS": fields(Grid)}, UNFUSED)
TERNARY = source_of("encode/ternary_grid", {"TERNARY_FIELDS": fields(Ternary)}, UNFUSED)
CODEBOOK = source_of("encode/codebook", {"CODEBOOK_FIELDS": fields(Codebook), "CODEBOOK": f"{{{VALUES}}}"}, UNFUSED)
BLOCKS = source_of("encode/blocks", {"BLOCKS_FIELDS": fields(Blocks)}, UNFUSED)
SOURCES = (FIT, LATTICE, TERNARY, CODEBOOK, BLOCKS)
# Weights of a process that NumPy encodes, in half a second, before a library of the same bytes is compiled for more.
FEW = {BLOCKS: 1 << 22, FIT: 1 << 21, CODEBOOK: 1 << 21}
_encoded: Counter[Source] = Counter()  # weights by NumPy so far


def blocks(x: Floats, weights: Floats, greatest: int, has_minimum: bool) -> Levels | None:
    """`search.fitted` by compiled code."""
    n, size = x.shape
    d, codes = np.empty(n, np.float32), np.empty(x.shape, np.uint8)
    minimum = np.empty(n, np.float32) if has_minimum else None
    arrays = {"x": x, "importance": weights, "d": d, "dmin": minimum, "codes": codes}
    facts = {"groups": WEIGHTS // size, "most": greatest if has_minimum else (greatest + 1) // 2}
    done = _called(FIT, "qgemm_fit_blocks", Fit, arrays, n=n, **facts, **_steps(search.WEIGHTED_STEPS))
    return Levels(codes, d, minimum) if done else None


def with_minimums(kind: Affine, x: Floats, importance: Floats | None) -> FitAffine | None:
    """`super_blocks.fitted_with_minimums` by compiled code."""
    n = len(x)
    d, dmin = np.empty((2, n), np.float32)
    sc, m = np.empty((2, n, kind.groups), np.uint8)
    codes = np.empty(x.shape, np.uint8)
    arrays = {"x": x, "importance": importance, "d": d, "dmin": dmin, "sc": sc, "m": m, "codes": codes}
    facts = {"groups": kind.groups, "most": kind.max_code, "most_scale": kind.max_scale}
    facts |= {"rooted": kind.rooted, "spills": kind.spills}
    steps = _steps(kind.steps if importance is None else search.WEIGHTED_STEPS)
    done = _called(FIT, "qgemm_fit_with_minimums", Fit, arrays, n=n, means=kind.means, **facts, **steps)
    return (to_float16(d), to_float16(dmin), sc, m, codes) if done else None


def without_minimums(kind: Symmetric, x: Floats, importance: Floats | None) -> FitSymmetric | None:
    """`super_blocks.fitted_without_minimums` by compiled code."""
    n = len(x)
    d, codes = np.empty(n, np.float32), np.empty(x.shape, np.uint8)
    sc = np.empty((n, kind.groups), np.int8)
    arrays = {"x": x, "importance": importance, "d": d, "sc": sc, "codes": codes}
    facts = {"groups": kind.groups, "most": kind.zero, "most_scale": kind.max_scale, "moved": kind.moved}
    means = {"with_means": kind.means is not None, "means": kind.means or 0}
    ends = {"least": kind.least, "empty": kind.empty}
    done = _called(FIT, "qgemm_fit_without_minimums", Fit, arrays, n=n, **facts, **means, **ends)
    return (to_float16(d), sc, codes) if done else None


def of_lattice(kind: lattice.Lattice, x: Floats, importance: Floats | None) -> lattice.Fit | None:
    """`lattice.fitted` by compiled code."""
    n, groups, table = len(x), WEIGHTS // kind.size, _table(kind.grid)
    fit = lattice.Fit(
        np.empty((n, groups), np.float32),
        np.empty((n, WEIGHTS // table.dims), np.int64),
        np.empty((n, WEIGHTS // lattice.MAGNITUDES), np.uint8),
        np.empty((n, groups), np.bool_),
    )
    arrays: Arrays = {
        **table.arrays, "x": x, "importance": importance,
        "scale": fit.scales, "points": fit.points, "signs": fit.signs, "empty": fit.empty,
    }  # fmt: skip
    facts = {"dims": table.dims, "base": table.base, "size": kind.size, "steps": kind.steps, "step": kind.step}
    flags = {"paired": kind.paired, "all_again": kind.refit_all, "first_fit": kind.first_fit}
    reals = {"least": kind.least, "means": kind.means, "flat": kind.flat or 0}
    done = _called(LATTICE, "qgemm_fit_lattice", Grid, arrays, n=n, **facts, **flags, **reals)
    return fit if done else None


def of_ternary(kind: ternary_grid.Ternary, x: Floats, importance: Floats | None) -> ternary_grid.Fit | None:
    """`ternary_grid.fitted` by compiled code."""
    n, table, points = len(x), _table("IQ1_S"), WEIGHTS // ternary_grid.DIMS
    fit = ternary_grid.Fit(
        np.empty(n, np.float32),
        np.empty((n, kind.groups), np.uint8),
        np.empty((n, points), np.int64),
        np.empty((n, points), np.bool_),
    )
    arrays: Arrays = {**table.arrays, "x": x, "importance": importance, **fit._asdict()}
    facts = {"base": table.base, "groups": kind.groups, "parts": kind.parts, "least": kind.least, "refit": kind.refit}
    return fit if _called(TERNARY, "qgemm_fit_ternary", Ternary, arrays, n=n, **facts) else None


def of_codebook(x: Floats, importance: Floats | None) -> tuple[Floats, Bytes] | None:
    """`iq4_nl.fitted` by compiled code."""
    fit = _of_codebook(x, importance, 1)
    return None if fit is None else (fit[0], fit[2])


def of_codebook_groups(x: Floats, importance: Floats | None) -> tuple[Floats, NDArray[np.int8], Bytes] | None:
    """`iq4_xs.fitted` by compiled code."""
    return _of_codebook(x, importance, iq4_xs.GROUPS)


def encoded(fmt: Format, x: Floats) -> NDArray[Any] | None:
    """`Format.encoded` by compiled code."""
    engine = _engine(fmt, x.size)
    if engine is None:
        return None
    x, blocks = np.ascontiguousarray(x), np.empty(len(x), fmt.dtype)
    job, _arrays = blocks_job(fmt, x, blocks, np.zeros(1, np.int32))
    engine[exported(fmt)](ctypes.byref(job), ctypes.c_int64(0), ctypes.c_int64(len(x)))
    return blocks


def encoded_at_once(fmt: Format, x: NDArray[Any], blocks: NDArray[Any]) -> bool:
    """`Format.encoded_at_once` by compiled code."""
    engine = _engine(fmt, x.size, begins=False)  # without a library NumPy encodes shares of x
    if engine is None or x.dtype != np.float32 or not (x.flags.c_contiguous and x.flags.aligned and x.dtype.isnative):
        return False
    refused = np.zeros(1, np.int32)
    job, _arrays = blocks_job(fmt, x, blocks, refused)
    run(engine[exported(fmt)], job, len(x), OF_THREAD)
    return not refused[0]


def decoded(fmt: Format, blocks: NDArray[Any]) -> Floats | None:
    """`Format.decoded` by compiled code."""
    if reason() or len(blocks) * fmt.weights < LEAST_DECODED:
        return None
    row = gcd(len(blocks), ROW_OF_BLOCKS)
    values = np.empty((len(blocks) // row, row * fmt.weights), np.float32)
    if not decode(fmt, blocks.reshape(-1, row), None, values, alone=True):
        return None
    if fmt.plain and np.isnan(values).any():  # NumPy keeps the bits of a NaN
        return None
    return values.reshape(-1, fmt.weights)


def compiles_blocks(fmt: Format) -> bool:
    """Whether blocks.c has an encoder of a format."""
    return fmt.name in OF_BLOCKS or fmt.variant is not None or of_groups(fmt)


def of_groups(fmt: Format) -> bool:
    """Whether it encodes groups of a format: of 32 to 256 weights and two bits and more, without zeros of floats."""
    floats = fmt.zero_field and fmt.dtype[fmt.zero_field].kind == "f"
    return fmt.family == "groups" and fmt.code_bits > 1 and not fmt.encoding.whole_rows and not floats


def exported(fmt: Format) -> str:
    """The function that encodes a format's blocks."""
    return f"qgemm_encode_{KBIT if fmt.variant is not None else fmt.family or fmt.name}"


def blocks_job(
    fmt: Format, x: Floats, blocks: NDArray[Any], refused: NDArray[np.int32]
) -> tuple[Blocks, dict[str, NDArray[Any]]]:
    """The argument of that function for x [n, weights] and blocks [n], and the arrays that it points to."""
    arrays: dict[str, NDArray[Any]] = {"x": x, "blocks": blocks, "refused": refused}
    facts: dict[str, float] = {}
    if fmt.variant is not None:
        assert fmt.codebook is not None
        arrays |= _edges(fmt)
        facts = {"planes": fmt.dtype["planes"].shape[0], "limit": fmt.encoding.limit}
        facts["absmax_bytes"] = fmt.dtype["absmax"].itemsize
    if of_groups(fmt):
        facts = {"group_bits": fmt.code_bits, "group_weights": fmt.weights, "group_zero": bool(fmt.zero_field)}
        facts |= {"group_bf16": fmt.dtype["d"].kind == "u", "block_bytes": fmt.block_bytes, "limit": fmt.encoding.limit}
    return Blocks(**{field: array.ctypes.data for field, array in arrays.items()}, **facts), arrays


@lru_cache(64)
def _edges(fmt: Format) -> dict[str, NDArray[Any]]:
    """Edges between the levels of kbit and the code of each, where that is not its number."""
    assert fmt.codebook is not None
    edges, codes = codebook.search(fmt.codebook)
    padded = np.pad(edges, (0, TABLE - len(edges)), constant_values=np.inf)
    return {"edges": padded} if np.array_equal(codes, np.arange(len(codes))) else {"edges": padded, "codes": codes}


def _engine(fmt: Format, weights: int, begins: bool = True) -> ctypes.CDLL | None:
    """The library that encodes a format's blocks; None: NumPy must."""
    return pooled(BLOCKS) if compiles_blocks(fmt) and not reason() and _pays(BLOCKS, weights, begins) else None


def _pays(source: Source, weights: int, begins: bool = True) -> bool:
    """Whether to encode by a library: it is at hand, or worth the seconds of a compiler.

    begins: whether NumPy encodes these weights otherwise.
    """
    if source not in FEW or at_hand(source):
        return True
    few = _encoded[source] + weights <= FEW[source]
    _encoded[source] += weights * begins
    return not few


def _of_codebook(x: Floats, importance: Floats | None, groups: int) -> tuple[Floats, NDArray[np.int8], Bytes] | None:
    n = len(x)
    d, sc, codes = np.empty(n, np.float32), np.empty((n, groups), np.int8), np.empty(x.shape, np.uint8)
    arrays = {"x": x, "importance": importance, "d": d, "sc": sc if groups > 1 else None, "codes": codes}
    done = _called(CODEBOOK, "qgemm_fit_codebook", Codebook, arrays, n=n, groups=groups)
    return (d, sc, codes) if done else None


class _Table(NamedTuple):
    """A grid for kernels/cpu/encode/points.h: arrays by the names of its fields."""

    arrays: dict[str, NDArray[np.int32]]
    dims: int
    base: int


@cache
def _table(name: str) -> _Table:
    """Levels of a point are 2 * code + 1, of the ternary grid the code."""
    grid = grids.grid(name)
    codes = grid.points if grid is grids.grid("IQ1_S") else 2 * grid.points + 1
    levels = (codes.astype(np.int64) << FIELD * np.arange(codes.shape[1])).sum(axis=1).astype(np.uint32).view(np.int32)
    fields_of_grid = {
        "point_of": grid.point_of, "starts": grid.starts, "counts": grid.counts, "neighbours": grid.neighbours,
        "near": np.concatenate([levels[grid.neighbours], np.zeros(LANES, np.int32)]), "levels": levels,
    }  # fmt: skip
    arrays = {field: np.ascontiguousarray(array, np.int32) for field, array in fields_of_grid.items()}
    return _Table(arrays, grid.points.shape[1], grid.base)


def _steps(steps: search.Steps) -> dict[str, float]:
    return {"first": steps.first, "step": steps.step, "tries": steps.tries, "absolute": steps.absolute}


def _called(source: Source, name: str, struct: type[ctypes.Structure], arrays: Arrays, **facts: float) -> bool:
    """Call a function of a library with arrays and numbers by the names of its fields; False: NumPy must."""
    x = arrays["x"]
    assert x is not None, "every fit has an x"
    engine = library(source) if not reason() and _pays(source, x.size) else None
    if engine is None:
        return False
    contiguous = {field: np.ascontiguousarray(array) for field, array in arrays.items() if array is not None}
    engine[name](ctypes.byref(struct(**{field: array.ctypes.data for field, array in contiguous.items()}, **facts)))
    return True


COMPILED: dict[Callable[..., Any], Callable[..., Any]] = {  # for qgemm/codec/compiled.py
    Format.decoded: decoded,
    Format.encoded: encoded,
    Format.encoded_at_once: encoded_at_once,
    search.fitted: blocks,
    super_blocks.fitted_with_minimums: with_minimums,
    super_blocks.fitted_without_minimums: without_minimums,
    lattice.fitted: of_lattice,
    ternary_grid.fitted: of_ternary,
    iq4_nl.fitted: of_codebook,
    iq4_xs.fitted: of_codebook_groups,
}

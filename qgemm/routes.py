"""The dispatch table of the GPU: which kernel computes which product. `qgemm routes` prints it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from . import activations
from .block import Format
from .errors import UnsupportedError
from .jit import Template
from .tiles import ROWS, SPAN, WARPS, spans, tile_dtype

ANY = 1 << 62

SPLITS = 4  # groups of four warps that share a strip of tiles in the fused kernels
C_TYPES = {"float32": "float", "float16": "half", "bfloat16": "bf16"}  # NumPy's names -> the kernels'
TYPES = tuple(C_TYPES.values())


class Formats(NamedTuple):
    """A set of formats with the word that the table prints for it."""

    label: str
    holds: Callable[[Format], bool]


TILED = Formats("tiled", lambda fmt: bool(fmt.slots))
PLAIN = Formats("plain", lambda fmt: fmt.plain and fmt.levels is not None)


class Problem(NamedTuple):
    """One product y [m, n] = x [m, k] @ w [n, k].T on a GPU of compute capability sm (90 is 9.0)."""

    format: Format
    activation: str
    m: int
    n: int
    k: int
    sm: int
    x: str = "half"  # C++ name of x's type

    def __str__(self) -> str:
        return f"{self.format} {self.activation} of {self.x} M={self.m} N={self.n} K={self.k} on sm_{self.sm}"


class Route(NamedTuple):
    """One row: `kernel` serves these formats, activations and types of x, up to `most` rows of x.

    least, below: the compute capabilities from one on, and before the other. tokens: the sizes of its token tile, of
    which the smallest that holds M is taken; () if it has none.
    """

    kernel: str
    activations: tuple[str, ...]
    types: tuple[str, ...]
    most: int
    least: int
    below: int
    formats: Formats
    tokens: tuple[int, ...]
    what: str

    def fits(self, p: Problem) -> bool:
        """Whether this row serves the problem."""
        return (
            p.activation in self.activations
            and p.x in self.types
            and p.m <= self.most
            and self.runs_on(p.sm)
            and self.formats.holds(p.format)
        )

    @property
    def gpus(self) -> str:
        """The GPUs that it serves, e.g. "sm_75 on" or "sm_90 to sm_119"."""
        return f"sm_{self.least} {'on' if self.below == ANY else f'to sm_{self.below - 1}'}"

    def runs_on(self, sm: int) -> bool:
        """Whether its kernel is built for this compute capability."""
        return self.least <= sm < self.below


class Tiling(NamedTuple):
    """How the prefill kernel cuts y and K: a CTA has a tile of `strips` * 64 rows of W and `tokens` rows of x.

    splits: warpgroups that share K, for each strip. stage: spans of 64 columns in a stage of its ring, at most 4; deep:
    the most stages. ctas: on an SM at a time. m, least: it is for up to so many rows of x, and at least so many strips.
    """

    m: int
    least: int
    tokens: int
    strips: int
    splits: int
    stage: int
    deep: int
    ctas: int = 1

    @property
    def threads(self) -> int:
        """Of a CTA: its warpgroups, and the producer's."""
        return 128 * (self.strips * self.splits + 1)


# Measured on an H200 with q4_0. Two strips share x, of which an SM gets 60 bytes a cycle at most; four warpgroups hide
# each other's decoding.
TILINGS = (
    #      m <=  strips >=  tokens  strips  splits  stage  deep
    Tiling(16,   200,       16,     2,      2,      4,     8),
    Tiling(16,   0,         16,     1,      4,      4,     8),
    Tiling(32,   100,       32,     2,      2,      4,     4),
    Tiling(32,   0,         32,     1,      4,      4,     4),
    Tiling(64,   200,       64,     2,      2,      2,     6),
    Tiling(64,   0,         64,     1,      4,      2,     8),
    Tiling(128,  65,        128,    2,      1,      2,     5),
    Tiling(128,  0,         128,    1,      2,      2,     4),
    Tiling(256,  65,        256,    2,      1,      1,     5),
    Tiling(256,  0,         128,    2,      1,      1,     8),
    Tiling(ANY,  0,         256,    2,      1,      1,     5),
)  # fmt: skip
PREFILL = tuple(sorted({row.tokens for row in TILINGS}))


ROUTES = (
    #      kernel      activations    types of x  m <=  sm >=  <    formats  tokens        what it does
    Route("decode",   ("a16",),       ("half",),  8,    90,    100, TILED,   (8,),         "at the speed of memory"),
    Route("prefill",  ("a16",),       ("half", "bf16"), ANY, 90, 100, TILED, PREFILL,      "wgmma on weights rounded once"),
    Route("decode",   ("a16",),       ("half",),  16,   100,   120, TILED,   (8, 16),      "at the speed of memory"),
    Route("decode_a8", ("a8",),       TYPES,      16,   90,    120, TILED,   (8, 16),      "the same by integer dots"),
    Route("fused",    ("a16",),       TYPES,      8,    75,    ANY, TILED,   (1, 2, 4, 8), "sums in float32 registers"),
    Route("fused_a8", ("a8",),        TYPES,      8,    75,    ANY, TILED,   (1, 2, 4, 8), "integer dots by dp4a"),
    Route("unpack",   ("a16", "a8"),  TYPES,      ANY,  75,    ANY, TILED,   (),           "row panels, then cuBLAS"),
    Route("cublas",   ("a16",),       TYPES,      ANY,  75,    ANY, PLAIN,   (),           "cuBLAS on the weights"),
)  # fmt: skip


class Split(NamedTuple):
    """How a decode kernel shares a matrix out: CTAs of `groups` * 16 rows, `splits` warps that share K.

    kernels, tokens, strips: the kernels, their token tiles, and the least number of strips of 64 rows that it is for.
    shared: bytes of shared memory that the rings of a CTA may take, which decides how many CTAs an SM holds; deep:
    the most spans in a ring.
    """

    kernels: tuple[str, ...]
    tokens: tuple[int, ...]
    strips: int
    groups: int
    splits: int
    shared: int
    deep: int


A16, A8 = ("decode",), ("decode_a8",)

# Measured on an H200 (132 SMs) with q4_0: about one CTA an SM with 16 warps, or two or more with 8, and 90 to 200 KB in
# flight an SM. decode_a8 waits for the kernel that quantizes x, so that what is in flight meanwhile counts for more:
# 8192 x 8192, M = 16: 13.7 us with two CTAs an SM, 15.2 with one.
SPLITS_OF_K = (
    #     kernel  tokens   strips >=  groups  splits  shared      deep
    Split(A16,    (8, 16), 133,       4,      8,      92 << 10,   4),
    Split(A16,    (8, 16), 101,       4,      16,     183 << 10,  3),
    Split(A16,    (8, 16), 67,        2,      8,      113 << 10,  6),
    Split(A16,    (8, 16), 34,        2,      16,     213 << 10,  4),
    Split(A8,     (8,),    133,       4,      8,      113 << 10,  4),
    Split(A8,     (8,),    34,        4,      16,     183 << 10,  3),
    Split(A8,     (16,),   133,       4,      8,      75 << 10,   4),
    Split(A8,     (16,),   101,       4,      16,     113 << 10,  3),
    Split(A8,     (16,),   34,        2,      16,     113 << 10,  4),
    Split(A16 + A8, (8, 16), 0,       1,      16,     213 << 10,  4),
)  # fmt: skip


def splits_for(kernel: str, tokens: int) -> Iterator[Split]:
    """The rows of SPLITS_OF_K for this kernel and token tile."""
    return (row for row in SPLITS_OF_K if kernel in row.kernels and tokens in row.tokens)


def split_of(kernel: str, tokens: int, strips: int) -> Split:
    """The first row of SPLITS_OF_K for this kernel and token tile on a matrix of so many strips of 64 rows."""
    return next(row for row in splits_for(kernel, tokens) if strips >= row.strips)


def ring_bytes(fmt: Format, groups: int, tokens: int, depth: int, kernel: str) -> int:
    """Shared memory of a warp of a decode kernel: `depth` stages, and the fields per block of the tiles they span.

    A stage is the codes of some row groups of a span, and its share of x: in decode, halves with 16 bytes of padding a
    token.
    """
    dtype = tile_dtype(fmt)
    span = dtype["spans"].base.itemsize
    fields = (dtype.itemsize - spans(fmt) * span) * groups // WARPS
    token = activations.DTYPE.itemsize if kernel == "decode_a8" else 2 * SPAN + 16
    return depth * (span * groups // WARPS + tokens * token) + in_flight(fmt, depth) * fields


def in_flight(fmt: Format, depth: int) -> int:
    """Tiles that `depth` consecutive spans may belong to."""
    return 1 + -(-(depth - 1) // spans(fmt))


def c_type(dtype: np.dtype[Any]) -> str:
    """The type in which kernels read an array of this dtype; what they do not know is converted to float."""
    return C_TYPES.get(dtype.name, "float")


def route(p: Problem) -> Route:
    """The first row that fits; UnsupportedError prints the problem and where routes live."""
    for row in ROUTES:
        if row.fits(p):
            return row
    raise UnsupportedError(f"no kernel for {p}; the table is ROUTES in qgemm/routes.py (`qgemm routes` prints it)")


def decode_template(fmt: Format, split: Split, tokens: int, kernel: str) -> Template:
    """The template of a decode kernel but for its types."""
    depth = 2  # one alone, and nothing would be in flight
    while (
        depth < split.deep and split.splits * ring_bytes(fmt, split.groups, tokens, depth + 1, kernel) <= split.shared
    ):
        depth += 1
    return {"TOKENS": tokens, "GROUPS": split.groups, "SPLITS": split.splits, "DEPTH": depth}


SHARED = 227 << 10  # bytes of shared memory that a CTA of sm_90 may have
FLAGS = 1024  # of CTAs that hand over parts of a tile


def tiling_of(m: int, strips: int) -> Tiling:
    """The first row of TILINGS for M rows of x and so many strips of 64 rows of W."""
    return next(row for row in TILINGS if m <= row.m and strips >= row.least)


def prefill_unit(fmt: Format, tiling: Tiling) -> int:
    """Columns at whose multiples the kernel may cut K: a stage, or a tile if that is more."""
    return max(tiling.stage, spans(fmt)) * SPAN


def prefill_template(fmt: Format, tiling: Tiling, source: str, out: str) -> Template:
    """The template of the prefill kernel: as many stages as fit."""
    along, itemsize = spans(fmt), 4 if out == "float" else 2
    dtype = tile_dtype(fmt)
    codes = dtype["spans"].base.itemsize
    fields = dtype.itemsize - along * codes
    rows = tiling.strips * ROWS
    whole = tiling.stage % along == 0
    weights = tiling.stage // along * dtype.itemsize if whole else tiling.stage * codes
    parts = (tiling.splits - 1) * rows * tiling.tokens * 4
    staged = (16 if tiling.tokens % 32 else 32) * (rows * itemsize + 16 * tiling.strips)

    def shared(depth: int) -> int:
        slots = 0 if whole else 1 + (depth - 1 + along - 1) * tiling.stage // along
        stages = depth * (2 * SPAN * tiling.stage * tiling.tokens + tiling.strips * weights)
        return stages + slots * (tiling.strips * fields + 8) + parts + staged + 16 * depth + 256

    depths = range(tiling.deep - tiling.deep % tiling.splits, 0, -tiling.splits)
    depth = next(d for d in depths if shared(d) <= SHARED // tiling.ctas)
    return {
        "In": source, "Out": out, "TOKENS": tiling.tokens, "STRIPS": tiling.strips, "SPLITS": tiling.splits,
        "STAGE": tiling.stage, "DEPTH": depth, "CTAS": tiling.ctas, "SHARED": shared(depth), "FLAGS": FLAGS,
    }  # fmt: skip


def variants(fmt: Format, sm: int) -> Iterator[tuple[str, Template]]:
    """Every (kernel, template) that the table can ask for with this format on this GPU: what CI compiles."""
    for row in ROUTES:
        if not row.formats.holds(fmt) or not row.runs_on(sm) or row.kernel == "cublas":
            continue
        if row.kernel == "unpack":
            for out in TYPES:
                yield row.kernel, {"Out": out}
            continue
        if row.kernel == "prefill":
            for source, tiling in product(row.types, dict.fromkeys(row._replace(m=0, least=0) for row in TILINGS)):
                for out in (source, "float"):
                    yield row.kernel, prefill_template(fmt, tiling, source, out)
            continue
        for tokens, out in product(row.tokens, TYPES):
            if row.kernel in ("decode", "decode_a8"):
                source: Template = {"In": "half"} if row.kernel == "decode" else {}
                for split in splits_for(row.kernel, tokens):
                    yield row.kernel, {**source, "Out": out, **decode_template(fmt, split, tokens, row.kernel)}
            elif row.kernel == "fused_a8":
                yield row.kernel, {"Out": out, "TOKENS": tokens, "SPLITS": SPLITS}
            else:
                for kind in row.types:
                    yield row.kernel, {"In": kind, "Out": out, "TOKENS": tokens, "SPLITS": SPLITS}


def common_variants() -> Iterator[tuple[str, Template]]:
    """Every (kernel, template) that knows no format."""
    for source in TYPES:
        yield "quantize_activations", {"In": source}

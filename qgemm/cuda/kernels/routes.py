"""The dispatch table of the GPU: which kernel computes which product. `qgemm routes` prints it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from qgemm.codec.format import Format
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.layout.tile import SPAN
from qgemm.cuda.upload import encode_template, pack_template, planes_template, restore_template
from qgemm.errors import UnsupportedError

from . import prefill_sm80 as prefill_mma
from .decode_config import BULK_COPIES, COLUMN_TILE, INSIDE, decode_template, splits_for
from .sm90_config import TOKENS, compiled, prefill_template

ANY = 1 << 62

PREPARED = "Activations"  # x that is quantized already
# decode_a8 quantizes up to so many rows of x itself, in each of its CTAs, for up to so many weights: a kernel for it
# costs the GPU 1.5 us and the host 3.
ROWS_INSIDE, WEIGHTS_INSIDE = 2, 1 << 26

SPLITS = 4  # groups of four warps that share a strip of tiles in the fused kernels
C_TYPES = {"float32": "float", "float16": "half", "bfloat16": "bf16"}  # NumPy's names -> the kernels'
TYPES = tuple(C_TYPES.values())
FLOAT, HALF, HALVES, WIDE = ("float",), ("half",), ("half", "bf16"), ("float", "bf16")
MMA_TOKENS, A8_TOKENS = (
    tuple(sorted({cut.tokens for cut in prefill_mma.CUTS if cut.kernel == kernel}))
    for kernel in (prefill_mma.A16, prefill_mma.A8)
)


class Formats(NamedTuple):
    """A set of formats with the word that the table prints for it."""

    label: str
    holds: Callable[[Format], bool]


TILED = Formats("tiled", lambda fmt: bool(fmt.slots))
INTEGER = Formats("integer", lambda fmt: bool(fmt.slots) and fmt.integer)
CODEBOOK = Formats("codebook", lambda fmt: bool(fmt.slots) and fmt.codebook is not None)
SIXTEENS = Formats("integer, groups of 16", lambda fmt: INTEGER.holds(fmt) and fmt.group == 16)
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

    def tile(self, m: int) -> int:
        """The token tile for M rows of x."""
        return next(tokens for tokens in self.tokens if tokens >= m)

    @property
    def gpus(self) -> str:
        """The GPUs that it serves, e.g. "sm_75 on" or "sm_90 to sm_119"."""
        return f"sm_{self.least} {'on' if self.below == ANY else f'to sm_{self.below - 1}'}"

    def runs_on(self, sm: int) -> bool:
        """Whether its kernel is built for this compute capability."""
        return self.least <= sm < self.below


ROUTES = (
    #     kernel         activations    x       m <= sm >= <    formats   tokens        what it does
    Route("decode",      ("a16",),      TYPES,  8,   80,  ANY, INTEGER,  (1, 8),       "at the speed of memory"),
    Route("prefill",     ("a16",),      HALVES, ANY, 90,  100, INTEGER,  TOKENS,       "wgmma, from packed weights"),
    Route("decode",      ("a16",),      TYPES,  16,  80,  ANY, INTEGER,  (16,),        "at the speed of memory"),
    Route("decode_a8",   ("a8",),       TYPES,  8,   80,  ANY, INTEGER,  (1, 8),       "the same by integer dots"),
    Route("prefill",     ("a8",),       HALF,   16,  90,  100, SIXTEENS, TOKENS,       "on decoded activations"),
    Route("decode_a8",   ("a8",),       TYPES,  16,  80,  ANY, INTEGER,  (16,),        "the same by integer dots"),
    Route("prefill",     ("a8",),       HALF,   ANY, 90,  100, INTEGER,  TOKENS,       "on decoded activations"),
    Route("decode",      ("a16",),      HALVES, 16,  80,  ANY, CODEBOOK, (1, 8, 16),   "with levels rounded to x"),
    Route("prefill",     ("a16",),      HALVES, ANY, 90,  100, CODEBOOK, TOKENS,       "wgmma, levels rounded to half"),
    Route("fused",       ("a16",),      FLOAT,  8,   80,  ANY, CODEBOOK, (1, 2, 4, 8), "with exact levels"),
    Route("fused",       ("a16",),      TYPES,  8,   75,  80,  TILED,    (1, 2, 4, 8), "sums in float32 registers"),
    Route("fused_a8",    ("a8",),       TYPES,  8,   75,  80,  INTEGER,  (1, 2, 4, 8), "integer dots by dp4a"),
    Route("prefill_mma", ("a16",),      HALVES, ANY, 80,  90,  TILED,    MMA_TOKENS,   "mma.sync, from packed weights"),
    Route("prefill_mma", ("a16",),      HALVES, 128, 100, 120, TILED,    MMA_TOKENS,   "mma.sync, from packed weights"),
    Route("prefill_mma", ("a16",),      HALVES, ANY, 120, ANY, TILED,    MMA_TOKENS,   "mma.sync, from packed weights"),
    Route("prefill_a8",  ("a8",),       TYPES,  64,  80,  ANY, INTEGER,  A8_TOKENS,    "mma.sync, integer dots"),
    Route("prefill_a8",  ("a8",),       HALF,   ANY, 86,  90,  INTEGER,  A8_TOKENS,    "mma.sync, integer dots"),
    Route("prefill_a8",  ("a8",),       HALF,   ANY, 120, ANY, INTEGER,  A8_TOKENS,    "mma.sync, integer dots"),
    Route("prefill_a8",  ("a8",),       WIDE,   ANY, 80,  ANY, INTEGER,  A8_TOKENS,    "mma.sync, integer dots"),
    Route("unpack",      ("a16",),      TYPES,  ANY, 75,  ANY, TILED,    (),           "row panels, then cuBLAS"),
    Route("unpack",      ("a8",),       TYPES,  ANY, 75,  ANY, INTEGER,  (),           "on decoded activations"),
    Route("cublas",      ("a16",),      TYPES,  ANY, 75,  ANY, PLAIN,    (),           "cuBLAS on the weights"),
)  # fmt: skip


def c_type(dtype: np.dtype[Any]) -> str:
    """The type in which kernels read an array of this dtype; what they do not know is converted to float."""
    return C_TYPES.get(dtype.name, "float")


def route(p: Problem) -> Route:
    """The first row that fits; UnsupportedError prints the problem and where routes live."""
    for row in ROUTES:
        if row.fits(p):
            return row
    raise UnsupportedError(
        f"no kernel for {p}; the table is ROUTES in qgemm/cuda/kernels/routes.py (`qgemm routes` prints it)"
    )


def variants(fmt: Format, sm: int) -> Iterator[tuple[str, Template]]:
    """Every (kernel, template) that the table can ask for with this format on this GPU: what CI compiles."""
    if TILED.holds(fmt):
        yield from (("pack", pack_template(fmt)), ("restore", restore_template(fmt)))
    if INTEGER.holds(fmt) and fmt.encode is not None:
        yield from (("encode", encode_template(name)) for name in TYPES)
    if CODEBOOK.holds(fmt):
        yield from (("quantize_codebook", planes_template(In=name)) for name in TYPES)
        yield from (("dequantize_codebook", planes_template(Out=name)) for name in TYPES)
    found: dict[Any, tuple[str, Template]] = {}  # two rows may ask for the same
    for kernel, template in _variants_of_rows(fmt, sm):
        found.setdefault((kernel, *template.values()), (kernel, template))
    yield from found.values()


def _variants_of_rows(fmt: Format, sm: int) -> Iterator[tuple[str, Template]]:
    for row in ROUTES:
        if not row.formats.holds(fmt) or not row.runs_on(sm) or row.kernel == "cublas":
            continue
        if row.kernel == "unpack":
            for out in TYPES:
                yield row.kernel, {"Out": out}
            continue
        if row.kernel in (prefill_mma.A16, prefill_mma.A8):
            kinds = row.types if row.kernel == prefill_mma.A16 else (PREPARED,)
            for cut, source, out in product(prefill_mma.cuts_for(row.kernel, fmt, sm), kinds, TYPES):
                yield row.kernel, prefill_mma.template(fmt, cut, source, out, sm)
            continue
        if row.kernel == "prefill":
            for source, tiling in product(row.types, compiled(fmt)):
                yield row.kernel, prefill_template(fmt, tiling, source)
            continue
        for tokens in row.tokens:
            if row.kernel in ("decode", "decode_a8"):
                for source in sources(row, fmt, tokens, sm):
                    for split in splits_for(fmt, row.kernel, tokens, sm):
                        yield row.kernel, decode_template(fmt, split, tokens, row.kernel, source, sm)
            else:
                sums = {"TOKENS": tokens, "SPLITS": SPLITS}
                for out, kind in product(TYPES, ("",) if row.kernel == "fused_a8" else row.types):
                    yield row.kernel, {**({"In": kind} if kind else {}), "Out": out, **sums}


def sources(row: Route, fmt: Format, tokens: int, sm: int) -> tuple[str, ...]:
    """What the decode kernel of a row may get as x with this token tile: only types that no row before takes."""
    (activation,) = row.activations
    types = tuple(x for x in row.types if route(Problem(fmt, activation, tokens, 1, 1, sm, x)) is row)
    if row.kernel == "decode":
        return types
    return (PREPARED, *types) if tokens <= COLUMN_TILE and quantizes_inside(1, 1, 1, sm) else (PREPARED,)


def quantizes_inside(m: int, k: int, weights: int, sm: int) -> bool:
    """Whether decode_a8 quantizes x [m, k] itself rather than get it from a kernel of its own."""
    numbers = m * -(-k // SPAN) * SPAN
    return m <= ROWS_INSIDE and numbers <= INSIDE and weights <= WEIGHTS_INSIDE and sm >= BULK_COPIES


def common_variants() -> Iterator[tuple[str, Template]]:
    """Every (kernel, template) that knows no format."""
    for source in TYPES:
        yield "quantize_activations", {"In": source}
    for out in ("half", "float"):
        yield "dequantize_activations", {"Out": out}
    for source in TYPES:
        yield "round_activations", {"In": source, "Out": "half" if source == "half" else "float"}

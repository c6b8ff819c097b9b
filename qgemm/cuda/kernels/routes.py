"""The dispatch table of the GPU: the kernel of each product. `qgemm routes` prints it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from enum import Enum
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from qgemm.codec.format import Format
from qgemm.codec.group_activations import GROUP_COLUMNS
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.problem import C_TYPES, TYPES, Output, Problem, Routed
from qgemm.errors import UnsupportedError

from . import gemm_sm80_s8, gemm_sm90_s8, prefill_sm80, prefill_sm80_eight_bits, prefill_sm90_eight_bits
from .decode import DECODE, DECODE_A8, DECODE_SLICES, MOE_DECODE, MOE_DECODE_TILES, sliced
from .dot_floats import GEMV_FLOATS, MOE_FLOATS, differs
from .expert_tiles import DECODE_TILE, Size
from .gemm_sm80_s8 import GEMM_SM80_S8
from .gemm_sm80_s8 import pays as s8_pays
from .gemm_sm90_s8 import GEMM_SM90_S8
from .gemv import GEMV_DP4A, GEMV_SIMT
from .gemv import TOKEN_TILES as GEMV_TOKENS
from .kernel import Kernel, Launchable
from .moe_prefill_sm80 import MOE_PREFILL_SM80
from .moe_prefill_sm80 import TOKEN_TILES as EXPERT_TOKENS
from .panels import CUBLAS, DEQUANTIZE
from .prefill_sm80 import PREFILL_SM80, PREFILL_SM80_A8
from .prefill_sm80_eight_bits import PREFILL_SM80_EIGHT_BITS
from .prefill_sm80_eight_bits import measured as sm80_eight_bit_configs
from .prefill_sm90 import MOE_PREFILL_SM90, PREFILL_SM90
from .prefill_sm90_eight_bits import PREFILL_SM90_EIGHT_BITS
from .prefill_sm90_eight_bits import TOKEN_TILES as WGMMA_S8_TOKENS
from .sm90_cost import TOKEN_TILES as SM90_TOKENS
from .sm90_token_tiles import GROUPED_TOKENS
from .transforms import TRANSFORMS

ANY = 1 << 62
WGMMA = (90, 100)  # the first compute capability that has wgmma, and the first one after the last

FLOAT, HALF, HALVES, WIDE = ("float",), ("half",), ("half", "bf16"), ("float", "bf16")
MMA_TOKENS, A8_TOKENS = (
    tuple(sorted({sm80.tokens for sm80 in prefill_sm80.SM80_CONFIGS if sm80.kernel == kernel.name}))
    for kernel in (PREFILL_SM80, PREFILL_SM80_A8)
)
EIGHT_BIT_TOKENS = tuple(sorted({config.tokens for config in sm80_eight_bit_configs()}))
GEMM_TOKENS = (gemm_sm90_s8.BLOCK_TOKENS,)
S8_TOKENS = tuple(sorted({config.tokens for config in gemm_sm80_s8.measured()}))
# mma.sync of e4m3 on sm_90 costs 1.9 times as much as of int8: 180.5 instead of 97.3 us with 256 rows of x, 44.1
# instead of 22.2 us with 16 (8192x8192).
E4M3_BY_MMA_SYNC = 1.9
EXACT_ROWS = 16  # rows of x up to which exact products stay exact, whatever was timed
MAX_LAUNCHES = 1024  # launches in the cache
LARGE = 4096  # rows of x, too many for the decode kernels
TYPE_NAMES = tuple(C_TYPES)


class Formats(NamedTuple):
    """A set of formats, and its label in the printed table."""

    label: str
    holds: Callable[[Format], bool]


TILED = Formats("tiled", lambda fmt: fmt.tiled)
INTEGER = Formats("integer", lambda fmt: fmt.tiled and fmt.integer)
NO_TABLE = Formats("integer, no table", gemm_sm80_s8.serves)
NUMBERS = Formats("no codebook", lambda fmt: fmt.tiled and not fmt.needs_table)
CODEBOOK = Formats("codebook", lambda fmt: fmt.tiled and fmt.needs_table)
FEW_BITS = Formats("few bits, points of 8", sliced)
SIXTEENS = Formats("integer, groups of 16", lambda fmt: INTEGER.holds(fmt) and fmt.group == 16)
E4M3 = Formats("mxfp4", lambda fmt: fmt.tiled and fmt.e4m3)
PLAIN = Formats("plain", lambda fmt: fmt.plain and fmt.levels is not None)


class Grouping(Enum):
    """How the rows of x of a launch meet matrices W."""

    DENSE = "every row meets all of them"
    SLOTS = "each row meets the experts that its ids name"
    TILES = "rows are sorted by expert, in token tiles"


def grouping_of(p: Problem) -> Grouping:
    """The grouping of a problem."""
    if p.routed is None:
        return Grouping.DENSE
    return Grouping.TILES if p.routed.tokens else Grouping.SLOTS


def gemm_pays(p: Problem) -> bool:
    """Whether gemm_sm90_s8 is predicted to be faster than the kernel that converts W in its mainloop."""
    us = gemm_sm90_s8.us_in_a_call(p)
    if p.activation == "e4m3_g256":
        return us < E4M3_BY_MMA_SYNC * prefill_sm80_eight_bits.ranked(p)[0][1]
    return us < prefill_sm90_eight_bits.ranked(p)[0][1]


class Route(NamedTuple):
    """One row: `kernel` serves these formats, activations and types of x, up to `max_rows` rows of x.

    least, below: the first compute capability, and the first one after the last. tokens: the sizes of the kernel's
    token tile, () if it has none; the smallest that holds M serves, or that of the problem if its rows are sorted.
    pays: whether the kernel is worth it for a problem that rows below serve as well. note: the last column of
    `qgemm routes`.
    """

    kernel: Kernel
    activations: tuple[str, ...]
    types: tuple[str, ...]
    max_rows: int
    least: int
    below: int
    formats: Formats
    tokens: tuple[int, ...]
    note: str
    pays: Callable[[Problem], bool] = lambda problem: True
    grouping: Grouping = Grouping.DENSE

    def fits(self, p: Problem) -> bool:
        """Whether this row serves the problem, unless a row above does."""
        return self.may_serve(p) and self.pays(p)

    def may_serve(self, p: Problem) -> bool:
        """Whether the kernel can serve the problem, even where another one is faster."""
        return (
            grouping_of(p) is self.grouping
            and (self.grouping is not Grouping.TILES or (p.routed or Routed()).tokens in self.tokens)
            and p.x in self.types
            and p.m <= self.max_rows
            and self.can_serve(p)
        )

    def can_serve(self, p: Problem) -> bool:
        """Whether the kernel multiplies by this format with this activation on this GPU, whatever the sizes."""
        return p.activation in self.activations and self.runs_on(p.sm) and self.formats.holds(p.format)

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


DENSE = (
    #     kernel           act       x       m <= sm>= <    formats   tokens       note
    Route(DECODE_SLICES,   ("a16",), TYPES,  1,   80,  ANY, FEW_BITS, (1,),        "x in slices of eight bits"),
    Route(DECODE,          ("a16",), TYPES,  8,   80,  ANY, NUMBERS,  (1, 8),      "at the speed of memory"),
    Route(PREFILL_SM90,    ("a16",), HALVES, ANY, *WGMMA,    NUMBERS,  SM90_TOKENS, "wgmma, from packed weights"),
    Route(DECODE,          ("a16",), TYPES,  16,  80,  ANY, NUMBERS,  (16,),       "at the speed of memory"),
    Route(DECODE_A8,       ("a8",),  TYPES,  8,   80,  ANY, INTEGER,  (1, 8),      "the same by integer dots"),
    Route(PREFILL_SM90,    ("a8",),  HALF,   16,  *WGMMA,    SIXTEENS, SM90_TOKENS, "on decoded activations"),
    Route(DECODE_A8,       ("a8",),  TYPES,  16,  80,  ANY, INTEGER,  (16,),       "the same by integer dots"),
    Route(PREFILL_SM90,    ("a8",),  HALF,   ANY, *WGMMA,    INTEGER,  SM90_TOKENS, "on decoded activations"),
    Route(DECODE,          ("a16",), HALVES, 16,  80,  ANY, CODEBOOK, (1, 8, 16),  "with levels rounded to x"),
    Route(PREFILL_SM90,    ("a16",), HALVES, ANY, *WGMMA,    CODEBOOK, SM90_TOKENS, "wgmma, levels rounded to half"),
    Route(GEMV_SIMT,       ("a16",), FLOAT,  8,   80,  ANY, CODEBOOK, GEMV_TOKENS, "with exact levels"),
    Route(GEMV_SIMT,       ("a16",), TYPES,  8,   75,  80,  TILED,    GEMV_TOKENS, "sums in float32 registers"),
    Route(GEMV_DP4A,       ("a8",),  TYPES,  8,   75,  80,  INTEGER,  GEMV_TOKENS, "integer dots by dp4a"),
    Route(PREFILL_SM80,    ("a16",), HALVES, ANY, 80,  90,  TILED,    MMA_TOKENS,  "mma.sync, from packed weights"),
    Route(PREFILL_SM80,    ("a16",), HALVES, 128, 100, 120, TILED,    MMA_TOKENS,  "mma.sync, from packed weights"),
    Route(PREFILL_SM80,    ("a16",), HALVES, ANY, 120, ANY, TILED,    MMA_TOKENS,  "mma.sync, from packed weights"),
    Route(PREFILL_SM80_A8, ("a8",),  TYPES,  64,  80,  ANY, INTEGER,  A8_TOKENS,   "mma.sync, integer dots"),
    Route(PREFILL_SM80_A8, ("a8",),  HALF,   ANY, 86,  90,  INTEGER,  A8_TOKENS,   "mma.sync, integer dots"),
    Route(PREFILL_SM80_A8, ("a8",),  HALF,   ANY, 120, ANY, INTEGER,  A8_TOKENS,   "mma.sync, integer dots"),
    Route(PREFILL_SM80_A8, ("a8",),  WIDE,   ANY, 80,  ANY, INTEGER,  A8_TOKENS,   "mma.sync, integer dots"),
    Route(GEMM_SM90_S8,    ("a8_g256",), TYPES, ANY, *WGMMA, INTEGER, GEMM_TOKENS, "W as bytes, wgmma", gemm_pays),
    Route(PREFILL_SM90_EIGHT_BITS, ("a8_g256",), TYPES, ANY, *WGMMA, INTEGER, WGMMA_S8_TOKENS, "wgmma of bytes"),
    Route(GEMM_SM80_S8,    ("a8_g256",), TYPES, ANY, 80,  90,  NO_TABLE, S8_TOKENS, "W as bytes in registers", s8_pays),
    Route(GEMM_SM80_S8,    ("a8_g256",), TYPES, ANY, 100, ANY, NO_TABLE, S8_TOKENS, "W as bytes in registers", s8_pays),
    Route(PREFILL_SM80_EIGHT_BITS, ("a8_g256",), TYPES, ANY, 80, 90, INTEGER, EIGHT_BIT_TOKENS, "mma.sync of bytes"),
    Route(PREFILL_SM80_EIGHT_BITS, ("a8_g256",), TYPES, ANY, 100, ANY, INTEGER, EIGHT_BIT_TOKENS, "mma.sync of bytes"),
    Route(GEMM_SM90_S8,    ("e4m3_g256",), TYPES, ANY, *WGMMA, E4M3, GEMM_TOKENS, "of e4m3", gemm_pays),
    Route(PREFILL_SM80_EIGHT_BITS, ("e4m3_g256",), TYPES, ANY, 89, ANY, E4M3, EIGHT_BIT_TOKENS, "mma.sync of e4m3"),
    Route(DEQUANTIZE,      ("a16",), TYPES,  ANY, 75,  ANY, TILED,    (),          "row panels, then cuBLAS"),
    Route(DEQUANTIZE,      ("a8",),  TYPES,  ANY, 75,  ANY, INTEGER,  (),          "on decoded activations"),
    Route(GEMV_FLOATS,     ("a16",), TYPES,  8,   75,  ANY, PLAIN,    (8,),        "x of another type", differs),
    Route(CUBLAS,          ("a16",), TYPES,  ANY, 75,  ANY, PLAIN,    (),          "cuBLAS on the weights"),
)  # fmt: skip
BY_SLOTS = (
    Route(MOE_DECODE,      ("a16",), TYPES,  ANY, 80,  ANY, NUMBERS,  (1,),        "experts, each looked up"),
    Route(MOE_DECODE,      ("a16",), HALVES, ANY, 80,  ANY, CODEBOOK, (1,),        "experts, levels rounded to x"),
    Route(MOE_FLOATS,      ("a16",), TYPES,  ANY, 75,  ANY, PLAIN,    (1,),        "experts of floats, looked up"),
)  # fmt: skip
BY_TILES = (
    Route(MOE_DECODE_TILES, ("a16",), HALVES, ANY, 80, ANY, TILED,    (DECODE_TILE,), "experts, tokens sorted by them"),
    Route(MOE_PREFILL_SM90, ("a16",), HALVES, ANY, *WGMMA, TILED,    GROUPED_TOKENS, "many of them, by wgmma"),
    Route(MOE_PREFILL_SM80, ("a16",), HALVES, ANY, 80, 90, TILED,     EXPERT_TOKENS, "many of them, by mma.sync"),
    Route(MOE_PREFILL_SM80, ("a16",), HALVES, ANY, 100, ANY, TILED,   EXPERT_TOKENS, "many of them, by mma.sync"),
)  # fmt: skip
ROUTES = (
    *DENSE,
    *(row._replace(grouping=Grouping.SLOTS) for row in BY_SLOTS),
    *(row._replace(grouping=Grouping.TILES) for row in BY_TILES),
)

KERNELS = tuple(dict.fromkeys(row.kernel for row in ROUTES))
SOURCES = {kernel.name: kernel.source or kernel.name for kernel in KERNELS}
# The largest numbers of slots of a launch that looks experts up, and of experts of a token that it sums.
MAX_SLOTS = min(row.kernel.max_slots for row in BY_SLOTS)
MAX_TOP_K = min(row.kernel.max_top_k for row in BY_SLOTS)


def source_of(kernel: str) -> str:
    """The file and entry point of a kernel, or of a transform, by its name."""
    return SOURCES.get(kernel, kernel)


def route(p: Problem) -> Route:
    """The row of the fastest kernel by the times of the problem's GPU, without any the first row that fits.

    UnsupportedError prints the problem and where routes live.
    """
    if p.times is not None and p.timed() is not None:
        times = [(times[0][1], row) for row in alternatives(p) if (times := row.kernel.timed(p))]
        if times:
            return min(times, key=lambda pair: pair[0])[1]
    for row in ROUTES:
        if row.fits(p):
            return row
    served = [row.least for row in ROUTES if p.activation in row.activations and row.formats.holds(p.format)]
    since = f" (sm_{min(served)} is the least that has one)" if served and p.sm < min(served) else ""
    raise UnsupportedError(
        f"no kernel for {p}{since}; the table is ROUTES in qgemm/cuda/kernels/routes.py (`qgemm routes` prints it)"
    )


def alternatives(p: Problem) -> list[Route]:
    """The rows of all kernels that can serve a problem as exactly, the row that is chosen without times first.

    Up to EXACT_ROWS rows of x no kernel that rounds weights takes the place of one that does not.
    """
    rows = {row.kernel: row for row in reversed(ROUTES) if row.may_serve(p)}
    first = next((row for row in ROUTES if row.fits(p)), None)
    if first is None:
        return []
    others = (row for row in reversed(rows.values()) if row.kernel is not first.kernel)
    exact = p.m <= EXACT_ROWS and not first.kernel.rounds
    return [first, *(row for row in others if not (exact and row.kernel.rounds))]


def can_serve(kernel: Kernel, p: Problem) -> bool:
    """Whether a kernel multiplies by this format with this activation on this GPU, whatever the sizes."""
    return any(row.kernel is kernel and row.can_serve(p) for row in ROUTES)


def sorts(x: str, sm: int) -> bool:
    """Whether a kernel of sorted rows reads x of this type on this GPU."""
    return any(row.runs_on(sm) and x in row.types for row in BY_TILES)


def token_tile(sizes: tuple[Size, ...], slots: int, experts: int, sms: int, sm: int) -> int:
    """Rows of a token tile if sorting the slots by expert pays, else 0."""
    for row in BY_TILES:
        if row.kernel.token_tile is not None and row.runs_on(sm):
            return row.kernel.token_tile(sizes, slots, experts, sms, sm)
    return 0


@lru_cache(maxsize=MAX_LAUNCHES)
def launch(kernel: Kernel, p: Problem) -> Launchable:
    """The launch of a kernel for a problem, by its fastest config; kept. Without times that is the first ranked."""
    config = kernel.ranked(p)[0][0] if p.times is None else kernel.choose(p)
    return kernel.launch(p, config)


def variants(fmt: Format, sm: int) -> Iterator[tuple[str, Template]]:
    """Every (kernel, template) that the table can ask for with this format on this GPU: what CI compiles."""
    for transform in TRANSFORMS:
        if transform.takes is not None and transform.takes(fmt):
            yield from ((transform.name, template) for template in transform.variants(fmt))
    yield from extra_units(fmt, sm)
    templates: dict[Any, tuple[str, Template]] = {}  # two rows may ask for the same
    for row in ROUTES:
        if row.formats.holds(fmt) and row.runs_on(sm):
            for template in _templates(row, fmt, sm):
                templates.setdefault((row.kernel.name, *template.values()), (row.kernel.name, template))
    yield from templates.values()


def extra_units(
    fmt: Format | None, sm: int, activations: Collection[str] = tuple(GROUP_COLUMNS)
) -> Iterator[tuple[str, Template]]:
    """The (kernel, template) pairs that launches on this GPU need beside those of configs; None: without a format."""
    for kernel in KERNELS:
        if any(row.kernel is kernel and row.runs_on(sm) and (fmt is None or row.formats.holds(fmt)) for row in ROUTES):
            yield from kernel.extra_units(fmt, sm, activations)


def _templates(row: Route, fmt: Format, sm: int) -> Iterator[Template]:
    """Templates for a route's problems of all sizes, for the types of x that no earlier route serves."""
    kernel, (activation,) = row.kernel, row.activations
    for tokens, x in product(row.tokens, row.types):
        of_tiles = tokens if row.grouping is Grouping.TILES else 0
        routed = None if row.grouping is Grouping.DENSE else Routed(tokens=of_tiles)
        p = Problem(fmt, activation, tokens, 1, 1, sm, x, routed=routed)
        # The tile's own number of rows, and the largest number of the route if that has this tile.
        max_rows = min(row.max_rows, LARGE)
        sizes = (tokens, max_rows) if max_rows > row.tokens[-1] or row.tile(max_rows) == tokens else (tokens,)
        if not any(route(p._replace(m=m)) is row for m in sizes):
            continue
        for source in kernel.reads(p):
            for out in kernel.outs(source) or TYPE_NAMES[:1]:
                for form in kernel.forms(p._replace(x=source, outputs=(Output(1, out),))):
                    yield from (kernel.template(form, config) for config in kernel.configs(form))


def common_variants(sm: int) -> Iterator[tuple[str, Template]]:
    """Every (kernel, template) that knows no format, on this GPU."""
    yield from extra_units(None, sm)
    for transform in TRANSFORMS:
        if transform.takes is None:
            yield from ((transform.name, template) for template in transform.variants())

"""The dispatch table of the GPU: which kernel computes which product. `qgemm routes` prints it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from qgemm.codec.format import Format
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.problem import C_TYPES, TYPES, Output, Problem, Routed
from qgemm.errors import UnsupportedError

from . import gemm_sm90_s8, gemv, prefill_sm80
from .decode import DECODE, DECODE_A8, DECODE_SLICES, sliced
from .expert_tiles import DECODE_TILE
from .gemm_sm90_s8 import GEMM_SM90_S8
from .gemv import GEMV_DP4A, GEMV_SIMT
from .kernel import Kernel, Launchable
from .moe_decode import MOE_DECODE
from .moe_decode_tiles import MOE_DECODE_TILES
from .moe_prefill_sm80 import MOE_PREFILL_SM80
from .moe_prefill_sm80 import TOKENS as EXPERT_TOKENS
from .moe_prefill_sm90 import GROUPED_TOKENS, MOE_PREFILL_SM90
from .panels import CUBLAS, DEQUANTIZE
from .prefill_sm80 import PREFILL_SM80, PREFILL_SM80_A8
from .prefill_sm80_eight_bits import PREFILL_SM80_EIGHT_BITS
from .prefill_sm80_eight_bits import measured as sm80_eight_bit_configs
from .prefill_sm90 import PREFILL_SM90
from .prefill_sm90_eight_bits import PREFILL_SM90_EIGHT_BITS, tokens_of
from .sm90_cost import TOKENS
from .transforms import TRANSFORMS

ANY = 1 << 62

FLOAT, HALF, HALVES, WIDE = ("float",), ("half",), ("half", "bf16"), ("float", "bf16")
MMA_TOKENS, A8_TOKENS = (
    tuple(sorted({sm80.tokens for sm80 in prefill_sm80.SM80_CONFIGS if sm80.kernel == kernel.name}))
    for kernel in (PREFILL_SM80, PREFILL_SM80_A8)
)
EIGHT_BIT_TOKENS = tuple(sorted({config.tokens for config in sm80_eight_bit_configs()}))
GEMM_TOKENS, GEMM_PAYS = (gemm_sm90_s8.TOKENS,), gemm_sm90_s8.pays
MAX_LAUNCHES = 1024  # kept
LARGE = 4096  # rows of x that no kernel for few takes
TYPE_NAMES = tuple(C_TYPES)


class Formats(NamedTuple):
    """A set of formats with the word that the table prints for it."""

    label: str
    holds: Callable[[Format], bool]


TILED = Formats("tiled", lambda fmt: fmt.tiled)
INTEGER = Formats("integer", lambda fmt: fmt.tiled and fmt.integer)
NUMBERS = Formats("no codebook", lambda fmt: fmt.tiled and not fmt.needs_table)
CODEBOOK = Formats("codebook", lambda fmt: fmt.tiled and fmt.needs_table)
FEW_BITS = Formats("few bits, points of 8", sliced)
SIXTEENS = Formats("integer, groups of 16", lambda fmt: INTEGER.holds(fmt) and fmt.group == 16)
E4M3 = Formats("mxfp4", lambda fmt: fmt.tiled and fmt.e4m3)
PLAIN = Formats("plain", lambda fmt: fmt.plain and fmt.levels is not None)


class Route(NamedTuple):
    """One row: `kernel` serves these formats, activations and types of x, up to `most` rows of x.

    least, below: the compute capabilities from one on, and before the other. tokens: the sizes of its token tile, of
    which the smallest that holds M is taken, or of sorted rows that of the problem; () if it has none. pays: whether a
    problem that it could serve is worth it, where the rows below serve it as well.
    """

    kernel: Kernel
    activations: tuple[str, ...]
    types: tuple[str, ...]
    most: int
    least: int
    below: int
    formats: Formats
    tokens: tuple[int, ...]
    what: str
    pays: Callable[[Problem], bool] = lambda problem: True

    def fits(self, p: Problem) -> bool:
        """Whether this row serves the problem."""
        return (
            (p.routed is not None) == self.kernel.routed
            and (p.routed is not None and p.routed.tokens > 0) == self.kernel.grouped
            and (p.routed is None or not self.kernel.grouped or p.routed.tokens in self.tokens)
            and p.activation in self.activations
            and p.x in self.types
            and p.m <= self.most
            and self.runs_on(p.sm)
            and self.formats.holds(p.format)
            and self.pays(p)
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
    #     kernel           act       x       m <= sm>= <    formats   tokens       what it does
    Route(DECODE_SLICES,   ("a16",), TYPES,  1,   80,  ANY, FEW_BITS, (1,),        "x in slices of eight bits"),
    Route(DECODE,          ("a16",), TYPES,  8,   80,  ANY, NUMBERS,  (1, 8),      "at the speed of memory"),
    Route(PREFILL_SM90,    ("a16",), HALVES, ANY, 90,  100, NUMBERS,  TOKENS,      "wgmma, from packed weights"),
    Route(DECODE,          ("a16",), TYPES,  16,  80,  ANY, NUMBERS,  (16,),       "at the speed of memory"),
    Route(DECODE_A8,       ("a8",),  TYPES,  8,   80,  ANY, INTEGER,  (1, 8),      "the same by integer dots"),
    Route(PREFILL_SM90,    ("a8",),  HALF,   16,  90,  100, SIXTEENS, TOKENS,      "on decoded activations"),
    Route(DECODE_A8,       ("a8",),  TYPES,  16,  80,  ANY, INTEGER,  (16,),       "the same by integer dots"),
    Route(PREFILL_SM90,    ("a8",),  HALF,   ANY, 90,  100, INTEGER,  TOKENS,      "on decoded activations"),
    Route(DECODE,          ("a16",), HALVES, 16,  80,  ANY, CODEBOOK, (1, 8, 16),  "with levels rounded to x"),
    Route(PREFILL_SM90,    ("a16",), HALVES, ANY, 90,  100, CODEBOOK, TOKENS,      "wgmma, levels rounded to half"),
    Route(GEMV_SIMT,       ("a16",), FLOAT,  8,   80,  ANY, CODEBOOK, gemv.TOKENS, "with exact levels"),
    Route(GEMV_SIMT,       ("a16",), TYPES,  8,   75,  80,  TILED,    gemv.TOKENS, "sums in float32 registers"),
    Route(GEMV_DP4A,       ("a8",),  TYPES,  8,   75,  80,  INTEGER,  gemv.TOKENS, "integer dots by dp4a"),
    Route(PREFILL_SM80,    ("a16",), HALVES, ANY, 80,  90,  TILED,    MMA_TOKENS,  "mma.sync, from packed weights"),
    Route(PREFILL_SM80,    ("a16",), HALVES, 128, 100, 120, TILED,    MMA_TOKENS,  "mma.sync, from packed weights"),
    Route(PREFILL_SM80,    ("a16",), HALVES, ANY, 120, ANY, TILED,    MMA_TOKENS,  "mma.sync, from packed weights"),
    Route(PREFILL_SM80_A8, ("a8",),  TYPES,  64,  80,  ANY, INTEGER,  A8_TOKENS,   "mma.sync, integer dots"),
    Route(PREFILL_SM80_A8, ("a8",),  HALF,   ANY, 86,  90,  INTEGER,  A8_TOKENS,   "mma.sync, integer dots"),
    Route(PREFILL_SM80_A8, ("a8",),  HALF,   ANY, 120, ANY, INTEGER,  A8_TOKENS,   "mma.sync, integer dots"),
    Route(PREFILL_SM80_A8, ("a8",),  WIDE,   ANY, 80,  ANY, INTEGER,  A8_TOKENS,   "mma.sync, integer dots"),
    Route(GEMM_SM90_S8,    ("a8_g256",), TYPES, ANY, 90, 100, INTEGER, GEMM_TOKENS, "half the scales", GEMM_PAYS),
    Route(PREFILL_SM90_EIGHT_BITS, ("a8_g256",), TYPES, ANY, 90, 100, INTEGER, tokens_of("a8_g256"), "half the scales"),
    Route(PREFILL_SM80_EIGHT_BITS, ("a8_g256",), TYPES, ANY, 80, 90, INTEGER, EIGHT_BIT_TOKENS, "half the scales"),
    Route(PREFILL_SM80_EIGHT_BITS, ("a8_g256",), TYPES, ANY, 100, ANY, INTEGER, EIGHT_BIT_TOKENS, "half the scales"),
    Route(GEMM_SM90_S8,    ("e4m3_g256",), TYPES, ANY, 90, 100, E4M3, GEMM_TOKENS, "of e4m3", GEMM_PAYS),
    Route(PREFILL_SM80_EIGHT_BITS, ("e4m3_g256",), TYPES, ANY, 89, ANY, E4M3, EIGHT_BIT_TOKENS, "mma.sync of e4m3"),
    Route(DEQUANTIZE,      ("a16",), TYPES,  ANY, 75,  ANY, TILED,    (),          "row panels, then cuBLAS"),
    Route(DEQUANTIZE,      ("a8",),  TYPES,  ANY, 75,  ANY, INTEGER,  (),          "on decoded activations"),
    Route(CUBLAS,          ("a16",), TYPES,  ANY, 75,  ANY, PLAIN,    (),          "cuBLAS on the weights"),
    Route(MOE_DECODE,      ("a16",), TYPES,  ANY, 80,  ANY, NUMBERS,  (1,),        "experts, each looked up"),
    Route(MOE_DECODE,      ("a16",), HALVES, ANY, 80,  ANY, CODEBOOK, (1,),        "experts, levels rounded to x"),
    Route(MOE_DECODE_TILES, ("a16",), HALVES, ANY, 80, ANY, TILED,    (DECODE_TILE,), "experts, tokens sorted by them"),
    Route(MOE_PREFILL_SM90, ("a16",), HALVES, ANY, 90, 100, TILED,    GROUPED_TOKENS, "many of them, by wgmma"),
    Route(MOE_PREFILL_SM80, ("a16",), HALVES, ANY, 80, 90, TILED,     EXPERT_TOKENS, "many of them, by mma.sync"),
    Route(MOE_PREFILL_SM80, ("a16",), HALVES, ANY, 100, ANY, TILED,   EXPERT_TOKENS, "many of them, by mma.sync"),
)  # fmt: skip


def route(p: Problem) -> Route:
    """The first row that fits; UnsupportedError prints the problem and where routes live."""
    for row in ROUTES:
        if row.fits(p):
            return row
    served = [row.least for row in ROUTES if p.activation in row.activations and row.formats.holds(p.format)]
    since = f" (sm_{min(served)} is the least that has one)" if served and p.sm < min(served) else ""
    raise UnsupportedError(
        f"no kernel for {p}{since}; the table is ROUTES in qgemm/cuda/kernels/routes.py (`qgemm routes` prints it)"
    )


@lru_cache(maxsize=MAX_LAUNCHES)
def launch(kernel: Kernel, p: Problem) -> Launchable:
    """The launch of a kernel for a problem, by the config that the kernel ranks first; kept."""
    config, _ = kernel.ranked(p)[0]
    return kernel.launch(p, config)


def variants(fmt: Format, sm: int) -> Iterator[tuple[str, Template]]:
    """Every (kernel, template) that the table can ask for with this format on this GPU: what CI compiles."""
    for transform in TRANSFORMS:
        if transform.takes is not None and transform.takes(fmt):
            yield from ((transform.name, template) for template in transform.variants(fmt))
    yield from gemm_sm90_s8.variants(fmt, sm)
    found: dict[Any, tuple[str, Template]] = {}  # two rows may ask for the same
    for row in ROUTES:
        if row.formats.holds(fmt) and row.runs_on(sm):
            for template in _templates(row, fmt, sm):
                found.setdefault((row.kernel.name, *template.values()), (row.kernel.name, template))
    yield from found.values()


def _templates(row: Route, fmt: Format, sm: int) -> Iterator[Template]:
    """Templates of a route's problems of every size; a type of x only where the route is the first to serve it."""
    kernel, (activation,) = row.kernel, row.activations
    for tokens, x in product(row.tokens, row.types):
        routed = Routed(tokens=tokens if kernel.grouped else 0) if kernel.routed else None
        p = Problem(fmt, activation, tokens, 1, 1, sm, x, routed=routed)
        # The tile's own number of rows, and the most of the route, where that is the tile for it.
        most = min(row.most, LARGE)
        sizes = (tokens, most) if most > row.tokens[-1] or row.tile(most) == tokens else (tokens,)
        if not any(route(p._replace(m=m)) is row for m in sizes):
            continue
        for source in kernel.reads(p):
            for out in kernel.outs(source) or TYPE_NAMES[:1]:
                for asked in kernel.forms(p._replace(x=source, outputs=(Output(1, out),))):
                    yield from (kernel.template(asked, config) for config in kernel.configs(asked))


def common_variants(sm: int) -> Iterator[tuple[str, Template]]:
    """Every (kernel, template) that knows no format, on this GPU."""
    yield from gemm_sm90_s8.common_variants(sm)
    for transform in TRANSFORMS:
        if transform.takes is None:
            yield from ((transform.name, template) for template in transform.variants())

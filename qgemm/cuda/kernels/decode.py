"""The decode kernels: few rows of x at the speed of memory (sm_80 and later). One source, five records.

    decode            dense products, W4A16: x is multiplied by exact levels
    decode_a8         dense products, W4A8: dot products of integer codes
    decode_slices     dense products of one token by codes of few bits: x in slices of eight bits, integer products
    moe_decode        experts by slots: each token by the experts that its ids name, looked up by the kernel
    moe_decode_tiles  experts by token tiles: rows of x that moe_sort has sorted by expert

Only pointers change from call to call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from qgemm.codec.format import Format
from qgemm.cuda.driver.launch import Launch
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.jit.load import load
from qgemm.cuda.jit.twins import MAX_PRODUCTS, TYPE_CODES, ExpertProducts, ExpertTileProducts, Products, Types
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import Q8_1, Problem, Routed

from .decode_config import (
    A8,
    A16,
    BULK_COPIES,
    INSIDE,
    MMA_N,
    SLICES,
    SLOTS,
    SOURCE,
    SUMMED_SLOTS,
    TILES,
    DecodeConfig,
    decode_configs_for,
    decode_ranked,
    decode_template,
    gated_config,
    kernel_table_bytes,
    quantized_bytes,
    shared_limit,
    sliced_bytes,
    tile_kind,
)
from .expert_tiles import DECODE_TILE, max_token_tiles
from .kernel import Kernel, Launchable

TOKEN_TILES = (1, 8, 16)
POINT = 8  # weights of a point of a grid
# decode_a8 quantizes x in each of its CTAs up to these rows of x and weights: a kernel that only quantizes costs the
# GPU 1.5 us and the host 3 us.
ROWS_INSIDE, WEIGHTS_INSIDE = 2, 1 << 26
MAX_TOP_K = 32  # experts of a token that are summed: each lane of a warp holds one
MAX_SLOTS = 65535  # slots of a launch: CUDA's limit on the second axis of a grid


def sliced(fmt: Format) -> bool:
    """Whether one token is multiplied in slices: one mask turns codes of few bits into bytes, and a byte permutation
    finds points of eight weights among eight levels."""
    if not fmt.tiled or not fmt.integer or fmt.tile.digits is not None:
        return False
    return tile_kind(fmt) == "few_bits" if fmt.tile.grid is None else fmt.tile.grid.weights == POINT


# ---------------------------------------------------------------- configs


def token_tile(m: int) -> int:
    """The smallest token tile that holds M rows of x."""
    return next(tokens for tokens in TOKEN_TILES if tokens >= m)


def tokens_of(p: Problem) -> int:
    """Tokens of a CTA."""
    if p.routed is not None:
        return p.routed.tokens or 1
    return token_tile(p.m)


def table_name(name: str, p: Problem) -> str:
    """The name of a kernel in the table of configs, which has rows of its own for a sum over a token's experts."""
    return SUMMED_SLOTS if p.routed is not None and p.routed.summed else name


def row_blocks_of(p: Problem) -> int:
    """Blocks of 64 rows of W that a launch reads: of all products, or of all experts that may have a token."""
    rows = [output.n for output in p.outputs] or [p.n]
    if p.routed is None:
        return sum(-(-n // tiles.ROWS) for n in rows)
    n, count = (p.n, min(p.m, p.routed.experts)) if p.routed.tokens else (rows[0], slots_of(p))
    return -(-n // tiles.ROWS) * count * (2 if p.gated else 1)


def slots_of(p: Problem) -> int:
    """CTAs along the second axis of the grid: slots or, if y is the sum over a token's slots, tokens."""
    assert p.routed is not None
    return p.m if p.routed.summed else p.m * p.routed.top_k


def configs(name: str, p: Problem) -> Iterable[DecodeConfig]:
    """The configs for this token tile."""
    rows = decode_configs_for(p.format, table_name(name, p), tokens_of(p), p.sm)
    return map(gated_config, rows) if p.gated else rows


def ranked(name: str, p: Problem) -> list[tuple[DecodeConfig, None]]:
    """The configs for the rows of W that a launch reads, by the table."""
    tokens = tokens_of(p)
    m = p.m if p.routed is None else tokens
    rows = decode_ranked(p.format, table_name(name, p), tokens, m, row_blocks_of(p), p.k, p.sm)
    return [(gated_config(row) if p.gated else row, None) for row in rows]


def chosen(name: str, p: Problem, rows: Sequence[int]) -> set[DecodeConfig]:
    """The configs that are chosen for these numbers of rows of x, whether W has the launch alone or shares it, or for
    any number of slots of experts."""
    configs_chosen, table = set(), table_name(name, p)
    alone = row_blocks_of(p) if p.routed is None else -(-p.outputs[0].n // tiles.ROWS)
    for m in rows if p.routed is None else (1,):
        tokens = token_tile(m)
        more = {row.row_blocks for row in decode_configs_for(p.format, table, tokens, p.sm)}
        counts = {alone, *(count for count in more if count > alone)}
        for row_blocks in {2 * alone} if p.gated and p.routed is None else counts:  # gate and up, no third product
            config = decode_ranked(p.format, table, tokens, m, row_blocks, p.k, p.sm)[0]
            configs_chosen.add(gated_config(config) if p.gated else config)
    return configs_chosen


def chosen_of_tiles(p: Problem, rows: Sequence[int]) -> Iterable[DecodeConfig]:
    """All configs of the table: few."""
    return configs(TILES, p)


def template(name: str, p: Problem, config: DecodeConfig) -> Template:
    """The constants of a config."""
    return decode_template(p.format, config, tokens_of(p), table_name(name, p), p.x, p.sm, p.gated)


def forms(p: Problem) -> Iterator[Problem]:
    """Products, and a gate with its up projection."""
    return (p._replace(gated=gated) for gated in (False, True))


def forms_of_slots(p: Problem) -> Iterator[Problem]:
    """The problems of `forms`, and the sum over a token's experts."""
    assert p.routed is not None
    yield from forms(p)
    yield p._replace(routed=p.routed._replace(summed=True))


# ---------------------------------------------------------------- launches


def shared_bytes(name: str, fmt: Format, config: DecodeConfig, constants: Template, sm: int) -> int:
    """Shared memory of a CTA: the inbox, and then the pipelines, whose place the reduction takes at the end; at least
    the reserved bytes."""
    pipelines = kernel_table_bytes(fmt, name) + int(constants["WARP_SPLIT_K"]) * int(constants["WARP_BYTES"])
    pipelines += quantized_bytes(name, str(constants["In"]), int(constants["TOKENS"])) + sliced_bytes(config.columns)
    reserved = min(config.reserved, shared_limit(sm))  # on sm_120 a row for sm_90 exceeds the limit
    return max(int(constants["INBOX_BYTES"]) + max(pipelines, int(constants["REDUCE_BYTES"])), reserved)


def ctas_of(n: int, p: Problem, config: DecodeConfig) -> int:
    """CTAs that have N rows of y."""
    rows = 16 * config.m16_tiles // (2 if p.gated else 1)
    return -(-n // rows) * config.cluster_split_k


def describe(products: Products, p: Problem, m: int, config: DecodeConfig) -> int:
    """Fill in sizes and types of the products of a launch, and return their number of CTAs."""
    assert len(p.outputs) <= MAX_PRODUCTS
    products.k, products.m = p.k, m
    end = 0
    for product, output in zip(products.of, p.outputs, strict=False):
        end += 0 if p.gated and end else ctas_of(output.n, p, config)
        product.n, product.end, product.types = output.n, end, Types.from_names(*output[1:])
    return end


def prepare(
    name: str, p: Problem, config: DecodeConfig, grid: int | tuple[int, int],
    arguments: Products | ExpertProducts | ExpertTileProducts, pointers: int,
) -> Launch:  # fmt: skip
    """The launch of the kernel with these arguments, the first of which are this number of pointers."""
    constants, table = template(name, p, config), table_name(name, p)
    cluster = config.cluster_split_k if config.cluster_split_k > 1 else 0
    shared = shared_bytes(table, p.format, config, constants, p.sm)
    function, threads = load(SOURCE, p.format, **constants), 32 * int(constants["WARP_SPLIT_K"])
    return Launch(function, grid, threads, shared, (arguments,), arguments, pointers, cluster)


def launch(name: str, p: Problem, config: DecodeConfig) -> Launchable:
    """The launch of all products; its pointers are x, then w, y, bias and residual of each."""
    products = Products()
    ctas = describe(products, p, p.m, config)
    return prepare(name, p, config, ctas, products, 1 + 4 * len(p.outputs)).enter


def launch_by_slots(p: Problem, config: DecodeConfig) -> Launch:
    """The launch; its pointers are ids and weights, x, then w, y, bias and residual of each product."""
    routed = p.routed or Routed()
    arguments = ExpertProducts(
        expert_bytes=routed.stride.nbytes, expert_rows=routed.stride.rows, experts=routed.experts, top_k=routed.top_k,
        wide_ids=routed.ids == "int64", weights_type=TYPE_CODES.get(routed.weights, 0), x_of_slots=routed.x_of_slots,
        ids_are_known=routed.ids_are_known,
    )  # fmt: skip
    ctas = describe(arguments.products, p, 1, config)
    return prepare(SLOTS, p, config, (ctas, slots_of(p)), arguments, 3 + 4 * len(p.outputs))


class LaunchByTiles:
    """The kernel for all experts of one shape and format, and at most this number of sorted rows.

    Its call has a raw stream handle and the pointers of moe_prefill_sm90.
    """

    def __init__(self, p: Problem, config: DecodeConfig) -> None:
        """Prepare the launch on the current device."""
        routed = p.routed or Routed()
        arguments = ExpertTileProducts(
            expert_bytes=routed.stride.nbytes, expert_rows=routed.stride.rows, tiles_are_known=routed.ids_are_known
        )
        ctas = describe(arguments.products, p, DECODE_TILE, config)
        grid = ctas, max_token_tiles(p.m, routed.experts, DECODE_TILE)
        self._gated = p.gated
        self._launch = prepare(TILES, p, config, grid, arguments, 3 + 4 * len(p.outputs))

    def __call__(self, stream: int, *pointers: int) -> None:
        self._launch(stream, *self._in_order(*pointers))

    def bound(self, stream: int, *pointers: int, into: int | None = None) -> Callable[[], int]:
        """A call that launches with this stream and these pointers: `Launch.bound`."""
        return self._launch.bound(stream, *self._in_order(*pointers), into=into)

    def _in_order(
        self, x: int, counts: int, token_tiles: int, gate: int, up: int, _gate_absmax: int, _up_absmax: int,
        gate_bias: int, up_bias: int, y: int,
    ) -> tuple[int, ...]:  # fmt: skip
        """Pointers in the order of the kernel's arguments."""
        second = (up, 0, up_bias, 0) if self._gated else ()
        return counts, token_tiles, x, gate, y, gate_bias, 0, *second


# ---------------------------------------------------------------- records


def quantizes(p: Problem) -> bool:
    """Whether decode_a8 quantizes x itself rather than read the blocks of another kernel; n: of all products."""
    numbers = p.m * -(-p.k // tiles.K_BLOCK) * tiles.K_BLOCK
    return p.m <= ROWS_INSIDE and numbers <= INSIDE and p.n * p.k <= WEIGHTS_INSIDE and p.sm >= BULK_COPIES


def _reads_a8(p: Problem) -> tuple[str, ...]:
    inside = tokens_of(p) <= MMA_N and quantizes(p._replace(m=1, n=1, k=1))
    return (Q8_1, p.x) if inside else (Q8_1,)


DECODE, DECODE_SLICES = (
    Kernel(
        name, partial(configs, name), partial(ranked, name), partial(chosen, name), partial(template, name),
        partial(launch, name), SOURCE, products=MAX_PRODUCTS, adds=True, forms=forms,
    )
    for name in (A16, SLICES)
)  # fmt: skip
DECODE_A8 = Kernel(
    A8, partial(configs, A8), partial(ranked, A8), partial(chosen, A8), partial(template, A8), partial(launch, A8),
    SOURCE, products=MAX_PRODUCTS, adds=True, forms=forms, reads=_reads_a8, takes_q8_1=True, quantizes=quantizes,
)  # fmt: skip
MOE_DECODE = Kernel(
    SLOTS, partial(configs, SLOTS), partial(ranked, SLOTS), partial(chosen, SLOTS), partial(template, SLOTS),
    launch_by_slots, SOURCE, products=2, adds=True, forms=forms_of_slots, max_slots=MAX_SLOTS, max_top_k=MAX_TOP_K,
)  # fmt: skip
MOE_DECODE_TILES = Kernel(
    TILES, partial(configs, TILES), partial(ranked, TILES), chosen_of_tiles, partial(template, TILES), LaunchByTiles,
    SOURCE, products=2, forms=forms,
)  # fmt: skip

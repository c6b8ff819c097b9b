"""The decode kernels: one or several products with few rows of x at the speed of memory (sm_80 and later).

A16 multiplies x by exact levels, A8 dots of integer codes; one token meets codes of few bits in slices of eight bits,
by integer products. Nothing but pointers changes from call to call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from qgemm.codec.format import Format
from qgemm.cuda.driver.launch import Launch
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.jit.load import load
from qgemm.cuda.jit.twins import MAX_PRODUCTS, Products, Types
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import Q8_1, Problem

from .decode_config import (
    A8,
    A16,
    BULK_COPIES,
    COLUMN_TILE,
    INSIDE,
    SLICES,
    DecodeConfig,
    decode_configs_for,
    decode_ranked,
    decode_template,
    gated_config,
    kernel_table_bytes,
    quantized_bytes,
    sliced_bytes,
    tile_kind,
)
from .kernel import Kernel, Launchable

TOKENS = (1, 8, 16)  # token tiles
POINT = 8  # weights of a point of a grid
LEAST = 80  # compute capability
# decode_a8 quantizes up to so many rows of x itself, in each of its CTAs, for up to so many weights: a kernel for it
# costs the GPU 1.5 us and the host 3.
ROWS_INSIDE, WEIGHTS_INSIDE = 2, 1 << 26


def token_tile(m: int) -> int:
    """The smallest token tile that holds M rows of x."""
    return next(tokens for tokens in TOKENS if tokens >= m)


def takes(activation: str, p: Problem) -> bool:
    """Up to 16 rows of x; codes of a codebook by A16 alone."""
    return p.format.tiled and p.m <= TOKENS[-1] and p.sm >= LEAST and (activation == "a16" or p.format.integer)


def sliced(fmt: Format) -> bool:
    """Whether one token is multiplied in slices: codes of few bits, which one mask makes bytes of, and points of eight
    weights, which a byte permutation finds among eight levels."""
    if not fmt.tiled or not fmt.integer or fmt.tile.digits is not None:
        return False
    return tile_kind(fmt) == "few_bits" if fmt.tile.grid is None else fmt.tile.grid.weights == POINT


def takes_slices(p: Problem) -> bool:
    """One row of x."""
    return sliced(p.format) and p.m == 1 and p.activation == "a16" and p.sm >= LEAST


def configs(name: str, p: Problem) -> Iterator[DecodeConfig]:
    """The configs for this token tile."""
    found = decode_configs_for(p.format, name, token_tile(p.m), p.sm)
    return map(gated_config, found) if p.gated else found


def ranked(name: str, p: Problem) -> list[tuple[DecodeConfig, None]]:
    """Those for the rows of W of all products, by the table."""
    rows = decode_ranked(p.format, name, token_tile(p.m), p.m, row_blocks_of(p), p.k, p.sm)
    return [(gated_config(row) if p.gated else row, None) for row in rows]


def row_blocks_of(p: Problem) -> int:
    """Blocks of 64 rows of W of all products."""
    return sum(-(-output.n // tiles.ROWS) for output in p.outputs) if p.outputs else -(-p.n // tiles.ROWS)


def chosen(name: str, p: Problem, rows: Sequence[int]) -> set[DecodeConfig]:
    """Those that are chosen for these numbers of rows of x, by this W alone or with more."""
    found, alone = set(), row_blocks_of(p)
    for m in rows:
        tokens = token_tile(m)
        more = {row.row_blocks for row in decode_configs_for(p.format, name, tokens, p.sm)}
        for row_blocks in {alone, *(count for count in more if count > alone)}:
            found.add(decode_ranked(p.format, name, tokens, m, row_blocks, p.k, p.sm)[0])
    return found


def template(name: str, p: Problem, config: DecodeConfig) -> Template:
    """The constants of a config."""
    return decode_template(p.format, config, token_tile(p.m), name, p.x, p.sm, p.gated)


def launch(name: str, p: Problem, config: DecodeConfig) -> Launchable:
    """The launch of all products; its pointers are x, then w, y, bias and residual of each."""
    assert len(p.outputs) <= MAX_PRODUCTS
    constants = template(name, p, config)
    warps, rows = int(constants["WARP_SPLIT_K"]), 16 * config.m16_tiles // (2 if p.gated else 1)
    products, end = Products(k=p.k, m=p.m), 0
    for product, output in zip(products.of, p.outputs, strict=False):
        end += 0 if p.gated and end else -(-output.n // rows) * config.cluster_split_k
        product.n, product.end = output.n, end
        product.types = Types.from_names(*output[1:])
    shared = shared_bytes(name, p.format, config, constants)
    function = load(name, p.format, **constants)
    cluster = config.cluster_split_k if config.cluster_split_k > 1 else 0
    return Launch(function, end, 32 * warps, shared, (products,), products, 1 + 4 * len(p.outputs), cluster).enter


def shared_bytes(name: str, fmt: Format, config: DecodeConfig, constants: Template) -> int:
    """Shared memory of a CTA: the inbox, pipelines or, in their place at the end, sums; at least what is reserved."""
    pipelines = kernel_table_bytes(fmt, name) + int(constants["WARP_SPLIT_K"]) * int(constants["WARP_BYTES"])
    pipelines += quantized_bytes(name, str(constants["In"]), int(constants["TOKENS"])) + sliced_bytes(config.columns)
    return max(int(constants["INBOX_BYTES"]) + max(pipelines, int(constants["REDUCE_BYTES"])), config.reserved)


def quantizes_inside(m: int, k: int, weights: int, sm: int) -> bool:
    """Whether decode_a8 quantizes x [m, k] itself rather than get it from a kernel of its own."""
    numbers = m * -(-k // tiles.K_BLOCK) * tiles.K_BLOCK
    return m <= ROWS_INSIDE and numbers <= INSIDE and weights <= WEIGHTS_INSIDE and sm >= BULK_COPIES


def _reads_a8(p: Problem) -> tuple[str, ...]:
    inside = token_tile(p.m) <= COLUMN_TILE and quantizes_inside(1, 1, 1, p.sm)
    return (Q8_1, p.x) if inside else (Q8_1,)


def forms(p: Problem) -> Iterator[Problem]:
    """Products, and one that is the gate of another."""
    return (p._replace(gated=gated) for gated in (False, True))


DECODE = Kernel(
    A16, partial(takes, "a16"), partial(configs, A16), partial(ranked, A16), partial(chosen, A16),
    partial(template, A16), partial(launch, A16), products=MAX_PRODUCTS, adds=True, forms=forms,
)  # fmt: skip
DECODE_A8 = Kernel(
    A8, partial(takes, "a8"), partial(configs, A8), partial(ranked, A8), partial(chosen, A8),
    partial(template, A8), partial(launch, A8), reads=_reads_a8, products=MAX_PRODUCTS, adds=True,
    takes_q8_1=True, forms=forms,
)  # fmt: skip
DECODE_SLICES = Kernel(
    SLICES, takes_slices, partial(configs, SLICES), partial(ranked, SLICES), partial(chosen, SLICES),
    partial(template, SLICES), partial(launch, SLICES), products=MAX_PRODUCTS, adds=True, forms=forms,
)  # fmt: skip

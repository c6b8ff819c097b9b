"""The decode kernel of experts: few tokens, each by the experts that its ids name (sm_80 and later)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from qgemm.cuda.driver.launch import Launch
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.jit.load import load
from qgemm.cuda.jit.twins import TYPE_CODES, ExpertProducts, Types
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import Problem, Routed

from . import decode
from .decode_config import A16, DecodeConfig, decode_configs_for, decode_ranked, decode_template, gated_config
from .kernel import Kernel

MOE = "moe_decode"
MAX_TOP_K = 32  # experts of a token whose sum is taken: a lane of a warp knows one each
MAX_SLOTS = 65535  # of a launch: CUDA's limit on the second axis of a grid


def takes(p: Problem) -> bool:
    """Any number of tokens; each reads its experts anew, so that more than a few want another kernel."""
    return p.routed is not None and p.format.tiled and p.sm >= decode.LEAST and p.activation == "a16"


def configs(p: Problem) -> Iterator[DecodeConfig]:
    """Those of decode for one token."""
    found = for_experts(decode_configs_for(p.format, A16, 1, p.sm))
    return map(gated_config, found) if p.gated else found


def for_experts(rows: Iterable[DecodeConfig]) -> Iterator[DecodeConfig]:
    """The configs that need not know W before x is there: neither clusters nor weights fetched while waiting."""
    return (row for row in rows if row.cluster_split_k == 1 and not row.prefetch)


def ranked(p: Problem) -> list[tuple[DecodeConfig, None]]:
    """Those of decode for as many rows of W as all slots have."""
    row_blocks = -(-p.outputs[0].n // tiles.ROWS) * slots_of(p) * (2 if p.gated else 1)
    rows = for_experts(decode_ranked(p.format, A16, 1, 1, row_blocks, p.k, p.sm))
    return [(gated_config(row) if p.gated else row, None) for row in rows]


def chosen(p: Problem, rows: Sequence[int]) -> set[DecodeConfig]:
    """Those that are chosen for any number of tokens and of experts of each."""
    least = -(-p.outputs[0].n // tiles.ROWS)
    counts = {least, *(row.row_blocks for row in decode_configs_for(p.format, A16, 1, p.sm) if row.row_blocks > least)}
    found = (decode_ranked(p.format, A16, 1, 1, count, p.k, p.sm) for count in counts)
    best = [next(for_experts(rows)) for rows in found]
    return {gated_config(row) if p.gated else row for row in best}


def slots_of(p: Problem) -> int:
    """CTAs along the second axis of the grid: places in ids or, where y is the sum over them, tokens."""
    assert p.routed is not None
    return p.m if p.routed.summed else p.m * p.routed.top_k


def forms(p: Problem) -> Iterator[Problem]:
    """A product, a gate and what it gates, the sum over a token's experts."""
    assert p.routed is not None
    yield p
    yield p._replace(gated=True)
    yield p._replace(routed=p.routed._replace(summed=True))


def template(p: Problem, config: DecodeConfig) -> Template:
    """The constants of a config."""
    assert p.routed is not None
    constants = decode_template(p.format, config, 1, A16, p.x, p.sm, p.gated)
    return {**constants, "SUMMED": int(p.routed.summed)}


def launch(p: Problem, config: DecodeConfig) -> Launch:
    """The launch; its pointers are ids and weights, x, then w, y, bias and residual of each product."""
    constants = template(p, config)
    arguments, ctas = arguments_of(p, config)
    shared = decode.shared_bytes(A16, p.format, config, constants)
    function, grid = load(MOE, p.format, **constants), (ctas, slots_of(p))
    threads, pointers = 32 * int(constants["WARP_SPLIT_K"]), 3 + 4 * len(p.outputs)
    return Launch(function, grid, threads, shared, (arguments,), arguments, pointers)


def arguments_of(p: Problem, config: DecodeConfig) -> tuple[ExpertProducts, int]:
    """What the kernel is told of a problem, without its pointers; CTAs for the rows of an expert."""
    routed, (first, *_) = p.routed or Routed(), p.outputs
    ctas = -(-first.n // (16 * config.m16_tiles // (2 if p.gated else 1)))
    found = ExpertProducts(
        expert_bytes=routed.stride.nbytes, expert_rows=routed.stride.rows, experts=routed.experts, top_k=routed.top_k,
        wide_ids=routed.ids == "int64", weights_type=TYPE_CODES.get(routed.weights, 0), x_of_slots=routed.x_of_slots,
    )  # fmt: skip
    found.products.k, found.products.m = p.k, 1
    for product, output in zip(found.products.of, p.outputs, strict=False):
        product.n, product.end = output.n, ctas
        product.types = Types.of(*output[1:])
    return found, ctas


MOE_DECODE = Kernel(
    MOE, takes, configs, ranked, chosen, template, launch, products=2, adds=True, forms=forms, routed=True
)

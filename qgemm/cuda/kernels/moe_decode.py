"""The decode kernel of experts: few tokens, each by the experts that its ids name (sm_80 and later)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qgemm.cuda.driver.launch import Launch
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.jit.load import load
from qgemm.cuda.jit.twins import TYPE_CODES, ExpertProducts, Types
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import Problem, Routed

from . import decode
from .decode_config import (
    DecodeConfig,
    decode_configs_for,
    decode_ranked,
    decode_template,
    gated_config,
)
from .kernel import Kernel

MOE = "moe_decode"
SUMMED = "moe_decode_sum"  # the same kernel in the table of configs, where y is the sum over a token's experts
MAX_TOP_K = 32  # experts of a token whose sum is taken: a lane of a warp knows one each
MAX_SLOTS = 65535  # of a launch: CUDA's limit on the second axis of a grid


def takes(p: Problem) -> bool:
    """Any number of tokens; each reads its experts anew, so that more than a few want another kernel."""
    return p.routed is not None and p.format.tiled and p.sm >= decode.LEAST and p.activation == "a16"


def name_of(p: Problem) -> str:
    """What the table of configs calls the kernel for a problem."""
    assert p.routed is not None
    return SUMMED if p.routed.summed else MOE


def configs(p: Problem) -> Iterator[DecodeConfig]:
    """Those of the table for one token."""
    found = decode_configs_for(p.format, name_of(p), 1, p.sm)
    return map(gated_config, found) if p.gated else found


def ranked(p: Problem) -> list[tuple[DecodeConfig, None]]:
    """Those for as many rows of W as all slots have."""
    row_blocks = -(-p.outputs[0].n // tiles.ROWS) * slots_of(p) * (2 if p.gated else 1)
    rows = decode_ranked(p.format, name_of(p), 1, 1, row_blocks, p.k, p.sm)
    return [(gated_config(row) if p.gated else row, None) for row in rows]


def chosen(p: Problem, rows: Sequence[int]) -> set[DecodeConfig]:
    """Those that are chosen for any number of tokens and of experts of each."""
    least, name = -(-p.outputs[0].n // tiles.ROWS), name_of(p)
    counts = {least, *(row.row_blocks for row in decode_configs_for(p.format, name, 1, p.sm) if row.row_blocks > least)}
    best = [decode_ranked(p.format, name, 1, 1, count, p.k, p.sm)[0] for count in counts]
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
    constants = decode_template(p.format, config, 1, name_of(p), p.x, p.sm, p.gated)
    return {**constants, "SUMMED": int(p.routed.summed), "CTAS": max(1, config.ctas)}


def launch(p: Problem, config: DecodeConfig) -> Launch:
    """The launch; its pointers are ids and weights, x, then w, y, bias and residual of each product."""
    constants = template(p, config)
    warps, cluster = int(constants["WARP_SPLIT_K"]), config.cluster_split_k
    arguments, ctas = arguments_of(p, config)
    shared = decode.shared_bytes(name_of(p), p.format, config, constants)
    function, grid = load(MOE, p.format, **constants), (ctas, slots_of(p))
    pointers = 3 + 4 * len(p.outputs)
    return Launch(
        function, grid, 32 * warps, shared, (arguments,), arguments, pointers, cluster if cluster > 1 else 0
    )  # fmt: skip


def arguments_of(p: Problem, config: DecodeConfig) -> tuple[ExpertProducts, int]:
    """What the kernel is told of a problem, without its pointers; CTAs for the rows of an expert."""
    routed, (first, *_) = p.routed or Routed(), p.outputs
    ctas = -(-first.n // (16 * config.m16_tiles // (2 if p.gated else 1))) * config.cluster_split_k
    found = ExpertProducts(
        expert_bytes=routed.stride.nbytes, expert_rows=routed.stride.rows, experts=routed.experts, top_k=routed.top_k,
        wide_ids=routed.ids == "int64", weights_type=TYPE_CODES.get(routed.weights, 0), x_of_slots=routed.x_of_slots,
        ids_are_known=routed.ids_are_known,
    )  # fmt: skip
    found.products.k, found.products.m = p.k, 1
    for product, output in zip(found.products.of, p.outputs, strict=False):
        product.n, product.end = output.n, ctas
        product.types = Types.from_names(*output[1:])
    return found, ctas


MOE_DECODE = Kernel(
    MOE, takes, configs, ranked, chosen, template, launch, products=2, adds=True, forms=forms, routed=True
)

"""The decode kernel over token tiles of sorted rows: experts that have few tokens each (sm_80 and later)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from qgemm.cuda.driver.launch import Launch
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.jit.load import load
from qgemm.cuda.jit.twins import ExpertTileProducts, Types
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import Problem, Routed

from . import decode
from .decode_config import DecodeConfig, decode_configs_for, decode_ranked, decode_template, gated_config
from .expert_tiles import DECODE_TILE, max_token_tiles
from .kernel import Kernel

NAME = "moe_decode_tiles"


def takes(p: Problem) -> bool:
    """Rows sorted by expert, of 16 bits, in token tiles of eight."""
    sorted_rows = p.routed is not None and p.routed.tokens == DECODE_TILE
    return sorted_rows and p.format.tiled and p.sm >= decode.LEAST and p.x in ("half", "bf16")


def configs(p: Problem) -> Iterator[DecodeConfig]:
    """Those of the table."""
    found = decode_configs_for(p.format, NAME, DECODE_TILE, p.sm)
    return map(gated_config, found) if p.gated else found


def ranked(p: Problem) -> list[tuple[DecodeConfig, None]]:
    """Those for the rows of W of as many experts as there may be with a token."""
    experts = min(p.m, (p.routed or Routed()).experts)
    row_blocks = -(-p.n // tiles.ROWS) * experts * (2 if p.gated else 1)
    rows = decode_ranked(p.format, NAME, DECODE_TILE, DECODE_TILE, row_blocks, p.k, p.sm)
    return [(gated_config(row) if p.gated else row, None) for row in rows]


def chosen(p: Problem, rows: Sequence[int]) -> Iterator[DecodeConfig]:
    """All of the table."""
    return configs(p)


def forms(p: Problem) -> Iterator[Problem]:
    """A product, and a gate with what it gates."""
    return (p._replace(gated=gated) for gated in (False, True))


def template(p: Problem, config: DecodeConfig) -> Template:
    """The constants of a config."""
    constants = decode_template(p.format, config, DECODE_TILE, NAME, p.x, p.sm, p.gated)
    return {**constants, "CTAS": max(1, config.ctas)}


class TilesLaunch:
    """The kernel for all experts of one shape and format, and so many sorted rows at most.

    A call takes a raw stream handle and the pointers that that of moe_prefill_sm90 takes.
    """

    def __init__(self, p: Problem, config: DecodeConfig) -> None:
        """Prepare the launch on the current device."""
        assert p.routed is not None
        constants, cluster = template(p, config), config.cluster_split_k
        ctas = -(-p.n // (16 * config.m16_tiles // (2 if p.gated else 1))) * cluster
        found = ExpertTileProducts(
            expert_bytes=p.routed.stride.nbytes, expert_rows=p.routed.stride.rows,
            tiles_are_known=p.routed.ids_are_known,
        )  # fmt: skip
        found.products.k, found.products.m = p.k, DECODE_TILE
        for product, output in zip(found.products.of, p.outputs, strict=False):
            product.n, product.end, product.types = output.n, ctas, Types.from_names(*output[1:])
        grid = ctas, max_token_tiles(p.m, p.routed.experts, DECODE_TILE)
        shared = decode.shared_bytes(NAME, p.format, config, constants)
        self._gated, function = p.gated, load(NAME, p.format, **constants)
        self._launch = Launch(
            function, grid, 32 * int(constants["WARP_SPLIT_K"]), shared, (found,), found, 3 + 4 * len(p.outputs),
            cluster if cluster > 1 else 0,
        )  # fmt: skip

    def __call__(self, stream: int, *pointers: int) -> None:
        self._launch(stream, *self._in_order(*pointers))

    def bound(self, stream: int, *pointers: int, into: int | None = None) -> Callable[[], int]:
        """See Launch."""
        return self._launch.bound(stream, *self._in_order(*pointers), into=into)

    def _in_order(
        self, x: int, counts: int, token_tiles: int, gate: int, up: int, _gate_absmax: int, _up_absmax: int,
        gate_bias: int, up_bias: int, y: int,
    ) -> tuple[int, ...]:  # fmt: skip
        """Pointers in the order of the kernel's."""
        second = (up, 0, up_bias, 0) if self._gated else ()
        return counts, token_tiles, x, gate, y, gate_bias, 0, *second


MOE_DECODE_TILES = Kernel(
    NAME, takes, configs, ranked, chosen, template, TilesLaunch, products=2, forms=forms, routed=True, grouped=True
)

"""Products by experts of many tokens on the host: the token tile, the launch over rows that are sorted by expert.

The kernel is prefill_sm90 with other tiles of y: those of a token tile, which moe_sort lists on the device, have the
weights of its expert. Nothing here knows how many there are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import hypot
from typing import NamedTuple

from qgemm.codec.format import Format
from qgemm.cuda.driver.launch import Launch, TensorMap
from qgemm.cuda.driver.workspace import workspace
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.jit.load import load
from qgemm.cuda.jit.twins import GATE_CODES, TYPE_CODES, Divisor, GroupedProducts, StreamK, Types
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import TUNED_SMS, Output, Problem

from .expert_tiles import Size, best_tile, expected_tiles, read_us
from .kernel import Kernel
from .prefill_sm90 import FLAG
from .sm90_config import MAX_PARTIALS, SUM, Sm90Config, prefill_template, stages_of

NAME = "moe_prefill_sm90"
POINTERS = 11  # of GroupedProducts, that a call writes
GATES = ("silu", "swiglu_oai")  # of models that are prepared; others compile at first use

# A config for each token tile. The second of a size is for formats that have fewer than ENOUGH stages by the first.
# Few tokens leave registers for four row_blocks a CTA, which share rows of x and the ends of a tile.
STATIC = 1024  # bytes of shared memory of the schedule, aligned as the pipeline is
CONFIGS = tuple(
    Sm90Config(tokens, row_blocks, 1, k_blocks, static=STATIC)
    for tokens, row_blocks, k_blocks in (
        (16, 4, 4), (16, 4, 2), (24, 4, 4), (24, 4, 2), (32, 4, 4), (32, 4, 2), (48, 4, 4), (48, 4, 2), (64, 4, 2),
        (80, 4, 2), (96, 4, 2), (96, 4, 1), (128, 2, 2), (160, 2, 2), (160, 2, 1), (256, 2, 1),
    )
)  # fmt: skip
ENOUGH = 3  # stages: one is multiplied, the one before given back, one loaded
GROUPED_TOKENS = tuple(dict.fromkeys(config.tokens for config in CONFIGS))


class Cost(NamedTuple):
    """us that a tile takes of an SM: for each k_block, and for its ends; what no token changes, then for each token."""

    k_block: tuple[float, float]
    tile: tuple[float, float]


# The cost model, on 132 multiprocessors, by the row_blocks of a CTA: fitted to products of an H200, 54 of them 5% off.
COSTS = {2: Cost((0.0674, 0.0022), (1.63, 0.0101)), 4: Cost((0.166, 0.0039), (1.46, 0.0153))}


def config_of(fmt: Format, tokens: int) -> Sm90Config | None:
    """The config of a token tile for a format; None if none fits."""
    found = (config for config in CONFIGS if config.tokens == tokens and config.fits(fmt))
    return next((config for config in found if stages_of(fmt, config) >= ENOUGH), None)


@lru_cache(maxsize=4096)
def token_tile(sizes: tuple[Size, ...], slots: int, experts: int, sms: int = TUNED_SMS) -> int:
    """Rows of a token tile for products of so many slots by these experts; 0 where moe_decode takes less time."""
    fitting = [tokens for tokens in GROUPED_TOKENS if all(config_of(size.format, tokens) for size in sizes)]
    times = {tokens: sum(grouped_us(size, tokens, slots, experts, sms) for size in sizes) for tokens in fitting}
    return best_tile(times, sizes, slots, experts)


def grouped_us(size: Size, tokens: int, slots: int, experts: int, sms: int = TUNED_SMS) -> float:
    """The time of a product of sorted rows, of slots that choose among the experts at random."""
    met, count = expected_tiles(slots, experts, tokens)
    config = config_of(size.format, tokens)
    assert config is not None
    cost, k_blocks = COSTS[config.row_blocks], -(-size.k // tiles.K_BLOCK)
    row_tiles = -(-size.n // (tiles.ROWS * config.row_blocks))
    of_tile = k_blocks * _linear(cost.k_block, tokens) + _linear(cost.tile, tokens)
    return hypot(max(1.0, count * row_tiles / sms) * of_tile, read_us(size, met))


def _linear(us: tuple[float, float], tokens: int) -> float:
    return us[0] + us[1] * tokens


def configs(p: Problem) -> Iterator[Sm90Config]:
    """That of the problem's token tile."""
    assert p.routed is not None
    found = config_of(p.format, p.routed.tokens)
    if found is not None:
        yield found


def ranked(p: Problem) -> list[tuple[Sm90Config, None]]:
    """The same."""
    return [(config, None) for config in configs(p)]


def chosen(p: Problem, rows: Sequence[int]) -> Iterator[Sm90Config]:
    """The same: the token tile is chosen before."""
    return configs(p)


def forms(p: Problem) -> Iterator[Problem]:
    """A product, and a gate with what it gates."""
    yield p
    for gate in GATES:
        yield p._replace(gated=True, outputs=(Output(p.n, "float32", gate=gate), Output(p.n)))


def template(p: Problem, config: Sm90Config) -> Template:
    """The constants of a config."""
    gate = GATE_CODES[p.outputs[0].gate] if p.gated else 0
    return {**prefill_template(p.format, config, p.x), "GATED": int(p.gated), "GATE": gate}


class GroupedLaunch:
    """The kernel for all experts of one shape and format, and so many sorted rows at most.

    A call takes a raw stream handle and pointers to x, to what moe_sort wrote (counts, token tiles), to tiles of both
    products, row_absmax of both, biases of both (0 for none), and y; x has `rows_of_x` rows and is a multiple of 16.
    """

    def __init__(self, p: Problem, config: Sm90Config) -> None:
        """Prepare the launch on the current device."""
        assert p.routed is not None
        constants, first, *second = template(p, config), *p.outputs
        row_blocks, units = -(-p.n // tiles.ROWS), -(-p.k // config.unit(p.format))
        size = p.sms * config.row_blocks * tiles.ROWS * config.tokens * SUM
        self._size = FLAG * MAX_PARTIALS + (1 << (size - 1).bit_length())
        self._map, self._box = TensorMap.aligned(), (p.x, rows_of_x(p.m, config.tokens), p.k, config.tokens)
        self._x, self._device, self._lock = 0, p.device, threading.Lock()
        found = GroupedProducts(
            expert_bytes=p.routed.stride.nbytes, expert_rows=p.routed.stride.rows, n=p.n, k=p.k,
            rows_of_x=rows_of_x(p.m, config.tokens), tiles_are_known=p.routed.ids_are_known,
        )  # fmt: skip
        found.epilogue.types = Types.from_names(first.y, "", "")
        found.bias_types[:] = [TYPE_CODES.get(output.bias, 0) for output in (first, *(second or (Output(p.n),)))]
        row_tiles = -(-row_blocks // (config.row_blocks // len(p.outputs)))
        found.stream_k = StreamK(
            ctas=Divisor.by(p.sms), work_units=Divisor.by(units), row_tiles=Divisor.by(row_tiles)
        )  # fmt: skip
        function, shared = load(NAME, p.format, **constants), int(constants["SMEM_BYTES"])

        def of_map(tensor_map: TensorMap) -> Launch:
            return Launch(function, p.sms, config.threads, shared, (tensor_map, found), found, POINTERS)

        self._of_map, self._launch = of_map, of_map(self._map)

    def bound(
        self, stream: int, x: int, counts: int, token_tiles: int, *pointers: int, into: int | None = None
    ) -> Callable[[], int]:
        """See Launch: with a tensor map of its own, and partials in the workspace of `stream`."""
        tensor_map = TensorMap.aligned()
        tensor_map.encode(x, *self._box)
        partials = workspace(self._device, stream, "sm90 partials", self._size).pointer
        return self._of_map(tensor_map).bound(stream, counts, token_tiles, partials, x, *pointers, into=into)

    def __call__(self, stream: int, x: int, counts: int, token_tiles: int, *pointers: int) -> None:
        partials = workspace(self._device, stream, "sm90 partials", self._size).pointer
        with self._lock:
            if x != self._x:
                self._map.encode(x, *self._box)
                self._x = x
            self._launch(stream, counts, token_tiles, partials, x, *pointers)


def rows_of_x(rows: int, tokens: int) -> int:
    """Rows of a buffer of sorted x: a box of the tensor map may begin at the last one."""
    return rows + tokens


MOE_PREFILL_SM90 = Kernel(
    NAME, configs, ranked, chosen, template, GroupedLaunch, products=2, forms=forms,
    token_tile=lambda sizes, slots, experts, sms, sm: token_tile(sizes, slots, experts, sms),
)  # fmt: skip

"""prefill_sm90 on the host: dense products, and products by experts over rows that are sorted by expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from qgemm.cuda.driver.launch import Launch, TensorMap, by_tensor_map
from qgemm.cuda.driver.workspace import address, workspace
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.jit.load import load
from qgemm.cuda.jit.twins import DenseProduct, Divisor, EpilogueArguments, Outputs, StreamK, Types
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import SCALED_ROWS, Problem
from qgemm.locks import new_lock

from . import sm90_cost
from .grouped_products import POINTERS, forms, gate_template, grouped_products
from .kernel import Kernel, half_rows
from .sm90_config import Sm90Config, prefill_template
from .sm90_grid import PAIR, PARTIALS, grid_of, partials_bytes, stream_k_of, workspace_bytes
from .sm90_token_tiles import config_of, rows_of_x, token_tile

SOURCE = "prefill_sm90"


class PrefillLaunch:
    """The kernel for all matrices of one shape and format, and one number of rows of x.

    enter: a call, with a raw stream handle and pointers to x, w, y, bias and residual (0 for none). x has 16-byte
    alignment.
    """

    def __init__(self, p: Problem, config: Sm90Config) -> None:
        """Prepare the launch on the current device."""
        row_blocks, (output,) = -(-p.n // tiles.ROWS), p.outputs
        template = prefill_template(p.format, config, p.x)
        count, unit = config.tiles(p.m, row_blocks), config.unit(p.format)
        units = -(-p.k // unit)
        grid = grid_of(count, units, p.sms, config.single_tile, config.row_blocks * unit // tiles.K_BLOCK)
        assert not (config.single_tile and count > grid.ctas)
        product = DenseProduct(
            epilogue=EpilogueArguments(types=Types.from_names(*output[1:])), n=p.n, k=p.k, m=p.m,
            stream_k=stream_k_of(grid, count, units, -(-row_blocks // config.row_blocks)),
        )  # fmt: skip
        workspace_size = workspace_bytes(grid, count, config)
        partials = partial(address, p.device, PARTIALS, workspace_size)
        launch = by_tensor_map(
            (p.x, p.m, p.k, min(p.m, config.tokens)), partials, load(SOURCE, p.format, **template), (product,),
            grid.ctas, config.threads, int(template["SMEM_BYTES"]), product, 3 + len(Outputs._fields_),
            PAIR if grid.cluster_split_k else 0,
        )  # fmt: skip

        scaled = p.x == SCALED_ROWS

        def enter(stream: int, x: int, w: int, *outputs: int) -> None:
            launch(stream, x, w, x if scaled else 0, *outputs)

        self.enter, self.grid, self.template, self.workspace_size = enter, grid, template, workspace_size

    def __call__(self, stream: int, x: int, w: int, y: int, bias: int = 0, residual: int = 0) -> None:
        """Launch the kernel on a raw stream handle; x has 16-byte alignment."""
        self.enter(stream, x, w, y, bias, residual)


class GroupedLaunch:
    """The kernel for all experts of one shape and format, and a largest number of sorted rows.

    A call requires a raw stream handle and pointers to x, to the counts and token tiles of moe_sort, to tiles of both
    products, row_absmax of both, biases of both (0 for none), and y. x has `rows_of_x` rows and 16-byte alignment.
    """

    def __init__(self, p: Problem, config: Sm90Config) -> None:
        """Prepare the launch on the current device."""
        constants, rows = grouped_template(p, config), rows_of_x(p.m, config.tokens)
        self._partials = partials_bytes(p.sms, config)
        self._map, self._box = TensorMap.aligned(), (p.x, rows, p.k, config.tokens)
        self._x, self._device, self._lock = 0, p.device, new_lock()
        row_tiles = -(-p.n // (tiles.ROWS * config.row_blocks // len(p.outputs)))
        stream_k = StreamK(
            ctas=Divisor.by(p.sms),
            work_units=Divisor.by(-(-p.k // config.unit(p.format))),
            row_tiles=Divisor.by(row_tiles),
        )
        products = grouped_products(p, stream_k, rows)
        function, shared = load(SOURCE, p.format, **constants), int(constants["SMEM_BYTES"])

        def with_map(tensor_map: TensorMap) -> Launch:
            return Launch(function, p.sms, config.threads, shared, (tensor_map, products), products, POINTERS)

        self._with_map, self._launch = with_map, with_map(self._map)

    def bound(
        self, stream: int, x: int, counts: int, token_tiles: int, *pointers: int, into: int | None = None
    ) -> Callable[[], int]:
        """`Launch.bound`, with a new tensor map of x, and with partials in the workspace of `stream`."""
        tensor_map = TensorMap.aligned()
        tensor_map.encode(x, *self._box)
        partials = workspace(self._device, stream, PARTIALS, self._partials).pointer
        return self._with_map(tensor_map).bound(stream, counts, token_tiles, partials, x, *pointers, into=into)

    def __call__(self, stream: int, x: int, counts: int, token_tiles: int, *pointers: int) -> None:
        partials = workspace(self._device, stream, PARTIALS, self._partials).pointer
        with self._lock:
            if x != self._x:
                self._map.encode(x, *self._box)
                self._x = x
            self._launch(stream, counts, token_tiles, partials, x, *pointers)


def grouped_template(p: Problem, config: Sm90Config) -> Template:
    """The constants of a config for sorted rows."""
    return {**prefill_template(p.format, config, p.x), "GROUPED": 1, **gate_template(p)}


def grouped_configs(p: Problem) -> Iterator[Sm90Config]:
    """The config of the problem's token tile."""
    assert p.routed is not None
    config = config_of(p.format, p.routed.tokens)
    if config is not None:
        yield config


def grouped_ranked(p: Problem) -> list[tuple[Sm90Config, None]]:
    """The one config of the token tile, which `token_tile` has chosen before."""
    return [(config, None) for config in grouped_configs(p)]


def grouped_chosen(p: Problem, rows: Sequence[int]) -> Iterator[Sm90Config]:
    """The one config of the token tile, for any number of rows."""
    return grouped_configs(p)


PREFILL_SM90 = Kernel(
    SOURCE, sm90_cost.configs, sm90_cost.ranked, sm90_cost.chosen,
    lambda p, config: prefill_template(p.format, config, p.x), lambda p, config: PrefillLaunch(p, config).enter,
    reads=half_rows, adds=True, rounds=True,
)  # fmt: skip
MOE_PREFILL_SM90 = Kernel(
    "moe_prefill_sm90", grouped_configs, grouped_ranked, grouped_chosen, grouped_template, GroupedLaunch,
    SOURCE, reads=half_rows, products=2, forms=forms,
    token_tile=lambda sizes, slots, experts, sms, sm: token_tile(sizes, slots, experts, sms),
)  # fmt: skip

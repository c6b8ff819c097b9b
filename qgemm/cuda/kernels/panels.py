"""Products by cuBLAS: of plain weights directly, of packed weights panel by panel, decoded into bounded scratch memory.

A panel of packed weights has x's type if that is exact enough: float16 (scaled by a power of two, so that nothing
overflows) or bfloat16 for activations of the same type, float32 for other activations. Plain weights and x of one type
are multiplied as they are; of two types both become float32, so that products are exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from qgemm.codec.format import Format
from qgemm.cuda.devices import is_capturing
from qgemm.cuda.driver.cublas import Matrix, cublas
from qgemm.cuda.driver.workspace import relaxed_capture, workspace
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.libraries import Library, default_library
from qgemm.cuda.problem import C_TYPES, ITEMSIZE, Problem

from .add_epilogue import epilogue_launch
from .kernel import Kernel, Launchable, Ranked
from .transforms import DEQUANTIZE_TILES

WORKSPACE = 256 << 20  # bytes of dense weights at a time
MAX_GRID_Y = 65535  # CUDA's limit on the second axis of a grid
LEGACY = 1  # the largest handle of CUDA's default stream, which no graph captures
ALIGNED = 256  # bytes between pieces of scratch memory


def decode(fmt: Format, tiles_pointer: int, row_blocks: int, weights: Matrix, exponent: int, stream: int) -> None:
    """Decode tiles of whole row_blocks times 2^-exponent into `weights` [rows, K], in their type."""
    if weights.rows * weights.columns:
        kernel, k = DEQUANTIZE_TILES.load(fmt, Out=C_TYPES[weights.dtype]), weights.columns
        factor, (_, along, nbytes) = np.float32(2.0**-exponent), tiles.tiles_shape(fmt, tiles.ROWS, k)
        row_bytes = k * ITEMSIZE[weights.dtype]
        for first in range(0, row_blocks, MAX_GRID_Y):
            count, row = min(MAX_GRID_Y, row_blocks - first), first * tiles.ROWS
            part, target = tiles_pointer + first * along * nbytes, weights.pointer + row * row_bytes
            kernel(
                (along * tiles.k_blocks(fmt), count),
                (tiles.WARPS * tiles.LANES,),
                (part, target, np.int64(weights.rows - row), np.int64(k), factor),
                stream,
            )


def launch(p: Problem, _: None) -> Launchable:
    """A call of cuBLAS for each panel of rows of W; a kernel adds the epilogue to float32 sums.

    Scratch memory is x in the panels' type, a panel, and the sums, each where it is needed.
    """
    plain, x_type, output = p.format.plain, _name_of(p.x), p.outputs[0]
    packed_type = plain_type(p.format) if plain else ""
    panel_type = x_type if not plain or packed_type == x_type else "float32"
    exponent = p.exponent if panel_type == "float16" else 0
    direct = output.y in ("float32", panel_type) and not (output.bias or output.residual)
    as_it_is = packed_type == panel_type
    itemsize = ITEMSIZE[panel_type]
    step = p.n if as_it_is else max(1, WORKSPACE // (p.k * itemsize) // tiles.ROWS) * tiles.ROWS
    step = min(step, p.n)
    sizes = (
        p.m * p.k * itemsize * (x_type != panel_type),
        step * p.k * itemsize * (not as_it_is),
        p.m * p.n * 4 * (not direct),
    )
    *starts, nbytes = accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes), initial=0)
    add = None if direct else epilogue_launch(p.device, p.m, output)
    library, arrays = cublas(p.device), default_library()
    row_block = 0 if plain else prod(tiles.tiles_shape(p.format, tiles.ROWS, p.k))

    def convert(pointer: int, name: str, target: Matrix) -> None:
        """Numbers of a type -> a matrix of another type."""
        shape = target.rows, target.columns
        values = arrays.array_at(pointer, shape, name, p.device)
        arrays.assign(arrays.array_at(target.pointer, shape, target.dtype, p.device), values)

    def run(stream: int, x: int, w: int, y: int, bias: int, residual: int) -> None:
        with relaxed_capture(), arrays.stream_context(stream, p.device), library.lock:
            memory, scratch = _scratch(arrays, p.device, stream, nbytes)
            copied_x, panel, sums = (scratch + start for start in starts)
            values = Matrix(copied_x if sizes[0] else x, p.m, p.k, panel_type)
            if sizes[0]:
                convert(x, x_type, values)
            target = y if direct else sums
            multiply(stream, values, w, panel, target, output.y if direct else "float32")
            if add is not None:
                add(stream, sums, y, bias, residual)
            del memory  # later work of the stream may have it

    def multiply(stream: int, values: Matrix, w: int, panel: int, target: int, y: str) -> None:
        for start in range(0, p.n, step):
            count = min(step, p.n - start)
            rows = Matrix(w if as_it_is else panel, count, p.k, panel_type)
            if plain and not as_it_is:
                convert(w + start * p.k * ITEMSIZE[packed_type], packed_type, rows)
            elif not plain:
                first = w + start // tiles.ROWS * row_block
                decode(p.format, first, -(-count // tiles.ROWS), rows, exponent, stream)
            columns = Matrix(target + start * ITEMSIZE[y], p.m, count, y, p.n)
            library.multiply(stream, values, rows, columns, 2.0**exponent)

    return run


def _scratch(arrays: Library, device: int, stream: int, nbytes: int) -> tuple[Any, int]:
    """Memory of the stream and its address: of a library or, since a graph needs it at every replay, a workspace."""
    if not nbytes:
        return None, 0
    if stream > LEGACY and is_capturing(stream):
        return None, workspace(device, stream, "panels", 1 << (nbytes - 1).bit_length()).pointer
    memory = arrays.scratch(nbytes, device)()
    return memory, arrays.pointer(memory)


def plain_type(fmt: Format) -> str:
    """NumPy's name of the type of a plain format."""
    return "bfloat16" if fmt.name == "bf16" else fmt.dtype.name


def _name_of(c_name: str) -> str:
    """NumPy's name of a type by the kernels' name."""
    return next(name for name, c in C_TYPES.items() if c == c_name)


def _no_config(p: Problem, rows: Sequence[int] = ()) -> tuple[()]:
    return ()


def _ranked(p: Problem) -> list[Ranked]:
    return [(None, None)]


def _dequantize_templates(p: Problem, rows: Sequence[int]) -> Iterator[Template]:
    return DEQUANTIZE_TILES.variants(p.format)


def _template(p: Problem, config: Template) -> Template:
    return config


# Its launches run the transform of the same name, whatever the config.
DEQUANTIZE = Kernel(
    DEQUANTIZE_TILES.name,
    _no_config,
    _ranked,
    _dequantize_templates,
    _template,
    launch,
    adds=True,
    uses_exponent=True,
    rounds=True,
)
CUBLAS = Kernel("cublas", _no_config, _ranked, _no_config, _template, launch, adds=True, uses_exponent=True)

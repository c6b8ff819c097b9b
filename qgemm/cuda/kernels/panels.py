"""Products by cuBLAS: of plain weights directly, of packed weights panel by panel, decoded into bounded scratch memory.

A panel of packed weights has x's type if that is exact enough: float16 (scaled by a power of two, so that nothing
overflows) or bfloat16 for activations of the same type, float32 for other activations. Plain weights and x of one type
are multiplied as they are; of two types both become float32, so that products are exact.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from qgemm.arrays import on_stream
from qgemm.codec.format import Format, float_dtype
from qgemm.cuda.driver.cublas import array_at, cublas
from qgemm.cuda.driver.launch import Launch
from qgemm.cuda.driver.workspace import relaxed_capture, workspace
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.jit.twins import GATE_CODES, TYPE_CODES
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import C_TYPES, Output, Problem, c_type

from .kernel import Kernel, Launchable, Ranked
from .transforms import ADD_EPILOGUE, DEQUANTIZE_TILES, EPILOGUE_THREADS

WORKSPACE = 256 << 20  # bytes of dense weights at a time
MAX_GRID_Y = 65535  # CUDA's limit on the second axis of a grid
MAX_CTAS = 1 << 20  # CTAs of add_epilogue, whose threads store several numbers each if y is larger
LEGACY = 1  # the largest handle of CUDA's default stream, which no graph captures
ALIGNED = 256  # bytes between pieces of scratch memory


def dense(fmt: Format, k: int, row_blocks: Any, rows: int, dtype: np.dtype[Any], exponent: int) -> Any:
    """Tiles of whole row_blocks -> the first `rows` rows of weights [rows, k] times 2^-exponent, of dtype."""
    import cupy

    weights = cupy.empty((rows, k), dtype)
    decode(fmt, row_blocks, weights, exponent)
    return weights


def decode(fmt: Format, row_blocks: Any, weights: Any, exponent: int) -> None:
    """The same into an array of weights, on the current stream."""
    if weights.size:
        kernel, k = DEQUANTIZE_TILES.load(fmt, Out=c_type(weights.dtype)), weights.shape[1]
        factor = np.float32(2.0**-exponent)
        for first in range(0, len(row_blocks), MAX_GRID_Y):
            part = row_blocks[first : first + MAX_GRID_Y]
            target = weights[first * tiles.ROWS :]
            kernel(
                (part.shape[1] * tiles.k_blocks(fmt), len(part)),
                (tiles.WARPS * tiles.LANES,),
                (part, target, np.int64(len(target)), np.int64(k), factor),
            )


def launch(p: Problem, _: None) -> Launchable:
    """A call of cuBLAS for each panel of rows of W; a kernel adds the epilogue to float32 sums.

    Scratch memory is x in the panels' type, a panel, and the sums, each where it is needed.
    """
    plain, x_type, output = p.format.plain, _numpy_type(p.x), p.outputs[0]
    y_type = float_dtype(output.y)
    packed_type = plain_dtype(p.format) if plain else np.dtype(np.uint8)
    shape = (p.n, p.k) if plain else tiles.tiles_shape(p.format, p.n, p.k)
    panel_type = x_type if not plain or packed_type == x_type else np.dtype(np.float32)
    exponent = p.exponent if panel_type == np.float16 else 0
    direct = output.y in ("float32", panel_type.name) and not (output.bias or output.residual)
    as_it_is = packed_type == panel_type
    step = p.n if as_it_is else max(1, WORKSPACE // (p.k * panel_type.itemsize) // tiles.ROWS) * tiles.ROWS
    step = min(step, p.n)
    sizes = (
        p.m * p.k * panel_type.itemsize * (x_type != panel_type),
        step * p.k * panel_type.itemsize * (not as_it_is),
        p.m * p.n * 4 * (not direct),
    )
    *starts, nbytes = accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes), initial=0)
    add = None if direct else epilogue_launch(p.m, output)
    library = cublas(p.device)

    def run(stream: int, x: int, w: int, y: int, bias: int, residual: int) -> None:
        with relaxed_capture(), on_stream(stream), library.lock:
            memory, scratch = _scratch(p.device, stream, nbytes)
            copied_x, panel, sums = (scratch + start for start in starts)
            values = array_at(x, (p.m, p.k), x_type)
            if sizes[0]:
                source, values = values, array_at(copied_x, values.shape, panel_type)
                values[...] = source
            target = array_at(y, (p.m, p.n), y_type) if direct else array_at(sums, (p.m, p.n), np.dtype(np.float32))
            multiply(stream, values, array_at(w, shape, packed_type), panel, target)
            if add is not None:
                add(stream, sums, y, bias, residual)
            del memory  # later work of the stream may have it

    def multiply(stream: int, values: Any, weights: Any, panel: int, target: Any) -> None:
        for start in range(0, p.n, step):
            stop = min(start + step, p.n)
            rows = weights[start:stop] if as_it_is else array_at(panel, (stop - start, p.k), panel_type)
            if plain and not as_it_is:
                rows[...] = weights[start:stop]
            elif not plain:
                decode(p.format, weights[start // tiles.ROWS : -(-stop // tiles.ROWS)], rows, exponent)
            library.multiply(stream, values, rows, target[:, start:stop], 2.0**exponent)

    return run


def _scratch(device: int, stream: int, nbytes: int) -> tuple[Any, int]:
    """Memory of the stream and its address: of CuPy's pool or, since a graph needs it at every replay, a workspace."""
    import cupy

    if not nbytes:
        return None, 0
    if stream > LEGACY and cupy.cuda.runtime.streamIsCapturing(stream):
        return None, workspace(device, stream, "panels", 1 << (nbytes - 1).bit_length()).pointer
    memory = cupy.empty(nbytes, np.uint8)
    return memory, memory.data.ptr


def epilogue_launch(m: int, output: Output) -> Launch:
    """The kernel that adds an epilogue. Its pointers: sums [M, N] of float32, y, bias, residual, 0 for none."""
    count = m * output.n
    pointers = (ctypes.c_void_p * 4)()
    size = ctypes.sizeof(ctypes.c_void_p)
    arrays = (ctypes.c_void_p.from_buffer(pointers, offset) for offset in range(0, 4 * size, size))
    types = (TYPE_CODES.get(name, 0) for name in (output.y, output.bias, output.residual))
    codes = (ctypes.c_int(code) for code in (*types, GATE_CODES.get(output.gate, 0)))
    arguments = (*arrays, ctypes.c_int64(output.n), ctypes.c_int64(count), *codes)
    grid = min(MAX_CTAS, -(-count // EPILOGUE_THREADS))
    function = ADD_EPILOGUE.load(None, **ADD_EPILOGUE.types[0])
    return Launch(function, grid, EPILOGUE_THREADS, 0, arguments, pointers, 4, programmatic=False)


def plain_dtype(fmt: Format) -> np.dtype[Any]:
    """NumPy's dtype of a plain format."""
    return float_dtype("bfloat16") if fmt.name == "bf16" else fmt.dtype


def _numpy_type(c_name: str) -> np.dtype[Any]:
    """NumPy's dtype of a type by the kernels' name."""
    return float_dtype(next(name for name, c in C_TYPES.items() if c == c_name))


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

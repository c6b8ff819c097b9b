"""Products by cuBLAS: of plain weights directly, of packed weights panel by panel, decoded into a bounded workspace.

A panel has x's type if that is exact enough: float16 (scaled by a power of two, so that nothing overflows) or bfloat16
for activations of the same type, float32 for other activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from qgemm.arrays import on_stream
from qgemm.codec.format import Format, float_dtype
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import C_TYPES, Problem, c_type

from .kernel import Kernel, Launchable, Ranked
from .transforms import DEQUANTIZE_TILES

WORKSPACE = 256 << 20  # bytes of dense weights at a time
MAX_GRID_Y = 65535  # CUDA's limit on the second axis of a grid


def dense(fmt: Format, k: int, row_blocks: Any, rows: int, dtype: np.dtype[Any], exponent: int) -> Any:
    """Tiles of whole row_blocks -> the first `rows` rows of weights [rows, k] times 2^-exponent, of dtype."""
    import cupy

    weights = cupy.empty((rows, k), dtype)
    if weights.size:
        kernel = DEQUANTIZE_TILES.load(fmt, Out=c_type(dtype))
        factor = np.float32(2.0**-exponent)
        for first in range(0, len(row_blocks), MAX_GRID_Y):
            part = row_blocks[first : first + MAX_GRID_Y]
            target = weights[first * tiles.ROWS :]
            kernel(
                (part.shape[1] * tiles.k_blocks(fmt), len(part)),
                (tiles.WARPS * tiles.LANES,),
                (part, target, np.int64(len(target)), np.int64(k), factor),
            )
    return weights


def launch(p: Problem, _: None) -> Launchable:
    """A call of cuBLAS for each panel of rows of W."""
    plain, x_type, y_type = p.format.plain, _numpy_type(p.x), float_dtype(p.outputs[0].y)
    packed_type = plain_dtype(p.format) if plain else np.dtype(np.uint8)
    shape = (p.n, p.k) if plain else tiles.tiles_shape(p.format, p.n, p.k)
    panel_type = x_type if not plain or packed_type == x_type else np.dtype(np.float32)
    exponent = p.exponent if panel_type == np.float16 else 0
    step = max(1, WORKSPACE // max(1, p.k * panel_type.itemsize) // tiles.ROWS) * tiles.ROWS
    direct = y_type.name in ("float32", panel_type.name)

    def run(stream: int, x: int, w: int, y: int, *_: int) -> None:
        with on_stream(stream):
            multiply(x, w, y)

    def multiply(x: int, w: int, y: int) -> None:
        import cupy

        values = _view(x, (p.m, p.k), x_type).astype(panel_type, copy=False)
        weights, target = _view(w, shape, packed_type), _view(y, (p.m, p.n), y_type)
        sums = target if direct else cupy.empty(target.shape, np.float32)
        for start in range(0, p.n, step):
            stop = min(start + step, p.n)
            if plain:
                panel = weights[start:stop].astype(panel_type, copy=False)
            else:
                row_blocks = weights[start // tiles.ROWS : -(-stop // tiles.ROWS)]
                panel = dense(p.format, p.k, row_blocks, stop - start, panel_type, exponent)
            _gemm(values, panel, sums[:, start:stop], 2.0**exponent)
        if not direct:
            target[...] = sums

    return run


def plain_dtype(fmt: Format) -> np.dtype[Any]:
    """NumPy's dtype of a plain format."""
    return float_dtype("bfloat16") if fmt.name == "bf16" else fmt.dtype


def _numpy_type(c_name: str) -> np.dtype[Any]:
    """NumPy's dtype of a type by the kernels' name."""
    return float_dtype(next(name for name, c in C_TYPES.items() if c == c_name))


def _view(pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """A contiguous CuPy array over memory that the caller owns."""
    import cupy

    size = int(np.prod(shape)) * dtype.itemsize
    memory = cupy.cuda.UnownedMemory(pointer, size, None)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


def _gemm(x: Any, w: Any, y: Any, alpha: float) -> None:
    """y [M, N] (rows may be strided) = alpha * x [M, K] @ w [N, K].T, float32 sums, on the current stream."""
    import cupy
    from cupy.cuda import cublas, runtime

    kinds = {"float32": runtime.CUDA_R_32F, "float16": runtime.CUDA_R_16F, "bfloat16": runtime.CUDA_R_16BF}
    scalars = np.array([alpha, 0], np.float32)
    handle = cupy.cuda.device.get_cublas_handle()
    cublas.setStream(handle, cupy.cuda.get_current_stream().ptr)
    (m, k), n = x.shape, len(w)
    factors = scalars.ctypes.data  # alpha, beta
    cublas.gemmEx(
        handle, cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N, n, m, k,
        factors, w.data.ptr, kinds[w.dtype.name], k, x.data.ptr, kinds[x.dtype.name], k,
        factors + 4, y.data.ptr, kinds[y.dtype.name], y.strides[0] // y.itemsize,
        cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_GEMM_DEFAULT,
    )  # fmt: skip


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
    DEQUANTIZE_TILES.name, _no_config, _ranked, _dequantize_templates, _template, launch, uses_exponent=True
)
CUBLAS = Kernel("cublas", _no_config, _ranked, _no_config, _template, launch, uses_exponent=True)

"""Products of packed weights by kernels/cpu/: a library a format (libraries.py)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.codec import activations
from qgemm.codec.format import Blocks, Format
from qgemm.codec.packing import Floats
from qgemm.tensor import Tensor

from .libraries import A8, A16, FLOATS, OF_TILE, TABLE, TOKENS, Product, fields, loaded, multiplied_as, serves, source
from .library import compiles, library, reason
from .pool import pool, run
from .sources import source_of

LEAST_TILED = 16  # rows of x: fewer are multiplied one by one
ROWS = 32  # of W that a thread takes at least: two tiles
UNFUSED = ("-ffp-contract=off",)  # of rounding that NumPy does in two steps
ALIGNED = 64  # bytes: a cache line, and a vector
PANEL = 1 << 22  # weights that are decoded at a time, of a format without a library of its own


class Quantization(ctypes.Structure):
    """x [n, 32] float32 and its blocks, for kernels/cpu/activations.c."""

    _fields_ = (("x", ctypes.c_void_p), ("blocks", ctypes.c_void_p))


QUANTIZER = source_of(
    "activations",
    {
        "UNIT": f"{activations.UNIT}f",
        "QUANTIZATION_FIELDS": fields(Quantization),
        "ACTIVATION_BYTES": str(activations.DTYPE.itemsize),
    },
    UNFUSED,
)


def quantize(x: Floats) -> Blocks | None:
    """Values [n, 32] -> blocks of activations [n], as `qgemm.codec.activations.encode` makes them; None: NumPy must."""
    engine = None if reason() else _quantizer()
    if engine is None:
        return None
    values = np.require(x, np.float32, ["C", "A"])
    blocks = np.empty(len(values), activations.DTYPE)
    run(engine.qgemm_quantize, Quantization(values.ctypes.data, blocks.ctypes.data), len(values), 8 * ROWS)
    return blocks


@cache
def _quantizer() -> ctypes.CDLL | None:
    return library(QUANTIZER)


def preparation(formats: Sequence[Format], quantizes: bool) -> list[Callable[[], bool]]:
    """What products by weights of these formats compile at first use, each a call; quantizes: x as well."""
    wanted = dict.fromkeys(multiplied_as(fmt) for fmt in formats if serves(fmt))
    loads: list[Callable[[], object]] = [partial(loaded, fmt) for fmt in wanted]
    if loads:
        loads += [pool, _quantizer] if quantizes else [pool]
    return [partial(compiles, each) for each in loads]


def multiply_a8(x: Blocks, w: Tensor, y: NDArray[Any]) -> bool:
    """y [M, N] = x's blocks of activations [M, K / 32] by the codes of w [N, K]; False where NumPy must do it."""
    if not w.format.integer or source(w.format) is None or not serves(w.format):
        return False
    engine = loaded(w.format)
    if engine is None:
        return False
    _multiply(engine, x, A8, activations.UNIT, w, y)
    return True


def multiply_a16(x: NDArray[Any], w: Tensor, y: NDArray[Any]) -> bool:
    """y [M, N] = x [M, K] by the exact weights of w [N, K]; False where NumPy must do it."""
    if not serves(w.format):
        return False
    fmt = multiplied_as(w.format)
    engine = loaded(fmt)
    if engine is None:
        return False
    if fmt == w.format:
        _multiply(engine, x, A16 if fmt.integer else FLOATS, 1.0, w, y)
        return True
    height = max(1, PANEL // max(1, w.shape[1]))
    for start in range(0, len(w.blocks), height):
        values = w.format.dequantize(w.blocks[start : start + height])
        _multiply(engine, x, FLOATS, 1.0, Tensor(fmt, values.shape, values), y[:, start : start + height])
    return True


def _multiply(engine: ctypes.CDLL, x: NDArray[Any], digits: int, unit: float, w: Tensor, y: NDArray[Any]) -> None:
    """Rows of x in slices: by tiles as many as they take, the rest one by one. Tiles of "a16" are of floats."""
    for start in range(0, len(x), TOKENS):
        stop = min(start + TOKENS, len(x))
        whole = start + (stop - start) // OF_TILE * OF_TILE if stop - start >= LEAST_TILED else start
        for tiles, tokens in ((1, slice(start, whole)), (0, slice(whole, stop))):
            if tokens.start < tokens.stop:
                with np.errstate(over="ignore", invalid="ignore"):  # a float64 beyond float32 is infinite
                    part = np.require(x[tokens], None if digits == A8 else np.float32, ["C", "A"])
                _job(engine, part, FLOATS if tiles and digits == A16 else digits, tiles, unit, w, y[tokens])


def _job(
    engine: ctypes.CDLL, x: NDArray[Any], digits: int, tiles: int, unit: float, w: Tensor, y: NDArray[Any]
) -> None:
    """One packing of x, contiguous, and one job of all threads."""
    size = engine.qgemm_packed_bytes(digits, tiles, w.shape[1])
    packed = _aligned(len(x) * size)
    engine.qgemm_pack(packed.ctypes.data, x.ctypes.data, digits, tiles, len(x), w.shape[1])
    blocks = w.blocks
    if blocks.strides[-1] != w.format.block_bytes:
        blocks = np.ascontiguousarray(blocks)
    own = y.dtype == np.float32 and y.strides[-1] == 4 and y.flags.aligned
    sums = y if own else np.empty(y.shape, np.float32)
    table = _table(w.format)
    product = Product(
        len(y), *w.shape, blocks.ctypes.data, blocks.strides[0], packed.ctypes.data, size,
        sums.ctypes.data, sums.strides[0] // 4, None if table is None else table.ctypes.data, unit, digits, tiles,
    )  # fmt: skip
    run(engine.qgemm_rows, product, w.shape[0], ROWS)
    if sums is not y:
        with np.errstate(over="ignore"):
            y[...] = sums


def _table(fmt: Format) -> Floats | None:
    """The levels of a codebook of floats, with zeros behind them."""
    if not fmt.needs_table:
        return None
    assert fmt.codebook is not None
    return np.pad(fmt.codebook, (0, TABLE - len(fmt.codebook)))


def _aligned(size: int) -> NDArray[np.uint8]:
    """Bytes that start at a multiple of a vector."""
    memory = np.empty(size + ALIGNED, np.uint8)
    start = -memory.ctypes.data % ALIGNED
    return memory[start : start + size]

"""Products of packed weights by kernels/cpu/: a library a format (libraries.py)."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.codec import activations
from qgemm.codec.format import Blocks, Format
from qgemm.codec.packing import Floats
from qgemm.tensor import Tensor

from .calls import A8, A16, FLOATS, LEAST_TILED, ROWS, TABLE, TARGETS, TOKENS, Target, fields
from .libraries import loaded, multiplied_as, serves, source
from .library import compiles, library, reason
from .pool import pool, ready, run
from .sources import source_of

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


class Weights(NamedTuple):
    """One product of a call: weights [N, K] and the memory of y [M, N]."""

    w: Tensor
    y: NDArray[Any]


def multiply(x: NDArray[Any], products: Sequence[Weights], a8: bool) -> bool:
    """y = x [M, K] @ w.T of each; a8: x as blocks of activations [M, K / 32], or values that are quantized to them.

    x is packed once for all weights of a format, and the rows of all weights are shared out together. False where NumPy
    must do it: then nothing is written.
    """
    digits = [_digits(p.w.format, a8) for p in products]
    if None in digits:
        return False
    engines = [loaded(multiplied_as(p.w.format)) for p in products]
    if None in engines or (a8 and _quantizer() is None):
        return False
    if not a8 or x.dtype != activations.DTYPE:
        with np.errstate(over="ignore", invalid="ignore"):  # a float64 beyond float32 is infinite
            x = x.astype(np.float32, copy=False)
    x = np.require(x, requirements=["C", "A"])
    whole = [p for p in products if multiplied_as(p.w.format) == p.w.format]
    for start in range(0, len(whole), TARGETS):
        _multiply(x, whole[start : start + TARGETS], a8)
    for w, y in (p for p in products if multiplied_as(p.w.format) != p.w.format):
        height = max(1, PANEL // max(1, w.shape[1]))
        for start in range(0, len(w.blocks), height):
            values = w.format.dequantize(w.blocks[start : start + height])
            part = Tensor(multiplied_as(w.format), values.shape, values)
            _multiply(x, [Weights(part, y[:, start : start + height])], a8)
    return True


def _digits(fmt: Format, a8: bool) -> int | None:
    """Digits of x for a format's library; None where there is none."""
    if not serves(fmt) or (a8 and (not fmt.integer or source(fmt) is None)):
        return None
    return A8 if a8 else A16 if multiplied_as(fmt).integer else FLOATS


def _multiply(x: NDArray[Any], products: Sequence[Weights], a8: bool) -> None:
    """All products in one call; x contiguous."""
    made = [_sums(p.y) for p in products]
    targets = (Target * len(products))()
    packers: dict[tuple[Any, ...], int] = {}
    keep, nbytes = [], 0
    for i, (w, y) in enumerate(zip((p.w for p in products), made, strict=True)):
        blocks, target = w.blocks, template(loaded(w.format), w.format, w.shape, a8)
        if blocks.strides[-1] != w.format.block_bytes:
            blocks = np.ascontiguousarray(blocks)
        keep.append(blocks)
        targets[i] = target
        targets[i].w, targets[i].w_row = blocks.ctypes.data, blocks.strides[0]
        targets[i].y, targets[i].y_row = y.ctypes.data, y.strides[0] // 4
        targets[i].x_row = x.strides[0]
        if a8 and x.dtype == activations.DTYPE:
            targets[i].quantize = None
        targets[i].packed_by = packers.setdefault((target.pack, target.digits), i)
        if targets[i].packed_by == i:
            nbytes += scratch_bytes(target, len(x))
    ready().qgemm_multiply(targets, len(products), x.ctypes.data, len(x), scratch(nbytes))
    for p, sums in zip(products, made, strict=True):
        if sums is not p.y:
            with np.errstate(over="ignore"):
                p.y[...] = sums


def _sums(y: NDArray[Any]) -> NDArray[Any]:
    """y, or memory for sums in float32 where it cannot take them."""
    own = y.dtype == np.float32 and y.strides[-1] == 4 and y.flags.aligned
    return y if own else np.empty(y.shape, np.float32)


def scratch_bytes(target: Target, m: int) -> int:
    """Memory for m rows of x as a format's products take them."""
    return int(min(m, TOKENS) * max(target.row_bytes, target.tile_bytes if m >= LEAST_TILED else 0))


@lru_cache(maxsize=1024)
def template(engine: ctypes.CDLL | None, fmt: Format, shape: tuple[int, int], a8: bool) -> Target:
    """What is the same of all products by weights of a format, whose library is `engine`, and a shape."""
    digits = _digits(fmt, a8)
    assert engine is not None, "asked before"
    assert digits is not None, "asked before"
    table, quantizer = _table(fmt), _quantizer() if a8 else None
    of_tiles = FLOATS if digits == A16 else digits
    sizes = (engine.qgemm_packed_bytes(*kind, shape[1]) for kind in ((digits, 0), (of_tiles, 1)))
    return Target(
        pack=_address(engine.qgemm_pack), rows=_address(engine.qgemm_rows),
        quantize=None if quantizer is None else _address(quantizer.qgemm_quantize_blocks),
        table=None if table is None else table.ctypes.data, n=shape[0], k=shape[1], digits=digits,
        unit=activations.UNIT if a8 else 1.0, **dict(zip(("row_bytes", "tile_bytes"), sizes, strict=True)),
    )  # fmt: skip


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


@cache
def _table(fmt: Format) -> Floats | None:
    """The levels of a codebook of floats, with zeros behind them."""
    if not fmt.needs_table:
        return None
    assert fmt.codebook is not None
    return np.pad(fmt.codebook, (0, TABLE - len(fmt.codebook)))


class _Scratch(threading.local):
    """Memory of a thread, which starts at a multiple of a vector."""

    size = address = 0
    memory: Any = None


_scratch = _Scratch()


def scratch(size: int) -> int:
    """The address of so many bytes, until the thread asks again."""
    if size > _scratch.size:
        _scratch.memory = np.empty(size + ALIGNED, np.uint8)
        start = _scratch.memory.ctypes.data
        _scratch.size, _scratch.address = size, start + -start % ALIGNED
    return _scratch.address

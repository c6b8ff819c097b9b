"""Products of packed weights by kernels/cpu/products.c, a library a format."""

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

from .library import compiles, folder, library, reason
from .pool import pool, run

A8, A16 = 1, 3  # digits of x: int8 codes, or three of 7 bits
TOKENS = 256  # rows of x that are packed at a time
OF_TILE, LEAST_TILED = 8, 16  # rows of x that tiles take together; fewer than so many are done one by one
ROWS = 16  # of W that a thread takes at least
ALIGNED = 64  # bytes: a cache line, and a vector


C_TYPES = {
    ctypes.c_int64: "int64_t", ctypes.c_int32: "int32_t", ctypes.c_float: "float", ctypes.c_void_p: "void*",
}  # fmt: skip


class Product(ctypes.Structure):
    """y [m, n] = x [m, k] @ W [n, k].T, for kernels/cpu/products.c, which takes its fields from here.

    w, w_row: the first row of blocks, bytes from one to the next. packed: x as `qgemm_pack` makes it. y_row: numbers
    from a row of y to the next. unit: what all sums are multiplied by.
    """

    _fields_ = (
        ("m", ctypes.c_int64), ("n", ctypes.c_int64), ("k", ctypes.c_int64),
        ("w", ctypes.c_void_p), ("w_row", ctypes.c_int64),
        ("packed", ctypes.c_void_p), ("packed_row", ctypes.c_int64),
        ("y", ctypes.c_void_p), ("y_row", ctypes.c_int64),
        ("unit", ctypes.c_float), ("digits", ctypes.c_int32), ("tiles", ctypes.c_int32),
    )  # fmt: skip


class Quantization(ctypes.Structure):
    """x [n, 32] float32 and its blocks, for kernels/cpu/activations.c."""

    _fields_ = (("x", ctypes.c_void_p), ("blocks", ctypes.c_void_p))


def quantize(x: Floats) -> Blocks | None:
    """Values [n, 32] -> blocks of activations [n], as `qgemm.codec.activations.encode` makes them; None: NumPy must."""
    engine = None if reason() else _quantizer()
    if engine is None:
        return None
    values = np.ascontiguousarray(x)
    blocks = np.empty(len(values), activations.DTYPE)
    run(engine.qgemm_quantize, Quantization(values.ctypes.data, blocks.ctypes.data), len(values), ROWS * ROWS)
    return blocks


@cache
def _quantizer() -> ctypes.CDLL | None:
    unit = {"UNIT": f"{activations.UNIT}f", "QUANTIZATION_FIELDS": fields(Quantization)}
    return library("activations", {**unit, "ACTIVATION_BYTES": str(activations.DTYPE.itemsize)})


def fields(struct: type[ctypes.Structure]) -> str:
    """C for the members of a struct."""
    return " ".join(f"{C_TYPES[kind]} {name};" for name, kind, *_ in struct._fields_)


def preparation(formats: Sequence[Format], quantizes: bool) -> list[Callable[[], bool]]:
    """What products by weights of these formats compile at first use, each a call; quantizes: x as well."""
    loads: list[Callable[[], object]] = [partial(_loaded, fmt) for fmt in formats if serves(fmt)]
    if loads:
        loads += [pool, _quantizer] if quantizes else [pool]
    return [partial(compiles, each) for each in loads]


def serves(fmt: Format) -> bool:
    """Whether there is C code for a format, and a compiler for it."""
    return fmt.integer and _has_header(fmt.name) and not reason()


def multiply_a8(x: Blocks, w: Tensor, y: NDArray[Any]) -> bool:
    """y [M, N] = x's blocks of activations [M, K / 32] by the codes of w [N, K]; False where NumPy must do it."""
    engine = _engine(w.format)
    if engine is None:
        return False
    _multiply(engine, x, A8, activations.UNIT, w, y)
    return True


def multiply_a16(x: NDArray[Any], w: Tensor, y: NDArray[Any]) -> bool:
    """y [M, N] = x [M, K] by the exact weights of w [N, K]; False where NumPy must do it."""
    engine = _engine(w.format)
    if engine is None:
        return False
    _multiply(engine, x, A16, 1.0, w, y)
    return True


def _multiply(engine: ctypes.CDLL, x: NDArray[Any], digits: int, unit: float, w: Tensor, y: NDArray[Any]) -> None:
    """Rows of x in slices: by tiles as many as whole groups of them take, the rest one by one."""
    for start in range(0, len(x), TOKENS):
        stop = min(start + TOKENS, len(x))
        whole = start + (stop - start) // OF_TILE * OF_TILE if stop - start >= LEAST_TILED else start
        for tiles, tokens in ((1, slice(start, whole)), (0, slice(whole, stop))):
            if tokens.start < tokens.stop:
                with np.errstate(over="ignore", invalid="ignore"):  # a float64 beyond float32 is infinite
                    part = np.ascontiguousarray(x[tokens], dtype=np.float32 if digits == A16 else None)
                _job(engine, part, digits, tiles, unit, w, y[tokens])


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
    sums = y if y.dtype == np.float32 and y.strides[-1] == 4 else np.empty(y.shape, np.float32)
    product = Product(
        len(y), *w.shape, blocks.ctypes.data, blocks.strides[0], packed.ctypes.data, size,
        sums.ctypes.data, sums.strides[0] // 4, unit, digits, tiles,
    )  # fmt: skip
    run(engine.qgemm_rows, product, w.shape[0], ROWS)
    if sums is not y:
        with np.errstate(over="ignore"):
            y[...] = sums


@cache
def _has_header(name: str) -> bool:
    return (folder() / "formats" / f"{name}.h").is_file()


def _engine(fmt: Format) -> ctypes.CDLL | None:
    """The library of a format; None if there is none, or none is wanted."""
    return _loaded(fmt) if serves(fmt) else None


@cache
def _loaded(fmt: Format) -> ctypes.CDLL | None:
    definitions = {
        "FORMAT_HEADER": f'"formats/{fmt.name}.h"',
        "BLOCK_BYTES": str(fmt.block_bytes),
        "BLOCK_WEIGHTS": str(fmt.weights),
        "ACTIVATION_BYTES": str(activations.DTYPE.itemsize),
        "PRODUCT_FIELDS": fields(Product),
        "TOKENS_OF_TILE": str(OF_TILE),
        "MOST_TOKENS": str(TOKENS),
    }
    if fmt.codebook is not None:
        definitions["LEVELS_PLUS_SHIFT"] = "{" + ",".join(str(int(level) + 128) for level in fmt.codebook) + "}"
    found = library("products", definitions)
    if found is None:
        return None
    number, size, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
    found.qgemm_packed_bytes.argtypes, found.qgemm_packed_bytes.restype = [number, number, size], size
    found.qgemm_pack.argtypes, found.qgemm_pack.restype = [pointer, pointer, number, number, size, size], None
    return found


def _aligned(size: int) -> NDArray[np.uint8]:
    """Bytes that start at a multiple of a vector."""
    memory = np.empty(size + ALIGNED, np.uint8)
    start = -memory.ctypes.data % ALIGNED
    return memory[start : start + size]

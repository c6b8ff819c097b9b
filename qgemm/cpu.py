"""The NumPy backend: products on packed tensors, decoded tile by tile, never as a whole.

Few tokens: every core sums the levels of its row tiles block by block and scales the sums. Many tokens: the cores
decode a panel together, then BLAS multiplies it with its own threads. The two never mix: BLAS called from several
threads at once, each call on all cores, was up to 10x slower on a busy machine (OpenBLAS 0.3.30).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bits import Floats
from .block import CHUNK, Blocks, Levels
from .errors import UnsupportedError
from .formats.q8_1 import FORMAT as Q8_1
from .parallel import for_slices
from .tensor import Tensor

FEW_TOKENS = 4  # above, BLAS on decoded panels is faster than block sums by einsum (2 cores, 4096 x 4096)
TILE = 1 << 18  # weights that one core works on at a time: 1 MiB of float32
PANEL = 1 << 21  # weights decoded by all cores before BLAS is called: 8 MiB of float32
TOKENS = 1 << 22  # activations converted to float32 at a time: 16 MiB
SUMS = 1 << 19  # integer block sums that one core holds at a time: 2 MiB of float32


def multiply_a16(x: NDArray[Any], w: Tensor, y: NDArray[Any]) -> None:
    """y [M, N] = x [M, K] @ w [N, K].T with exact weights and float32 sums; y of any float dtype."""
    step = max(1, TOKENS // max(1, x.shape[1]))
    for start in range(0, len(x), step):
        tokens = slice(start, start + step)
        with np.errstate(over="ignore", invalid="ignore"):  # a float64 beyond float32 is infinite, NaN stays NaN
            chunk = np.ascontiguousarray(x[tokens], dtype=np.float32)
        multiply = _multiply_few if len(chunk) <= FEW_TOKENS else _multiply_panels
        multiply(chunk, w, y[tokens])


def _multiply_few(x: Floats, w: Tensor, y: NDArray[Any]) -> None:
    blocks, k = w.blocks, w.shape[1]

    def work(rows: slice) -> None:
        part = blocks[rows]
        levels = w.format.decode_levels(part.reshape(-1))
        width = k if levels.scale is None else levels.codes.shape[-1]
        codes = levels.codes.reshape(len(part), -1, width).astype(np.float32, copy=False)
        if levels.zero:
            codes -= np.float32(levels.zero)
        parts = (None if values is None else values.reshape(len(part), -1) for values in levels[1:3])
        y[:, rows] = _scaled_sums(x.reshape(len(x), -1, width), codes, *parts)

    for_slices(len(blocks), max(1, TILE // k), work)


def _scaled_sums(x: Floats, codes: Floats, scale: Floats | None, minimum: Floats | None) -> Floats:
    """x [m, groups, width], codes [n, groups, width], scale and minimum [n, groups] -> y [m, n]."""
    y = np.empty((len(x), len(codes)), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinity in x or w are data
        for token, values in zip(y, x, strict=True):
            sums = np.einsum("ngw,gw->ng", codes, values)
            token[:] = sums[:, 0] if scale is None else np.einsum("ng,ng->n", sums, scale)
            if minimum is not None:
                token += np.einsum("ng,g->n", minimum, values.sum(axis=1))
    return y


def _multiply_panels(x: Floats, w: Tensor, y: NDArray[Any]) -> None:
    blocks, k = w.blocks, w.shape[1]
    height = min(len(blocks), max(1, PANEL // max(1, k)))
    panel = np.empty((height, k), np.float32)
    for start in range(0, len(blocks), height):
        part = blocks[start : start + height]

        def work(rows: slice, part: Blocks = part) -> None:
            panel[rows] = _decode(w, part[rows])

        for_slices(len(part), max(1, CHUNK // max(1, k)), work)
        y[:, start : start + len(part)] = _product(x, panel[: len(part)])


def _product(x: Floats, w: Floats) -> Floats:
    with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinity in x or w are data
        return x @ w.T


def _decode(w: Tensor, blocks: Blocks) -> Floats:
    return w.format.decode(blocks.reshape(-1)).reshape(len(blocks), w.shape[1])


def quantize_activations(x: NDArray[Any]) -> Tensor:
    """Values [..., K] -> a Q8_1 tensor [..., K]. NaN and infinity are kept as NaN of their own block.

    Unlike `quantize`, which refuses them: an activation that overflowed must not stop the other rows.
    """
    count = Q8_1.blocks_in(x.shape[-1], "activations")
    values = x.reshape(-1, Q8_1.weights) if x.size else x.reshape(0, Q8_1.weights)
    blocks = np.empty(len(values), Q8_1.dtype)

    def work(part: slice) -> None:
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite becomes NaN in its own output row
            blocks[part] = Q8_1.encode(values[part].astype(np.float32, copy=False))  # type: ignore[misc]

    for_slices(len(values), CHUNK // Q8_1.weights, work)
    return Tensor(Q8_1, x.shape, blocks.reshape(*x.shape[:-1], count))


def multiply_a8(x: Blocks, w: Tensor, y: NDArray[Any]) -> None:
    """y [M, N] = x @ w.T from x's Q8_1 blocks [M, K / 32] and the integer codes of w [N, K].

    Per block, with weight scale dw and minimum mw, activation scale da and sum sa, sumi the integer dot product of
    the unsigned codes (exact in float32, |sumi| < 2^24):   dw * (da * sumi - zero * sa) + mw * sa
    """
    blocks = w.blocks
    if w.format.plain or w.format.levels is None:
        raise UnsupportedError(f"{w.format} has no integer codes for activation 'a8' (tensor {w.name}); use 'a16'")
    q = x["qs"].transpose(1, 2, 0).astype(np.float32)  # [blocks, 32, M]
    d, s = (np.ascontiguousarray(x[name].T, dtype=np.float32) for name in ("d", "s"))  # [blocks, M]
    rows_step = min(64, max(1, TILE // max(1, w.shape[1])))
    token_step = max(1, SUMS // (rows_step * max(1, len(d))))

    def work(rows: slice) -> None:
        part = blocks[rows]
        levels = w.format.decode_levels(part.reshape(-1))
        codes, dw, mw = _by_block(levels, len(part))
        for start in range(0, len(x), token_step):
            tokens = slice(start, start + token_step)
            y[tokens, rows] = _block_sums(codes, dw, mw, levels.zero, q[:, :, tokens], d[:, tokens], s[:, tokens]).T

    for_slices(len(blocks), rows_step, work)


def _by_block(levels: Levels, rows: int) -> tuple[Floats, Floats, Floats | None]:
    """Levels of rows * b blocks -> codes [b, rows, 32], scale [b, rows], minimum [b, rows] or None, float32."""
    assert levels.scale is not None and levels.codes.shape[-1] == Q8_1.weights
    codes = levels.codes.reshape(rows, -1, Q8_1.weights).transpose(1, 0, 2).astype(np.float32)
    scale = np.ascontiguousarray(levels.scale.reshape(rows, -1).T)
    minimum = None if levels.minimum is None else np.ascontiguousarray(levels.minimum.reshape(rows, -1).T)
    return codes, scale, minimum


def _block_sums(codes: Floats, dw: Floats, mw: Floats | None, zero: int, q: Floats, da: Floats, sa: Floats) -> Floats:
    """The sum over blocks of dw * (da * sumi - zero * sa) + mw * sa, [rows, tokens]."""
    with np.errstate(invalid="ignore", over="ignore"):  # scales may be infinite or NaN: they are data
        sums = codes @ q  # [blocks, rows, tokens]
        sums *= da[:, None]
        if zero:
            sums -= (np.float32(zero) * sa)[:, None]
        total: Floats = np.einsum("br,brt->rt", dw, sums)
        if mw is not None:
            total += np.einsum("br,bt->rt", mw, sa)  # not @, which would call BLAS on all cores from each core
    return total

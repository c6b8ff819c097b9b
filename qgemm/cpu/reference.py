"""Products by NumPy, the reference of every kernel: packed tensors are decoded tile by tile, never as a whole.

Few tokens: every core multiplies the codes of its row tiles group by group and scales the sums. Many tokens: the cores
decode a panel together, then BLAS multiplies it with its own threads; "a8" decodes its activations as well. The two do
not mix: BLAS called from several threads at once, each call on all cores, was up to 10x slower (OpenBLAS 0.3.30, 2
cores).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.codec import q8_1_f32
from qgemm.codec.format import Blocks, Levels
from qgemm.codec.group_activations import GROUP_COLUMNS
from qgemm.codec.packing import Floats
from qgemm.codec.q8_1_f32 import UNIT
from qgemm.errors import UnsupportedError
from qgemm.parallel import for_slices, workers
from qgemm.tensor import Tensor

from . import eight_bits, native
from .native.products import Product

Engine = Callable[[NDArray[Any], Tensor, NDArray[Any]], None]  # x, w, y

FEW_TOKENS = 64  # above, BLAS on decoded panels is faster (2 cores, 4096 x 4096)
TILES = 1 << 22  # weights that all cores together work on at a time, in a tile each
TILE = 1 << 19  # weights of a tile at most: 2 MiB of float32; shorter tiles wait for the interpreter lock
SLICE = 1 << 17  # weights of a panel that one core decodes at a time
PANEL_WEIGHTS = 1 << 22  # weights decoded by all cores before BLAS is called: 16 MiB of float32
X_CHUNK = 1 << 22  # activations converted to float32 at a time: 16 MiB
SUMS = 1 << 19  # block sums that one core holds at a time: 2 MiB of float32
BLAS_ALONE = 8192  # rows * tokens of a block product up to which OpenBLAS stays on the calling thread


def multiply(x: NDArray[Any], products: Sequence[Product], activation: str) -> None:
    """y = x @ w.T + bias + residual of each product, rounded once; none of them is gated.

    x: [M, K] of any float dtype, or blocks of activations [M, K / 32]; values are quantized once for all products.
    """
    engines: dict[str, Engine] = {"a16": multiply_a16, "a8": multiply_a8}
    engine = engines.get(activation) or partial(eight_bits.multiply, activation=activation)
    if activation != "a16" and len(x) and not x.dtype.names:
        x = prepared(x, activation).blocks
    for p in products:
        assert p.y is not None, "no product is gated"
        y = p.y if p.sums_alone else np.empty(p.y.shape, np.float32)
        if p.w.shape[1] == 0:
            y[...] = 0  # an empty sum
        elif y.size:
            engine(x, p.w, y)
        if not p.sums_alone:
            with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinity are data
                for added in (p.bias, p.residual):
                    if added is not None:
                        y += added.astype(np.float32, copy=False)
                p.y[...] = y


def prepared(x: NDArray[Any], activation: str) -> Tensor:
    """Values [..., K] -> a Tensor of activations of any kind but "a16"."""
    return eight_bits.quantize(x, activation) if activation in GROUP_COLUMNS else quantize_activations(x)


def multiply_a16(x: NDArray[Any], w: Tensor, y: NDArray[Any]) -> None:
    """y [M, N] = x [M, K] @ w [N, K].T with exact weights and float32 sums; y of any float dtype."""
    step = max(1, X_CHUNK // max(1, x.shape[1]))
    for start in range(0, len(x), step):
        tokens = slice(start, start + step)
        with np.errstate(over="ignore", invalid="ignore"):  # a float64 beyond float32 is infinite, NaN stays NaN
            chunk = np.ascontiguousarray(x[tokens], dtype=np.float32)
        if len(chunk) <= FEW_TOKENS and w.format.has_scale:
            _multiply_groups(w, y[tokens], _by_group(chunk, w.format.group))
        else:
            _multiply_panels(chunk, w, y[tokens])


def _multiply_panels(x: Floats, w: Tensor, y: NDArray[Any], rest: Floats | None = None, unit: float = 1.0) -> None:
    """y [M, N] = unit * (x [M, K] @ w [N, K].T + rest [M, groups] @ shift [N, groups].T): see `_shift`."""
    blocks, k = w.blocks, w.shape[1]
    height = min(len(blocks), max(1, PANEL_WEIGHTS // max(1, k)))
    panel = np.empty((height, k), np.float32)
    shifts = None if rest is None else np.empty((height, rest.shape[1]), np.float32)
    for start in range(0, len(blocks), height):
        part = blocks[start : start + height]

        def work(rows: slice, part: Blocks = part) -> None:
            levels = w.format.decode_levels(part[rows].reshape(-1))
            panel[rows] = levels.values().reshape(-1, k)
            if shifts is not None:
                shifts[rows] = _shift(levels).reshape(-1, shifts.shape[1])

        for_slices(len(part), max(1, SLICE // max(1, k)), work)
        with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinity in x or w are data
            total = x @ panel[: len(part)].T
            if rest is not None and shifts is not None:
                total += rest @ shifts[: len(part)].T
            if unit != 1:
                total *= np.float32(unit)
            y[:, start : start + len(part)] = total


def _shift(levels: Levels) -> Floats:
    """What each group adds for every one that is added to its activations: minimum - scale * zero, [n, groups]."""
    assert levels.scale is not None
    with np.errstate(over="ignore", invalid="ignore"):  # a scale may be any bit pattern
        shift = -levels.scale * np.asarray(levels.zero, np.float32)
        return shift if levels.minimum is None else levels.minimum + shift


def quantize_activations(x: NDArray[Any]) -> Tensor:
    """Values [..., K] -> a Tensor [..., K] of activations. NaN and infinity are kept as NaN of their own block.

    Unlike `quantize`, which refuses them: an activation that overflowed must not stop the other rows.
    """
    fmt = q8_1_f32.FORMAT
    count = fmt.blocks_in(x.shape[-1], "activations")
    values = x.reshape(-1, fmt.weights) if x.size else x.reshape(0, fmt.weights)
    shape = *x.shape[:-1], count
    if not native.reason():
        with np.errstate(over="ignore", invalid="ignore"):  # a float64 beyond float32 is infinite
            compiled = native.quantize(values.astype(np.float32, copy=False))
        if compiled is not None:
            return Tensor(fmt, x.shape, compiled.reshape(shape))
    blocks = np.empty(len(values), fmt.dtype)

    def work(part: slice) -> None:
        with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinity become NaN in their own output row
            blocks[part] = q8_1_f32.encode(values[part].astype(np.float32, copy=False))

    for_slices(len(values), SLICE // fmt.weights, work)
    return Tensor(fmt, x.shape, blocks.reshape(shape))


def multiply_a8(x: Blocks, w: Tensor, y: NDArray[Any]) -> None:
    """y [M, N] = x @ w.T from x's blocks of activations [M, K / 32] and the integer codes of w [N, K].

    Per block of x, with scale dw and minimum mw of the weights' group, activation scale da and sum sa, sumi the integer
    dot product of the codes (exact in float32, |sumi| < 2^24):   dw * (da * sumi - zero * sa) + mw * sa
    Groups of 16 have no sum of their own; they use signed codes, and add up the codes of x for a minimum:
    dw * da * sum((codes - zero) * q) + mw * da * sum(q)
    """
    if not w.format.integer:
        raise UnsupportedError(f"{w!r}: {w.format} has no integer codes for activation 'a8'; use 'a16'")
    step = max(1, X_CHUNK // max(1, w.shape[1]))
    for start in range(0, len(x), step):
        part, y_part = x[start : start + step], y[start : start + step]
        (_multiply_codes if len(part) <= FEW_TOKENS else _multiply_decoded)(part, w, y_part)


def _multiply_codes(x: Blocks, w: Tensor, y: NDArray[Any]) -> None:
    """Integer dot products of the codes, group by group."""
    q = x["qs"].astype(np.float32).reshape(len(x), -1)
    da, sa = (np.ascontiguousarray(x[name].T) for name in ("d", "s"))
    width = min(q8_1_f32.FORMAT.weights, w.format.group)
    parts = q8_1_f32.FORMAT.weights // width
    _multiply_groups(w, y, _by_group(q, width), da.repeat(parts, axis=0), sa if parts == 1 else None)


def _multiply_decoded(x: Blocks, w: Tensor, y: NDArray[Any]) -> None:
    """y [M, N] of activations in Q8_1, by BLAS on decoded values da * q and weights, and on sa minus their sums.

    dw * (da * sumi - zero * sa) + mw * sa  =  (da * q) @ w + (mw - dw * zero) * (sa - da * sum(q)),   per block of x
    """
    values = x["qs"].astype(np.float32)
    with np.errstate(invalid="ignore"):  # infinity times zero is data
        values *= x["d"][..., None]
        rest, of_group = None, w.format.group // q8_1_f32.FORMAT.weights
        if of_group and (w.format.zero != 0 or w.format.has_minimum):
            rest = x["s"] - values.sum(axis=-1)
            rest = rest.reshape(len(x), -1, of_group).sum(axis=-1)
    _multiply_panels(values.reshape(len(x), -1), w, y, rest, UNIT)


def _multiply_groups(w: Tensor, y: NDArray[Any], x: Floats, da: Floats | None = None, sa: Floats | None = None) -> None:
    """y [M, N] from activations x [groups, width, M], or from codes x and scales da [groups, M].

    sa [groups, M]: sums by which the zero is subtracted from dot products; None if it is subtracted from the codes. A
    group here has `width` weights; several of them may be a group of the format, and share its scale.
    """
    blocks, signed = w.blocks, sa is None
    with np.errstate(invalid="ignore"):  # infinity times zero is data
        sums_of_x = sa if sa is not None else x.sum(axis=1) if da is None else da * x.sum(axis=1)
    rows_step = min(256, max(1, min(TILE, TILES // workers()) // w.shape[1]))
    token_step = max(1, min(BLAS_ALONE // rows_step, SUMS // (rows_step * len(x))))

    def work(rows: slice) -> None:
        part = blocks[rows]
        levels = w.format.decode_levels(part.reshape(-1))
        codes, scale, minimum, zero = _of_rows(levels, len(part), x.shape[1])
        with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinity in x or w are data
            if signed and zero is not None:
                codes -= zero[..., None]
            for start in range(0, y.shape[0], token_step):
                tokens = slice(start, start + token_step)
                sums = codes @ x[:, :, tokens]  # [groups, rows, tokens]
                if da is not None:
                    sums *= da[:, None, tokens]
                if zero is not None and not signed:
                    sums -= zero[..., None] * sums_of_x[:, None, tokens]
                total = np.einsum("gr,grt->tr", scale, sums)
                if minimum is not None:  # einsum, not @, which would call BLAS on all cores from each core
                    total += np.einsum("gr,gt->tr", minimum, sums_of_x[:, tokens])
                if da is not None:
                    total *= np.float32(UNIT)
                y[tokens, rows] = total

    for_slices(len(blocks), rows_step, work)


def _by_group(x: Floats, width: int) -> Floats:
    """Activations [M, K] -> [K / width, width, M], without a copy."""
    return x.reshape(len(x), -1, width).transpose(1, 2, 0)


def _of_rows(levels: Levels, rows: int, width: int) -> tuple[Floats, Floats, Floats | None, Floats | None]:
    """Levels of whole rows -> codes [groups, rows, width]; scale, minimum and zero, [groups, rows] or None each.

    zero: [1, 1] where all groups have the same. A group of more than `width` weights repeats its scale, minimum and
    zero.
    """
    assert levels.scale is not None
    codes = levels.codes.reshape(rows, -1, width).transpose(1, 0, 2).astype(np.float32)
    shared = levels.codes.shape[-1] // width

    def of_groups(part: NDArray[Any]) -> Floats:
        by_group = part.reshape(rows, -1).T.astype(np.float32)
        return np.ascontiguousarray(by_group if shared == 1 else by_group.repeat(shared, axis=0))

    zero = levels.zero
    zeros = of_groups(zero) if isinstance(zero, np.ndarray) else np.full((1, 1), zero, np.float32) if zero else None
    return codes, of_groups(levels.scale), None if levels.minimum is None else of_groups(levels.minimum), zeros

"""Launching prefill_mma: products of many rows of x on tensor cores by mma.sync, for GPUs from sm_80 on."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

from . import jit, tiles
from .block import Format
from .launch import Launch
from .splits import PADDING, shared_limit


class Cut(NamedTuple):
    """How y is cut: a CTA has `tokens` rows of x and `strips` * 64 rows of W.

    groups: of 16 rows of W, of a warp. splits: of every `splits` spans of K, one is a warp's.
    """

    tokens: int
    strips: int
    groups: int
    splits: int

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return tiles.LANES * tiles.WARPS * self.strips // self.groups * self.splits


# A warp decodes weights once, for all tokens; it holds 64 or 128 sums a lane. Eight warps, where that fits.
CUTS = (
    #   tokens  strips  groups  splits
    Cut(128,    4,      2,      1),
    Cut(128,    2,      2,      2),
    Cut(128,    1,      2,      4),
    Cut(128,    1,      2,      2),
    Cut(64,     1,      2,      4),
    Cut(32,     1,      2,      4),
    Cut(16,     1,      2,      4),
)  # fmt: skip
STORED = 32  # tokens whose sums are in shared memory at a time
FULL = 0.9  # of the SMs: a cut should give so many CTAs
DEEP = 5  # stages at most


def cuts_for(fmt: Format, sm: int) -> tuple[Cut, ...]:
    """The rows of CUTS of which two stages fit into shared memory."""
    return tuple(cut for cut in CUTS if shared_bytes(fmt, cut, 2) <= shared_limit(sm))


def cut_of(fmt: Format, n: int, m: int, sm: int, processors: int) -> Cut:
    """The first row of CUTS that keeps a GPU of so many SMs busy and is not half empty, or else the last."""
    cuts = [cut for cut in cuts_for(fmt, sm) if cut.tokens < 2 * m or cut is CUTS[-1]]
    return next((cut for cut in cuts if ctas(cut, n, m) >= FULL * processors), cuts[-1])


def ctas(cut: Cut, n: int, m: int) -> int:
    """CTAs of a product."""
    return -(-n // (cut.strips * tiles.ROWS)) * -(-m // cut.tokens)


def shared_bytes(fmt: Format, cut: Cut, depth: int) -> int:
    """Shared memory of a CTA: `depth` stages of codes, fields and x, or the sums that take their place at the end."""
    dtype = tiles.tile_dtype(fmt)
    weights = dtype.itemsize - (tiles.spans(fmt) - 1) * dtype["spans"].base.itemsize
    stage = cut.splits * (cut.strips * weights + cut.tokens * 2 * (tiles.SPAN + PADDING))
    sums = cut.splits * min(cut.tokens, STORED) * (cut.strips * tiles.ROWS + 4) * 4
    return max(depth * stage, sums)


def template(fmt: Format, cut: Cut, source: str, out: str, sm: int) -> jit.Template:
    """The template of the kernel: as many stages as fit."""
    depth = next(deep for deep in range(DEEP, 1, -1) if shared_bytes(fmt, cut, deep) <= shared_limit(sm))
    sizes = {"TOKENS": cut.tokens, "STRIPS": cut.strips, "GROUPS": cut.groups, "SPLITS": cut.splits, "DEPTH": depth}
    return {"In": source, "Out": out, **sizes}


@cache
def launch(
    device: int, fmt: Format, shape: tuple[int, int], m: int, source: str, out: str, exponent: int, cut: Cut | None
) -> Launch:
    """The launch for every matrix of this shape, format and exponent and M rows of x; its pointers are w, x, y."""
    import cupy

    on = cupy.cuda.Device(device)
    (n, k), sm = shape, int(on.compute_capability)
    cut = cut or cut_of(fmt, n, m, sm, on.attributes["MultiProcessorCount"])
    constants = template(fmt, cut, source, out, sm)
    pointers = tuple(ctypes.c_void_p() for _ in range(3))
    sizes = ctypes.c_int64(n), ctypes.c_int64(k), ctypes.c_int(m)
    factors = ctypes.c_float(2.0**-exponent), ctypes.c_float(2.0**exponent)
    return Launch(
        jit.load("prefill_mma", fmt, **constants),
        ctas(cut, n, m),
        cut.threads,
        shared_bytes(fmt, cut, int(constants["DEPTH"])),
        (*pointers, *sizes, *factors),
        pointers,
    )


MOST_EXPONENT = 126  # beyond it the factor is no float32


def multiply(x: Any, w: Any, y: Any, source: str, out: str, stream: int, cut: Cut | None = None) -> None:
    """y [M, N] = x [M, K] of half or bf16 times a DeviceTensor, on a raw stream handle; source, out: types of x, y."""
    if x.data.ptr % 16:  # a view into an array: the kernel copies 16 bytes at a time
        x = x.copy()
    exponent = max(-MOST_EXPONENT, min(w.exponent, MOST_EXPONENT)) if source == "half" else 0
    run = launch(w.device, w.format, w.shape, len(y), source, out, exponent, cut)
    run(stream, w.pointer, x.data.ptr, y.data.ptr)

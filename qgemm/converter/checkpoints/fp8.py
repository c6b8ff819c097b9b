"""FP8 matrices as Weights: eight-bit floats, with or without scales.

    NAME                     F8_E4M3 or F8_E5M2  [..., N, K]
    NAME_scale, _scale_inv   float               one, or [..., N], [..., N, 1], [..., 1, K], [..., N / 128, K / 128]
    NAME less ".weight", with the same endings or .scale, .scale_weight
    MXFP8: NAME_scale  uint8 [..., N, K / 32], e of 2^(e - 127); other scales may be the same bytes as F8_E8M0

W = number * scale in float32 under every name of the scale: "inv" refers to the quantizer's divisor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import gcd, prod

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.format import CHUNK
from qgemm.codec.packing import Floats
from qgemm.errors import CheckpointError
from qgemm.files.paths import shown, shown_path
from qgemm.formats import f8
from qgemm.parallel import for_slices
from qgemm.tensor import Tensor

from ..array_weights import Stored
from ..weight import Weight, original_shape, stored_shape
from .matrix import floats_of
from .methods import EightBits

SCALES = (
    "_scale",
    "_scale_inv",
    "_scales",
    ".scale",
    ".scale_weight",
)  # after the name, with or without ".weight"
INPUTS = (".input_scale", ".scale_input")  # scales of activations, which are ignored
MARKERS = ("scaled_fp8",)  # empty tensors that mark a checkpoint with scales
EXPONENTS = ("F8_E8M0", "U8")  # types of scales 2^(e - BIAS); bytes are exponents only where the config says so
BIAS, NAN = 127, 255  # the exponent of 1, and the one that is not a number
RUN = 4096  # largest number of weights scaled at a time, so that rows may have any length
KINDS = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}
NUMBERS = {kind: f8.NUMBERS[name] for kind, name in KINDS.items()}


def scale_of(name: str, stored: Mapping[str, Stored]) -> str | None:
    """The name of the tensor that scales an eight-bit one, None if there is none."""
    stem = name.removesuffix(".weight")
    names = sorted({base + end for base in (name, stem) for end in SCALES} & stored.keys())
    if len(names) > 1:
        where = shown_path(stored[name].file.path)
        raise CheckpointError(f"{where}: tensor {shown(name)}: has scales twice: {', '.join(map(shown, names))}")
    return names[0] if names else None


def parts(name: str, stored: Mapping[str, Stored]) -> set[str]:
    """The names of a scaled tensor and of the tensors that belong to it."""
    scale = scale_of(name, stored)
    if scale is None:
        return {name}
    return {name, scale} | {name.removesuffix(".weight") + end for end in INPUTS}


def matrix(name: str, stored: Mapping[str, Stored], method: EightBits | None) -> Weight:
    """The tensor of this name, scaled if it has a scale; method: the config's settings of scales."""
    file, entry = stored[name]
    numbers, shape = NUMBERS[entry.type], entry.shape or (1,)
    scale_name = scale_of(name, stored)
    if scale_name is None:
        if method is not None and len(shape) > 1:
            raise _refusal(name, stored[name], "has no scale, which the config speaks of")

        def plain(start: int, stop: int) -> Floats:
            weights: Floats = numbers[file.read(entry, start, stop)]
            return weights

        native = partial(_native, name, stored[name], shape[-1], lambda start, stop, run: _ones((stop - start) // run))
        plain_weight = Weight(name, stored_shape(shape), entry.type, entry.nbytes, 1, values=plain, native=native)
        return replace(plain_weight, original=original_shape(shape))
    scale, (rows, columns) = _scale(name, stored[name], stored[scale_name], method or EightBits())
    *_, n, k = (1, *shape)
    run = gcd(k, columns, RUN)  # adjacent weights of one row that share a scale in any layout

    def scales(start: int, stop: int, run: int) -> Floats:
        """The scale of each run of weights."""
        first = np.arange(start, stop, run)
        row, column = first // k, first % k
        run_scales: Floats = scale[row // n % len(scale), row % n // rows, column // columns]
        return run_scales

    def values(start: int, stop: int) -> Floats:
        weights: Floats = numbers[file.read(entry, start, stop)].reshape(-1, run)
        with np.errstate(over="ignore", invalid="ignore"):  # scales may be anything
            weights *= scales(start, stop, run)[:, None]
        return weights.reshape(-1)

    nbytes = entry.nbytes + stored[scale_name].entry.nbytes
    native = partial(_native, name, stored[name], gcd(k, columns), scales)
    return Weight(
        name, stored_shape(shape), entry.type, nbytes, run, values=values, quantized=True, irregular=True,
        original=original_shape(shape), native=native,
    )  # fmt: skip


def _native(name: str, stored: Stored, shared: int, scales: Callable[[int, int, int], Floats]) -> Tensor:
    """The tensor in blocks of float8; shared: the largest number of adjacent weights that share a scale everywhere."""
    file, entry = stored
    group = next((group for group in reversed(f8.GROUP_SIZES) if shared % group == 0), None)
    if group is None:
        least = f8.GROUP_SIZES[0]
        rule = f"scales of {shared} weights side by side are held by no blocks, of which the least have {least}"
        raise _refusal(name, stored, f"{rule}; `qgemm convert` reads it as floats")
    fmt, count = f8.f8_format(KINDS[entry.type], group), prod(entry.shape)
    blocks = np.empty(count // group, fmt.dtype)

    def work(part: slice) -> None:
        start, stop = part.start * group, min(part.stop, len(blocks)) * group
        blocks["qs"][part] = file.read(entry, start, stop).reshape(-1, group)
        blocks["d"][part] = scales(start, stop, group)

    for_slices(len(blocks), max(1, CHUNK // group), work)
    shape = stored_shape(entry.shape)
    return Tensor(fmt, shape, blocks.reshape(*shape[:-1], -1), name)


def _ones(count: int) -> Floats:
    return np.ones(count, np.float32)


def _scale(name: str, weight: Stored, scale: Stored, method: EightBits) -> tuple[Floats, tuple[int, int]]:
    """The scales of a tensor [..., N, K] as [matrices, a, b], and the rows and columns of W per scale."""
    shape, scale_shape = weight.entry.shape or (1,), scale.entry.shape
    *lead, n, k = (1, *shape) if len(shape) == 1 else shape
    rows, columns = method.block
    blocks = (*lead, -(-n // rows), -(-k // columns)), method.block
    grids: list[tuple[tuple[int, ...], tuple[int, int]]] = [blocks]
    if not method.exponents:
        grids = [
            ((*lead, n), (1, k)),
            ((*lead, n, 1), (1, k)),
            ((*lead, 1, k), (n, 1)),
            ((*lead, 1, 1), (n, k)),
            blocks,
        ]
    kinds = (*EXPONENTS,) if method.exponents else ("F32", "F16", "BF16", EXPONENTS[0])
    if scale.entry.type not in kinds:
        expected = f"; {' or '.join(kinds)} is" if method.exponents else ""
        raise _refusal(name, weight, f"its scale is {scale.entry.type}, which is not read{expected}")
    if all(size == 1 for size in scale_shape) and not method.exponents:
        return _floats(name, scale).reshape(1, 1, 1), (n, k)
    for grid, shared in grids:
        if scale_shape == grid and 0 not in shape:
            return _floats(name, scale).reshape(-1, -(-n // shared[0]), -(-k // shared[1])), shared
    raise _refusal(
        name, weight, f"{list(scale_shape)} scales are not those of {list(shape)} weights, nor of {method.block} blocks"
    )


def _floats(name: str, scale: Stored) -> Floats:
    """The scales of the tensor of this name, read whole."""
    count = prod(scale.entry.shape)
    if scale.entry.type in EXPONENTS:
        return powers(name, scale, 0, count)
    return floats_of(scale, scale.file.read(scale.entry, 0, count))


def powers(name: str, exponents: Stored, start: int, stop: int) -> Floats:
    """Numbers start to stop of a tensor of exponents; name: of the tensor that an error names."""
    raw: NDArray[np.uint8] = exponents.file.read(exponents.entry, start, stop)
    if (raw == NAN).any():
        raise _refusal(name, exponents, f"a scale is {NAN}, which is no number")
    return np.ldexp(np.float32(1), raw.astype(np.int32) - BIAS)


def _refusal(name: str, weight: Stored, rule: str) -> CheckpointError:
    return CheckpointError(f"{shown_path(weight.file.path)}: tensor {shown(name)}: {weight.entry.type}: {rule}")

"""Matrices of four-bit numbers (e2m1) with one scale per 16 or 32, of compressed-tensors and ModelOpt.

    weight_packed        uint8   [N, K / 2]   byte j: the code of weight 2 j in the low nibble, of 2 j + 1 in the high
    weight_scale         float8 e4m3 [N, K / 16] (NVFP4), or uint8 [N, K / 32], e of 2^(e - 127) (MXFP4)
    weight_global_scale  float32 [1]          NVFP4: divisor of the scales

ModelOpt's names are weight, weight_scale and weight_scale_2; the last is a factor of the scales. W = v * scale in
float32, where v is the number of a code, and scale the quotient or product in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import numpy as np

from qgemm.codec.format import Blocks
from qgemm.codec.packing import Floats
from qgemm.errors import CheckpointError
from qgemm.files.paths import shown, shown_path
from qgemm.formats import FORMATS
from qgemm.packed import Packed
from qgemm.tensor import Tensor
from qgemm.views import Scaled

from ..array_weights import Stored
from ..weight import Weight
from . import mxfp4
from .fp8 import NUMBERS
from .methods import Nvfp4

FORMS = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
PARTS = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", "input_scale")
MODELOPT = ("weight", "weight_scale", "weight_scale_2", "input_scale")
NVFP4 = FORMATS["nvfp4"]
GROUP = NVFP4.group
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def modelopt(path: str, stored: Mapping[str, Stored], method: Nvfp4) -> tuple[dict[str, Weight], set[str]]:
    """The matrices of a ModelOpt checkpoint in NVFP4, by the name of their first part, and the names of all parts."""
    modules = [name.removesuffix("_scale_2") for name in stored if name.endswith(".weight_scale_2")]
    weights = {name: _Nvfp4(name.removesuffix(".weight"), stored, MODELOPT).weight() for name in modules}
    return weights, {f"{name.removesuffix('.weight')}.{part}" for name in modules for part in MODELOPT}


def matrix(module: str, stored: Mapping[str, Stored], form: str) -> Weight:
    """The matrix of one module of a compressed-tensors checkpoint."""
    return _Nvfp4(module, stored, PARTS).weight() if form == FORMS[0] else _mxfp4(module, stored)


def _mxfp4(module: str, stored: Mapping[str, Stored]) -> Weight:
    codes, scales = (byte_part(module, stored, part, "U8") for part in PARTS[:2])
    if f"{module}.{PARTS[2]}" in stored:
        _refuse(module, codes, f"has a {PARTS[2]}, which MXFP4 has not")
    n, k = codes.entry.shape[0], 2 * codes.entry.shape[1]
    if scales.entry.shape != (n, k // mxfp4.MXFP4.weights) or k % mxfp4.MXFP4.weights:
        _refuse(module, codes, f"{list(scales.entry.shape)} scales are not those of {[n, k]} weights")

    def read(start: int, stop: int) -> Blocks:
        pairs = codes.file.read(codes.entry, start * mxfp4.BYTES, stop * mxfp4.BYTES).reshape(-1, mxfp4.BYTES)
        return mxfp4.blocks_of(pairs, scales.file.read(scales.entry, start, stop))

    prefix = f"{shown_path(codes.file.path)}: tensor {shown(f'{module}.weight')}"
    return mxfp4.weight_of_blocks(f"{module}.weight", (n, k), read, prefix)


class _Nvfp4:
    """One matrix in NVFP4: its parts checked against each other, and readers of them."""

    def __init__(self, module: str, stored: Mapping[str, Stored], parts: tuple[str, ...]) -> None:
        self.module, self.divides = module, parts is PARTS
        self.codes, self.scales = (
            byte_part(module, stored, parts[0], "U8"),
            byte_part(module, stored, parts[1], "F8_E4M3"),
        )
        self.n, self.k = self.codes.entry.shape[0], 2 * self.codes.entry.shape[1]
        if self.scales.entry.shape != (self.n, self.k // GROUP) or self.k % GROUP:
            rule = f"{list(self.scales.entry.shape)} {parts[1]} are not those of {[self.n, self.k]} weights"
            _refuse(module, self.codes, rule)
        global_scale = stored.get(f"{module}.{parts[2]}")
        if global_scale is None:
            _refuse(module, self.codes, f"there is no {parts[2]}")
        # The library of PARTS rounds scales that are divided by a tensor without axes.
        shapes = ((1,),) if self.divides else ((), (1,))
        if global_scale.entry.type != "F32" or global_scale.entry.shape not in shapes:
            rule = f"{parts[2]} is {global_scale.entry.type} {list(global_scale.entry.shape)}, not one F32"
            _refuse(module, self.codes, rule)
        self.factor: np.float32 = global_scale.file.read(global_scale.entry, 0, 1)[0]
        self.nbytes = self.codes.entry.nbytes + self.scales.entry.nbytes

    def values(self, start: int, stop: int) -> Floats:
        """Weights start to stop, which are whole groups."""
        pairs = self.codes.file.read(self.codes.entry, start // 2, stop // 2)
        numbers = E2M1[np.stack([pairs & 15, pairs >> 4], -1).reshape(-1, GROUP)]
        scale = NUMBERS["F8_E4M3"][self.scales.file.read(self.scales.entry, start // GROUP, stop // GROUP)]
        with np.errstate(all="ignore"):  # scales may be anything
            scale = scale / self.factor if self.divides else scale * self.factor
            numbers *= scale[:, None]
        return numbers.reshape(-1)

    def native(self) -> Packed:
        """ggml's blocks, and the tensor's scale beside them; CheckpointError where blocks do not hold the scales."""
        if self.k % NVFP4.weights:
            _refuse(self.module, self.codes, f"rows of {self.k} are no blocks of {NVFP4.weights}")
        scales = self.scales.file.read(self.scales.entry, 0, self.n * self.k // GROUP)
        if scales.max(initial=0) >= 0x7F:  # ggml reads 0x7f as 0, and scales as unsigned
            _refuse(self.module, self.codes, "a weight_scale is negative or NaN, which NVFP4 blocks do not hold")
        pairs = self.codes.file.read(self.codes.entry, 0, self.n * self.k // 2)
        codes = np.stack([pairs & 15, pairs >> 4], -1).reshape(-1, 2, GROUP // 2)
        blocks = np.empty(self.n * self.k // NVFP4.weights, NVFP4.dtype)
        blocks["d"] = scales.reshape(-1, NVFP4.weights // GROUP)
        blocks["qs"] = (codes[:, 0] | codes[:, 1] << np.uint8(4)).reshape(len(blocks), -1)
        tensor = Tensor(NVFP4, (self.n, self.k), blocks.reshape(self.n, -1), f"{self.module}.weight")
        return tensor if self.factor == 1 else Scaled(tensor, self.factor, self.divides)

    def weight(self) -> Weight:
        """The matrix as a Weight."""
        return Weight(
            f"{self.module}.weight", (self.n, self.k), "NVFP4", self.nbytes, GROUP, values=self.values,
            quantized=True, irregular=True, native=self.native,
        )  # fmt: skip


def byte_part(module: str, stored: Mapping[str, Stored], part: str, kind: str) -> Stored:
    """A part, which must be a matrix of this type of one byte."""
    tensor = stored.get(f"{module}.{part}")
    if tensor is None:
        other = next(tensor for name, tensor in stored.items() if name.startswith(f"{module}."))
        _refuse(module, other, f"there is no {part}")
    if tensor.entry.type != kind or len(tensor.entry.shape) != 2 or 0 in tensor.entry.shape:
        _refuse(module, tensor, f"{part} is {tensor.entry.type} {list(tensor.entry.shape)}, not a matrix of {kind}")
    return tensor


def _refuse(module: str, stored: Stored, rule: str) -> NoReturn:
    raise CheckpointError(f"{shown_path(stored.file.path)}: tensor {shown(f'{module}.weight')}: {rule}")

"""Write checkpoints: matrices of a group format in the parts of AWQ, GPTQ or compressed-tensors.

The inverse of awq_gptq.py and compressed.py, whose tables of parts apply. Every part has a row or a column per row of
W, so consecutive rows of W are consecutive rows or columns of each part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.format import Blocks, Format
from qgemm.codec.packing import Bytes
from qgemm.formats.groups import group_format

from ..array_weights import Stored
from ..weight import GROUP_FAMILY
from . import bits as packing
from .awq_gptq import AWQ_COLUMNS, AwqGptqMatrix
from .compressed import CompressedMatrix
from .matrix import GroupedMatrix, Rows
from .methods import Method, Scheme
from .modules import Modules

WEIGHT = ".weight"


class Part(NamedTuple):
    """One tensor of a matrix: its safetensors type, its shape, and whether its columns are rows of W."""

    type: str
    shape: tuple[int, ...]
    across: bool = False


class Layout(ABC):
    """How a method stores matrices.

    name: its name for users. bits: the widths of codes. one_setting: whether all matrices have the same bits and
    groups.
    """

    name: str
    bits: tuple[int, ...]
    one_setting = True

    def holds(self, fmt: Format) -> bool:
        """Whether the layout can store every part of a format's blocks."""
        integer = not fmt.zero_field or fmt.dtype[fmt.zero_field].kind == "u"
        return fmt.family == GROUP_FAMILY and fmt.code_bits in self.bits and integer and fmt.codebook is None

    def refusal(self, fmt: Format, shape: tuple[int, ...]) -> str:
        """Why a tensor of this shape cannot be stored, "" if it can."""
        if len(shape) != 2:
            return f"{self.name} has matrices alone"
        words = packing.WORD // gcd(packing.WORD, fmt.code_bits)
        if shape[0] % words or shape[1] % words:
            return f"{self.name} fills words of {words} codes"
        return ""

    @abstractmethod
    def parts(self, fmt: Format, n: int, k: int) -> dict[str, Part]:
        """The tensors of a matrix [N, K], by their suffix after the module's name and a dot."""

    @abstractmethod
    def constants(self, fmt: Format, n: int, k: int) -> dict[str, NDArray[Any]]:
        """The parts that do not depend on weights."""

    @abstractmethod
    def rows(self, fmt: Format, rows: Rows) -> dict[str, NDArray[Any]]:
        """Rows of W, a multiple of 32 except at the end, as rows or columns of the other parts."""

    @abstractmethod
    def config(self, formats: Mapping[str, Format], plain: Sequence[str]) -> dict[str, Any]:
        """The quantization_config; formats: of each quantized module, plain: the names of the other modules."""

    @abstractmethod
    def matrix(self, module: str, stored: Mapping[str, Stored], fmt: Format) -> GroupedMatrix:
        """The reader of a written matrix."""


def rows_of(fmt: Format, blocks: Blocks, k: int) -> Rows:
    """Blocks [rows, K / weights] -> codes [rows, K], scales and zeros [rows, groups]; a group is a block or a row."""
    levels = fmt.decode_levels(blocks.reshape(-1))
    assert levels.scale is not None
    groups = slice(0, 1) if fmt.encoding.whole_rows else slice(None)
    scales = levels.scale.reshape(len(blocks), -1)[:, groups]
    zeros = np.broadcast_to(np.asarray(levels.zero), levels.scale.shape).reshape(len(blocks), -1)[:, groups]
    return Rows(levels.codes.reshape(len(blocks), k), scales, zeros.astype(np.uint8))


def _groups(fmt: Format, k: int) -> int:
    return 1 if fmt.encoding.whole_rows else k // fmt.weights


def _scale_type(fmt: Format) -> str:
    return "F16" if fmt.dtype["d"].kind == "f" else "BF16"


def _scales(fmt: Format, rows: Rows) -> NDArray[Any]:
    """Scales in their stored type; bfloat16 as uint16 bits."""
    if _scale_type(fmt) == "F16":
        return rows.scales.astype(np.float16)
    return (rows.scales.view(np.uint32) >> 16).astype(np.uint16)


def _words(codes: Bytes, bits: int) -> NDArray[np.int32]:
    return packing.pack_codes(codes, bits).view(np.int32)


class _Columns(Layout):
    """The common part of AWQ and GPTQ: parts with a column per row of W."""

    @abstractmethod
    def settings(self, fmt: Format) -> Method:
        """The settings of matrices of a format."""

    def parts(self, fmt: Format, n: int, k: int) -> dict[str, Part]:
        groups, words = _groups(fmt, k), packing.word_count(n, fmt.code_bits)
        return {"qzeros": Part("I32", (groups, words), True), "scales": Part(_scale_type(fmt), (groups, n), True)}

    def constants(self, fmt: Format, n: int, k: int) -> dict[str, NDArray[Any]]:
        return {}

    def matrix(self, module: str, stored: Mapping[str, Stored], fmt: Format) -> GroupedMatrix:
        return AwqGptqMatrix(module, stored, self.settings(fmt))

    def config(self, formats: Mapping[str, Format], plain: Sequence[str]) -> dict[str, Any]:
        settings = self.settings(next(iter(formats.values())))
        return {"quant_method": settings.name, "bits": settings.bits, "group_size": settings.group}


class Awq(_Columns):
    """AWQ in the layout "gemm"."""

    name, bits = "awq", (4,)

    def settings(self, fmt: Format) -> Method:
        return Method("awq", 4, -1 if fmt.encoding.whole_rows else fmt.weights, 2, None, False)

    def parts(self, fmt: Format, n: int, k: int) -> dict[str, Part]:
        return {"qweight": Part("I32", (k, n // 8), True), **super().parts(fmt, n, k)}

    def rows(self, fmt: Format, rows: Rows) -> dict[str, NDArray[Any]]:
        def words(columns: NDArray[Any]) -> NDArray[np.int32]:
            eights = columns.reshape(len(columns), -1, len(AWQ_COLUMNS))[..., AWQ_COLUMNS]
            return _words(eights.reshape(columns.shape), 4)

        return {"qweight": words(rows.codes.T), "qzeros": words(rows.zeros.T), "scales": _scales(fmt, rows).T}

    def config(self, formats: Mapping[str, Format], plain: Sequence[str]) -> dict[str, Any]:
        own = {"zero_point": True, "version": "gemm", "modules_to_not_convert": list(plain)}
        return {**super().config(formats, plain), **own}


class Gptq(_Columns):
    """GPTQ: version 1 where every zero is the middle code, which all readers support, else version 2."""

    name, bits = "gptq", (2, 3, 4, 8)

    def settings(self, fmt: Format) -> Method:
        version = 2 if fmt.zero_field else 1
        return Method(
            "gptq", fmt.code_bits, -1 if fmt.encoding.whole_rows else fmt.weights, version, version == 1, False
        )

    def parts(self, fmt: Format, n: int, k: int) -> dict[str, Part]:
        words = Part("I32", (packing.word_count(k, fmt.code_bits), n), True)
        return {"qweight": words, **super().parts(fmt, n, k), "g_idx": Part("I32", (k,))}

    def constants(self, fmt: Format, n: int, k: int) -> dict[str, NDArray[Any]]:
        return {"g_idx": (np.arange(k) // (k if fmt.encoding.whole_rows else fmt.weights)).astype(np.int32)}

    def rows(self, fmt: Format, rows: Rows) -> dict[str, NDArray[Any]]:
        zeros = np.ascontiguousarray((rows.zeros if fmt.zero_field else rows.zeros - np.uint8(1)).T)
        words = _words(rows.codes, fmt.code_bits).T
        return {"qweight": words, "qzeros": _words(zeros, fmt.code_bits), "scales": _scales(fmt, rows).T}

    def config(self, formats: Mapping[str, Format], plain: Sequence[str]) -> dict[str, Any]:
        settings = self.settings(next(iter(formats.values())))
        form = {"checkpoint_format": "gptq" if settings.version == 1 else "gptq_v2", "pack_dtype": "int32"}
        own = {"desc_act": False, "sym": settings.symmetric, "lm_head": False, "modules_to_not_convert": list(plain)}
        return {**super().config(formats, plain), **form, **own}


class CompressedTensors(Layout):
    """compressed-tensors, pack-quantized."""

    name, bits, one_setting = "compressed-tensors", tuple(range(2, 9)), False

    def refusal(self, fmt: Format, shape: tuple[int, ...]) -> str:
        return "" if len(shape) == 2 else f"{self.name} has matrices alone"

    def parts(self, fmt: Format, n: int, k: int) -> dict[str, Part]:
        groups, bits = _groups(fmt, k), fmt.code_bits
        parts = {
            "weight_packed": Part("I32", (n, packing.word_count(k, bits))),
            "weight_scale": Part(_scale_type(fmt), (n, groups)),
            "weight_shape": Part("I64", (2,)),
        }
        return parts | (
            {"weight_zero_point": Part("I32", (packing.word_count(n, bits), groups))} if fmt.zero_field else {}
        )

    def constants(self, fmt: Format, n: int, k: int) -> dict[str, NDArray[Any]]:
        return {"weight_shape": np.array([n, k], np.int64)}

    def rows(self, fmt: Format, rows: Rows) -> dict[str, NDArray[Any]]:
        parts: dict[str, NDArray[Any]] = {"weight_packed": _words(rows.codes, fmt.code_bits)}
        parts["weight_scale"] = _scales(fmt, rows)
        if fmt.zero_field:
            parts["weight_zero_point"] = _words(np.ascontiguousarray(rows.zeros.T), fmt.code_bits).T
        return parts

    def _weights(self, fmt: Format) -> dict[str, Any]:
        strategy = (
            {"strategy": "channel"} if fmt.encoding.whole_rows else {"strategy": "group", "group_size": fmt.weights}
        )
        return {"num_bits": fmt.code_bits, "type": "int", "symmetric": not fmt.zero_field, **strategy}

    def config(self, formats: Mapping[str, Format], plain: Sequence[str]) -> dict[str, Any]:
        kinds = list(dict.fromkeys(formats.values()))
        groups = {}
        for number, fmt in enumerate(kinds):
            targets = ["Linear"] if len(kinds) == 1 else [name for name, kind in formats.items() if kind == fmt]
            groups[f"group_{number}"] = {"targets": targets, "weights": self._weights(fmt), "input_activations": None}
        return {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
            "config_groups": groups, "ignore": list(plain),
        }  # fmt: skip

    def matrix(self, module: str, stored: Mapping[str, Stored], fmt: Format) -> GroupedMatrix:
        group = -1 if fmt.encoding.whole_rows else fmt.weights
        scheme = Scheme("pack-quantized", "int", fmt.code_bits, group, not fmt.zero_field, None, Modules())
        return CompressedMatrix(module, stored, scheme)


LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (Awq(), Gptq(), CompressedTensors())}


def written_by(layout: Layout) -> str:
    """The formats that a layout holds, for a message."""
    kinds = [group_format(bits, 128, zero=zero).name for bits in layout.bits for zero in ("none", "int")]
    return f"{', '.join(kinds)} and their like of other groups"

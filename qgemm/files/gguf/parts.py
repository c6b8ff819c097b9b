"""Tensors of types that ggml lacks: a .gguf file stores each as plain tensors, its parts.

kbit formats are stored by field:

    tensor              type       shape                   contents
    NAME.kbit_absmax    I8 or F16  (..., N, K / 32)        field absmax of each block, E4M4 or float16
    NAME.kbit_planes    I32        (..., N, K / 32 * bits) field planes of each block
    NAME.kbit_codebook  F32        (2^bits)                the level of each code

Families of formats (u4z_g128, f8_e4m3_g128 ...) are stored as the bytes of their blocks:

    NAME.qgemm_FORMAT   I8         (..., N, K / weights per block * bytes per block)

Metadata with either:

    key                         type    value
    general.architecture        STRING  "qgemm", so that no program takes the file for a model that it can run
    qgemm.general.architecture  any     the original general.architecture, if there is one
    qgemm.kbit.version          UINT32  1, the version of this layout

So every reader of GGUF can open the file and list the parts, while it could read nothing of a file with an unknown
type. Only `write` and `open` handle parts and these keys: tensors and metadata are read back as they were written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from math import prod
from typing import Any, TypeVar

import numpy as np
from gguf.constants import GGMLQuantizationType, GGUFValueType, Keys
from numpy.typing import NDArray

from qgemm.codec.format import CHUNK, Blocks, Format
from qgemm.codec.packing import Floats
from qgemm.errors import CodebookError, GGUFError
from qgemm.files.paths import shown
from qgemm.formats import FORMATS, GGML_TYPES, of_family
from qgemm.parallel import for_slices
from qgemm.tensor import Tensor

from .header import Place
from .layout import STRING, Buffer, read_value

ARCHITECTURE, OURS = Keys.General.ARCHITECTURE, "qgemm"
SAVED, VERSION = "qgemm.general.architecture", "qgemm.kbit.version"
RESERVED = SAVED, VERSION
LAYOUT = 1

PLAIN = {  # dtype of a field -> ggml type of its part
    np.dtype("u1"): GGML_TYPES[GGMLQuantizationType.I8],
    np.dtype("<u4"): GGML_TYPES[GGMLQuantizationType.I32],
    np.dtype("<f2"): GGML_TYPES[GGMLQuantizationType.F16],
}
F32 = GGML_TYPES[GGMLQuantizationType.F32]
CODEBOOK = ".kbit_codebook"
SUFFIXES = ".kbit_absmax", ".kbit_planes", CODEBOOK
I8 = GGML_TYPES[GGMLQuantizationType.I8]
AS_BLOCKS = re.compile(r"(.+)\.qgemm_(\w+)", re.DOTALL)  # name of a part that holds the bytes of blocks
KNOWN = [fmt for fmt in FORMATS.values() if fmt.stored_in_parts]

Value = TypeVar("Value")


# ---------------------------------------------------------------- writing


def parts_of(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The plain tensors, by name, that store a tensor: itself, or its parts."""
    fmt, codebook = tensor.format, tensor.codebook
    blocks = cache(lambda: tensor.blocks)
    if stored_as_blocks(fmt):
        shape = *tensor.shape[:-1], fmt.blocks_in(tensor.shape[-1]) * fmt.block_bytes
        return {first_part(name, fmt): Tensor(I8, shape, lambda: np.ascontiguousarray(blocks()).view(I8.dtype))}
    if codebook is None or not fmt.stored_in_parts:
        return {name: tensor}

    def part(field: str) -> Tensor:
        plain = PLAIN[fmt.dtype[field].base]
        return Tensor(plain, _part_shape(fmt, field, tensor.shape), lambda: blocks()[field].view(plain.dtype))

    fields = {name + _suffix(field): part(field) for field in fmt.dtype.names or ()}
    return {**fields, name + CODEBOOK: Tensor(F32, codebook.shape, codebook)}


def fields_of(name: str, fmt: Format, blocks: Blocks) -> dict[str, NDArray[Any]]:
    """The data that blocks [n] add to each part of a tensor, by name, contiguous; the codebook is written apart."""
    if stored_as_blocks(fmt):
        return {first_part(name, fmt): np.ascontiguousarray(blocks)}
    if not fmt.stored_in_parts:
        return {name: np.ascontiguousarray(blocks)}
    return {name + _suffix(field): np.ascontiguousarray(blocks[field]) for field in fmt.dtype.names or ()}


def stored_as_blocks(fmt: Format) -> bool:
    """Whether tensors of a format are stored as bytes of blocks: a family, which is recognized by its name."""
    return fmt.ggml_type is None and not (fmt.stored_in_parts or fmt.plain) and of_family(fmt.name) == fmt


def first_part(name: str, fmt: Format) -> str:
    """The name of the first or only part of a tensor in parts."""
    return name + (f".qgemm_{fmt.name}" if stored_as_blocks(fmt) else SUFFIXES[0])


def longest_part(fmt: Format) -> int:
    """The length that the longest part's name adds to the tensor's name."""
    if stored_as_blocks(fmt):
        return len(first_part("", fmt))
    return max(map(len, SUFFIXES)) if fmt.stored_in_parts else 0


def is_part(name: str) -> bool:
    """Whether a name is that of a part."""
    return name.endswith(SUFFIXES) or _format_of_blocks(name) is not None


def _format_of_blocks(name: str) -> Format | None:
    match = AS_BLOCKS.fullmatch(name)
    return None if match is None else of_family(match[2])


def codebook_of(name: str, fmt: Format) -> tuple[str, Floats]:
    """The name and the data of the codebook's part of a kbit tensor."""
    assert fmt.codebook is not None
    return name + CODEBOOK, fmt.codebook


def stored_keys(values: Mapping[str, Value], ours: Value, version: Value) -> dict[str, Value]:
    """Metadata as stored with parts; ours, version: the values of the architecture and of the layout's version."""
    if ARCHITECTURE in values:
        return {**values, ARCHITECTURE: ours, SAVED: values[ARCHITECTURE], VERSION: version}
    return {ARCHITECTURE: ours, **values, VERSION: version}


def _suffix(field: str) -> str:
    return f".kbit_{field}"


def _part_shape(fmt: Format, field: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a field's part, for a shape in weights."""
    return *shape[:-1], fmt.blocks_in(shape[-1]) * prod(fmt.dtype[field].shape)


# ---------------------------------------------------------------- reading


def model_keys(keys: Mapping[str, Place]) -> dict[str, Place]:
    """The original keys of a file with parts; the inverse of `stored_keys`."""
    original = {key: place for key, place in keys.items() if key not in RESERVED}
    if SAVED in keys:
        return {**original, ARCHITECTURE: keys[SAVED]}
    del original[ARCHITECTURE]
    return original


def broken_keys_rule(keys: Mapping[str, Place], data: Buffer) -> tuple[str, str]:
    """The first wrong key of a file with parts, and the rule that it breaks, or two empty strings."""
    kind, offset = keys[VERSION]
    if kind != GGUFValueType.UINT32:
        return VERSION, f"must be UINT32, is {GGUFValueType(kind).name}"
    if (version := read_value(data, kind, offset)) != LAYOUT:
        return VERSION, f"is {version}, only layout {LAYOUT} is read"
    kind, offset = keys.get(ARCHITECTURE, (-1, 0))
    if kind != STRING or read_value(data, kind, offset) != OURS:
        return ARCHITECTURE, f"must be {OURS!r} in a file of kbit tensors"
    return "", ""


class Joiner:
    """Joins tensors from their parts.

    Blocks are joined on use. Those of the last tensor are cached, since rows of a tensor are often read one after
    another.
    """

    def __init__(self) -> None:
        self._last: tuple[str, Blocks] | None = None
        self._formats: dict[tuple[str, bytes], Format] = {}  # many tensors share a codebook

    def joined(self, stored: Mapping[str, Tensor], refusal: Callable[[str, str], GGUFError]) -> dict[str, Tensor]:
        """The tensors of a file, each at the place of its first part; refusal(tensor, rule) makes the error."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in stored.items():
            suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)
            fmt = _format_of_blocks(name) if suffix is None else None
            whole = name.removesuffix(f".qgemm_{fmt.name}" if fmt is not None else suffix or "")
            if whole == name:
                tensors[name] = tensor
            elif whole in stored or (fmt is not None and whole in tensors):
                raise refusal(name, f"there is a tensor {shown(whole)} as well, of which it cannot be a part")
            elif fmt is not None:
                tensors[whole] = _tensor_of_bytes(whole, fmt, tensor, partial(refusal, name))
            elif whole not in tensors:
                tensors[whole] = self._join(whole, stored, refusal)
        return tensors

    def __reduce__(self) -> tuple[Any, ...]:
        return Joiner, ()  # without the caches

    def forget(self) -> None:
        """Drop the cached blocks."""
        self._last = None

    def _join(self, name: str, stored: Mapping[str, Tensor], refusal: Callable[[str, str], GGUFError]) -> Tensor:
        """Join a tensor from its parts, which must all exist, with matching shapes and the right types."""
        for suffix in SUFFIXES:
            if name + suffix not in stored:
                present = next(name + suffix for suffix in SUFFIXES if name + suffix in stored)
                raise refusal(present, f"there is no {shown(name + suffix)} beside it")
        codebook = stored[name + CODEBOOK]
        if codebook.format != F32:
            raise refusal(name + CODEBOOK, f"must be F32, is {codebook.format}")
        candidates = [fmt for fmt in KNOWN if codebook.shape == (1 << fmt.code_bits,)]
        if not candidates:
            counts = sorted({1 << fmt.code_bits for fmt in KNOWN})
            raise refusal(name + CODEBOOK, f"shape {codebook.shape} is not one of {counts} levels")
        for field in candidates[0].dtype.names or ():
            part = stored[name + _suffix(field)]
            types = [str(PLAIN[fmt.dtype[field].base]) for fmt in candidates]
            candidates = [fmt for fmt in candidates if PLAIN[fmt.dtype[field].base] == part.format]
            if not candidates:
                raise refusal(name + _suffix(field), f"must be {' or '.join(dict.fromkeys(types))}, is {part.format}")
        absmax = stored[name + SUFFIXES[0]].shape
        shape = *absmax[:-1], absmax[-1] * candidates[0].weights
        fields = {field: stored[name + _suffix(field)] for field in candidates[0].dtype.names or ()}
        for field, part in fields.items():
            if part.shape != (expected := _part_shape(candidates[0], field, shape)):
                raise refusal(name + _suffix(field), f"shape {part.shape} must be {expected} beside {absmax} of absmax")
        try:
            fmt = self._format(candidates[0], codebook)
        except CodebookError as error:
            raise refusal(name + CODEBOOK, str(error)) from None

        blocks = JoinedBlocks(self, name, fmt, fields)
        return Tensor(fmt, shape, blocks, name, blocks.read)

    def _format(self, fmt: Format, codebook: Tensor) -> Format:
        """The format with this codebook; the one in FORMATS if it is the default."""
        assert fmt.variant is not None
        key = fmt.name, codebook.blocks.tobytes()
        if key not in self._formats:
            variant = fmt.variant(codebook.blocks, None)
            self._formats[key] = fmt if variant == fmt else variant
        return self._formats[key]

    def blocks(self, name: str, fmt: Format, fields: Mapping[str, Tensor]) -> Blocks:
        """The blocks of a tensor, joined from its parts."""
        stored = {
            field: part.blocks for field, part in fields.items()
        }  # checks the file, even if the blocks are cached
        last = self._last
        if last is not None and last[0] == name:
            return last[1]
        shape = stored["absmax"].shape
        blocks = np.empty(prod(shape), fmt.dtype)
        flat: dict[str, Any] = {
            field: part.view(fmt.dtype[field].base).reshape(-1, *fmt.dtype[field].shape)
            for field, part in stored.items()
        }

        def work(rows: slice) -> None:
            for field, part in flat.items():
                blocks[field][rows] = part[rows]

        for_slices(len(blocks), CHUNK // fmt.weights, work)
        blocks.flags.writeable = False
        self._last = name, blocks.reshape(shape)
        return self._last[1]


def _tensor_of_bytes(name: str, fmt: Format, part: Tensor, refusal: Callable[[str], GGUFError]) -> Tensor:
    """The tensor whose blocks are the bytes of its part."""
    if part.format != I8:
        raise refusal(f"must be I8, is {part.format}")
    count, remainder = divmod(part.shape[-1], fmt.block_bytes)
    if remainder:
        raise refusal(f"rows of {part.shape[-1]} bytes are no whole blocks of {fmt}, which have {fmt.block_bytes}")
    blocks = PartAsBlocks(fmt, part)
    return Tensor(fmt, (*part.shape[:-1], count * fmt.weights), blocks, name, blocks.read)


class PartAsBlocks:
    """The bytes of a part as blocks, without a copy: all of them when called, a range by `read`."""

    def __init__(self, fmt: Format, part: Tensor) -> None:
        self._format, self._part = fmt, part

    def __call__(self) -> Blocks:
        """All blocks."""
        return self._part.blocks.view(self._format.dtype)

    def read(self, start: int, stop: int) -> Blocks:
        """Blocks start to stop, copied."""
        size = self._format.block_bytes
        return self._part.read(start * size, stop * size).view(self._format.dtype)


class JoinedBlocks:
    """The blocks of one tensor, joined from its parts by field: all of them when called, a range by `read`."""

    def __init__(self, joiner: Joiner, name: str, fmt: Format, fields: Mapping[str, Tensor]) -> None:
        self._joiner, self._name, self._format, self._fields = joiner, name, fmt, fields

    def __call__(self) -> Blocks:
        """All blocks."""
        return self._joiner.blocks(self._name, self._format, self._fields)

    def read(self, start: int, stop: int) -> Blocks:
        """Blocks start to stop, copied."""
        blocks = np.empty(stop - start, self._format.dtype)
        for field, part in self._fields.items():
            dtype = self._format.dtype[field]
            width = prod(dtype.shape)
            blocks[field] = part.read(start * width, stop * width).view(dtype.base).reshape(-1, *dtype.shape)
        return blocks

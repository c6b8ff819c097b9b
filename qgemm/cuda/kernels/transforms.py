"""The kernels that prepare operands: blocks to tiles and back, values to blocks, x to Q8_1 blocks and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from qgemm.codec.format import Format
from qgemm.codec.group_activations import GROUP_COLUMNS
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.jit.load import load
from qgemm.cuda.jit.twins import EncodeStats
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.layout.group_activations import byte_template
from qgemm.cuda.problem import TYPES

PLANES_THREADS = 256  # threads of a CTA that quantizes to flat bit planes, or decodes them
ENCODE_THREADS = 256  # threads of a CTA that encodes
GATHER_THREADS = 128  # threads of a CTA that decodes rows by their index
GROUPS_TOKENS = 4  # tokens that a thread of quantize_activations_groups loads at a time: one is half as fast
SCALE_THREADS = 512  # threads of a CTA that scales a row of x, whose registers hold a row of 16,384 values
SORT_THREADS = 512  # threads of a CTA that sorts ids of experts and rows of x
MOE_THREADS: Template = {"THREADS": 128}  # threads of a CTA that adds up rows of experts
EPILOGUE_THREADS = 256  # threads of a CTA that adds an epilogue to sums
BLOCKS_PER_WARP = 16  # blocks that a warp encodes at a time, at least: a chunk of 16 bytes for each byte of a block
# The result of an encoding CTA: sums of squares of errors and of values, and the first block that is refused.
ENCODE_STATS = np.dtype(EncodeStats)


@dataclass(frozen=True, eq=False)
class Transform:
    """One kernel that does not multiply.

    name: the name of its file and of its entry point. types: for each variant, the types of its arrays and constants
    that do not depend on a format. takes: whether it serves a format; None for kernels that know no format. constants:
    format -> the rest of its template.
    """

    name: str
    types: tuple[Template, ...]
    takes: Callable[[Format], bool] | None = None
    constants: Callable[[Format], Template] | None = None

    def template(self, fmt: Format | None = None, **types: str | int) -> Template:
        """The constants and types that its source is compiled with."""
        return {**types, **(self.constants(fmt) if self.constants is not None and fmt is not None else {})}

    def load(self, fmt: Format | None = None, **types: str | int) -> Any:
        """The kernel as a function on the current device."""
        return load(self.name, fmt, **self.template(fmt, **types))

    def variants(self, fmt: Format | None = None) -> Iterator[Template]:
        """Every template that it is compiled with."""
        return (self.template(fmt, **types) for types in self.types)


def _tiled(fmt: Format) -> bool:
    return fmt.tiled


def _floats(fmt: Format) -> bool:
    return fmt.plain and fmt.levels is not None


def encodes(fmt: Format) -> bool:
    """Whether `encode` writes blocks of a format: four lanes have the 32 weights of a block, integers with scales."""
    return _coded(fmt) and fmt.weights == 32 and fmt.encoding.weighted is None


def encodes_planes(fmt: Format) -> bool:
    """Whether `quantize_codebook` writes blocks of a format, and `dequantize_codebook` decodes its parts."""
    return fmt.tile.bit_planes and fmt.stored_in_parts


def encodes_groups(fmt: Format) -> bool:
    """Whether `encode_groups` writes blocks of a format: they have several groups, or an encoder with importance."""
    return _coded(fmt) and (fmt.weights > fmt.group or fmt.encoding.weighted is not None)


def encodes_weighted(fmt: Format) -> bool:
    """Whether `encode_groups` has a variant with importance."""
    return _coded(fmt) and fmt.encoding.weighted is not None


def _coded(fmt: Format) -> bool:
    """Whether a format of the registry, not of a family, has integer codes in slots, and an encoder."""
    return bool(fmt.tile.slots) and fmt.integer and fmt.encode is not None and not fmt.family


def _panel(fmt: Format) -> Template:
    return {"TILES": tiles.panel_tiles(fmt), "THREADS": tiles.PACK_THREADS}


def _planes(fmt: Format) -> Template:
    return {"THREADS": PLANES_THREADS}


def _gatherer(fmt: Format) -> Template:
    return {"THREADS": GATHER_THREADS}


def _encoder(fmt: Format) -> Template:
    return {"THREADS": ENCODE_THREADS, "BLOCKS_PER_WARP": blocks_per_warp(fmt)}


def groups_template(activation: str) -> Template:
    """The template of quantize_activations_groups for an activation of GROUP_COLUMNS, without the type of x."""
    return {**byte_template(activation), "TOKENS": GROUPS_TOKENS}


def blocks_per_warp(fmt: Format) -> int:
    """Blocks that a warp encodes at a time: at least one for each lane."""
    return max(BLOCKS_PER_WARP, 32 * fmt.group // fmt.weights) if encodes_groups(fmt) else BLOCKS_PER_WARP


IN, OUT = (tuple[Template, ...]({side: name} for name in TYPES) for side in ("In", "Out"))
ROUNDED = tuple[Template, ...]({"In": name, "Out": "half" if name == "half" else "float"} for name in TYPES)

PACK = Transform("pack", ({},), _tiled, _panel)
UNPACK = Transform("unpack", ({},), _tiled, _panel)
DEQUANTIZE_TILES = Transform("dequantize", OUT, _tiled)
GATHER_ROWS = Transform("gather_rows", OUT, _tiled, _gatherer)
GATHER_FLOATS = Transform("gather_floats", OUT, _floats, _gatherer)
ENCODE = Transform("encode", IN, encodes, _encoder)
ENCODE_GROUPS = Transform("encode_groups", ({"WEIGHTED": 0},), encodes_groups, _encoder)
ENCODE_WEIGHTED = Transform("encode_groups", ({"WEIGHTED": 1},), encodes_weighted, _encoder)
QUANTIZE_CODEBOOK = Transform("quantize_codebook", IN, encodes_planes, _planes)
DEQUANTIZE_CODEBOOK = Transform("dequantize_codebook", OUT, encodes_planes, _planes)
QUANTIZE_ACTIVATIONS = Transform("quantize_activations", IN)
DEQUANTIZE_ACTIVATIONS = Transform("dequantize_activations", ({"Out": "half"}, {"Out": "float"}))
ROUND_ACTIVATIONS = Transform("round_activations", ROUNDED)
QUANTIZE_ACTIVATIONS_GROUPS = Transform(
    "quantize_activations_groups",
    tuple({**source, **groups_template(activation)} for source in IN for activation in GROUP_COLUMNS),
)
SCALE_ROWS = Transform("scale_rows", ({"THREADS": SCALE_THREADS},))
MOE_SORT = Transform("moe_sort", ({"THREADS": SORT_THREADS},))
MOE_COMBINE = Transform("moe_combine", tuple({**i, **out, **MOE_THREADS} for i in IN for out in OUT))
ADD_EPILOGUE = Transform("add_epilogue", ({"THREADS": EPILOGUE_THREADS},))

TRANSFORMS = (
    PACK, UNPACK, DEQUANTIZE_TILES, GATHER_ROWS, GATHER_FLOATS, ENCODE, ENCODE_GROUPS, ENCODE_WEIGHTED,
    QUANTIZE_CODEBOOK, DEQUANTIZE_CODEBOOK, QUANTIZE_ACTIVATIONS, DEQUANTIZE_ACTIVATIONS, ROUND_ACTIVATIONS,
    QUANTIZE_ACTIVATIONS_GROUPS, SCALE_ROWS, MOE_SORT, MOE_COMBINE, ADD_EPILOGUE,
)  # fmt: skip

"""The C file of kernels/cpu/ that multiplies by the weights of a format, with the macros of that format."""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np

from qgemm.codec import q8_1_f32
from qgemm.codec.eight_bits import level_range
from qgemm.codec.format import Format
from qgemm.codec.group_activations import MIN_MAGNITUDE
from qgemm.formats import FORMATS

from . import prebuilt
from .calls import LEAST_TILED, OF_TILE, OF_TYPES, PACKED_TOKENS, Decoding, fields
from .compiler import compiler
from .library import Loader, reason
from .pool import pooled
from .sources import Source, folder, source_of


@cache
def source(fmt: Format) -> Source | None:
    """None for a format without a header, whose rows are decoded before they are multiplied as f32."""
    family = "kbit" if fmt.tile.bit_planes else fmt.family or ("plain" if fmt.plain else fmt.name)
    if fmt.levels is None or not (folder() / "formats" / f"{family}.h").is_file():
        return None
    definitions = {
        "FORMAT_HEADER": f'"formats/{family}.h"',
        "FORMAT_NAME": fmt.name,
        "BLOCK_BYTES": str(fmt.block_bytes),
        "BLOCK_WEIGHTS": str(fmt.weights),
        "TOKENS_OF_TILE": str(OF_TILE),
        "LEAST_TILED": str(LEAST_TILED),
        "MOST_TOKENS": str(PACKED_TOKENS),
        "DECODING_FIELDS": fields(Decoding),
        **OF_TYPES,
    }
    if not fmt.integer:
        if fmt.family == "f8":
            definitions["MANTISSA_BITS"] = "3" if "e4m3" in fmt.name else "2"
        return compilable(fmt, source_of("floats", {**definitions, "CODE_PLANES": str(fmt.code_bits)}))
    definitions["ACTIVATION_BYTES"] = str(q8_1_f32.DTYPE.itemsize)
    least, greatest = level_range(fmt)
    definitions |= {
        "LEAST_LEVEL": f"{least}f",
        "GREATEST_LEVEL": f"{greatest}f",
        "LEAST_EIGHT_BITS": f"{MIN_MAGNITUDE}f",
    }
    if fmt.codebook is not None:
        definitions["LEVELS"] = "{" + ",".join(str(int(level)) for level in fmt.codebook) + "}"
    if fmt.tile.grid is not None:
        points = np.ascontiguousarray(fmt.tile.grid.points()).view(f"<u{fmt.tile.grid.weights}").reshape(-1)
        definitions["GRID_WEIGHTS"] = str(fmt.tile.grid.weights)
        definitions["GRID_POINTS"] = "{" + ",".join(map(hex, points.tolist())) + "}"
    if fmt.family == "groups":
        definitions |= group_definitions(fmt)
    return compilable(fmt, source_of("products", definitions))


def compilable(fmt: Format, library_source: Source) -> Source | None:
    """The source; None for a family of formats in a wheel without a compiler, which has libraries of listed formats.

    A library that can be neither loaded nor compiled would disable all others.
    """
    return None if fmt.family and compiler() is None and not prebuilt.has(library_source) else library_source


def group_definitions(fmt: Format) -> dict[str, str]:
    """The macros of a group format for kernels/cpu/formats/groups.h."""
    zero = 0 if not fmt.zero_field else fmt.dtype[fmt.zero_field].itemsize
    return {
        "GROUP_BITS": str(fmt.code_bits),
        "GROUP_ZERO": str(zero),
        "GROUP_BF16": str(int(fmt.dtype["d"].kind == "u")),
    }


def multiplied_as(fmt: Format) -> Format:
    """The format whose library multiplies: its own, or f32 for weights that are decoded first."""
    return FORMATS["f32"] if source(fmt) is None else fmt


def serves(fmt: Format) -> bool:
    """Whether compiled code multiplies by a format: any whose weights can be decoded, where there is a compiler."""
    return fmt.levels is not None and not reason()


@Loader
def loaded(fmt: Format) -> ctypes.CDLL | None:
    """The library of a format, None where it cannot be compiled; codebooks of floats share one."""
    if fmt.needs_table and not fmt.family and fmt.name in FORMATS and fmt is not FORMATS[fmt.name]:
        return loaded(FORMATS[fmt.name])
    library_source = source(fmt)
    assert library_source is not None, "multiplied_as gives formats with a source"
    code = pooled(library_source)
    return code if code is None else sized(code)


def sized(code: ctypes.CDLL) -> ctypes.CDLL:
    """A library of products, with the signature of its function for the size of a packed row."""
    code.qgemm_packed_bytes.argtypes = [ctypes.c_int32, ctypes.c_int32, ctypes.c_int64]
    code.qgemm_packed_bytes.restype = ctypes.c_int64
    return code

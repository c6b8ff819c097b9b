"""i8_g16, i8_g32: 16 or 32 signed bytes share a float32 scale, w = d * q with q in -128..127.

offset  bytes    field
     0      4    d   float32 scale
     4  weights  qs  byte j: weight j

GPUs hold weights in these formats whose own layout no kernel reads: any type whose levels are integers of eight bits
has them exactly. FORMATS finds the two by name, and lists none.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import numpy as np

from qgemm.codec.format import Blocks, DeviceForm, Format, Levels, TileLayout
from qgemm.codec.layouts import signed_bytes
from qgemm.codec.packing import Floats, reciprocal, round_away
from qgemm.codec.scales import absmax

FAMILY = "float_scales"
NAME = re.compile(r"i8_g(16|32)")
MIN_SCALE = np.float32(2.0**-125)  # the reciprocal of a smaller scale overflows


def named(name: str) -> Format | None:
    """The format of this name; None for any other name."""
    match = NAME.fullmatch(name.lower())
    return None if match is None else i8_format(int(match[1]))


@cache
def i8_format(group: int) -> Format:
    """The format of groups of 16 or 32 weights, the same one at each call."""
    dtype = np.dtype([("d", "<f4"), ("qs", "i1", group)])

    def encode(x: Floats) -> Blocks:
        """Values [n, group] -> blocks [n]: d = absmax / 127, q nearest to x / d."""
        d = absmax(x) / np.float32(127)
        d = np.where(d < MIN_SCALE, np.float32(0), d)
        codes = np.clip(np.nan_to_num(round_away(x * reciprocal(d)[:, None])), -127, 127)
        return pack(Levels(codes.astype(np.int8), d))

    def levels(blocks: Blocks) -> Levels:
        """Blocks [n] -> codes [n, 1, group], scale [n, 1]."""
        return Levels(blocks["qs"][:, None], blocks["d"][:, None])

    def pack(levels: Levels) -> Blocks:
        """Integers [..., group] as codes, a scale for each group -> blocks."""
        assert levels.scale is not None
        blocks = np.empty(levels.scale.size, dtype)
        blocks["d"], blocks["qs"] = levels.scale.reshape(-1), levels.codes.reshape(-1, group)
        return blocks

    return Format(
        f"i8_g{group}", group, dtype, encode, levels, formula="d * q", pack=pack, family=FAMILY,
        tile=TileLayout(
            slots={"qs": tuple(range(group))}, to_tile=signed_bytes.to_tile, from_tile=signed_bytes.from_tile
        ),
    )  # fmt: skip


def device_form(levels_of: Callable[[Blocks], Levels], group: int) -> DeviceForm:
    """The device form of a format whose levels are integers -128..127 times a scale of `group` weights."""
    fmt = i8_format(group)
    assert fmt.pack is not None
    pack = fmt.pack
    return DeviceForm(fmt, lambda blocks: pack(levels_of(blocks)))

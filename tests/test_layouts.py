"""The table of docs/formats.md: every format has a row, and formulas of grids agree with the gguf package."""

from __future__ import annotations

import gguf
import layouts
import numpy as np
import pytest
from strategies import GRIDS, over_formats

import qgemm


def test_every_type_has_a_line():
    lines = layouts.table().splitlines()[2:]
    assert {line.split(" | ")[0].removeprefix("| ") for line in lines} == {str(fmt) for fmt in qgemm.FORMATS.values()}
    q4_k = next(line for line in lines if line.startswith("| Q4_K "))
    assert "| 12 | 256 | 32 | 144 | 4.5 | d * sc * q - dmin * m | d f16, dmin f16, scales 12, qs 128 |" in q4_k


def grid_block(name: str, d: float, sc: int, negative: bool) -> np.ndarray:
    """A block of a grid's format with scale d, one integer sc in all groups, index 0 and one sign in all places."""
    block = np.zeros((), qgemm.FORMATS[name].dtype)
    signs = 0x7F if negative else 0  # seven signs; the parity of their number is the eighth
    if name == "iq1_m":
        high = int(np.float16(d).view(np.uint16))
        block["scales"] = [0o1111 * sc | (high >> 4 * i & 15) << 12 for i in range(4)]
        block["qh"] = 0x88 * negative
        return block
    block["d"] = d
    if name == "iq1_s":
        block["qh"] = negative << 15 | sc << 12
    elif name == "iq2_xxs":
        block["qs"][:, 1] = sc << 28 | sum(signs << 7 * i for i in range(4))
    elif name == "iq3_xxs":
        block["rest"] = sc << 28 | sum(signs << 7 * i for i in range(4))
    else:
        block["scales"] = 0x11 * sc
        if name == "iq2_xs":
            block["qs"] = signs << 9
        else:
            block["signs"] = 0xFF * negative
    return block


@over_formats(GRIDS)
@pytest.mark.parametrize("negative", [False, True])
def test_formulas_of_grids_are_those_of_the_package(fmt, negative):
    """The formula of a grid gives every level of a block: for each integer of a group, and both signs."""
    name = fmt.name
    codec = getattr(gguf.quants, "IQ1_S" if name == "iq1_m" else name.upper())
    codec.init_grid()
    grid = codec.grid.reshape(-1, codec.grid.shape[-1])
    delta, sign = (-1 / 8, -1) if negative else (1 / 8, 1)
    for sc in range(8 if name.startswith("iq1") else 16):
        names = {"d": 0.5, "sc": sc, "sign": sign, "delta": delta, "grid": grid, "q": 0}
        levels = np.asarray(eval(fmt.formula, {"__builtins__": {}}, names)).reshape(-1)
        values = fmt.decode(grid_block(name, 0.5, sc, negative)[None])[0]
        np.testing.assert_array_equal(values, np.tile(levels, fmt.weights // levels.size))
        assert levels.any()

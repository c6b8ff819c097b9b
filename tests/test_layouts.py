"""The table of docs/formats.md: every format has a row, and formulas of grids agree with the gguf package."""

from __future__ import annotations

import gguf
import layouts
import numpy as np
from strategies import GRIDS, over_formats

import qgemm


def test_every_type_has_a_line():
    lines = layouts.table().splitlines()[2:]
    assert {line.split(" | ")[0].removeprefix("| ") for line in lines} == {str(fmt) for fmt in qgemm.FORMATS.values()}
    q4_k = next(line for line in lines if line.startswith("| Q4_K "))
    assert "| 12 | 256 | 32 | 144 | 4.5 | d * sc * q - dmin * m | d f16, dmin f16, scales 12, qs 128 |" in q4_k


@over_formats(GRIDS)
def test_formulas_of_grids_are_those_of_the_package(fmt):
    """The formula of a grid gives the level of a block with scale 1 and all other bits 0."""
    name, formula = fmt.name, fmt.formula
    blocks = np.zeros(1, fmt.dtype)
    if name == "iq1_m":
        blocks["scales"][0] = 0, 0, 0xC000, 0x3000  # 0x3c00, 1 as a half, in the high nibbles of four words
    else:
        blocks["d"] = 1
    codec = getattr(gguf.quants, "IQ1_S" if name == "iq1_m" else name.upper())
    codec.init_grid()
    grid = codec.grid.reshape(-1, codec.grid.shape[-1])
    names = {"d": 1.0, "sc": 0, "sign": 1, "delta": 1 / 8, "grid": grid}
    levels = np.asarray(eval(formula, {"__builtins__": {}}, {**names, "q": 0}))
    values = fmt.decode(blocks.view(fmt.dtype))[0]
    np.testing.assert_array_equal(values[: levels.size], levels.reshape(-1))
    assert levels.any()

"""The lines of docs/formats.md: every type is there, and the fields and formulas of borrowed types are theirs."""

from __future__ import annotations

import gguf
import layouts
import numpy as np
import pytest
from strategies import DECODED_BY_GGUF, each

import qgemm


def test_every_type_has_a_line():
    lines = layouts.table().splitlines()[2:]
    assert {line.split(" | ")[0].removeprefix("| ") for line in lines} == {str(fmt) for fmt in qgemm.FORMATS.values()}
    q4_k = next(line for line in lines if line.startswith("| Q4_K "))
    assert "| 12 | 256 | 32 | 144 | 4.5 | d * sc * q - dmin * m | d f16, dmin f16, scales 12, qs 128 |" in q4_k


@each(DECODED_BY_GGUF)
def test_fields_fill_a_block(fmt):
    assert layouts.layout_of(fmt).dtype.itemsize == fmt.block_bytes


@pytest.mark.parametrize("name", sorted(set(layouts.BORROWED) & {fmt.name for fmt in DECODED_BY_GGUF}))
def test_formulas_are_those_of_the_package(name):
    """Of a block whose scale is 1 and whose other bits are all 0."""
    fmt = qgemm.FORMATS[name]
    formula, dtype = layouts.layout_of(fmt)
    blocks = np.zeros(1, dtype)
    if name == "iq1_m":
        blocks["scales"][0] = (0, 0, 0, 0, 0, 0xC0, 0, 0x30)  # 0x3c00, 1 as a half, in the high nibbles of four words
    else:
        blocks["d"] = 1
    if "grid" in formula:
        codec = getattr(gguf.quants, "IQ1_S" if name == "iq1_m" else name.upper())
        codec.init_grid()
        grid = codec.grid.reshape(-1, codec.grid.shape[-1])
    else:
        grid = None
    names = {"d": 1.0, "sc": 0, "sign": 1, "delta": 1 / 8, "grid": grid}
    found = np.asarray(eval(formula, {"__builtins__": {}}, {**names, "q": 0}))
    values = fmt.decode(blocks.view(fmt.dtype))[0]
    np.testing.assert_array_equal(values[: found.size], found.reshape(-1))
    assert found.any()

"""Facts of the record: its formula, codes and scales are those of the blocks that the format decodes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from formats_of_tests import OWN_FORMATS
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    EVERY,
    EVERY_BLOCK,
    EVERY_TILED,
    FORMATS,
    TEST_FORMATS,
    over_formats,
    raw_blocks,
)

import qgemm
from qgemm.codec.format import Format, Levels
from qgemm.codec.packing import as_bytes, unpack_bit_planes, unpack_slots


def codes_of(fmt: Format, blocks: np.ndarray) -> np.ndarray:
    """Blocks [n] -> the bits of their codes as they are, [n, weights], by nothing but the record."""
    codes, shift = np.zeros((len(blocks), fmt.weights), np.int64), 0
    for name, slots in fmt.tile.slots.items():
        field, bits = blocks[name], 8 * fmt.dtype[name].itemsize // fmt.weights
        part = (
            unpack_bit_planes(field)
            if fmt.tile.bit_planes
            else unpack_slots(as_bytes(field).reshape(len(blocks), -1), bits)
        )
        codes[:, list(slots)] |= part.astype(np.int64) << shift
        shift += bits
    if fmt.tile.digits is not None:
        return fmt.tile.digits.unpack(blocks).astype(np.int64)
    lowest, highest = fmt.code_range
    return np.where(codes > highest, codes - (highest - lowest + 1), codes)


def tame_blocks(fmt: Format, draw, count: int = 9) -> np.ndarray:
    """Blocks of random bytes whose scales are ordinary numbers, none of them zero."""
    blocks = raw_blocks(draw, fmt, (count,)).copy()
    for name in fmt.scale_fields:
        blocks[name] = np.linspace(0.5, 2, count)
    if fmt.zero_field:
        blocks[fmt.zero_field] = np.linspace(0, fmt.code_range[1], count)
    if fmt.scatter_scale is not None:
        fmt.scatter_scale(blocks, np.linspace(0.5, 2, count).astype(np.float16))
    for name, (least, end) in fmt.encoding.ordinary.items():
        blocks[name] = np.linspace(least, end - 1, blocks[name].size).reshape(blocks[name].shape)
    return blocks


def names_of_a_grid(fmt: Format, blocks: np.ndarray, levels: Levels) -> dict[str, np.ndarray]:
    """What formulas of grids name: `grid` has all magnitudes there are, or the three levels of the ternary ones."""
    scale, codes = levels.scale[..., None], levels.codes.astype(np.int64)
    d = blocks["d"] if fmt.scattered_scale is None else fmt.scattered_scale(blocks)
    d = d.astype(np.float64)[:, None, None]
    if "delta" not in fmt.formula:
        unit = {"iq3_s": 1, "iq3_xxs": 4}.get(fmt.name, 8)
        sc = np.rint((scale / d * unit - 1) / 2)
        return {"d": d, "sc": sc, "sign": np.sign(codes), "grid": np.arange(256), "q": np.abs(codes)}
    delta = codes % 8 if levels.minimum is None else np.sign(levels.minimum / levels.scale)[..., None]
    delta = np.where(delta == 1, 1 / 8, -1 / 8)
    level = np.rint(codes / 8 - (delta if levels.minimum is None else 0)).astype(int)
    return {
        "d": d,
        "sc": np.rint((scale / d * 8 - 1) / 2),
        "grid": np.array([-1, 0, 1]),
        "q": level + 1,
        "delta": delta,
    }


@over_formats(EVERY_TILED)
@given(data=st.data())
def test_formula_is_what_decodes(fmt, data):
    """Evaluated in float64 with a block's fields, its codes q and the 6-bit integers of a super-block."""
    blocks = tame_blocks(fmt, data.draw)
    levels = fmt.decode_levels(blocks)
    names = {
        name: blocks[name].astype(np.float64)[:, None, None] for name in fmt.dtype.names if not fmt.dtype[name].shape
    }
    if fmt.tile.grid is None:
        names |= {"q": codes_of(fmt, blocks).reshape(levels.codes.shape), "codebook": fmt.codebook}
    for name in ({"absmax", *fmt.tile.number_bytes} - {"z"}) & set(names):
        names[name] = levels.scale[..., None]
    if fmt.tile.grid is not None:
        names = names_of_a_grid(fmt, blocks, levels)
    elif "d" not in names and "d" in fmt.dtype.names:  # bytes of groups, of which the format tells the floats' halves
        names["d"] = 2 * levels.scale[..., None]
    elif fmt.weights > fmt.group:  # sc and m of groups, of which the format tells only the products
        names["sc"] = np.rint(levels.scale[..., None] / names["d"])
        names["m"] = np.rint(-levels.minimum[..., None] / names["dmin"]) if fmt.has_minimum else None
    evaluated = eval(fmt.formula.replace("^", "**"), {"__builtins__": {}}, names)
    size = np.abs(evaluated).max() + sum(np.abs(part).max() for part in levels[1:3] if part is not None) * 300
    np.testing.assert_allclose(fmt.decode(blocks), evaluated.reshape(len(blocks), -1), rtol=0, atol=size * 2.0**-22)


@over_formats(EVERY_TILED)
@given(data=st.data())
def test_codes_have_the_range_zero_and_size_that_the_format_tells(fmt, data):
    """The values that scales are multiplied by are integers of eight bits wherever "a8" multiplies them."""
    blocks = tame_blocks(fmt, data.draw)
    levels, (lowest, highest) = fmt.decode_levels(blocks), fmt.code_range
    assert levels.codes.shape == (len(blocks), fmt.weights // fmt.group, fmt.group)
    assert (levels.minimum is not None) == fmt.has_minimum
    assert isinstance(levels.zero, np.ndarray) == (fmt.zero is None)
    values = levels.codes
    if fmt.tile.grid is None:
        assert highest - lowest + 1 == (3 if fmt.tile.digits is not None else 1 << fmt.code_bits)
        codes = codes_of(fmt, blocks).reshape(levels.codes.shape)
        values = codes if fmt.codebook is None else fmt.codebook[codes]
        np.testing.assert_array_equal(levels.codes, values)
    assert np.abs(values - (fmt.zero or 0)).max() <= fmt.max_level
    assert fmt.integer == (levels.codes.dtype.kind in "iu")
    if fmt.integer:
        assert (levels.codes.dtype.itemsize, fmt.needs_table) == (1, False)


def test_every_code_is_reached():
    """The ends of the range are codes of some block: it is no wider than it must be."""
    for fmt in EVERY_TILED:
        blocks = np.frombuffer(np.random.default_rng(1).bytes(999 * fmt.block_bytes), fmt.dtype)
        reached = codes_of(fmt, blocks) if fmt.tile.grid is None else fmt.decode_levels(blocks).codes
        if fmt.tile.grid is not None:  # as bytes of both signs
            reached = np.append(reached, [-reached.max(), -reached.min()])
        assert (reached.min(), reached.max()) == fmt.code_range


@over_formats(EVERY)
def test_ordinary_scales_are_of_fields_of_bytes_or_bfloat16(fmt):
    for name in {*fmt.encoding.ordinary, *fmt.tile.number_bytes}:
        assert fmt.dtype[name].base in (("<u2", "u1") if fmt.family else ("u1",))
        assert name not in fmt.code_fields


def test_a_codebook_tells_nothing_but_what_codes_stand_for():
    """mxfp4 has one, of integers: "a8" multiplies these, its codes are nibbles, and ggml knows its blocks."""
    fmt = qgemm.FORMATS["mxfp4"]
    assert fmt.codebook.tolist() == [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]
    assert (fmt.integer, fmt.needs_table, fmt.tile.bit_planes, fmt.stored_in_parts) == (True, False, False, False)
    kbit = qgemm.FORMATS["kbit4"].variant(range(16), None)  # integers by chance, of one tensor
    assert (kbit.integer, kbit.needs_table, kbit.tile.bit_planes, kbit.stored_in_parts) == (False, True, True, True)
    assert not fmt.codebook.flags.writeable


def test_a_field_of_floats_of_an_unknown_name_is_refused():
    """quantize would not see that such a scale is infinite."""
    dtype = np.dtype([("scale", "<f2"), ("qs", "u1", 16)])
    with pytest.raises(ValueError, match="Q3_0: the field scale of floats is none of the scales d, dmin, m, absmax"):
        dataclasses.replace(OWN_FORMATS["q3_0"], dtype=dtype)


def test_a_format_is_two_files():
    """docs/adding-a-format.md, followed: no file of the package or of kernels/ knows q3_0 or q6_0.

    But for the types of ik_llama.cpp, one of which is called Q6_0 as well.
    """
    root = Path(qgemm.__file__).parents[1]
    sources = [path for folder in ("qgemm", "kernels") for path in (root / folder).rglob("*.*") if path.is_file()]
    named = [path for path in sources if path.suffix in (".py", ".cu", ".cuh", ".c", ".h")]
    assert len(named) > 400
    named = [path for path in named if path.name not in ("ik.py", "interleaved.py")]
    for name in OWN_FORMATS:
        assert [path for path in named if name in path.read_text()] == []
        assert (Path(__file__).parent / "formats_of_tests" / f"{name}.py").is_file()
        assert (Path(__file__).parent / "data" / "kernels" / "formats" / f"{name}.cuh").is_file()


def test_formats_of_tests_are_not_listed():
    assert not {fmt.name for fmt in TEST_FORMATS} & {fmt.name for fmt in FORMATS}
    with pytest.raises(qgemm.UnsupportedError, match="no format 'q3_0'"):
        qgemm.quantize(np.ones((1, 32), np.float32), "q3_0")


@over_formats(
    [fmt for fmt in EVERY_BLOCK if fmt.encode is not None and fmt.scale_fields and not fmt.encoding.needs_importance]
)
def test_the_first_block_that_a_kernel_refused_is_named(fmt):
    """As `quantize` names it on the CPU, from an array of any library."""
    x = np.ones((3, 4 * fmt.weights))
    x[1, 2 * fmt.weights + 5] = 3e38
    with pytest.raises(qgemm.QuantizeError) as of_cpu:
        fmt.quantize(x)
    with pytest.raises(qgemm.QuantizeError) as from_check:
        fmt.check_first(x, 6, read=np.array)
    assert str(from_check.value) == str(of_cpu.value)
    fmt.check_first(x, 12)  # what kernels tell when they refused nothing

"""Rows of weights as numbers by compiled code: bit for bit those of NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import float_dtype, random_tensor, set_scales
from numpy.testing import assert_array_equal
from strategies import over_formats

import qgemm
from qgemm.codec.format import FLOATS
from qgemm.cpu import decode, native
from qgemm.cpu.native import encoders, libraries, library

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(library.reason()), reason=library.reason()),
]
WITH_HEADER = [fmt for fmt in qgemm.FORMATS.values() if fmt.levels is not None and libraries.source(fmt)]


@pytest.fixture(autouse=True)
def compiled_code(monkeypatch):
    monkeypatch.delenv("QGEMM_CPU")


def assert_same_bits(values, want):
    """NaN for NaN, else the same bits: of zeros the same sign."""
    unsigned = f"u{values.itemsize}"
    nan = np.isnan(want.astype(np.float64))
    assert_array_equal(np.isnan(values.astype(np.float64)), nan)
    assert_array_equal(values.view(unsigned)[~nan], want.view(unsigned)[~nan])


@over_formats(WITH_HEADER)
def test_weights_are_numpys(fmt, monkeypatch):
    """Any bytes, with scales that are zero, infinite, NaN or subnormal; rows that end within 256 weights."""
    rng = np.random.default_rng(1)
    k = 275 if fmt.plain else -(-544 // fmt.weights) * fmt.weights
    blocks = rng.integers(0, 256, (40, fmt.blocks_in(k) * fmt.block_bytes), np.uint8).view(fmt.dtype)
    set_scales(fmt, blocks[:4], np.inf)
    set_scales(fmt, blocks[4:8], 0.0)
    w = qgemm.Tensor(fmt, (40, k), blocks)
    index = rng.integers(0, 40, (2, 3))
    monkeypatch.setattr(decode, "MIN_WEIGHTS", 1)
    with np.errstate(invalid="ignore", over="ignore"):
        for name in FLOATS:
            want = fmt.dequantize(blocks, name)
            assert_same_bits(w.dequantize(name), want)
            assert_same_bits(w.rows(index, name), want[index])


@over_formats(WITH_HEADER)
def test_ranges_of_a_conversion_are_numpys(fmt):
    """On the calling thread, any number of blocks; the bits of a NaN of plain numbers are kept."""
    rng = np.random.default_rng(3)
    count = -(-encoders.LEAST_DECODED // fmt.weights) + 7
    blocks = rng.integers(0, 256, (count, fmt.block_bytes), np.uint8).view(fmt.dtype).reshape(-1)
    assert encoders.decoded(fmt, blocks[:2]) is None
    for part in (blocks, blocks[: count // 2 * 2]):
        with np.errstate(invalid="ignore", over="ignore"):
            values, want = fmt.decoded(part), fmt.decode(part)
            assert_same_bits(values, want)
        assert values.shape == want.shape
        if fmt.plain:
            assert values.tobytes() == want.tobytes()


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_on_any_number_of_threads(threads, monkeypatch):
    w = random_tensor(qgemm.FORMATS["q5_k"], 333, 512, np.random.default_rng(2))
    monkeypatch.setenv("QGEMM_THREADS", str(threads))
    assert_same_bits(w.dequantize(), w.format.dequantize(w.blocks))


def test_compiled_code_is_what_answers(monkeypatch):
    """Few weights are decoded by NumPy, before a compiler has started; rows of an index never are."""
    w = random_tensor(qgemm.FORMATS["q4_0"], 8, 64, np.random.default_rng(3))
    seen = []
    monkeypatch.setattr(native, "decode", lambda *arguments: seen.append(arguments[2]) or False)
    w.dequantize()
    assert seen == []
    w.rows([3])
    assert [index.tolist() for index in seen] == [[3]]


def test_tensors_of_other_shapes(monkeypatch):
    """Experts, a vector, rows that are not next to each other, a codebook of its own, nothing at all."""
    monkeypatch.setattr(decode, "MIN_WEIGHTS", 1)
    rng = np.random.default_rng(4)
    experts = qgemm.quantize(rng.standard_normal((3, 5, 64), np.float32), "q8_0")
    book = qgemm.quantize(rng.standard_normal((7, 64), np.float32), "kbit3", codebook=np.linspace(-2, 1, 8))
    for w in (experts, experts[1], experts[1][::2], experts[0][2], book, experts[:, :0]):
        assert_same_bits(w.dequantize(), w.format.dequantize(w.blocks))
    assert experts[0].rows(np.zeros((2, 0), np.int64)).shape == (2, 0, 64)


@pytest.mark.parametrize("by", ["numpy", ""])
def test_rows_are_rows(by, monkeypatch):
    """By integers of any type and shape; an index that is no row, or of a tensor without rows, is an error."""
    monkeypatch.setenv("QGEMM_CPU", by)
    w = random_tensor(qgemm.FORMATS["q4_1"], 9, 96, np.random.default_rng(5))
    want = w.dequantize()
    for index in ([8, 0, 8], np.uint8([[1], [2]]), np.arange(9)[::-2], 4):
        assert_array_equal(w.rows(index), want[index])
    assert w.rows([1], "float16").dtype == np.float16
    assert w.rows([1], float_dtype("bfloat16")).dtype.name == "bfloat16"
    for index in ([9], [-1], [0, 2**40]):
        with pytest.raises(IndexError, match=r"has rows 0 to 8"):
            w.rows(index)
    with pytest.raises(TypeError, match="of integers, got float64"):
        w.rows([0.5])
    with pytest.raises(qgemm.ShapeError, match="those of a matrix"):
        w[0].rows([1])

"""Weights interleaved by 16 rows: products by them have the bounds and bits of products by the blocks."""

from __future__ import annotations

import mmap
import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import assert_a8_formula, expected_sums, random_tensor
from measured_errors import check_rms
from numpy.testing import assert_array_equal
from strategies import over_formats

import qgemm
from qgemm.cpu.native import interleave, libraries, library, products
from qgemm.once import Once
from qgemm.system import process

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(library.reason()), reason=library.reason()),
]
SCALE_A_LANE = {"q1_0", "q2_0", "stq1_0", "tq1_0", "tq2_0"}  # kernels/cpu/lane_rows.h
INTEGER = [fmt for fmt in qgemm.FORMATS.values() if fmt.levels is not None and fmt.integer]
INTERLEAVED = [fmt for fmt in INTEGER if fmt.name not in SCALE_A_LANE]
MAX_BITS = 12  # a weight: a code of eight, and for 16 weights a scale and a minimum in float32


@pytest.fixture(autouse=True)
def compiled_code(monkeypatch):
    monkeypatch.delenv("QGEMM_CPU")


def packed_tensor(fmt, n, blocks, seed=0):
    """A tensor, and the same with its interleaved copy."""
    w = random_tensor(fmt, n, blocks * fmt.weights, np.random.default_rng(seed))
    packed = w.packed_for_cpu()
    assert packed.interleaved is not None
    return w, packed


def test_no_copy_without_a_use(monkeypatch):
    rng = np.random.default_rng()
    experts = qgemm.quantize(rng.standard_normal((2, 3, 64)), "q4_0")
    for w in (experts, *(random_tensor(qgemm.FORMATS[name], 3, 256, rng) for name in ("f16", *SCALE_A_LANE))):
        assert w.packed_for_cpu() is w
    monkeypatch.setenv("QGEMM_CPU", "numpy")
    assert experts[0].packed_for_cpu().interleaved is None


@over_formats(INTERLEAVED)
@pytest.mark.parametrize("m", [1, 6, 19])
@pytest.mark.parametrize("blocks", [1, 11])
def test_products(fmt, m, blocks):
    """Within the bounds of products by the blocks, for K of any number of blocks and N of no multiple of 16."""
    w, packed = packed_tensor(fmt, 37, blocks, m)
    x = np.random.default_rng(m).standard_normal((m, w.shape[1]), np.float32)
    assert_a8_formula(qgemm.matmul(x, packed, "a8"), x, w, partial_dots=True)
    expected_sums(x, w).check(qgemm.matmul(x, packed))
    assert_array_equal(packed.dequantize(), w.dequantize())


@over_formats(INTERLEAVED)
@pytest.mark.parametrize("activation", ["a8", "a16"])
def test_bits_are_those_of_tiles(fmt, activation):
    """16 rows of x have the bits that they have by the blocks. Fewer have the same bits each, "a8" those of tiles."""
    w, packed = packed_tensor(fmt, 37, 5)
    x = np.random.default_rng(1).standard_normal((23, w.shape[1]), np.float32)
    y, tiled = qgemm.matmul(x, packed, activation), 16 if activation == "a16" else 0
    assert_array_equal(y[:16], qgemm.matmul(x[:16], w, activation))
    for m in (1, 2, 3, 4, 7):
        assert_array_equal(qgemm.matmul(x[tiled : tiled + m], packed, activation), y[tiled : tiled + m])


@pytest.mark.parametrize("name", ["q8_0", "q8_1"])
def test_levels_of_minus_128(name):
    """Such bytes, which no encoder writes, go through a loop of their own on AVX2."""
    w, _ = packed_tensor(qgemm.FORMATS[name], 37, 11)
    blocks = w.blocks.copy()
    blocks["qs"][::2, :, 3] = -128
    packed = qgemm.Tensor(name, w.shape, blocks).packed_for_cpu()
    x = np.random.default_rng(2).standard_normal((7, w.shape[1]), np.float32)
    expected_sums(x, packed).check(qgemm.matmul(x, packed))


@over_formats(INTERLEAVED)
@pytest.mark.skipif("avx2" not in process.cpu().split(), reason="for a CPU with AVX2")
def test_bits_do_not_depend_on_the_instructions(fmt, monkeypatch):
    """AVX2 alone, also where x is -128, which only activations from elsewhere hold."""
    w, packed = packed_tensor(fmt, 33, 13)
    x = qgemm.quantize_activations(np.ones((7, w.shape[1]), np.float32), "a8")
    blocks = x.blocks.copy()
    blocks["qs"] = np.random.default_rng(8).choice(np.array([-128, 127], np.int8), blocks["qs"].shape)
    inputs = [qgemm.Tensor(x.format, (m, w.shape[1]), blocks[:m]) for m in (1, 2, 7)]
    inputs += [np.random.default_rng(m).standard_normal((m, w.shape[1]), np.float32) for m in (1, 7)]
    want = [qgemm.matmul(x, packed) for x in inputs]
    monkeypatch.setattr(library, "NATIVE", ("-march=x86-64-v3",))
    monkeypatch.setattr(library, "cpu", lambda: "")
    monkeypatch.setattr(library, "_loaded", Once())
    libraries.loaded.cache_clear()
    try:
        packed = qgemm.Tensor(w.format, w.shape, w.blocks).packed_for_cpu()
        for x, y in zip(inputs, want, strict=True):
            assert_array_equal(qgemm.matmul(x, packed), y)
    finally:
        libraries.loaded.cache_clear()
        products.template.cache_clear()


def test_several_weights_with_and_without():
    """Weights of a call need x in two orders; a bias, a residual and a gate follow as for blocks."""
    rng = np.random.default_rng(2)
    w = [random_tensor(qgemm.FORMATS[name], n, 256, rng) for name, n in (("q4_0", 80), ("q4_0", 48), ("q8_0", 80))]
    mixed = [w[0].packed_for_cpu(), w[1], w[2].packed_for_cpu()]
    bias, residual = rng.standard_normal(80, np.float32), rng.standard_normal((19, 80), np.float32)
    for m in (1, 6, 19):
        x = rng.standard_normal((m, 256), np.float32)
        for y, v in zip(qgemm.matmul_many(x, mixed, "a8"), w, strict=True):
            np.testing.assert_allclose(y, qgemm.matmul(x, v, "a8"), rtol=1e-4, atol=1e-3)
        for _ in range(2):
            y = qgemm.matmul(x, mixed[0], "a8", bias=bias, residual=residual[:m])
            want = qgemm.matmul(x, w[0], "a8", bias=bias, residual=residual[:m])
            np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-3)
        gate, up = random_tensor(w[0].format, 80, 256, rng), mixed[0]
        y, want = (
            qgemm.gated(x, g, u, "silu", activation="a8") for g, u in ((gate.packed_for_cpu(), up), (gate, w[0]))
        )
        check_rms(y, want, "float32")


def test_eight_bits_of_groups_read_the_blocks():
    w = random_tensor(qgemm.FORMATS["q4_0"], 37, 512, np.random.default_rng(3))
    x = np.random.default_rng(4).standard_normal((5, 512), np.float32)
    assert_array_equal(qgemm.matmul(x, w.packed_for_cpu(), "a8_g256"), qgemm.matmul(x, w, "a8_g256"))


@over_formats(INTERLEAVED)
def test_memory(fmt):
    """The copy is aligned and read-only, and belongs to one tensor of one process."""
    w, packed = packed_tensor(fmt, 32, 256 // fmt.weights)
    copy = packed.interleaved
    assert copy.ctypes.data % interleave.ALIGNED == 0
    assert not copy.flags.writeable
    assert copy.nbytes <= 32 * 256 * MAX_BITS / 8
    assert w.interleaved is None
    assert pickle.loads(pickle.dumps(packed)).interleaved is None


@pytest.mark.parametrize("name", ["q4_0", "q8_0", "q4_1", "q4_k", "q6_k", "q2_k", "iq4_nl", "iq4_xs", "mxfp4", "nvfp4"])
def test_a_copy_needs_no_more_memory_than_the_blocks(name):
    w, packed = packed_tensor(qgemm.FORMATS[name], 32, 8)
    assert packed.interleaved.nbytes <= 1.01 * w.nbytes


def test_large_scratch_memory_is_kept_until_the_next_call(monkeypatch):
    """Small memory is kept, and serves calls that need less."""
    monkeypatch.setattr(products, "KEPT_BYTES", 1 << 12)
    products.scratch(1 << 16)
    address = products.scratch(1 << 10)
    assert products._scratch.memory[0] == 1 << 10
    assert products.scratch(1 << 9) == address


@pytest.mark.skipif(sys.platform != "linux", reason="other systems get no advice")
def test_advice_is_of_whole_pages_within_the_blocks(monkeypatch):
    advice, page = [], mmap.PAGESIZE
    libc = SimpleNamespace(madvise=lambda start, length, kind: advice.append((start.value, length.value, kind)))
    monkeypatch.setattr(process.ctypes, "CDLL", lambda name: libc)
    process.advise_unused(page + 1, 3 * page)
    process.advise_unused(page + 1, page)
    assert advice == [(2 * page, 2 * page, process.MADV_COLD)]

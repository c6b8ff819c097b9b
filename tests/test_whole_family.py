"""All 240 group formats, of which other tests use twelve: pytest -m family; CI has a share of them each week."""

from __future__ import annotations

import harness
import numpy as np
import pytest
from harness import Lanes, device_array, to_device
from helpers import assert_a8_formula, expected_sums, normal, random_tensor
from strategies import over_formats

import qgemm
from qgemm.cpu import native
from qgemm.cuda.jit import codegen, nvrtc
from qgemm.cuda.kernels import routes
from qgemm.cuda.layout import tile
from qgemm.formats.groups import members

pytestmark = [pytest.mark.family, pytest.mark.compiles]
each_of_the_family = over_formats(members())


@each_of_the_family
def test_quantizing_is_a_projection(fmt):
    x = normal(3, 2 * fmt.weights, seed=1)
    once = fmt.dequantize(fmt.quantize(x))
    assert fmt.dequantize(fmt.quantize(once)).tobytes() == once.tobytes()


@each_of_the_family
@pytest.mark.skipif(bool(native.reason()), reason=f"no compiled code: {native.reason()}")
def test_products_on_the_cpu(fmt, monkeypatch):
    """Compiled code and NumPy stay within the bounds of a16 and a8."""
    w, x = random_tensor(fmt, 20, 512, np.random.default_rng(2)), normal(3, 512)
    for compiled in (False, True):
        if compiled:
            monkeypatch.delenv("QGEMM_CPU")
        expected_sums(x, w).check(qgemm.matmul(x, w))
        assert_a8_formula(qgemm.matmul(x, w, "a8"), x, w, partial_dots=compiled)


@each_of_the_family
@harness.needs_compiler
def test_lanes(fmt):
    """Blocks of random bytes come back from tiles; each weight's level is in the lane and register that owns it."""
    rng = np.random.default_rng(3)
    count = tile.columns(fmt) // fmt.weights
    blocks = np.frombuffer(rng.bytes(64 * count * fmt.block_bytes), fmt.dtype).reshape(64, count)
    tiles = tile.pack(fmt, blocks)
    assert tile.unpack(fmt, tiles, 64, tile.columns(fmt)).tobytes() == blocks.tobytes()
    levels = fmt.levels(blocks.reshape(-1))
    rows = levels.codes.reshape(64, -1).astype(np.float32) - (fmt.zero or 0)
    split = rows.reshape(4, 2, 8, -1, 4, 2, 4, 2)  # m16 r g k_block step far t e
    expected = split.transpose(3, 0, 2, 6, 4, 5, 1, 7).reshape(-1, 4, 32, 4, 4, 2)
    actual = device_array(expected.shape, "f4")
    Lanes(fmt).call("levels", 4, to_device(tiles), actual)
    np.testing.assert_array_equal(actual, expected)


@each_of_the_family
def test_a_kernel_of_each_kind_compiles(fmt):
    """Kernels compile for the tuned architecture, and products of few tokens spill nothing."""
    kernels = dict(routes.variants(fmt, 90))
    for name in ("decode", "decode_a8", "pack"):
        source = codegen.compose(routes.source_of(name), fmt, **kernels[name])
        report = nvrtc.compile_cubin(source, "sm_90a", codegen.headers(fmt)).report
        assert "0 bytes spill stores" in report

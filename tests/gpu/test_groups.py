"""Group formats on a GPU, f8_e4m3 and s7_1of2: products by every route, tiles and weights."""

from __future__ import annotations

import helpers
import numpy as np
import pytest
from helpers import cupy, expected_product, guarded, random_tensor
from strategies import EVERY_UNLISTED, over_formats

import qgemm
from qgemm.codec.format import float_dtype

M = (1, 5, 16, 17, 64, 200)


@over_formats(EVERY_UNLISTED)
def test_tiles_and_weights(fmt):
    """Blocks come back bit for bit; decoded they are the host's but for the rounding of d * q - d * z."""
    w = random_tensor(fmt, 200, 1000, np.random.default_rng(1))
    on_gpu = w.to_device()
    assert on_gpu.to_host().blocks.tobytes() == w.blocks.tobytes()
    size = np.abs(w.format.levels(w.blocks.reshape(-1)).scale).max() * (w.format.code_range[1] + 256) * 2.0**-22
    assert np.abs(on_gpu.dequantize("float32").get() - w.dequantize()).max() <= (size if fmt.zero_field else 0)


@over_formats(EVERY_UNLISTED)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_products_of_every_size(fmt, dtype):
    """Over the borders of tiles of tokens; K ends inside a tile of W; guards stay as they are."""
    rng = np.random.default_rng(2)
    w = random_tensor(fmt, 200, 1344, rng)
    on_gpu = w.to_device()
    for m in (m for m in M if dtype != "float32" or m <= 16):  # more rows of float32 x are rounded
        x = rng.standard_normal((m, w.shape[1])).astype(float_dtype(dtype))
        rows, y = guarded(m, 200)
        qgemm.matmul(cupy().asarray(x), on_gpu, out=y)
        expected_product(x, w, dtype).check(y.get())
        assert cupy().isnan(rows[[0, -1]]).all()


@over_formats([fmt for fmt in EVERY_UNLISTED if fmt.integer])
def test_products_of_quantized_activations(fmt):
    rng = np.random.default_rng(3)
    w = random_tensor(fmt, 130, 768, rng)
    on_gpu = w.to_device()
    for m in (1, 8, 16, 100):
        x = rng.standard_normal((m, w.shape[1]), np.float32)
        y = qgemm.matmul(cupy().asarray(x), on_gpu, activation="a8").get()
        helpers.assert_a8(y, x, w)

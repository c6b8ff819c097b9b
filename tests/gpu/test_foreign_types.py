"""STQ1_0 and types of ik_llama.cpp on a GPU, which holds them in another format: weights and products."""

from __future__ import annotations

import helpers
import numpy as np
import pytest
from gguf_bytes import file_of, saved, tensor
from helpers import DATA, cupy, expected_product

import qgemm

GOLDEN = np.load(DATA / "ik_types.npz")


@pytest.mark.parametrize("number", [133, 139, 144, 155, 157, 229, 340])
def test_weights_and_products(tmp_path, number):
    raw, expected = GOLDEN[f"{number}.bytes"], GOLDEN[f"{number}.values"]
    content = file_of(tensors=[tensor(b"w", expected.shape[::-1], number)], data=raw.tobytes())
    w = qgemm.open(saved(tmp_path / "m.gguf", content))["w"]
    on_gpu = w.to_device()
    assert on_gpu.format == w.format.on_device
    np.testing.assert_array_equal(on_gpu.dequantize("float32").get(), w.dequantize())
    for m in (1, 16, 100):
        x = np.random.default_rng(m).standard_normal((m, w.shape[1])).astype(np.float16)
        expected_product(x, w.in_device_form(), "float16").check(qgemm.matmul(cupy().asarray(x), on_gpu).get())


@pytest.mark.parametrize("m", [1, 40])
def test_stq1_0(m):
    rng = np.random.default_rng(0)
    w = qgemm.quantize(rng.standard_normal((200, 512)).astype(np.float32), "stq1_0")
    on_gpu = w.to_device()
    assert str(on_gpu.format) == "TQ2_0"
    np.testing.assert_array_equal(on_gpu.dequantize("float32").get(), w.dequantize())
    x = rng.standard_normal((m, 512)).astype(np.float32)
    helpers.assert_a8(qgemm.matmul(cupy().asarray(x), on_gpu, activation="a8").get(), x, w.in_device_form())

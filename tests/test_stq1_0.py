"""STQ1_0: the layout of its groups, the rule of its encoder, and the blocks of tq2_0 that a GPU holds instead."""

from __future__ import annotations

import numpy as np
import pytest
from files import model
from hypothesis import given
from hypothesis import strategies as st
from strategies import raw_blocks, seeds

import qgemm
from qgemm.cuda.kernels.needed import needed
from qgemm.formats import stq1_0

FORMAT = qgemm.FORMATS["stq1_0"]
# (sign, slot) -> the four weights of a group over d, as files of AngelSlim store them.
GROUPS = {
    (0, 0): (0, 1, 1, 1),
    (0, 1): (0, 1, -1, 1),
    (0, 3): (0, 1, -1, -1),
    (0, 6): (1, 0, 1, -1),
    (0, 9): (1, -1, 0, 1),
    (0, 15): (1, -1, -1, 0),
    (1, 0): (0, -1, -1, -1),
    (1, 7): (-1, 0, 1, 1),
    (1, 12): (-1, -1, -1, 0),
}


@pytest.mark.parametrize("group", [0, 1, 15, 16, 37, 63])
def test_a_group_is_four_weights_sixteen_apart(group):
    for (sign, slot), weights in GROUPS.items():
        blocks = np.zeros(1, FORMAT.dtype)
        blocks["d"] = 0.5
        blocks["qs"][0, group // 2] = slot << 4 * (group % 2)
        blocks["sign"][0, group // 8] = sign << group % 8
        first = 64 * (group // 16) + group % 16
        np.testing.assert_array_equal(FORMAT.decode(blocks)[0, first : first + 64 : 16], np.array(weights) / 2)


@given(seed=seeds())
def test_the_least_of_each_four_is_zero(seed):
    """The scale is the mean magnitude of all others, which keep their signs."""
    x = np.random.default_rng(seed).standard_normal((3, 256)).astype(np.float32)
    w = FORMAT.decode(FORMAT.encode(x))
    groups, size = (np.moveaxis(a.reshape(3, 4, 4, 16), 2, 3).reshape(-1, 4) for a in (w, np.abs(x)))
    np.testing.assert_array_equal((groups == 0).argmax(axis=1), size.argmin(axis=1))
    assert ((groups == 0).sum(axis=1) == 1).all()
    nonzeros = w != 0
    np.testing.assert_array_equal(np.sign(w[nonzeros]), np.sign(x[nonzeros]))
    mean = np.array(
        [size[nonzeros].mean(dtype=np.float64) for size, nonzeros in zip(np.abs(x), nonzeros, strict=True)], np.float32
    )
    np.testing.assert_array_equal(np.abs(w).max(axis=1), mean.astype(np.float16).astype(np.float32))


@given(data=st.data())
def test_tiles_of_tq2_0_have_the_same_weights(data):
    blocks = raw_blocks(data.draw, FORMAT, (5,))
    converted = FORMAT.device.convert(blocks)
    assert converted.dtype == FORMAT.on_device.dtype
    np.testing.assert_array_equal(
        FORMAT.on_device.decode(converted).view(np.uint32), FORMAT.decode(blocks).view(np.uint32)
    )


def test_a_gpu_gets_the_device_form():
    """Kernels and tiles are those of tq2_0, for experts too."""
    x = np.random.default_rng(0).standard_normal((2, 64, 512)).astype(np.float32)
    w = qgemm.quantize(x, "stq1_0")
    form = w.in_device_form()
    assert str(form.format) == "TQ2_0"
    assert form.shape == w.shape
    np.testing.assert_array_equal(form.dequantize(), w.dequantize())
    assert needed([w], 90) == needed([form], 90)
    assert qgemm.quantize(x[0], "q4_0").in_device_form().format == qgemm.FORMATS["q4_0"]


def test_it_is_written_and_read(tmp_path):
    w = qgemm.quantize(np.random.default_rng(0).standard_normal((8, 256)).astype(np.float32), "stq1_0")
    path = model(tmp_path / "m.gguf", {"w": w})
    with qgemm.open(path) as opened:
        assert opened["w"].format is stq1_0.FORMAT
        np.testing.assert_array_equal(opened["w"].blocks, w.blocks)
    done = tmp_path / "converted.gguf"
    qgemm.convert(path, done, "stq1_0", force=True)
    with qgemm.open(done) as opened:
        np.testing.assert_array_equal(opened["w"].dequantize(), w.dequantize())

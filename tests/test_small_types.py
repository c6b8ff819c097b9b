"""NVFP4, Q1_0 and Q2_0: ggml's bytes and values; blocks of other sizes under their numbers."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from helpers import DATA
from hypothesis import given
from hypothesis import strategies as st
from strategies import over_formats, seeds

import qgemm
from qgemm.formats import nvfp4

# TYPE.plain, TYPE.values: bytes of ggml 0.25.3's C code and the values that it decodes, for x of the other file.
GOLDEN = np.load(DATA / "ggml_small_types.npz")
X = np.load(DATA / "ggml_encoders.npz")["x"]
NAMES = ("nvfp4", "q1_0", "q2_0")
WITHOUT_ORACLE = [qgemm.FORMATS[name] for name in NAMES[1:]]  # the gguf package lacks them


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_ggml(name):
    quantized = qgemm.quantize(X, name)
    wrong = (quantized.blocks.view(np.uint8).reshape(len(X), -1) != GOLDEN[f"{name}.plain"]).any(axis=1)
    assert not wrong.any(), np.flatnonzero(wrong)


@pytest.mark.parametrize("name", NAMES)
def test_values_of_ggml(name):
    blocks = GOLDEN[f"{name}.plain"].reshape(-1).view(qgemm.FORMATS[name].dtype).reshape(len(X), -1)
    values = qgemm.Tensor(name, X.shape, blocks).dequantize()
    rows = GOLDEN["rows"]
    np.testing.assert_array_equal(values[rows].view(np.uint32), GOLDEN[f"{name}.values"].view(np.uint32))


@pytest.mark.parametrize("name", NAMES)
def test_an_importance_matrix_changes_nothing(name):
    """ggml has no other encoder for it, so it is refused rather than ignored."""
    with pytest.raises(qgemm.UnsupportedError, match=f"{name.upper()} is encoded alike"):
        qgemm.quantize(np.ones((1, 256), np.float32), name, imatrix=np.ones(256))


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_one_block_is_like_many(name, data):
    fmt, rng = qgemm.FORMATS[name], data.draw(seeds())
    x = (rng.standard_normal((5, fmt.weights)) * np.exp2(rng.integers(-20, 10, (5, 1)))).astype(np.float32)
    assert fmt.encode(x)[3:4].tobytes() == fmt.encode(x[3:4]).tobytes()


@over_formats(WITHOUT_ORACLE)
def test_any_bytes_decode(fmt):
    """Each weight is its scale times its code, by the definition."""
    raw = np.random.default_rng(1).integers(0, 256, (50, fmt.block_bytes), np.uint8)
    raw[:, 1] &= 0xBF  # scales below 2
    got = fmt.decode(raw.reshape(-1).view(fmt.dtype))
    bits = 16 * 8 // fmt.weights
    for block, values in zip(raw, got, strict=True):
        (d,) = struct.unpack("<e", block[:2].tobytes())
        for i, value in enumerate(values):
            code = int(block[2 + i * bits // 8]) >> i * bits % 8 & (1 << bits) - 1
            assert value == np.float32(d) * (2 * code - 1 if bits == 1 else code - 1)


@over_formats(WITHOUT_ORACLE)
def test_a_block_of_another_size_is_refused(fmt, tmp_path):
    """Forks have other blocks under these numbers; their tensors end elsewhere."""
    qgemm.write(tmp_path / "x.gguf", {"w": qgemm.quantize(np.ones((4, 256), np.float32), fmt)})
    whole = (tmp_path / "x.gguf").read_bytes()
    (tmp_path / "y.gguf").write_bytes(whole[: -(fmt.block_bytes * 4)])
    with pytest.raises(qgemm.GGUFError, match="w"):
        qgemm.open(tmp_path / "y.gguf")
    with qgemm.open(tmp_path / "x.gguf") as file:
        assert file["w"].format is fmt


@given(seeds())
def test_scales_of_nvfp4(rng):
    """A value gets the nearest scale, a scale its own byte. Just below the normal numbers ggml has the next lower."""
    halves = nvfp4.SCALES[: nvfp4.MAX_SCALE + 1] * 2
    in_range = halves < 256  # ggml writes no larger scale
    assert (nvfp4.scales(halves[in_range]) == np.flatnonzero(in_range)).all()
    values = np.append(np.exp2(rng.uniform(-6, 7.9, 500)), rng.uniform(0, 7.5 / 512, 500)).astype(np.float32)
    error = np.abs(halves[nvfp4.scales(values)] - values)
    assert (error <= np.abs(halves[in_range][:, None] - values).min(axis=0)).all()
    assert (
        nvfp4.scales(np.array([0, 7.75 / 512, 300, 1e30], np.float32)) == [0, 7, nvfp4.MAX_SCALE, nvfp4.MAX_SCALE]
    ).all()

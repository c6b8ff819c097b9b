"""ggml types without a codec here, which the gguf package decodes, for products and values on the CPU.

Today there is none: the package's codecs of types that have one are taken in its place.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from helpers import EXCERPT, converted, exact, random_blocks
from strategies import DECODED_BY_GGUF, each

import qgemm
from qgemm.codec.error_bound import a16_bound
from qgemm.codec.format import Format
from qgemm.formats import GGML_TYPES, _defined, through_gguf


def tensor_of(fmt: Format) -> qgemm.Tensor:
    """A tensor of this type that ggml made of trained weights."""
    with qgemm.open(EXCERPT) as file:
        found = next(tensor for tensor in file.values() if tensor.format.name == fmt.name)
        return qgemm.Tensor(fmt, found.shape, found.blocks.copy().view(fmt.dtype), found.name)


def test_every_codec_of_the_package_is_there():
    codecs = {kind.name.lower() for kind in GGML_QUANT_SIZES if hasattr(gguf.quants, kind.name)}
    assert codecs <= set(qgemm.FORMATS)
    assert all(GGML_TYPES[fmt.ggml_type].name == fmt.name for fmt in DECODED_BY_GGUF)


def test_a_codec_of_this_library_comes_first(monkeypatch):
    """Type by type: a module that defines the name takes the package's place."""
    assert set(through_gguf.formats()) & {"q4_0", "q6_k", "mxfp4"}
    assert not any(qgemm.FORMATS[name].decoded_by for name in ("q4_0", "q6_k", "mxfp4"))
    own = Format("tq1_0", 256, qgemm.FORMATS["tq1_0"].dtype)
    monkeypatch.setattr("qgemm.formats.tq2_0.TQ1_0", own, raising=False)
    assert _defined()["tq1_0"] is own


@each(DECODED_BY_GGUF)
def test_any_bytes_decode_as_the_package_decodes_them(fmt):
    """In slices and in threads, in every shape."""
    rng = np.random.default_rng(fmt.ggml_type)
    count = 3 * through_gguf.SLICE // fmt.weights + 5
    blocks = random_blocks(fmt, 1, count * fmt.weights, rng)
    with np.errstate(all="ignore"):
        want = gguf.dequantize(blocks.view(np.uint8).reshape(count, -1), GGMLQuantizationType(fmt.ggml_type))
    nan = np.isnan(want)
    for got in (fmt.decode(blocks[0]), fmt.dequantize(blocks).reshape(want.shape)):
        np.testing.assert_array_equal(np.isnan(got), nan)
        np.testing.assert_array_equal(got.view(np.uint32)[~nan], want.view(np.uint32)[~nan])
    np.testing.assert_array_equal(fmt.decode(blocks[0][:9:2]), want[:9:2])
    one = qgemm.Tensor(fmt, (1, 1, fmt.weights), blocks[:, None, 7:8])
    np.testing.assert_array_equal(one.dequantize()[0, 0], want[7])


@each(DECODED_BY_GGUF)
@pytest.mark.parametrize("m", [1, 100])
def test_product_within_bound(fmt, m):
    w = tensor_of(fmt)
    x = np.random.default_rng(1).standard_normal((m, w.shape[1])).astype(np.float32)
    assert (np.abs(qgemm.matmul(x, w) - exact(x, w)) <= a16_bound(x, w.dequantize())).all()


@each(DECODED_BY_GGUF)
def test_trained_weights_come_back(fmt):
    """The values are those of the float32 tensor that ggml quantized, as near as the bits allow."""
    w = tensor_of(fmt)
    with qgemm.open(EXCERPT) as file:
        source = file[f"{w.name.rpartition('.')[0]}.f32"].dequantize()
    error = np.linalg.norm(w.dequantize() - source) / np.linalg.norm(source)
    assert error < 2.0 ** (1 - fmt.bpw / 1.5) + 0.2


@each(DECODED_BY_GGUF)
def test_what_it_cannot_do_is_said(fmt):
    w = tensor_of(fmt)
    x = np.ones((1, w.shape[1]), np.float32)
    with pytest.raises(qgemm.UnsupportedError, match=f"{fmt} has no integer codes for activation 'a8'; use 'a16'"):
        qgemm.matmul(x, w, "a8")
    with pytest.raises(qgemm.UnsupportedError, match=f"{fmt} has no encoder"):
        fmt.quantize(x)
    with pytest.raises(qgemm.UnsupportedError, match=f"the gguf package decodes {fmt}.*multiply it on the CPU"):
        w.to_device()
    assert (fmt.integer, dict(fmt.slots), fmt.plain, fmt.has_scale) == (False, {}, False, False)


@pytest.mark.parametrize("target", ["f16", "f32"])
def test_conversion(target, tmp_path):
    """Every tensor of the excerpt, the values rounded once."""
    dtype = qgemm.FORMATS[target].dtype
    lines = converted(EXCERPT, tmp_path / "x.gguf", target)
    with qgemm.open(EXCERPT) as file, qgemm.open(tmp_path / "x.gguf") as made:
        names = [name for name in file if not file[name].format.plain]
        assert len(names) > 10
        for name in names:
            assert made[name].format.name == lines[name].new.lower() == target
            np.testing.assert_array_equal(made[name].dequantize(), file[name].dequantize(dtype).astype(np.float32))

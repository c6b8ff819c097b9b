"""Quantizing to a codebook on the GPU, and decoding from flat bit planes there: bit for bit what NumPy makes."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import check_product, cupy, normal
from strategies import CODEBOOKS, over_formats

import qgemm
from qgemm.codec.format import float_dtype
from qgemm.cuda import planes
from qgemm.cuda.kernels import transforms

TYPES = ("float16", "float32", "bfloat16")


def variants(fmt):
    """The format with its codebook, also descending, and others: asymmetric, ties and duplicates, extreme levels."""
    rng, count = np.random.default_rng(31), len(fmt.codebook)
    yield fmt
    yield fmt.variant(fmt.codebook[::-1], None)
    yield fmt.variant(rng.uniform(-0.3, 1, count), None)
    yield fmt.variant(rng.integers(-3, 4, count) * 2.0 ** rng.integers(-30, 2, count), None)
    yield fmt.variant(
        rng.choice(np.array([0, -0.0, 1e-45, -1e-45, 1e-38, 3e38, -3e38, 1, -1], np.float32), count), None
    )


def values(rng):
    """Rows that a kbit block can hold: ordinary, on a coarse grid, zeros, subnormal quotients, every absmax of E4M4."""
    yield rng.standard_normal((37, 160))
    yield rng.integers(-16, 17, (40, 64)) * 2.0 ** rng.integers(-12, 1, (40, 1))
    yield np.zeros((3, 32))
    yield rng.standard_normal((50, 96)) * 2.0 ** rng.integers(-149, -80, (50, 1))
    yield rng.standard_normal((60, 64)) * 2.0 ** rng.integers(-100, 2, (60, 64))
    yield rng.uniform(0, 31.4, (2000, 32)) * 10.0 ** rng.uniform(-6, 0, (2000, 1))


@over_formats(CODEBOOKS)
@pytest.mark.parametrize("dtype", TYPES)
def test_quantize_and_dequantize_equal_numpy_bit_for_bit(fmt, dtype):
    rng = np.random.default_rng(29)
    for own in variants(fmt):
        for x in values(rng):
            x = np.clip(x, -31, 31).astype(float_dtype(dtype))
            want, got = qgemm.quantize(x, own), qgemm.quantize(cupy().asarray(x), own)
            assert got.to_host().blocks.tobytes() == want.blocks.tobytes()
            with np.errstate(all="ignore"):  # levels may be beyond half
                decoded = want.dequantize(dtype)
            decoded_on_gpu = got.dequantize(dtype).get()
            nan = np.isnan(decoded.astype(np.float32))
            bits = f"u{decoded.itemsize}"
            np.testing.assert_array_equal(decoded_on_gpu.view(bits)[~nan], decoded.view(bits)[~nan])
            assert np.isnan(decoded_on_gpu[nan].astype(np.float32)).all()


@over_formats(CODEBOOKS)
def test_tiles_from_planes_are_those_from_blocks(fmt):
    """Repacking is lossless; ragged rows and columns."""
    w = qgemm.quantize(np.random.default_rng(3).standard_normal((130, 7 * 32)), fmt)
    uploaded = planes.Planes.upload(w)
    assert uploaded.nbytes == w.nbytes
    tiled = uploaded.to_device()
    assert (tiled.data == w.to_device().data).all()
    assert tiled.exponent == w.to_device().exponent
    assert tiled.to_host().blocks.tobytes() == w.blocks.tobytes()
    assert uploaded.to_host().blocks.tobytes() == w.blocks.tobytes()


def test_quantized_on_the_gpu_multiplied_on_the_gpu():
    cp = cupy()
    x = cp.asarray(normal(5, 128)).astype(np.float16)
    w = qgemm.quantize(cp.asarray(normal(100, 128, seed=1)), "kbit4", absmax="float16")
    y = qgemm.matmul(x, w.to_device())
    check_product(y.get(), x.get(), w.to_host())


def test_any_array_of_the_gpu():
    """torch, views that are not contiguous or not aligned, float64, several matrices, nothing."""
    cp = cupy()
    x = cp.asarray(normal(2, 3, 193))
    for view in (x[..., :192], x[..., 1:], x[:, ::2, 64:128], x[..., :64].astype(np.float64), x[:0, :, :32]):
        want = qgemm.quantize(view.get(), "kbit3")
        got = qgemm.quantize(view, "kbit3")
        assert got.shape == want.shape
        assert got.to_host().blocks.tobytes() == want.blocks.tobytes()
        assert (got.dequantize().get() == want.dequantize()).all()
    torch = pytest.importorskip("torch", reason="torch is not installed")
    t = torch.randn(8, 64, device="cuda")
    assert (
        qgemm.quantize(t, "kbit5").to_host().blocks.tobytes()
        == qgemm.quantize(t.cpu().numpy(), "kbit5").blocks.tobytes()
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 31.5, -40.0, 1e300])
def test_what_a_block_cannot_hold_is_refused_as_on_the_host(value):
    x = np.ones((5, 64), np.float64 if value == 1e300 else np.float32)
    x[3, 40] = value
    with pytest.raises(qgemm.QuantizeError) as on_host:
        qgemm.quantize(x, "kbit4")
    with pytest.raises(qgemm.QuantizeError) as on_gpu:
        qgemm.quantize(cupy().asarray(x), "kbit4")
    assert str(on_gpu.value) == str(on_host.value)
    assert "block 1 of row 3" in str(on_gpu.value)


def test_errors_name_what_came_and_what_fits():
    cp = cupy()
    with pytest.raises(qgemm.UnsupportedError, match="Q4_0 has no encoder on a GPU, the kbit formats have one"):
        planes.Planes.upload(qgemm.quantize(np.ones((1, 32)), "q4_0"))
    with pytest.raises(qgemm.ShapeError, match="row length 33"):
        qgemm.quantize(cp.ones((1, 33)), "kbit4")
    with pytest.raises(qgemm.ShapeError, match="only a matrix"):
        qgemm.quantize(cp.ones((2, 2, 32)), "kbit4").to_device()
    with pytest.raises(qgemm.UnsupportedError, match="KBIT4 a8"):
        qgemm.matmul(cp.ones((1, 32)), qgemm.quantize(cp.ones((2, 32)), "kbit4").to_device(), "a8")


def test_a_long_array_takes_several_turns(monkeypatch):
    """More blocks than all CTAs take at once, the last of them ragged."""
    monkeypatch.setattr(planes, "CTAS", 1)
    cp = cupy()
    threads = transforms.PLANES_THREADS * cp.cuda.Device().attributes["MultiProcessorCount"]
    x = cp.asarray(normal(5 * threads // 4 + 3, 64))
    got, want = qgemm.quantize(x, "kbit2"), qgemm.quantize(x.get(), "kbit2")
    assert got.to_host().blocks.tobytes() == want.blocks.tobytes()
    assert (got.dequantize().get() == want.dequantize()).all()

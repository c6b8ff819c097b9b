"""Encoders that search, and ternary ones: ggml's bytes, with and without an importance matrix, and more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import seeds

import qgemm
from qgemm.codec.packing import pack_planes, pack_sixes, unpack_planes, unpack_sixes

# x of 18 families of weights, an importance matrix, and TYPE.plain, TYPE.imatrix: bytes of ggml 0.25.3's C code.
GOLDEN = np.load(Path(__file__).parent / "data" / "ggml_encoders.npz")
X, IMATRIX = GOLDEN["x"], GOLDEN["imatrix"]
K_QUANTS = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs")
each_k_quant = pytest.mark.parametrize("name", K_QUANTS)


def rows_of(tensor: qgemm.Tensor) -> np.ndarray:
    return tensor.blocks.view(np.uint8).reshape(len(tensor.blocks), -1)


@pytest.mark.parametrize(("name", "kind"), [case.split(".") for case in GOLDEN if "." in case])
def test_bytes_of_ggml(name, kind):
    quantized = qgemm.quantize(X, name, imatrix=IMATRIX if kind == "imatrix" else None)
    wrong = (rows_of(quantized) != GOLDEN[f"{name}.{kind}"]).any(axis=1)
    assert not wrong.any(), np.flatnonzero(wrong)


@pytest.mark.slow
@each_k_quant
@settings(max_examples=15)  # per type
@given(data=st.data())
def test_a_super_block_does_not_depend_on_its_neighbours(name, data):
    """A block encodes alone as it does among others, although NumPy sums a single column in another order."""
    fmt, rng = qgemm.FORMATS[name], data.draw(seeds())
    count = data.draw(st.sampled_from([1, 2, 65, 512, 513]))
    x = (rng.standard_normal((count, 256)) * np.exp2(rng.integers(-20, 20, (count, 1)))).astype(np.float32)
    importance = rng.uniform(0, 4, x.shape).astype(np.float32)
    for encode in (fmt.encode, lambda values: fmt.encoding.weighted(values, importance[: len(values)])):
        all_at_once = encode(x)
        assert all_at_once[:1].tobytes() == encode(x[:1]).tobytes()
    last = count - 1
    assert fmt.encode(x)[last:].tobytes() == fmt.encode(x[last:]).tobytes()
    assert (
        fmt.encoding.weighted(x, importance)[last:].tobytes()
        == fmt.encoding.weighted(x[last:], importance[last:]).tobytes()
    )


@each_k_quant
def test_no_blocks_of_no_values(name):
    fmt, none = qgemm.FORMATS[name], np.zeros((0, 256), np.float32)
    assert len(fmt.encode(none)) == len(fmt.encoding.weighted(none, none)) == 0


@each_k_quant
def test_zeros_and_a_constant(name):
    """Zeros are exact, a constant nearly."""
    x = np.zeros((2, 512), np.float32)
    x[1] = -0.75
    decoded = qgemm.quantize(x, name).dequantize()
    assert (decoded[0] == 0).all()
    np.testing.assert_allclose(decoded[1], x[1], rtol=0.04)


@pytest.mark.parametrize(
    ("name", "max_error"),
    [("q2_k", 0.35), ("q3_k", 0.2), ("iq4_xs", 0.09), ("q4_k", 0.09), ("q5_k", 0.045), ("q6_k", 0.025)],
)
def test_errors_of_normal_weights(name, max_error):
    """Relative RMS errors; an importance matrix has less error where it weighs more."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((32, 1024)).astype(np.float32)
    important = np.where(rng.random(1024) < 0.1, np.float32(100), np.float32(1))
    plain, weighted = (qgemm.quantize(x, name, imatrix=importance).dequantize() - x for importance in (None, important))
    assert np.sqrt((plain**2).mean()) < max_error
    assert (weighted[:, important > 1] ** 2).mean() < (plain[:, important > 1] ** 2).mean()


@given(seeds())
def test_packing_is_undone(rng):
    sc, m = rng.integers(0, 64, (2, 3, 8), dtype=np.uint8)
    assert all(map(np.array_equal, unpack_sixes(pack_sixes(sc, m)), (sc, m)))
    for bits in (1, 2, 4):
        codes = rng.integers(0, 2**bits, (3, 64 // bits), dtype=np.uint8)
        assert np.array_equal(unpack_planes(pack_planes(codes, bits), bits), codes)


@pytest.mark.parametrize("name", ["q4_0", "q5_1", "iq4_nl", *K_QUANTS])
def test_an_importance_matrix_of_rows(name):
    """An importance matrix is [K] for all rows, or has the shape of x."""
    rng = np.random.default_rng(6)
    x, importance = rng.standard_normal((2, 3, 512)).astype(np.float32), rng.uniform(0, 2, (2, 3, 512))
    alike = qgemm.quantize(x, name, imatrix=importance[0, 0])
    own = qgemm.quantize(x, name, imatrix=importance)
    assert alike.blocks[0, 0].tobytes() == own.blocks[0, 0].tobytes()
    assert alike.blocks[1].tobytes() != own.blocks[1].tobytes()
    assert qgemm.quantize(x[1, 2], name, imatrix=importance[1, 2]).blocks.tobytes() == own.blocks[1, 2].tobytes()
    assert qgemm.quantize(x[:0], name, imatrix=importance[0, 0]).shape == (0, 3, 512)


def test_what_an_importance_matrix_must_be():
    x = np.ones((2, 256), np.float32)
    with pytest.raises(qgemm.ShapeError, match=r"imatrix has shape \(255,\), x of shape \(2, 256\) needs"):
        qgemm.quantize(x, "q4_k", imatrix=np.ones(255))
    for bad in (-1, np.nan, np.inf):
        with pytest.raises(qgemm.UnsupportedError, match="negative or not finite"):
            qgemm.quantize(x, "q4_k", imatrix=np.full(256, bad))
    for bad, dtype in (("text", "<U4"), (np.full(256, 1 + 1j), "complex128"), (np.full(256, None), "object")):
        with pytest.raises(TypeError, match=f"imatrix must be of real numbers, got {dtype}"):
            qgemm.quantize(x, "q4_k", imatrix=bad)
    with pytest.raises(qgemm.UnsupportedError, match="negative or not finite"):
        qgemm.quantize(x, "q4_k", imatrix=np.full(256, 1e300))  # beyond float32
    with pytest.raises(qgemm.UnsupportedError, match="Q8_0 is encoded alike with an importance matrix and without"):
        qgemm.quantize(x, "q8_0", imatrix=np.ones(256))
    x[1, 3] = np.nan
    with pytest.raises(qgemm.QuantizeError, match="block 0 of row 1 holds NaN"):
        qgemm.quantize(x, "q4_k", imatrix=np.ones(256))

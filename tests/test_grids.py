"""Encoders of the IQ1, IQ2 and IQ3 types: ggml's bytes, neighbours of codes that are no point, and refusals."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from helpers import DATA
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import seeds

import qgemm
from qgemm.codec.grids import DISTANCES, grid
from qgemm.converter.mixture import needs_importance

# TYPE.plain, TYPE.imatrix: bytes of ggml 0.25.3's C code, for x and imatrix of the other file.
GOLDEN = np.load(DATA / "ggml_grids.npz")
OTHERS = np.load(DATA / "ggml_encoders.npz")
X, IMATRIX = OTHERS["x"], OTHERS["imatrix"]
ALWAYS_NEED = ("iq1_s", "iq2_xs", "iq2_xxs")  # ggml_quantize_requires_imatrix
NAMES = ("iq1_m", "iq1_s", "iq2_s", "iq2_xs", "iq2_xxs", "iq3_s", "iq3_xxs")
each_type = pytest.mark.parametrize("name", NAMES)


@pytest.mark.parametrize(("name", "kind"), [case.split(".") for case in GOLDEN])
def test_bytes_of_ggml(name, kind):
    """With zeros among its groups an iq3_s block of ggml is one that it reads otherwise; these are its bytes."""
    encoded = qgemm.quantize(X, name, imatrix=IMATRIX if kind == "imatrix" else None)
    wrong = (encoded.blocks.view(np.uint8).reshape(len(X), -1) != GOLDEN[f"{name}.{kind}"]).any(axis=1)
    assert not wrong.any(), np.flatnonzero(wrong)


def test_every_case_is_held_against_ggml():
    cases = {f"{name}.imatrix" for name in NAMES} | {f"{name}.plain" for name in NAMES if name not in ALWAYS_NEED}
    assert set(GOLDEN) == cases


@each_type
def test_an_importance_matrix_is_asked_for_where_ggml_has_no_encoder_without(name, tmp_path):
    x = np.ones((1, 256), np.float32)
    if name not in ALWAYS_NEED:
        assert qgemm.quantize(x, name).shape == (1, 256)
        return
    with pytest.raises(qgemm.UnsupportedError, match=f"{name.upper()} is encoded with an importance matrix alone"):
        qgemm.quantize(x, name)
    qgemm.write(tmp_path / "x.gguf", {"output.weight": qgemm.quantize(x, "f32")})
    with pytest.raises(qgemm.QgemmError, match=f"{name.upper()} needs an importance matrix"):
        qgemm.convert(tmp_path / "x.gguf", tmp_path / "y.gguf", name, pure=True)
    assert not (tmp_path / "y.gguf").exists()
    assert needs_importance("output.weight", name, name)


@pytest.mark.slow
@each_type
@settings(max_examples=15)  # for each type
@given(data=st.data())
def test_a_super_block_does_not_depend_on_its_neighbours(name, data):
    """One alone, the last of many: sums of NumPy run in another order over a single column."""
    fmt, rng = qgemm.FORMATS[name], data.draw(seeds())
    x = rng.standard_normal((data.draw(st.sampled_from([2, 65])), 256))
    x = (x * np.exp2(rng.integers(-20, 14, (len(x), 1)))).astype(np.float32)
    importance = rng.uniform(0, 4, x.shape).astype(np.float32)
    assert (
        fmt.encoding.weighted(x, importance)[-1:].tobytes() == fmt.encoding.weighted(x[-1:], importance[-1:]).tobytes()
    )
    if name not in ALWAYS_NEED:
        assert fmt.encode(x)[-1:].tobytes() == fmt.encode(x[-1:]).tobytes()


@given(data=st.data())
@pytest.mark.parametrize("name", NAMES)
def test_any_finite_values_are_encoded(name, data):
    """Sparse, tiny, all alike, with importances of zero: values come back finite, of zeros zeros."""
    rng = data.draw(seeds())
    x = rng.standard_normal((3, 256)) * np.exp2(rng.integers(-60, 12, (3, 1)))
    x[rng.random(x.shape) < data.draw(st.sampled_from([0, 0.5, 0.99]))] = 0
    x[rng.integers(3)] = data.draw(st.sampled_from([0.0, -0.75, 2.0**-30]))
    importance = rng.uniform(0, 4, 256)
    importance[rng.random(256) < data.draw(st.sampled_from([0, 0.5, 1]))] = 0
    x = x.astype(np.float32)
    values = qgemm.quantize(x, name, imatrix=importance.astype(np.float32)).dequantize()
    assert np.isfinite(values).all()
    assert (values[(x == 0).all(axis=1)] == 0).all()


def test_values_of_a_grid_are_fitted_nearly():
    """Weights that a type stores exactly have far less error than normal weights, whose error falls with more bits."""
    rng, errors = np.random.default_rng(3), {}
    x = rng.standard_normal((16, 512)).astype(np.float32)
    for name in NAMES:
        once = qgemm.quantize(x, name, imatrix=np.ones(512))
        change = qgemm.quantize(once.dequantize(), name, imatrix=np.ones(512)).dequantize() - once.dequantize()
        errors[name] = np.sqrt(((once.dequantize() - x) ** 2).mean())
        assert np.sqrt((change**2).mean()) < 0.35 * errors[name], name
    ranked = sorted(NAMES, key=errors.__getitem__)
    assert ranked == sorted(NAMES, key=lambda name: -qgemm.FORMATS[name].bpw)


@pytest.mark.parametrize("name", DISTANCES)
def test_neighbours_are_the_nearest_points(name):
    """The neighbours of some codes, by hand: all points at the few smallest distances, the nearest first."""
    points, rng = grid(name), np.random.default_rng(4)
    codec = getattr(gguf.quants, name)
    assert (np.array(codec.grid_map)[points.points] == codec.grid.reshape(points.points.shape)).all()
    off = np.flatnonzero(points.point_of < 0)
    assert len(off) + len(points.points) == len(points.point_of)
    for number in rng.choice(off, 50):
        codes = number // points.base ** np.arange(points.points.shape[1]) % points.base
        distances = ((points.points - codes) ** 2).sum(axis=1)
        reach = np.unique(distances)[DISTANCES[name] - 1]
        want = sorted(np.flatnonzero(distances <= reach), key=lambda point: (distances[point], point))
        start = points.starts[number]
        assert points.neighbours[start : start + points.counts[number]].tolist() == want


@each_type
def test_a_scale_beyond_float16_is_refused(name):
    """Also the scale whose bits lie in four fields; refused blocks would decode to infinity."""
    x = np.ones((2, 512), np.float32)
    assert np.isfinite(qgemm.quantize(x * 1000, name, imatrix=np.ones(512)).dequantize()).all()
    x[1, 256:] = 1e8
    with pytest.raises(qgemm.QuantizeError, match="block 1 of row 1 needs"):
        qgemm.quantize(x, name, imatrix=np.ones(512))

"""Compiled fits of the encoders: NumPy's, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import DATA
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from strategies import seeds

import qgemm
from qgemm.codec import search
from qgemm.cpu.native import encoders, library

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(library.reason()), reason=library.reason()),
]
GOLDEN = np.load(DATA / "ggml_encoders.npz")
GRIDS = np.load(DATA / "ggml_grids.npz")
STEPS = (search.STEPS, search.Steps(-0.5, 0.1, 16, absolute=True), None)


@pytest.fixture(autouse=True)
def compiled_code(monkeypatch):
    monkeypatch.delenv("QGEMM_CPU")


@pytest.mark.parametrize("steps", STEPS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@example(data=None)
def test_fits_are_those_of_numpy(steps, data):
    """Any number of groups, also of zeros, all alike, tiny, of weights that are zero."""
    rng = np.random.default_rng(0) if data is None else data.draw(seeds())
    size, n = (32, 65) if data is None else (data.draw(st.sampled_from([16, 32])), data.draw(st.integers(2, 50)))
    x = rng.standard_normal((size, n)) * np.exp2(rng.integers(-140, 100, n))
    x[:, rng.random(n) < 0.2] = rng.choice([0.0, -0.0, 1.5, -2.0])
    x = np.where(rng.random((size, n)) < 0.1, 0, x).astype(np.float32)
    weights = np.where(rng.random((size, n)) < 0.1, 0, rng.random((size, n))).astype(np.float32)
    most = int(rng.choice([3, 15, 31]))
    found = encoders.fit(x, weights, most, steps)
    before, search._compiled[:] = list(search._compiled), []
    try:
        with np.errstate(all="ignore"):
            want = search.symmetric(x, weights, most) if steps is None else search.affine(x, weights, most, steps)
    finally:
        search._compiled[:] = before
    assert found is not None
    np.testing.assert_array_equal(found.codes, want.codes)
    assert found.scale.tobytes() == want.scale.tobytes()
    assert (found.minimum is None) == (want.minimum is None)
    if want.minimum is not None:
        np.testing.assert_array_equal(found.minimum, want.minimum)


@pytest.mark.parametrize("name", ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k"])
def test_bytes_with_it_and_without(name, monkeypatch):
    encoders.install()
    made = [qgemm.quantize(GOLDEN["x"], name, imatrix=of) for of in (None, GOLDEN["imatrix"])]
    for each, kind in zip(made, ("plain", "imatrix"), strict=True):
        assert each.blocks.tobytes() == GOLDEN[f"{name}.{kind}"].tobytes()
    monkeypatch.setenv("QGEMM_CPU", "numpy")
    assert qgemm.quantize(GOLDEN["x"], name).blocks.tobytes() == made[0].blocks.tobytes()


@pytest.mark.parametrize("name", [case for case in GRIDS if "." in case])
def test_grids_with_it(name):
    """The bytes of ggml, by compiled code."""
    encoders.install()
    kind, _, way = name.partition(".")
    made = qgemm.quantize(GOLDEN["x"], kind, imatrix=GOLDEN["imatrix"] if way == "imatrix" else None)
    assert made.blocks.tobytes() == GRIDS[name].tobytes()

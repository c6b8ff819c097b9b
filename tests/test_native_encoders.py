"""Compiled fits of the encoders: the bytes of NumPy's, and so of ggml's."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from helpers import DATA
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from strategies import seeds

import qgemm
from qgemm.codec import search
from qgemm.cpu.native import encoders, library
from qgemm.errors import QuantizeError
from qgemm.formats.kbit import kbit, kbit_float32

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(library.reason()), reason=library.reason()),
]
GOLDEN = {**np.load(DATA / "ggml_encoders.npz"), **np.load(DATA / "ggml_grids.npz")}
X, IMATRIX = GOLDEN["x"], GOLDEN["imatrix"]
WEIGHTED = [name for name, fmt in qgemm.FORMATS.items() if search.searched(fmt)]
KBIT = {
    **{name: fmt for name, fmt in qgemm.FORMATS.items() if fmt.variant is not None},
    "kbit3 with levels alike, in no order": kbit(3, codebook=[0.5, -1, 0.25, 0.25, 0, 1, -0.5, -1]),
    "kbit4_f32": kbit_float32(4, np.arange(16) ** 2),
}
GROUPS = ("u2z_g64", "u3_g32", "u4z_g128", "u5_g256_bf16", "u6z_g32_bf16", "u7_g128", "u8_g64", "u8z_g256")
COMPILED = {name: qgemm.FORMATS[name] for name in dict.fromkeys([*WEIGHTED, *encoders.OF_BLOCKS, *GROUPS])} | KBIT


each_compiled = pytest.mark.parametrize(("name", "fmt"), COMPILED.items(), ids=list(COMPILED))


@pytest.fixture(autouse=True)
def compiled_code(monkeypatch):
    monkeypatch.delenv("QGEMM_CPU")
    monkeypatch.setattr(encoders, "FEW", {})


@each_compiled
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@example(data=None)
def test_bytes_are_those_of_numpy(name, fmt, monkeypatch, data):
    """Any number of blocks, also of zeros, all alike, tiny, of weights that are zero."""
    rng = np.random.default_rng(0) if data is None else data.draw(seeds())
    n = 17 if data is None else data.draw(st.integers(1, 40))
    x = rng.standard_normal((n, fmt.weights)) * np.exp2(rng.integers(rng.choice([-30, -140]), 10, (n, 1)))
    x[rng.random(n) < 0.2] = rng.choice([0.0, -0.0, 0.75, -2.0])
    x[rng.random(n) < 0.2] = rng.choice([0.75, -0.75], fmt.weights)  # magnitudes alike, signs apart
    x = np.where(rng.random(x.shape) < rng.choice([0, 0.1, 0.9]), 0, x).astype(np.float32)
    column_weights = np.where(rng.random(x.shape) < 0.1, 0, rng.random(x.shape)).astype(np.float32)
    for importance in (column_weights, None):
        if fmt.encoding.needs_importance if importance is None else name not in WEIGHTED:
            continue

        def encoded(importance=importance):
            with np.errstate(all="ignore"):
                return fmt.encoded(x) if importance is None else search.search(fmt, x, importance)

        blocks = encoded()
        monkeypatch.setenv("QGEMM_CPU", "numpy")
        want = encoded()
        monkeypatch.delenv("QGEMM_CPU")
        wrong = blocks.view(np.uint8).reshape(n, -1) != want.view(np.uint8).reshape(n, -1)
        assert not wrong.any(), (importance is not None, np.argwhere(wrong))


@pytest.mark.parametrize("case", [case for case in GOLDEN if "." in case])
def test_bytes_of_ggml(case):
    """Every type that is fitted, with an importance matrix and without."""
    name, _, way = case.partition(".")
    tensor = qgemm.quantize(X, name, imatrix=IMATRIX if way == "imatrix" else None)
    assert tensor.blocks.tobytes() == GOLDEN[case].tobytes()


def test_every_type_that_is_fitted_has_a_golden_case():
    fitted = {"q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs"}
    assert {case.partition(".")[0] for case in GOLDEN if "." in case} >= fitted


@each_compiled
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=seeds(), value=st.sampled_from([np.nan, -np.inf, np.inf, 3e38, 65504.0 * 127, 31.25, 32.0, 1e-41]))
def test_numpy_refuses_the_same_blocks(name, fmt, monkeypatch, seed, value):
    """Values that are not finite, and scales at the ends of float16 and E4M4, are refused; else the bytes are equal."""
    rng = np.random.default_rng(seed)
    x = (value * rng.random((3, 2 * fmt.weights))).astype(np.float32)
    x[rng.random(x.shape) < 0.9] = 1
    x[rng.integers(3), rng.integers(x.shape[1])] = value

    def encoded():
        try:
            return qgemm.quantize(x, fmt).blocks.tobytes()
        except QuantizeError as error:
            return str(error)

    if fmt.encoding.needs_importance:
        return
    by_c = encoded()
    monkeypatch.setenv("QGEMM_CPU", "numpy")
    assert encoded() == by_c
    monkeypatch.delenv("QGEMM_CPU")
    assert isinstance(by_c, str) or np.isfinite(value)


@each_compiled
def test_numpy_does_without(name, fmt, monkeypatch):
    """No library is asked for where QGEMM_CPU says so."""
    monkeypatch.setenv("QGEMM_CPU", "numpy")
    monkeypatch.setattr(encoders, "library", lambda source: pytest.fail("compiles"))
    x = np.ones((2, 256), np.float32)
    assert (qgemm.quantize(x, fmt, imatrix=x[0] if name in WEIGHTED else None).dequantize() > 0).all()


@pytest.mark.parametrize(("name", "source"), [("q4_0", encoders.BLOCKS), ("q4_k", encoders.FIT)])
def test_few_weights_wait_for_no_compiler(name, source, monkeypatch):
    """NumPy encodes them, of all calls together, unless the library is there already."""
    sources, compiled = [], library.library
    for module, function in ((encoders, "library"), (encoders, "pooled")):
        monkeypatch.setattr(module, function, lambda source: sources.append(source) or compiled(source))
    monkeypatch.setattr(encoders, "FEW", {source: 3 * 512})
    monkeypatch.setattr(encoders, "_encoded", Counter())
    monkeypatch.setattr(encoders, "at_hand", lambda source: False)
    x = np.random.default_rng(0).standard_normal((2, 256), np.float32)
    blocks = [qgemm.quantize(x, name).blocks.tobytes() for _ in range(3)]
    assert not sources
    blocks.append(qgemm.quantize(x, name).blocks.tobytes())
    assert set(sources) == {source}
    monkeypatch.setattr(encoders, "_encoded", Counter())
    monkeypatch.setattr(encoders, "at_hand", library.at_hand)
    sources.clear()
    blocks.append(qgemm.quantize(x, name).blocks.tobytes())
    assert set(sources) == {source}
    assert len(set(blocks)) == 1

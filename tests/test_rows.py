"""DeviceTensor.rows without a GPU: its launch runs the kernel on the host, with the addresses that it gets."""

from __future__ import annotations

from functools import cache

import cupy_like
import harness
import helpers
import numpy as np
import pytest
from harness import argument_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import TILED, by_turns, over_formats, seeds

import qgemm
from qgemm.cuda import libraries, rows
from qgemm.cuda.kernels import transforms
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.tensor import DeviceTensor

pytestmark = [pytest.mark.compiles, harness.needs_compiler]
FLOATS = [qgemm.FORMATS[name] for name in ("f16", "bf16", "f32")]
DTYPES = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # relative rounding errors


class Launch:
    """Stands for Launch: a call runs the grid at once."""

    def __init__(self, kernel, grid, block, shared, arguments, pointers, count, programmatic):
        assert (shared, count, programmatic) == (0, len(pointers), False)
        self.kernel, self.grid, self.block, self.scalars = kernel, grid, block, arguments[count:]
        assert all(type(scalar) is type(argument_of(scalar.value)) for scalar in self.scalars)

    def __call__(self, stream, *pointers):
        assert stream == 7
        self.kernel(self.grid, self.block, *pointers, *self.scalars)


@pytest.fixture
def host(monkeypatch):
    """CuPy on NumPy, and kernels on the host."""
    cupy_like.install(monkeypatch)
    kernel = cache(harness.Kernel)
    monkeypatch.setattr(libraries, "LIBRARIES", {})
    monkeypatch.setattr(transforms, "load", lambda name, fmt, **template: kernel(name, fmt, **template))
    monkeypatch.setattr(rows, "Launch", Launch)
    monkeypatch.setattr(rows, "gather_launch", rows.gather_launch.__wrapped__)  # not cached across tests


def on_device(w: qgemm.Tensor) -> DeviceTensor:
    if w.format.plain:
        return DeviceTensor(w.format, w.shape, cupy_like.asarray(w.blocks))
    packed = tiles.pack(w.format, w.blocks)
    return DeviceTensor(w.format, w.shape, cupy_like.asarray(packed.view(np.uint8).reshape(*packed.shape, -1)))


@over_formats([*TILED, *FLOATS])
@given(data=st.data())
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_of_an_index(fmt, data, host):
    """An index of any shape and order gathers the rows that NumPy decodes, rounded once."""
    rng, dtype = data.draw(seeds()), by_turns(list(DTYPES), fmt, [*TILED, *FLOATS])
    k = fmt.weights * data.draw(st.integers(1, 12 if fmt.weights > 100 else 90))
    w = helpers.random_tensor(fmt, data.draw(st.sampled_from([1, 63, 64, 65, 200])), k, rng)
    shape = data.draw(st.sampled_from([(), (1,), (7,), (3, 2), (0,), (2, 0)]))
    index = rng.integers(0, len(w), shape)
    gathered = on_device(w).rows(cupy_like.asarray(index), dtype)
    want = w.dequantize()[index]
    assert (gathered.shape, gathered.dtype.name) == ((*shape, k), dtype)
    assert (np.abs(gathered.get().astype(np.float32) - want) <= DTYPES[dtype] * np.abs(want) + 2.0**-25).all()


def test_an_unsupported_index_is_refused(host):
    w = on_device(helpers.random_tensor(qgemm.FORMATS["q4_0"], 64, 64, np.random.default_rng(0)))
    index = cupy_like.asarray(np.arange(8))
    elsewhere = cupy_like.asarray(np.arange(8))
    elsewhere.number = 1
    for wrong in (np.arange(8), elsewhere, [0]):
        with pytest.raises(qgemm.UnsupportedError, match=r"a CuPy array or torch tensor on cuda:0"):
            w.rows(wrong)
    for wrong, dtype in ((index.astype(np.int32), "float32"), (index[::2], "float32"), (index, "float64")):
        with pytest.raises(qgemm.UnsupportedError, match=r"float16, bfloat16.* by a contiguous index of int64; got"):
            w.rows(wrong, dtype)

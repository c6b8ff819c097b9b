"""Products of plain weights by cuBLAS and by gemv_floats without a GPU: kernels run on the host, NumPy is cuBLAS."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace

import harness
import numpy as np
import pytest
from harness import argument_of
from launches_like import array_at
from moe_on_host import Launch as LaunchOfStruct

import qgemm
from qgemm.codec.format import float_dtype
from qgemm.cuda import libraries
from qgemm.cuda.kernels import add_epilogue, dot_floats, panels, routes, transforms
from qgemm.cuda.problem import C_TYPES, ITEMSIZE, Output, Problem
from qgemm.gating import gated_by

pytestmark = [pytest.mark.compiles, harness.needs_compiler]
TYPES = tuple(C_TYPES)
FORMATS = [qgemm.FORMATS[name] for name in ("f16", "bf16", "f32")]


class Launch:
    """Stands for Launch: a call runs the grid at once."""

    def __init__(self, kernel, grid, block, shared, arguments, pointers, count, programmatic=True):
        assert (shared, count) == (0, len(pointers))
        self.kernel, self.grid, self.block, self.scalars = kernel, grid, block, arguments[count:]
        assert all(type(scalar) is type(argument_of(scalar.value)) for scalar in self.scalars[:2])

    def __call__(self, stream, *pointers):
        self.kernel(self.grid, self.block, *pointers, *self.scalars)


class Cublas:
    """Stands for cuBLAS: NumPy multiplies; notes the types of its operands."""

    lock = nullcontext()

    def __init__(self):
        self.types = []

    def multiply(self, stream, x, w, y, alpha):
        assert x.dtype == w.dtype
        assert y.dtype in ("float32", x.dtype)
        self.types.append((x.dtype, y.dtype))
        left, right = (array_at(m.pointer, (m.rows, m.columns), m.dtype).astype(np.float32) for m in (x, w))
        for row, values in enumerate(alpha * (left @ right.T)):
            array_at(y.pointer + row * y.pitch * ITEMSIZE[y.dtype], (y.columns,), y.dtype)[...] = values


@pytest.fixture
def cublas(monkeypatch):
    library, kernel = Cublas(), cache(harness.Kernel)
    for module in (transforms, dot_floats):
        monkeypatch.setattr(module, "load", lambda name, fmt=None, **template: kernel(name, fmt, **template))
    monkeypatch.setattr(add_epilogue, "Launch", Launch)
    monkeypatch.setattr(panels, "cublas", lambda device: library)
    monkeypatch.setattr(panels, "relaxed_capture", nullcontext)
    arrays = SimpleNamespace(
        stream_context=lambda stream, device: nullcontext(),
        array_at=lambda pointer, shape, name, device: array_at(pointer, shape, name),
        assign=libraries._assign,
    )
    monkeypatch.setattr(panels, "default_library", lambda: arrays)

    def scratch(arrays, device, stream, nbytes):
        memory = np.full(nbytes, 0xFF, np.uint8)
        return memory, memory.ctypes.data

    monkeypatch.setattr(panels, "_scratch", scratch)
    return library


def operands(fmt, m, n, k, x_type):
    rng = np.random.default_rng(m)
    w = qgemm.quantize(rng.standard_normal((n, k)).astype(np.float32), fmt.name)
    return rng.standard_normal((m, k)).astype(np.float32).astype(float_dtype(x_type)), w


def multiplied(launch, x, w, output, bias, residual):
    """y of a launch, whose memory held NaN before."""
    blocks = np.ascontiguousarray(w.blocks)
    y = np.full((len(x), w.shape[0]), np.nan, np.float32).astype(float_dtype(output.y))
    pointers = [0 if array is None else array.ctypes.data for array in (x, blocks, y, bias, residual)]
    launch(7, *pointers)
    return y.astype(np.float32)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("x_type", TYPES)
@pytest.mark.parametrize("m", [3, 20])
def test_sums_are_exact_products_of_any_types(fmt, x_type, m, cublas, monkeypatch):
    """With and without an epilogue, in panels of 64 rows; the GPU's route names the kernel."""
    n, k = 150, 40
    monkeypatch.setattr(panels, "WORKSPACE", 64 * k * 4)
    x, w = operands(fmt, m, n, k, x_type)
    exact = x.astype(np.float64) @ w.dequantize(np.float64).T
    rng = np.random.default_rng(1)
    bias, residual = (rng.standard_normal(shape).astype(np.float32) for shape in (n, (m, n)))
    bias, residual = bias.astype(np.float16), residual.astype(float_dtype("bfloat16"))
    for y_type in TYPES:
        for added in ("", "bias", "residual", "gate"):
            output = Output(
                n, y_type, "float16" * (added == "bias"), "bfloat16" * (added in ("residual", "gate")),
                "silu" * (added == "gate"),
            )  # fmt: skip
            p = Problem(fmt, "a16", m, n, k, 90, C_TYPES[x_type], (output,))
            kernel = routes.route(p).kernel
            same = panels.plain_type(fmt) == x.dtype.name
            assert kernel.name == ("gemv_floats" if m <= 8 and not same else "cublas")
            monkeypatch.setattr(dot_floats, "Launch", HostLaunch)
            launch = kernel.launch(p, kernel.choose(p))
            y = multiplied(launch, x, w, output, bias if output.bias else None, residual if output.residual else None)
            want = exact + bias.astype(np.float64) if output.bias else exact
            if added == "residual":
                want = want + residual.astype(np.float64)
            elif added == "gate":
                want = gated_by("silu", residual.astype(np.float64), want)
            loss = {"float32": 0, "float16": 2.0**-11, "bfloat16": 2.0**-8}[y_type]
            np.testing.assert_allclose(y, want, rtol=loss + 1e-5, atol=1e-4)
            if kernel.name == "cublas":
                assert cublas.types[-1][0] == (x.dtype.name if same else "float32")


class HostLaunch(LaunchOfStruct):
    """A launch of a struct of arguments, by `enter` as well."""

    @property
    def enter(self):
        return self.__call__

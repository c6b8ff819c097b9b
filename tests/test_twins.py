"""Twins of host and device: a wrong copy on either side does not compile, or gives wrong numbers, without a GPU."""

from __future__ import annotations

import ctypes
import shutil
from functools import partial

import harness
import helpers
import numpy as np
import pytest
from harness import products
from q8_1_blocks import in_k_blocks

import qgemm
from qgemm.cuda.jit import codegen, nvrtc, sources
from qgemm.cuda.jit.twins import Divisor
from qgemm.cuda.kernels import routes
from qgemm.cuda.problem import Q8_1

pytestmark = [pytest.mark.compiles, harness.needs_compiler]
FORMAT = qgemm.FORMATS["q4_0"]


def compile_kernel(kernel):
    """A kernel of q4_0 in its first template, by NVRTC for the oldest GPU that it supports."""
    sm = 90 if kernel == "prefill_sm90" else 80
    template = next(template for name, template in routes.variants(FORMAT, sm) if name == kernel)
    arch = {80: "sm_80", 90: "sm_90a"}[sm]
    nvrtc.check(codegen.compose(routes.source_of(kernel), FORMAT, **template), arch, codegen.headers(FORMAT))


def assert_epilogue():
    """y = x @ W.T + bias, y and bias in float16."""
    w, x, expected = products.decode_problem(FORMAT, 1)
    bias = helpers.normal(len(w.blocks), seed=5).astype(np.float16)
    y = products.run_decode(FORMAT, "decode", "half", x.astype(np.float16), w, 1, "float16", bias)
    expected.plus(bias).rounded(np.float16).check(y)


def assert_division():
    """Divisor of the host and divide() of the device agree."""
    library = harness.library(f'#include "{harness.FOLDER / "schedule.cpp"}"', codegen.headers())
    for number, by in ((6, 3), (1000, 7), (2**31 - 1, 132)):
        assert library.divide(ctypes.byref(Divisor.by(by)), number) == number // by


def assert_activations():
    """The device decodes NumPy's blocks, in the order of the weights' codes, and quantizes x to the same values."""
    x = helpers.normal(2, 64, seed=4)
    quantized = qgemm.quantize_activations(x)
    expected, decoded = quantized.dequantize(), harness.device_array((2, 64), np.float32)
    for name, source, types in (
        ("dequantize_activations", in_k_blocks(quantized.blocks), {}),
        ("round_activations", x, {"In": "float"}),
    ):
        harness.Kernel(name, Out="float", **types)((2, 1), 128, harness.to_device(source), decoded, 64, 2)
        assert (decoded == expected).all()


def assert_a8():
    """Integer dot products are in the unit of the activations."""
    w, x, _ = products.problem(FORMAT, 1)
    blocks = in_k_blocks(qgemm.quantize_activations(x).blocks)
    helpers.assert_a8_formula(products.run_decode(FORMAT, "decode_a8", Q8_1, blocks, w, 1), x, w)


SWAPPED = ("int cluster_split_k; u32 units_per_cta;", "u32 units_per_cta; int cluster_split_k;")  # fields of StreamK
LIES = (
    # file                truth                      lie                         check that fails
    ("gemm/sm80/a16.cuh",      "In[K_BLOCK + 8]",         "In[K_BLOCK + 16]",         "prefill_sm80"),
    ("gemm/sm80/reduce.cuh",   "[Config::EPI_TOKENS][",   "[2 * Config::EPI_TOKENS][", "prefill_sm80"),
    ("host.cuh",          *SWAPPED,                                              "prefill_sm90"),
    ("host.cuh",          "int y; int bias;",        "int bias; int y;",         "decode"),
    ("host.cuh",          "u32 factor; u32 shift;",  "u32 shift; u32 factor;",   "prefill_sm90"),
    ("host.cuh",          "WARPS = 4",               "WARPS = 2",                "decode"),
    ("host.cuh",          "float2 ds[2];",           "float2 ds[4];",            "decode_a8"),
    ("host.cuh",          "UNIT = 524288",           "UNIT = 1",                 assert_activations),
    ("gemm/decode/a8.cuh",     "{ACTIVATION_UNIT, ACTI",  "{1.0f, ACTI",              assert_a8),
    ("gemm/decode/reduce.cuh", "ACC_ROWS + 4]",           "ACC_ROWS]",                "decode"),
    ("gemm/epilogue.cuh",      "case FLOAT16:",           "case BFLOAT16 + 1:",       assert_epilogue),
    ("gemm/schedule.cuh",      "2 * u32(number)",         "u32(number)",              assert_division),
    ("activations.cuh",   "8 * t + 4 * step",        "4 * t + 8 * step",         assert_activations),
    ("codes/quantize.cuh", "0x1p13f",                "0x1p12f",                  assert_activations),
)  # fmt: skip


@pytest.mark.parametrize(("file", "truth", "lie", "notices"), LIES, ids=lambda v: getattr(v, "__name__", str(v)))
def test_a_lie_is_noticed(file, truth, lie, notices, monkeypatch, tmp_path):
    """One number or one order changed in a copy of the sources: the check passes before, and not after."""
    copy, host_header = shutil.copytree(sources.kernels_dir(), tmp_path / "kernels"), codegen.host_header()
    monkeypatch.setattr(products, "kernel", harness.Kernel)  # not cached by name: the sources change
    for module in (sources, nvrtc):
        monkeypatch.setattr(module, "kernels_dir", lambda: copy)
    check, error, message = notices, AssertionError, None
    if isinstance(notices, str):
        check, error, message = partial(compile_kernel, notices), nvrtc.CompileError, "differ|elsewhere on the host"
    check()
    text = host_header if file == "host.cuh" else (copy / file).read_text()
    assert truth in text
    if file == "host.cuh":
        monkeypatch.setattr(codegen, "host_header", lambda: text.replace(truth, lie))
    else:
        (copy / file).write_text(text.replace(truth, lie))
    sources._text.cache_clear()
    try:
        with pytest.raises(error, match=message):
            check()
    finally:
        sources._text.cache_clear()

"""`tools/compile_kernels.py --fill-cache`: the kernels that a model needs, progress, and the summary."""

from __future__ import annotations

import functools
import io
import os

import compile_kernels
import fill_cache
import helpers
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qgemm
from qgemm.cuda.jit import cache, nvrtc
from qgemm.cuda.kernels.needed import ROWS, needed
from qgemm.cuda.kernels.routes import common_variants, route, variants
from qgemm.cuda.problem import TYPES, Output, Problem

EXCERPT = str(helpers.EXCERPT)


def zeros(fmt, *shape):
    return qgemm.Tensor(fmt, shape, np.zeros((*shape[:-1], shape[-1] // fmt.weights), fmt.dtype))


def named(keys):
    """Kernels with the names of their formats, "" for none."""
    return {(kernel, "" if fmt is None else fmt.name, template) for kernel, fmt, template in keys}


def filling(monkeypatch, *words):
    """The exit code of the tool."""
    monkeypatch.setattr("sys.argv", ["compile_kernels.py", "--fill-cache", *words])
    return compile_kernels.main()


# ---------------------------------------------------------------- which


@pytest.mark.parametrize("arch", nvrtc.ARCHS)
def test_a_model_needs_some_of_what_there_is(arch):
    sm = compile_kernels.sm_of(arch)
    fmt, floats = qgemm.FORMATS["q4_0"], qgemm.FORMATS["f32"]
    every = {(kernel, f.name, tuple(t.items())) for f in (fmt, floats) for kernel, t in variants(f, sm)}
    every |= {(kernel, "", tuple(template.items())) for kernel, template in common_variants(sm)}
    kernels = named(needed([zeros(fmt, 256, 512), zeros(floats, 8, 8), zeros(fmt, 64)], sm))
    assert kernels < every
    assert {kernel for kernel, *_ in kernels} >= {"pack", "quantize_activations", "gemv_floats"}


@given(
    st.sampled_from([qgemm.FORMATS[name] for name in ("q4_0", "q6_k", "kbit4")]),
    st.sampled_from([75, 90, 120]),
    st.sampled_from(("a16", "a8")),
    st.sampled_from(TYPES),
    st.sampled_from(ROWS),
    st.sampled_from(["float32", "float16", "bfloat16"]),
)
def test_what_a_product_asks_for_is_there(fmt, sm, activation, x, m, y):
    """Also for an expert of a stack, and for a matrix fused with others of its format."""
    if activation == "a8" and not fmt.integer:
        return
    p = Problem(fmt, activation, m, 512, 1024, sm, x)
    kernel = route(p).kernel
    p = p._replace(outputs=(Output(512, y if kernel.stores(p.x, y) else "float32"),))
    compiled = of_a_stack(fmt, sm)
    if not list(kernel.configs(p)):
        assert ("dequantize", fmt.name, (("Out", "half"),)) in compiled
        return
    for outputs in [p.outputs, p.outputs * kernel.products]:
        launched = p._replace(x=kernel.reads(p)[-1], outputs=outputs, n=512 * len(outputs))
        assert (
            kernel.name,
            fmt.name,
            tuple(kernel.template(launched, kernel.choose(launched)).items()),
        ) in compiled


@functools.cache
def of_a_stack(fmt, sm):
    return named(needed([zeros(fmt, 2, 512, 1024)], sm))


def test_a_model_without_matrices_needs_what_knows_no_format():
    kernels = named(needed([zeros(qgemm.FORMATS["q4_0"], 64), zeros(qgemm.FORMATS["f16"], 4)], 90))
    assert {name for _, name, _ in kernels} == {""}


# ---------------------------------------------------------------- output


@pytest.mark.compiles
def test_the_cache_is_filled_for_a_model(tmp_path, monkeypatch, capsys):
    """Size and time at the end, a line at each tenth without a terminal; a second run compiles nothing."""
    monkeypatch.setenv("QGEMM_CACHE_DIR", str(tmp_path / "cache"))
    words = "--file", EXCERPT, "--arch", "sm_90a", "--kernel", "pack", "--format", "q4_0", "--format", "q8_0"
    assert filling(monkeypatch, *words) == 0
    out, err = capsys.readouterr()
    entries = list((tmp_path / "cache").iterdir())
    assert len(entries) == 2
    assert out.startswith(f"2 of 2 kernels are in {tmp_path / 'cache'}: ")
    assert " KiB, 2 of them compiled in " in out
    assert f"{EXCERPT}: Q4_0, Q8_0, for sm_90a\n" in err
    assert err.splitlines()[-1].startswith("2 of 2 kernels, ")
    assert filling(monkeypatch, *words) == 0
    assert " 0 of them compiled in " in capsys.readouterr().out


def test_lines_of_progress(monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    assert list(fill_cache.progress(iter(range(137)), 137, "kernels")) == list(range(137))
    lines = stderr.getvalue().splitlines()
    assert len(lines) == 10
    assert (lines[0], lines[-1]) == ("14 of 137 kernels, 0 s", "137 of 137 kernels, 0 s")


def test_a_kernel_that_cannot_be_kept_is_an_error(tmp_path, monkeypatch):
    """A cache that cannot be written is an error."""
    monkeypatch.setattr(cache, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(cache, "compile_cubin", lambda *unit: nvrtc.Compiled(b"cubin", ""))
    (tmp_path / "file").touch()
    monkeypatch.setenv("QGEMM_CACHE_DIR", str(tmp_path / "file"))
    filled = fill_cache.fill("quantize_activations", None, {"In": "half"}, "sm_90a")
    assert filled.error.startswith(f"cannot be kept in {tmp_path / 'file'}: ")
    assert "0 of 1 kernels are in" in fill_cache.summary([filled], 1.0, tmp_path)
    monkeypatch.setenv("QGEMM_CACHE_DIR", str(tmp_path / "folder"))
    filled = fill_cache.fill("quantize_activations", None, {"In": "half"}, "sm_90a")
    (entry,) = (tmp_path / "folder").iterdir()
    assert filled == (True, os.path.getsize(entry), "")
    assert fill_cache.fill("quantize_activations", None, {"In": "half"}, "sm_90a").new is False


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--fill-cache"], "no GPU here to fill the cache for: name one by --arch, of sm_75"),
        (["--file", "x.gguf"], "add --fill-cache"),
        (["--fill-cache", "--all", "--arch", "sm_80"], "leave --all and --report out"),
    ],
)
def test_options_that_make_no_sense(words, message, monkeypatch, capsys):
    monkeypatch.setattr(fill_cache, "arch_here", lambda: "")
    monkeypatch.setattr("sys.argv", ["compile_kernels.py", *words])
    with pytest.raises(SystemExit):
        compile_kernels.main()
    assert message in capsys.readouterr().err


def test_the_gpu_at_hand_is_the_default(monkeypatch):
    monkeypatch.setattr(fill_cache, "arch_here", lambda: "sm_89")
    monkeypatch.setattr("sys.argv", ["compile_kernels.py", "--fill-cache"])
    assert compile_kernels.options().arch == ["sm_89"]

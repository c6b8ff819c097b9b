"""qgemm.prepare: everything at once, each thing once, before the first product."""

from __future__ import annotations

import threading
import time
from itertools import product

import cupy_like
import helpers
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qgemm
from qgemm import cpu, cuda, preparation
from qgemm.backend import Status
from qgemm.cpu import native
from qgemm.cuda.jit import load as loading
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.kernels.needed import needed
from qgemm.cuda.kernels.routes import route
from qgemm.cuda.problem import TYPES, Gpu, Output, Problem


def zeros(name, *shape):
    fmt = qgemm.FORMATS[name]
    return qgemm.Tensor(fmt, shape, np.zeros((*shape[:-1], shape[-1] // fmt.weights), fmt.dtype))


@pytest.fixture
def gpu(monkeypatch):
    """An H200 without one: what is loaded, in order, by `load`."""
    loaded = []
    cupy_like.install(monkeypatch)
    monkeypatch.setattr(cuda, "require", lambda who: None)
    monkeypatch.setattr(cuda, "status", lambda: Status(True, "", {}))
    monkeypatch.setattr(cuda.prepare, "gpu", lambda device: Gpu(device, 90, 132))
    monkeypatch.setattr(
        cuda.prepare, "load", lambda kernel, fmt, **template: loaded.append((kernel, fmt, tuple(template.items())))
    )
    return loaded


def test_every_kernel_of_a_model_is_loaded_once(gpu):
    """Those of products that were asked for: fewer of few rows, one activation and one type."""
    tensors = [zeros("q4_0", 256, 512), zeros("q6_k", 512, 256), zeros("f32", 64)]
    done = qgemm.prepare(tensors, progress=False)
    assert done.kernels == len(gpu) == len(set(gpu))
    assert set(gpu) == needed(tensors, 90)
    assert {fmt and fmt.name for _, fmt, _ in gpu} == {None, "q4_0", "q6_k"}
    gpu.clear()
    few = qgemm.prepare({"w": tensors[0]}, 1, activation="a16", dtype="float16", progress=False)
    assert 0 < few.kernels < done.kernels // 4
    assert "decode" in {kernel for kernel, *_ in gpu}
    assert not {kernel for kernel, *_ in gpu} & {"decode_a8", "prefill_sm90"}


@given(
    st.sampled_from(["q4_0", "q5_k", "kbit3"]),
    st.lists(st.integers(1, 600), min_size=1, max_size=3),
    st.sampled_from(TYPES),
    st.sampled_from([75, 89, 90, 120]),
)
def test_what_is_prepared_is_what_products_ask_for(name, rows, x, sm):
    """Neither less nor more: the config of every one of these rows, of fused products any."""
    fmt = qgemm.FORMATS[name]
    found = needed([zeros(name, 512, 1024)], sm, 132, rows, ["a16"], [x])
    asked = set()
    for m in rows:
        p = Problem(fmt, "a16", m, 512, 1024, sm, x)
        kernel = route(p).kernel
        if kernel.out_in_template or kernel.products > 1 or list(kernel.configs(p)):
            asked |= set(templates(kernel, p))
    of_format = {key for key in found if key[1] is fmt and key[0] not in ("pack", "dequantize")}
    assert of_format == asked


def templates(kernel, p):
    outs = ("float32", "float16", "bfloat16") if kernel.out_in_template else ("float32",)
    configs = kernel.configs(p) if kernel.products > 1 else [kernel.choose(p)]
    for config, out in product(list(configs), outs):
        template: Template = kernel.template(p._replace(outputs=(Output(p.n, out),)), config)
        yield kernel.name, p.format, tuple(template.items())


def test_kernels_are_compiled_at_the_same_time(gpu, monkeypatch):
    """Two at least: each waits for another."""
    together = threading.Barrier(2, timeout=60)
    monkeypatch.setattr(preparation.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    tasks = [together.wait] * 4
    monkeypatch.setattr(cuda.CudaBackend, "preparation", lambda *_: tasks)
    assert qgemm.prepare([zeros("q4_0", 64, 64)], progress=False).kernels == 4


def test_a_kernel_that_two_threads_need_is_compiled_once(monkeypatch):
    """Another one is compiled meanwhile."""
    cupy_like.install(monkeypatch)
    compiled, first_is_there, go_on = [], threading.Event(), threading.Event()

    def compile_it(source, arch, headers):
        compiled.append(source)
        if source == "slow":
            first_is_there.set()
            assert go_on.wait(60)
        return b""

    class Module:
        def load(self, cubin):
            pass

        def get_function(self, name):
            return name

    import cupy

    cupy.cuda.runtime.getDeviceProperties = lambda device: {"major": 9, "minor": 0}
    cupy.cuda.function = type("function", (), {"Module": Module})
    monkeypatch.setattr(loading, "_loaded", {})
    monkeypatch.setattr(loading, "cached_cubin", compile_it)
    monkeypatch.setattr(loading, "compose", lambda kernel, fmt, **template: kernel)
    threads = [threading.Thread(target=loading.load, args=("slow",)) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert first_is_there.wait(60)
    assert loading.load("quick") == "quick"
    go_on.set()
    for thread in threads:
        thread.join()
    assert sorted(compiled) == ["quick", "slow"]


def test_the_first_error_is_raised_and_nothing_more_is_begun(gpu, monkeypatch):
    begun = []

    def fails(index):
        begun.append(index)
        if index:
            time.sleep(0.02)  # the others take 20 s, in which the error is seen
        else:
            raise RuntimeError("no such instruction")

    monkeypatch.setattr(preparation.os, "sched_getaffinity", lambda _: {0}, raising=False)
    monkeypatch.setattr(cuda.CudaBackend, "preparation", lambda *_: [lambda i=i: fails(i) for i in range(1000)])
    with pytest.raises(RuntimeError, match="no such instruction"):
        qgemm.prepare([zeros("q4_0", 64, 64)], progress=False)
    assert len(begun) < 1000


def test_without_a_gpu_libraries_of_the_cpu_are_made(monkeypatch):
    """One for each format that has one, and the quantizer for a8; none where NumPy multiplies."""
    made = []
    monkeypatch.setattr(native.products, "_loaded", lambda fmt: made.append(fmt.name))
    monkeypatch.setattr(native.products, "_quantizer", lambda: made.append("quantizer"))
    monkeypatch.setattr(native.products, "reason", lambda: "")
    monkeypatch.setattr(native.products, "serves", lambda fmt: fmt.name.startswith("q"))
    monkeypatch.setattr(cuda, "status", lambda: Status(False, "no GPU", {}))
    tensors = [zeros("q4_0", 64, 64), zeros("q4_0", 32, 64), zeros("f32", 8, 8), zeros("q8_0", 64)]
    assert qgemm.prepare(tensors, progress=False).kernels == 2
    assert sorted(made) == ["q4_0", "quantizer"]
    assert qgemm.prepare(tensors, activation="a16", progress=False).kernels == 1
    monkeypatch.setattr(native.products, "reason", lambda: "no compiler")
    assert cpu.BACKEND.preparation(tensors, None, ("a16",), ("float32",)) == []


@pytest.mark.parametrize(
    ("arguments", "named", "error"),
    [
        ((["x"],), {}, (TypeError, "got str")),
        (([], 0), {}, (qgemm.UnsupportedError, "from 1 on")),
        (([], ()), {}, (qgemm.UnsupportedError, "from 1 on")),
        (([],), {"activation": "a4"}, (qgemm.UnsupportedError, "'a16' or 'a8'")),
        (([],), {"dtype": "int8"}, (TypeError, "got int8")),
    ],
)
def test_arguments_that_make_no_sense(arguments, named, error):
    kind, message = error
    with pytest.raises(kind, match=message):
        qgemm.prepare(*arguments, **named)


def test_command(run, gpu):
    status, out, err = run("prepare", helpers.EXCERPT, "--m", "1,512", "--dtype", "float16")
    assert (status, err) == (0, "")
    assert out.startswith(f"{len(gpu)} kernels are ready, in ")
    assert len(gpu) > 20

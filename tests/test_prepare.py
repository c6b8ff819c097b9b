"""qgemm.prepare: everything at once, each thing once, before the first product."""

from __future__ import annotations

import threading
import time
from itertools import product
from types import SimpleNamespace

import cupy_like
import helpers
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import qgemm
from qgemm import cpu, cuda, preparation
from qgemm.backend import Status
from qgemm.cpu import native
from qgemm.cuda.jit import load as loading
from qgemm.cuda.kernels.decode_config import CODEBOOK_DECODE_CONFIGS, DECODE_CONFIGS
from qgemm.cuda.kernels.needed import needed
from qgemm.cuda.kernels.prefill_sm90 import PREFILL_SM90
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


MOST_BLOCKS = max(row.row_blocks for row in (*DECODE_CONFIGS, *CODEBOOK_DECODE_CONFIGS))


@given(
    st.sampled_from(["q4_0", "q5_k", "kbit3"]),
    st.integers(1, 1 << 15),
    st.integers(1, 64).map(lambda blocks: 256 * blocks),
    st.lists(st.integers(1, 6000), min_size=1, max_size=4),
    st.sampled_from(["a16", "a8"]),
    st.sampled_from(TYPES),
    st.sampled_from([75, 80, 89, 90, 100, 120]),
    st.sampled_from([78, 132, 144]),
)
@example("q8_0", 13376, 4608, [1601], "a16", "half", 90, 132)  # no config of a multiple of 64 rows
def test_what_is_prepared_is_what_products_ask_for(name, n, k, rows, activation, x, sm, sms):
    """Neither less nor more: the config of every one of these rows, for these weights alone or fused with others."""
    fmt = qgemm.FORMATS[name]
    if activation == "a8" and not fmt.integer:
        return
    found = needed([shaped(name, n, k)], sm, sms, rows, [activation], [x])
    asked = {key for m in rows for key in templates(Problem(fmt, activation, m, n, k, sm, x, sms=sms))}
    if asked:
        assert {key for key in found if key[1] is fmt and key[0] not in ("pack", "dequantize")} == asked
    else:
        assert "dequantize" in {kernel for kernel, *_ in found}


@pytest.mark.parametrize("name", ["q4_0", "q6_k", "kbit4"])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (13376, 4608), (1, 256), (128256, 4096)])
def test_any_number_of_rows_is_prepared(name, n, k):
    """Without a choice of m: 1 to 4096, each of them."""
    fmt, found = qgemm.FORMATS[name], needed([shaped(name, n, k)], 90)
    for m in range(17, 4097):
        p = Problem(fmt, "a16", m, n, k, 90)
        assert ("prefill_sm90", fmt, tuple(PREFILL_SM90.template(p, PREFILL_SM90.choose(p)).items())) in found


def shaped(name, n, k):
    """What `needed` reads of a tensor, without its data."""
    return SimpleNamespace(format=qgemm.FORMATS[name], shape=(n, k), ndim=2)


def templates(p):
    """The kernels that products ask for, found by asking for each."""
    kernel = route(p).kernel
    outs = ("float32", "float16", "bfloat16") if kernel.out_in_template else ("float32",)
    more = range(1, MOST_BLOCKS + 1) if kernel.products > 1 else ()
    for source, out in product(kernel.reads(p), outs):
        for others in [(), *((Output(64 * blocks),) for blocks in more)]:
            asked = p._replace(x=source, outputs=(Output(p.n, out), *others))
            config = kernel.choose(asked)
            if config is not None:
                yield kernel.name, p.format, tuple(kernel.template(asked, config).items())


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

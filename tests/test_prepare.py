"""qgemm.prepare: everything at once, each thing once, before the first product."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import cupy_like
import helpers
import numpy as np
import pytest
from helpers import at_once
from hypothesis import example, given
from hypothesis import strategies as st
from tqdm import tqdm

import qgemm
from qgemm import cpu, cuda, parallel
from qgemm.backend import Status
from qgemm.cpu import native
from qgemm.cuda.jit import cache, nvrtc
from qgemm.cuda.jit import load as loading
from qgemm.cuda.kernels.decode_config import CODEBOOK_DECODE_CONFIGS, DECODE_CONFIGS
from qgemm.cuda.kernels.needed import needed
from qgemm.cuda.kernels.prefill_sm90 import PREFILL_SM90
from qgemm.cuda.kernels.routes import route
from qgemm.cuda.prepare import _slowest_first
from qgemm.cuda.problem import TYPES, Gpu, Output, Problem
from qgemm.once import Once


def zeros(name, *shape):
    fmt = qgemm.FORMATS[name]
    return qgemm.Tensor(fmt, shape, np.zeros((*shape[:-1], shape[-1] // fmt.weights), fmt.dtype))


@pytest.fixture
def gpu(monkeypatch):
    """An H200 that is not there: the kernels that `load` loads, in order."""
    loaded = []
    cupy_like.install(monkeypatch)
    monkeypatch.setattr(cuda, "require", lambda who: None)
    monkeypatch.setattr(cuda, "status", lambda: Status(True, "", {}))
    monkeypatch.setattr(cuda.prepare, "gpu", lambda device: Gpu(device, 90, 132))
    monkeypatch.setattr(cuda.prepare, "times_of", lambda device: None)

    def compiles(kernel, fmt, template):
        loaded.append((kernel, fmt, tuple(template.items())))
        return True

    monkeypatch.setattr(cuda.prepare, "compiles", compiles)
    return loaded


def test_every_kernel_of_a_model_is_loaded_once(gpu):
    """Those of products that were asked for: fewer of few rows and one type."""
    tensors = [zeros("q4_0", 256, 512), zeros("q6_k", 512, 256), zeros("f32", 64)]
    done = qgemm.prepare(tensors, progress=False)
    assert done.kernels == len(gpu) == len(set(gpu))
    assert set(gpu) == needed(tensors, 90, activations=["a16"])
    assert {fmt and fmt.name for _, fmt, _ in gpu} == {None, "q4_0", "q6_k"}
    gpu.clear()
    few = qgemm.prepare({"w": tensors[0]}, 1, activation="a16", dtype="float16", progress=False)
    assert few.kernels == len(gpu)
    assert set(gpu) < needed(tensors[:1], 90, activations=["a16"])
    assert {fmt and fmt.name for _, fmt, _ in gpu} <= {None, "q4_0"}
    kernels = {kernel for kernel, *_ in gpu}
    of_one_row, of_many = (route(Problem(tensors[0].format, "a16", m, 256, 512, 90)).kernel.name for m in (1, 4096))
    assert of_one_row in kernels
    assert not kernels & {"decode_a8", of_many}


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
    """Neither less nor more: the config of every one of these rows, for these weights alone, with others, as a gate."""
    fmt = qgemm.FORMATS[name]
    if activation == "a8" and not fmt.integer:
        return
    kernels = needed([shaped(name, n, k)], sm, sms, rows, [activation], [x])
    expected = {key for m in rows for key in templates(Problem(fmt, activation, m, n, k, sm, x, sms=sms))}
    if expected:
        assert {key for key in kernels if key[1] is fmt and key[0] not in ("pack", "dequantize")} == expected
    else:
        assert "dequantize" in {kernel for kernel, *_ in kernels}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["q4_0", "q6_k", "kbit4"])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (13376, 4608), (1, 256), (128256, 4096)])
def test_any_number_of_rows_is_prepared(name, n, k):
    """Without a choice of m: 1 to 4096, each of them."""
    fmt, kernels = qgemm.FORMATS[name], needed([shaped(name, n, k)], 90)
    for m in range(17, 4097):
        p = Problem(fmt, "a16", m, n, k, 90)
        assert ("prefill_sm90", fmt, tuple(PREFILL_SM90.template(p, PREFILL_SM90.choose(p)).items())) in kernels


def test_the_slowest_kernels_are_compiled_first():
    keys = [(name, None, ()) for name in ("decode", "moe_decode", "moe_prefill_sm90", "pack", "prefill_sm90")]
    first = ["moe_prefill_sm90", "prefill_sm90"]
    assert [name for name, *_ in sorted(keys, key=_slowest_first)] == [*first, "decode", "moe_decode", "pack"]


def shaped(name, n, k):
    """What `needed` reads of a tensor, without its data."""
    return SimpleNamespace(format=qgemm.FORMATS[name], shape=(n, k), ndim=2)


def templates(p):
    """The kernels that products ask for, found by asking for each."""
    kernel = route(p).kernel
    more = range(1, MOST_BLOCKS + 1) if kernel.products > 1 else ()
    pairs = ((source, out) for source in kernel.reads(p) for out in kernel.outs(source) or ("float32",))
    for source, out in pairs:
        for others in [(), *((Output(64 * blocks),) for blocks in more)]:
            problem = p._replace(x=source, outputs=(Output(p.n, out), *others))
            config = kernel.choose(problem)
            if config is not None:
                yield kernel.name, p.format, tuple(kernel.template(problem, config).items())
        if any(form.gated for form in kernel.forms(p)):
            problem = p._replace(x=source, gated=True, outputs=(Output(p.n, out, gate="silu"), Output(p.n)))
            yield kernel.name, p.format, tuple(kernel.template(problem, kernel.choose(problem)).items())


class Machine:
    """A GPU that is not there, over the real cache and `load`: the kernels compiled, by thread, and loaded, by device.

    together: of which each compilation of the first two waits for the other.
    """

    def __init__(self):
        self.compiled, self.loaded = [], []
        self.together, self.during = None, None

    def compile(self, source, arch, headers=None):
        self.compiled.append(source)
        if self.together and len(self.compiled) <= self.together.parties:
            self.together.wait()
        if self.during:
            self.during(source)
        return nvrtc.Compiled(f"cubin of {arch}: {source}".encode(), "")

    def forget(self, monkeypatch):
        """As in another process."""
        monkeypatch.setattr(loading, "_functions", Once())
        monkeypatch.setattr(loading, "_cubins", Once())


@pytest.fixture
def machine(monkeypatch, tmp_path):
    state = Machine()
    state.loaded = cupy_like.install(monkeypatch).cuda.driver.loaded
    monkeypatch.setenv("QGEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "compile_cubin", state.compile)
    monkeypatch.setattr(cache, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(cuda, "require", lambda who: None)
    monkeypatch.setattr(cuda, "status", lambda: Status(True, "", {}))
    monkeypatch.setattr(cuda.prepare, "gpu", lambda device: Gpu(device, 90, 132))
    monkeypatch.setattr(cuda.prepare, "times_of", lambda device: None)
    monkeypatch.setattr(parallel, "cpus", lambda: {0, 1})
    state.forget(monkeypatch)
    return state


FEW = {"m": (1, 9), "activation": "a16", "dtype": "float16", "progress": False}  # rows and types of a small model


def test_kernels_are_compiled_at_the_same_time_and_each_once(machine, monkeypatch):
    """Two wait for each other; a second call and another process compile none."""
    machine.together = threading.Barrier(2, timeout=60)
    first = qgemm.prepare([zeros("q4_0", 256, 512)], **FEW)
    assert first.kernels == first.compiled == len(machine.compiled) == len(set(machine.compiled)) > 4
    assert len(machine.loaded) == first.kernels
    assert str(first).startswith(f"{first.kernels} kernels are ready, {first.kernels} of them compiled now, in ")
    assert qgemm.prepare([zeros("q4_0", 256, 512)], **FEW)[:2] == (first.kernels, 0)
    machine.forget(monkeypatch)
    assert qgemm.prepare(zeros("q4_0", 256, 512), **FEW)[:2] == (first.kernels, 0)
    assert len(machine.compiled) == first.kernels
    assert len(set(machine.loaded)) == first.kernels < len(machine.loaded)


def test_two_calls_and_a_product_at_once_compile_each_kernel_once(machine):
    """Also where no folder keeps them."""
    w, done = zeros("q4_0", 256, 512), []
    ((kernel, fmt, template), *_) = needed([w], 90, 132, [1], ["a16"], ["half"])
    machine.during = lambda source: time.sleep(0.01)
    work = [lambda: done.append(qgemm.prepare(w, **FEW)), lambda: loading.load(kernel, fmt, **dict(template))]
    at_once(lambda call: call(), (*work, *work))
    assert len(machine.compiled) == len(set(machine.compiled)) == done[0].kernels == done[1].kernels
    assert sum(call.compiled for call in done) in (len(machine.compiled), len(machine.compiled) - 1)


def test_gpus_of_one_kind_share_what_is_compiled(machine, monkeypatch, tmp_path):
    """A kernel is loaded on the GPU of its weights; without a folder it is compiled once as well."""
    import cupy

    monkeypatch.setattr(parallel, "cpus", lambda: {0})  # devices of no threads
    (tmp_path / "file").touch()
    monkeypatch.setenv("QGEMM_CACHE_DIR", str(tmp_path / "file" / "below"))
    weights = []
    for device in (0, 1):
        data = cupy.empty((4, 8, 16), np.uint8)
        data.number = device
        weights.append(cuda.DeviceTensor(qgemm.FORMATS["q4_0"], (256, 512), data))
    done = qgemm.prepare(weights, **FEW)
    assert done.kernels == 2 * done.compiled == len(machine.loaded) == 2 * len(machine.compiled)
    assert {device for device, *_ in machine.loaded} == {0, 1}


def test_a_kernel_that_two_threads_need_is_compiled_once(machine):
    """Another one is compiled meanwhile."""
    first_is_there, go_on = threading.Event(), threading.Event()

    def slow(source):
        if "float" in source:
            first_is_there.set()
            assert go_on.wait(60)

    machine.during = slow
    threads = [
        threading.Thread(target=loading.load, args=("round_activations",), kwargs={"In": "float"}) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    assert first_is_there.wait(60)
    assert loading.load("round_activations", In="half").device == 0
    go_on.set()
    for thread in threads:
        thread.join()
    assert len(machine.compiled) == 2


def test_an_error_of_the_compiler_is_raised_with_its_log(machine):
    def fails(source):
        raise nvrtc.CompileError("compiling for sm_90a failed:\nundefined_name")

    machine.during = fails
    with pytest.raises(nvrtc.CompileError, match="undefined_name"):
        qgemm.prepare(zeros("q4_0", 256, 512), **FEW)
    begun = len(machine.compiled)
    machine.during = None
    assert begun <= qgemm.prepare(zeros("q4_0", 256, 512), **FEW).compiled


@pytest.fixture
def shut_down(monkeypatch):
    """An event that is set when `prepare`, which has one thread, cancels the tasks that have not begun."""
    event = threading.Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait=True, **options):
            super().shutdown(wait=False, **options)
            event.set()
            super().shutdown(wait)

    monkeypatch.setattr(parallel, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(parallel, "cpus", lambda: {0})
    return event


def test_ctrl_c_leaves_what_was_not_begun(shut_down, monkeypatch):
    """It waits for tasks that have begun: no thread is left over."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # the first bar starts a thread for all later ones
    begun, before = [], threading.active_count()

    def task(index):
        begun.append(index)
        if index == 3:
            os.kill(os.getpid(), signal.SIGINT)
        elif index > 3:
            shut_down.wait(1)  # no longer: a signal just before the main thread waits is seen at the next result
        return False

    monkeypatch.setattr(cpu.CpuBackend, "preparation", lambda *_: [partial(task, i) for i in range(1000)])
    monkeypatch.setattr(cuda, "status", lambda: Status(False, "no GPU", {}))
    with pytest.raises(KeyboardInterrupt):
        qgemm.prepare([zeros("q4_0", 64, 64)], progress=False)
    assert begun == list(range(len(begun)))
    assert 4 <= len(begun) <= 7
    assert threading.active_count() == before


def test_libraries_of_the_cpu_are_compiled_at_the_same_time(monkeypatch, tmp_path):
    """Each once; those of another process are read."""
    together, compiled = threading.Barrier(2, timeout=60), []

    def compile_it(by, source, words):
        compiled.append((source.name, *words))
        if len(compiled) <= 2:
            together.wait()
        return b"code"

    library = native.library
    monkeypatch.setenv("QGEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "compiled", compile_it)
    monkeypatch.setattr(library, "compiler", lambda: SimpleNamespace(identity=("cc", 1, 2), command=("cc",)))
    monkeypatch.setattr(library, "load_library", lambda code: None)
    monkeypatch.setattr(library, "_loaded", Once())
    monkeypatch.setattr(library, "reason", lambda: "")
    source = library.Source("products")
    loads = [lambda i=i: library.library(source._replace(words=(f"-DBLOCK_BYTES={i % 3}",))) for i in range(6)]
    tasks = [partial(library.compiles, load) for load in loads]
    monkeypatch.setattr(cpu.CpuBackend, "preparation", lambda *_: tasks)
    monkeypatch.setattr(cuda, "status", lambda: Status(False, "no GPU", {}))
    monkeypatch.setattr(parallel, "cpus", lambda: {0, 1})
    assert qgemm.prepare([], progress=False)[:2] == (6, 3)
    assert len(compiled) == 3
    monkeypatch.setattr(library, "_loaded", Once())
    assert qgemm.prepare([], progress=False)[:2] == (6, 0)


def test_the_first_error_is_raised_and_nothing_more_is_begun(gpu, shut_down, monkeypatch):
    begun = []

    def task(index):
        begun.append(index)
        if not index:
            raise RuntimeError("no such instruction")
        shut_down.wait()

    monkeypatch.setattr(cuda.CudaBackend, "preparation", lambda *_: [partial(task, i) for i in range(1000)])
    with pytest.raises(RuntimeError, match="no such instruction"):
        qgemm.prepare([zeros("q4_0", 64, 64)], progress=False)
    assert begun in ([0], [0, 1])


def test_without_a_gpu_libraries_of_the_cpu_are_made(monkeypatch):
    """One for each format that has one, that of threads, and the quantizer for a8; none where NumPy multiplies."""
    loads = []
    monkeypatch.setattr(native.products, "loaded", lambda fmt: loads.append(fmt.name))
    monkeypatch.setattr(native.products, "_quantizer", lambda: loads.append("quantizer"))
    monkeypatch.setattr(native.products, "pool", lambda: loads.append("pool"))
    monkeypatch.setattr(native.products, "serves", lambda fmt: fmt.name.startswith("q"))
    monkeypatch.setattr(cuda, "status", lambda: Status(False, "no GPU", {}))
    tensors = [zeros("q4_0", 64, 64), zeros("q4_0", 32, 64), zeros("f32", 8, 8), zeros("q8_0", 64)]
    assert qgemm.prepare(tensors, activation="a8", progress=False).kernels == 3
    assert sorted(loads) == ["pool", "q4_0", "quantizer"]
    assert qgemm.prepare(tensors, progress=False).kernels == 2
    monkeypatch.setattr(native.products, "serves", lambda fmt: False)
    assert cpu.BACKEND.preparation(tensors, None, ("a16",), ("float32",)) == []


@pytest.mark.parametrize(
    ("arguments", "named", "error"),
    [
        ((["x"],), {}, (TypeError, "got str")),
        (([], 0), {}, (qgemm.UnsupportedError, "from 1 on")),
        (([], ()), {}, (qgemm.UnsupportedError, "from 1 on")),
        (([], "8"), {}, (qgemm.UnsupportedError, "from 1 on, or several, got '8'")),
        (([], 1.5), {}, (qgemm.UnsupportedError, "got 1.5")),
        (([],), {"activation": "a4"}, (qgemm.UnsupportedError, "'a8_g256' or 'e4m3_g256'")),
        (([],), {"dtype": "int8"}, (TypeError, "got int8")),
    ],
)
def test_arguments_that_make_no_sense(arguments, named, error):
    kind, message = error
    with pytest.raises(kind, match=message):
        qgemm.prepare(*arguments, **named)


def test_command_where_nothing_is_compiled(run, monkeypatch):
    """It says why: here that NumPy was asked for, as by all tests (conftest.py)."""
    monkeypatch.setattr(cuda, "status", lambda: Status(False, "no GPU", {}))
    assert run("prepare", helpers.EXCERPT) == (0, "nothing is compiled: QGEMM_CPU=numpy\n", "")


def test_command(run, gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("QGEMM_CACHE_DIR", str(tmp_path))
    status, out, err = run("prepare", helpers.EXCERPT, "--m", "1,512", "--dtype", "float16")
    assert (status, err) == (0, "")
    assert out.startswith(f"{len(gpu)} kernels are ready, {len(gpu)} of them compiled now, in ")
    assert out.endswith(f" s, kept in {tmp_path}\n")
    assert len(gpu) > 20


@pytest.mark.parametrize("tensors", [qgemm.FORMATS["q4_0"], None, "model.gguf", [None]])
def test_what_is_no_tensor_is_not_prepared(tensors):
    with pytest.raises(TypeError, match="tensors must be Tensors or DeviceTensors, got "):
        qgemm.prepare(tensors)

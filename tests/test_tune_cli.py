"""The command `qgemm tune`, reports, `qgemm routes` and `qgemm.prepare` with times: see tests/tuning_bench.py."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import cupy_like
import launches_like
import merge_times
import numpy as np
import pytest
from tuning_bench import ADA, MACHINE, chosen, fastest, installed, problem, shaped

import qgemm
from qgemm import cuda
from qgemm.codec.format import float_dtype
from qgemm.cuda import clock, configs, tuner
from qgemm.cuda.call import plan, products
from qgemm.cuda.devices import Facts
from qgemm.cuda.driver import tuned
from qgemm.cuda.kernels import routes
from qgemm.cuda.kernels.needed import needed
from qgemm.cuda.times import HERE, SHIPPED, Times, rows_of, worth
from qgemm.once import Once

Q4_0 = qgemm.FORMATS["q4_0"]


@pytest.fixture
def bench(monkeypatch, tmp_path):
    return installed(monkeypatch, tmp_path)


def test_prepare_includes_the_configs_that_were_timed(bench):
    """Any that the times may choose for the prepared rows, and those of other shapes by the cost model."""
    w = shaped(Q4_0, 4096, 4096)
    qgemm.tune(w, (16, 512), activation="a16", dtype="float16", progress=False)
    times = tuned.times_of(0)
    for m, rows in ((12, [12]), (512, [512]), (300, range(1, 4097))):
        keys = needed([w], 89, 128, rows, ["a16"], ["half"], times)
        p = problem(Q4_0, m, 4096, 4096)
        kernel = routes.route(p._replace(outputs=())).kernel
        config = kernel.choose(p)
        if config is not None:
            assert (kernel.name, Q4_0, tuple(kernel.template(p, config).items())) in keys
    assert needed([w], 89, 128, [12], ["a16"], ["half"], Times()) <= keys


# ---------------------------------------------------------------- the command line


@pytest.fixture
def model(tmp_path):
    """A small file of two shapes."""
    rng = np.random.default_rng(0)
    path = tmp_path / "model.gguf"
    tensors = {
        name: qgemm.quantize(rng.standard_normal((n, 256)), Q4_0) for name, n in (("a", 64), ("b", 64), ("c", 32))
    }
    qgemm.write(path, {**tensors, "norm": np.ones(8, np.float32)}, {})
    return path


def test_the_command_tunes_a_file_and_reports(bench, model, tmp_path, run):
    report = tmp_path / "report.json"
    status, out, err = run(
        "tune", model, "--m", "1,64", "--activations", "a16", "--dtypes", "float16", "--report", report
    )
    assert (status, err) == (0, "")
    assert out.startswith("4 products have times, ")
    document = json.loads(report.read_text())
    assert (document["gpu"], document["driver"]) == MACHINE
    rows = list(rows_of(document["rows"]))
    assert {(row.key.n, row.m) for row in rows} == {(n, m) for n in (32, 64) for m in (1, 64)}
    assert all(row.us == worth(row.us) for row in rows)
    short = run("tune", model, "--minutes", "0.05", "--m", "8")
    assert "0.05 minutes were too short" in short[1]


def test_an_interrupted_command_says_that_times_are_kept(bench, model, run):
    def interrupt():
        raise KeyboardInterrupt

    bench.before = interrupt
    status, out, err = run("tune", model)
    assert (status, out) == (130, "")
    assert "the times up to now are kept" in err


def test_routes_say_where_a_choice_comes_from(bench, monkeypatch, run):
    """The cost model, a table of configs, times of this machine."""
    monkeypatch.setattr("qgemm.cli.routes.gpu_here", lambda: ADA)
    monkeypatch.setattr("qgemm.cli.routes.backends", lambda: {"cuda": SimpleNamespace(available=True)})
    words = "routes", "--problem", "q4_0 a16 M=64 N=4096 K=4096"
    assert "least predicted time" in run(*words)[1]
    qgemm.tune(shaped(Q4_0, 4096, 4096), (64, 512), activation="a16", dtype="float16", progress=False)
    out = run(*words)[1]
    assert f"chosen by {HERE}; the fastest is launched" in out
    assert chosen(problem(Q4_0, 64, 4096, 4096))[1] in out
    other = run("routes", "--problem", "q4_0 a16 M=100 N=4096 K=4096")[1]
    assert f"chosen by {HERE} with M=512" in other
    assert "least predicted time" in run(*words, "--sms", "84")[1]


def test_a_report_becomes_shipped_times(bench, model, tmp_path, run, monkeypatch):
    """Those of a GPU serve whoever has one of that name, and did not tune; a report of other kernels is refused."""
    report = tmp_path / "report.json"
    run("tune", model, "--m", "64", "--activations", "a16", "--dtypes", "float16", "--report", report)
    monkeypatch.setattr(configs, "path", lambda name: tmp_path / "configs" / f"{name}.json")
    (tmp_path / "configs").mkdir()
    path = merge_times.merge(report)
    assert path == tmp_path / "configs" / "gpus" / "nvidia_geforce_rtx_4090.json"
    assert merge_times.merge(report).read_text() == path.read_text()
    for entry in (tmp_path / "cache").iterdir():
        entry.unlink()
    tuned._times.values.clear()
    p = problem(Q4_0, 64, 64, 256)
    assert p.timed().source == SHIPPED
    assert chosen(p) == fastest(bench, p)
    for field, wrong in (("kernels", "0"), ("gpu", 7), ("rows", [{}])):
        report.write_text(json.dumps({**json.loads(report.read_text()), field: wrong}))
        with pytest.raises(qgemm.QgemmError):
            merge_times.merge(report)


@pytest.mark.parametrize("activation", ["a16", "a8"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("m", [1, 16, 70])
def test_a_candidate_is_launched_by_the_plan_of_a_product(monkeypatch, activation, dtype, m):
    """The clock's call: x in the form that the candidate's kernel reads, then the kernel by the candidate's config."""
    gpus = launches_like.installed(monkeypatch)
    w = np.random.default_rng(0).integers(-4, 5, (40, 64))
    on_device = gpus.tensor(w)
    x = cupy_like.asarray(np.random.default_rng(1).integers(-4, 5, (m, 64)), float_dtype(dtype))
    p = plan.problem(on_device, plan.Source(m, 64, dtype), activation)
    launch, launched = plan.launch, []
    monkeypatch.setattr(plan, "launch", lambda kernel, p: launched.append((kernel, p)) or launch(kernel, p))
    for candidate in tuner.candidates(p):
        if candidate.kernel.stores(p.x, "float32"):
            y = cupy_like.ndarray((m, 40), np.float32)
            launched.clear()
            products.multiply_by(x, on_device, y, clock.chosen(p, candidate))
            ((kernel, launched_problem),) = launched
            assert kernel is candidate.kernel
            assert kernel.choose(launched_problem) == candidate.config
            np.testing.assert_allclose(y.get(), x.get().astype(np.float64) @ w.T, rtol=2.0**-7)


def test_only_the_slow_path_looks_times_up(monkeypatch):
    """A call like an earlier one launches what that one did, at the same cost on the host."""
    gpus, lookups = launches_like.installed(monkeypatch), []
    monkeypatch.setattr(plan, "times_of", lambda device: lookups.append(device))
    w = gpus.tensor(np.ones((40, 64)))
    x = cupy_like.asarray(np.ones((1, 64)), np.float16)
    for expected in (1, 1, 1):
        qgemm.matmul(x, w)
        assert len(lookups) == expected


def test_times_need_no_library_of_arrays(monkeypatch, tmp_path):
    """Products with torch alone look times up as well; tuning itself needs CuPy, and says so."""
    monkeypatch.setenv("QGEMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(tuned, "_times", Once())
    tuned.machine.cache_clear()
    monkeypatch.setattr(tuned, "facts", lambda device: Facts("NVIDIA A10", (8, 6), 72))
    monkeypatch.setattr(tuned, "driver_cuda", lambda: (13, 0))
    assert not tuned.times_of(0)
    assert tuned.machine(0).gpu == "NVIDIA A10"
    tuned.machine.cache_clear()
    monkeypatch.setattr(cuda, "require", lambda who: None)
    with pytest.raises(qgemm.UnsupportedError, match="tuning needs CuPy"):
        qgemm.tune(shaped(Q4_0, 64, 256))

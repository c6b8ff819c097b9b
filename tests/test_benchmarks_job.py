"""The job that measures all rows of the documents, and the turns of its products, without a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from measured import made_up, plane_row, refused_benchmarks, row

from benchmarks import baselines, command, compiler, gpu, job, moe, operands, plan, results, stale
from benchmarks.moe_layers import MODELS
from benchmarks.report import eight_bit_tables, tables, targets
from qgemm.cli.timing import Loop, Times
from qgemm.codec.float_types import float_dtype
from qgemm.codec.group_activations import multiplies
from qgemm.formats import format_named

FACTS = {name: value for name, value in made_up().items() if name not in ("rows", "host_us", "pack")}
FACTS.update(sm=90, sms=132)


@pytest.fixture
def cupy(monkeypatch):
    """The part of CuPy that the code between kernels uses, over NumPy."""
    device = SimpleNamespace(id=0, synchronize=lambda: None, compute_capability="90")
    pool = SimpleNamespace(free_all_blocks=lambda: None)
    module = SimpleNamespace(
        cuda=SimpleNamespace(Device=lambda: device, Stream=lambda non_blocking: "stream"),
        get_default_memory_pool=lambda: pool,
        empty=np.empty, asarray=np.asarray, count_nonzero=np.count_nonzero, isfinite=np.isfinite, sqrt=np.sqrt,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cupy", module)


# ---------------------------------------------------------------- the plan


def planned(end):
    """The rows that the plan has for a file."""
    cases = [case for case, ends in plan.files_of_cases().items() if end in ends]
    return made_up(rows=[row(c.format, c.activation, c.m, c.shape, x=c.x, fp8_us=12.0) for c in cases])


def test_every_product_of_the_plan_has_a_kernel():
    for case in plan.files_of_cases():
        assert multiplies(case.activation, format_named(case.format)), case
    with_kernels = {case.format for case in plan.files_of_cases() if list(job.kernels_of(case, 90, 132))}
    assert with_kernels == {case.format for case in plan.files_of_cases()}


def test_no_table_and_no_target_lacks_a_planned_row(tmp_path):
    path, eight_bits = (tmp_path / f"h200{end}.json" for end in (plan.PRODUCTS, plan.EIGHT_BITS))
    results.write(path, planned(plan.PRODUCTS))
    results.write(eight_bits, planned(plan.EIGHT_BITS))
    for table in (eight_bit_tables.products_table, eight_bit_tables.others_table, eight_bit_tables.e4m3_table):
        assert "–" not in table(eight_bits)
    e4m3 = eight_bit_tables.e4m3_table(eight_bits)
    assert {line.split(" | ")[2] for line in e4m3.splitlines()[2:]} == {"fp16", "bf16"}
    assert "–" not in tables.headline_table(path)
    assert "–" not in tables.kbit_tables(path)
    unmeasured = [t.name for t in targets.targets(results.load(path)) for v in t.measured if t.verdict(v) == "-"]
    assert unmeasured == []
    speed = tables.speed_table(path)
    for part in ("`a16`, by M and N x K:", "`a8`, by M and N x K:", "by format and M, `a16`, 8192x8192:"):
        assert "–" not in speed.split(part)[1].split("\n\n")[1]


def test_the_most_important_rows_come_first():
    """Both types of x, of every shape of a block, smaller numbers of rows first."""
    shapes = plan.by_shape(plan.COMMON)
    assert list(shapes) == list(plan.SHAPES)
    first = shapes[plan.SQUARE]
    assert list(first) == list(plan.M)
    assert [str(case) for case in first[1][:3]] == [
        "Q4_0 a16 float16 M=1 N=8192 K=8192",
        "Q4_0 a16 bfloat16 M=1 N=8192 K=8192",
        "Q4_0 a8 float16 M=1 N=8192 K=8192",
    ]


# ---------------------------------------------------------------- products in turns


@pytest.mark.usefixtures("cupy")
def test_products_of_a_shape_take_turns(monkeypatch):
    """cuBLAS once for each type, reading once for each format; a product that fails is a line."""
    compared = []

    def compare(stream, loops, repeats, rest):
        compared.append((len(loops), rest))
        return [Times(loop.calls, loop.calls - 0.5, loop.calls + 1) for loop in loops]

    def prepared(stream, cublas, case, x, w, y, extras):
        assert (x.dtype, y.shape) == (float_dtype(case.x), (case.m, 512))
        if case.activation == "a8" and case.x == "bfloat16":
            raise RuntimeError("no kernel")
        return {**case.row, "route": "decode", "error": 1e-4}, {("product", case): Loop(10, None, None)}

    monkeypatch.setattr(gpu, "compare", compare)
    monkeypatch.setattr(gpu, "prepared", prepared)
    monkeypatch.setattr(baselines, "dense", lambda *_: {"torch": Loop(30, None, None), "own": Loop(20, None, None)})
    monkeypatch.setattr(baselines, "fp8", lambda *_: Loop(7, None, None))
    matrix = SimpleNamespace(read=Loop(5, None, None), packed=9000)
    x = np.ones((64, 256), np.float32)
    shared = SimpleNamespace(
        shape=(512, 256), matrices={"q4_0": matrix}, read_us={}, dense={"float16": [], "bfloat16": []},
        x=lambda m, dtype: x[:m].astype(float_dtype(dtype)),
    )  # fmt: skip
    cases = [
        plan.Case(name, activation, 1, 512, 256, x)
        for name in ("q4_0", "q8_0")
        for activation in ("a16", "a8")
        for x in results.X_TYPES
    ]
    items = list(gpu.measure("stream", None, shared, cases, gpu.Extras()))
    assert items.pop(0) == "Q4_0 a8 bfloat16 M=1 N=512 K=256: no kernel"
    assert [name for name, _ in items] == ["rows"] * 3
    first, *_, last = (measured for _, measured in items)
    assert (first["x"], first["us"], first["cublas_fp16_us"], first["cublas_via"]) == ("float16", 10, 20, "own")
    assert (last["x"], last["activation"], last["cublas_bf16_us"], last["stream_us"]) == ("bfloat16", "a16", 20, 5)
    of_64 = list(gpu.measure("stream", None, shared, [case._replace(m=64) for case in cases], gpu.Extras()))
    assert [measured["stream_us"] for _, measured in of_64[1:]] == [5, 5, 5]
    assert compared == [(3 + 4 + 1, gpu.LESS_REST), (3 + 4, gpu.REST)]
    of_bytes = list(gpu.measure("stream", None, shared, [cases[0]._replace(activation="a8_g256")], gpu.Extras()))
    assert [(measured["stream_us"], measured["fp8_us"]) for _, measured in of_bytes] == [(5, 7)]


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize("x_type", results.X_TYPES)
def test_a_check_sees_wrong_outputs_and_holes(x_type):
    """Rounding W and y to the type of x is no error; eight roundings are, and an output that was not written is."""
    rng, dtype = np.random.default_rng(0), float_dtype(x_type)
    x, dense = rng.standard_normal((16, 256)).astype(np.float32).astype(dtype), rng.standard_normal((64, 256))
    w = SimpleNamespace(copies=[dense], sample=dense, rows=np.arange(64))
    y, limit = np.empty((16, 64), dtype), operands.tolerance("a16", x_type)
    stream = FakeStream()

    def product(noise, stop=64):
        def multiply(x, w, y):
            exact = x.astype(np.float64) @ w.astype(np.float32).astype(dtype).astype(np.float64).T
            y[:, :stop] = (exact + noise * exact.std() * rng.standard_normal(exact.shape))[:, :stop].astype(dtype)

        return multiply

    error = operands.check(stream, product(0), x, w, y, limit)
    assert error == pytest.approx(2**0.5 * operands.ROUNDING[x_type], rel=0.1)
    with pytest.raises(ArithmeticError, match="0 outputs not finite"):
        operands.check(stream, product(8 * operands.ROUNDING[x_type]), x, w, y, limit)
    with pytest.raises(ArithmeticError, match="16 outputs not finite"):
        operands.check(stream, product(0, 63), x, w, y, limit)


class FakeStream:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def synchronize(self):
        pass


# ---------------------------------------------------------------- the job


@pytest.fixture
def launched(monkeypatch, cupy):
    """Replaces all that runs on a GPU -> measured cases in order, and a set of names to fail; shortens the plan."""
    common = plan.Block(("",), ("q4_0", "q6_k"), ("a16", "a8"), (plan.SQUARE, plan.SMALL), (1, 32, 64, 256))
    eight_bits = plan.Block(("_eight_bits",), ("q4_0",), ("a16", "a8_g256"), (plan.SQUARE,), (256,))
    rare = (
        plan.Block(("",), ("kbit4",), ("a16",), (plan.SQUARE,), (1, 8)),
        plan.Block(("_types",), ("q4_0", "iq4_nl"), ("a16",), (plan.SQUARE,), (1,)),
        plan.Block(("_groups",), ("q4_0", "u4_g128"), ("a16",), (plan.SQUARE,), (1,)),
    )
    monkeypatch.setattr(plan, "COMMON", (common, eight_bits))
    monkeypatch.setattr(plan, "RARE", rare)
    measured, failing = [], set()

    def measure(stream, cublas, shape, cases, extras):
        for case in cases:
            measured.append(case)
            if case.format in failing:
                yield f"{case}: wrong product"
                continue
            yield "rows", row(case.format, case.activation, case.m, case.shape, x=case.x)
            if case in extras.mma:
                yield "mma", {**case.row, "us": 1.0, results.DENSE_US[case.x]: 2.0}
            if case in extras.sustained:
                yield "sustained", {**case.row, "us": 1.0, results.DENSE_US[case.x]: 2.0}

    def steps(stream, repeats, types, mixtures):
        measured.append(mixtures[0])
        if "step" in failing:
            raise RuntimeError("out of memory")
        return [{"model": "llama-3-8b", "types": mixtures[0], "M": m, "x": x, "us": 1.0} for m in (1, 8) for x in types]

    def experts(stream, read_gbs, models, repeats, progress, types):
        measured.append(models[0])
        for t, skew in ((1, 0), (8, 0), (64, 0), (512, 0), (512, 1), (4096, 0), (4096, 1)):
            for x in types:
                yield {"model": models[0].name, "types": models[0].format, "M": t, "skew": skew, "x": x, "us": 1.0}

    class Compiling(compiler.Compiler):
        def __init__(self, arch):
            self.kernels, self.waits = {}, []

        def __exit__(self, *_):
            pass

        def submit(self, kernels):
            self.kernels.update(dict.fromkeys(kernels))

        def wait(self, kernels):
            assert set(kernels) <= set(self.kernels)

    cuda = SimpleNamespace(facts={"arch": "sm_90a"})
    for module, name, value in (
        (job, "Compiler", Compiling), (job, "Cublas", lambda stream: None), (job, "backends", lambda: {"cuda": cuda}),
        (job, "gpu_of", lambda device: SimpleNamespace(sm=90, sms=132)), (gpu, "facts", lambda stream: dict(FACTS)),
        (gpu, "measure", measure), (gpu, "operands_of", lambda *_: SimpleNamespace(failures=[])),
        (job.step, "rows", steps), (moe, "rows", experts), (job.host, "times", lambda a: {"host_us": {"a16": 6.0}}),
        (job.calls, "rows", lambda: [{"library": "torch", "call": "out", "us": 5.0, "beside_us": 9.0}]),
        (job.moe_host, "rows", lambda: [{"call": "layer", "us": 9.0}]),
        (job.pack, "rates", lambda *_: {"q4_0": {"gbs": 1.0}}), (job.planes, "rows", lambda *_: [plane_row("kbit4")]),
        (gpu, "sweeps", lambda stream, shape, options: [(f"q4_0 a16 {shape[0]}x{shape[1]}", {"16": 1.0})]),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    return SimpleNamespace(measured=measured, failing=failing)


def files(folder):
    return {end: results.load(folder / f"h200{end}.json") for end in plan.FILES}


def test_the_job_fills_every_file_and_then_has_nothing_to_do(tmp_path, launched):
    assert job.run(tmp_path, results.X_TYPES, 0, True) == []
    assert len(launched.measured) == len(set(launched.measured))  # no row is measured twice
    written = files(tmp_path)
    for end, measured in written.items():
        cases = {case for case, ends in plan.files_of_cases().items() if end in ends}
        assert set(map(results.key, measured["rows"])) == cases
        assert measured["read_gbs"] == FACTS["read_gbs"]
    assert set(written[""]) >= {"mma", "sustained", "steps", "experts", "calls", "experts_host", "planes", "host_us"}
    assert set(written["_types"]) == {*FACTS, "rows"}
    assert len(written[""]["sweep"]) == len(plan.SWEPT)
    assert len(written[""]["experts"]) == 2 * 7 * len(MODELS)
    assert not any(count.changed or count.unknown for count in stale.counts(written[""]).values())
    launched.measured.clear()
    assert job.run(tmp_path, results.X_TYPES, 0, True) == []
    assert launched.measured == []
    assert files(tmp_path) == written


def test_only_stale_and_missing_rows_are_measured_again(tmp_path, launched):
    """Rows of files with the same row are copied; rows that the plan lacks are dropped."""
    job.run(tmp_path, results.X_TYPES, 0, True)
    written, edited = files(tmp_path), files(tmp_path)[""]
    shared = plan.Case("q4_0", "a16", 1, 8192, 8192, "float16")
    lost = plan.Case("kbit4", "a16", 8, 8192, 8192, "bfloat16")
    rows = {results.key(measured): measured for measured in edited["rows"]}
    rows[plan.Case("q4_0", "a16", 32, 8192, 8192, "float16")]["kernels"] = "000000000000"
    del rows[lost], rows[shared]
    old = [*rows.values(), row("q4_0", "a8", 3), row("q4_1", "a8", 256, (8192, 8192))]
    results.write(tmp_path / "h200.json", {**edited, "rows": old})
    launched.measured.clear()
    job.run(tmp_path, results.X_TYPES, 0, True)
    assert [(case.format, case.m) for case in launched.measured] == [("q4_0", 32), ("kbit4", 8)]
    assert files(tmp_path) == written


def test_types_are_measured_one_after_the_other(tmp_path, launched):
    job.run(tmp_path, ["float16"], 0, True)
    assert {measured["x"] for measured in files(tmp_path)[""]["rows"]} == {"float16"}
    launched.measured.clear()
    job.run(tmp_path, ["bfloat16"], 0, True)
    rows = files(tmp_path)[""]["rows"]
    assert {measured["x"] for measured in rows} == {*results.X_TYPES}
    assert {case.x for case in launched.measured if isinstance(case, plan.Case)} == {"bfloat16"}


def test_failures_are_lines_and_all_else_is_measured(tmp_path, launched):
    launched.failing.update({"q6_k", "step"})
    failures = job.run(tmp_path, results.X_TYPES, 0, False)
    assert sum("wrong product" in failure for failure in failures) == len(failures) - 3
    assert sum("out of memory" in failure for failure in failures) == 3
    rows = files(tmp_path)[""]["rows"]
    formats = {case.format for case, ends in plan.files_of_cases().items() if "" in ends}
    assert formats - {measured["format"] for measured in rows} == {"q6_k"}
    assert command.show_failures(failures) == 1


def test_nothing_begins_once_the_time_is_over(tmp_path, launched, monkeypatch, capsys):
    """The rows so far are saved."""
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(moe, "perf_counter", lambda: next(clock))
    job.run(tmp_path, results.X_TYPES, 100, True)
    rows = files_there(tmp_path)[""]["rows"]
    assert 0 < len(rows) < 64
    assert {(measured["N"], measured["K"]) for measured in rows} == {(8192, 8192)}
    err = capsys.readouterr().err
    assert "are missed" not in err
    assert "are missing (measure them with --merge)" in err


def files_there(folder):
    return {path.stem.removeprefix("h200"): results.load(path) for path in folder.glob("h200*.json")}


def test_kernels_are_compiled_by_other_processes(tmp_path, monkeypatch):
    """First come, first compiled; a failure is not an error here."""
    monkeypatch.setattr(compiler, "ProcessPoolExecutor", Pool)
    keys = list(job.preparing(["q4_0", "kbit3"]))
    assert [key[0] for key in keys] == ["pack", "dequantize"] * 2
    compiled = []
    monkeypatch.setattr(compiler, "compile_one", lambda *unit: compiled.append(unit))
    with compiler.Compiler("sm_90a") as by_processes:
        by_processes.submit([*keys, *keys])
        by_processes.wait([*keys, ("unknown", None, ())])
    assert [unit[:2] for unit in compiled] == [
        ("pack", "q4_0"), ("dequantize", "q4_0"), ("pack", "kbit3"), ("dequantize", "kbit3"),
    ]  # fmt: skip
    assert {unit[3] for unit in compiled} == {"sm_90a"}


class Pool:
    def __init__(self, workers, mp_context):
        assert workers >= 1

    def submit(self, function, *arguments):
        function(*arguments)
        return SimpleNamespace(result=lambda: 1 / 0)

    def shutdown(self, wait, cancel_futures):
        pass


@pytest.mark.compiles
def test_one_kernel_is_compiled_into_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QGEMM_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    ((kernel, fmt, template), _) = job.preparing(["q4_0"])
    compiler.compile_one(kernel, fmt.name, dict(template), "sm_90a")
    assert len(list(tmp_path.glob("*.cubin"))) == 1


@pytest.mark.parametrize(
    "words", ["--all", "--all --out x --sweep", "--all --out x --m 1", "--cpu --x float16", "--x int8"]
)
def test_options_of_the_job(words, capsys):
    refused_benchmarks(capsys, *words.split(), status=1 if words == "--all" else 2)

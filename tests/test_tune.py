"""`qgemm.tune`: the fastest configs in spite of a wrong cost model, the file of times, interrupts, and the way back."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tuning_bench import MACHINE, chosen, fastest, installed, problem, shaped

import qgemm
from qgemm import cuda, parallel
from qgemm.cuda import tuner, tuning
from qgemm.cuda.driver import tuned
from qgemm.cuda.kernels import prefill_sm80, routes
from qgemm.cuda.problem import Q8_1, SCALED_ROWS, Output, Problem
from qgemm.cuda.times import HERE, SHIPPED, Key, Row, Times, as_json, rows_of, worth
from qgemm.files import compiled

Q4_0, Q4_K = qgemm.FORMATS["q4_0"], qgemm.FORMATS["q4_k"]


@pytest.fixture
def bench(monkeypatch, tmp_path):
    return installed(monkeypatch, tmp_path)


@pytest.mark.parametrize("activation", ["a16", "a8", "a8_g256"])
def test_products_use_the_fastest_config_that_was_timed(bench, activation):
    """The clock contradicts every cost model, the choice of the kernel included."""
    done = qgemm.tune(shaped(Q4_0, 4096, 4096), (1, 16, 512), activation=activation, dtype="float16", progress=False)
    assert done.finished
    assert done.stored
    assert done.products == 3
    for m in (1, 16, 512):
        p = problem(Q4_0, m, 4096, 4096, activation)
        assert p.timed().source == HERE
        assert chosen(p) == fastest(bench, p)
    other = problem(Q4_0, 16, 4096, 8192, activation)
    assert other.timed() is None
    assert chosen(other) == chosen(other._replace(times=None))


def test_a_wrong_cost_model_is_corrected(bench, monkeypatch):
    """Every config of the model has a time of its own; the tuner finds the best, whatever the prediction."""
    monkeypatch.setattr(prefill_sm80, "SM80_CONFIGS", tuple(c._replace(us=1 / c.us) for c in prefill_sm80.SM80_CONFIGS))
    prefill_sm80.sm80_configs_for.cache_clear()
    truth = {}
    for config in prefill_sm80.SM80_CONFIGS:
        truth |= {str(prefill_sm80.Plan(config, s)): 100 / config.us / s for s in range(1, 5)}
    bench.us_of = lambda p, candidate: truth.get(candidate.name[1], 1e6)
    qgemm.tune(shaped(Q4_K, 4096, 4096), 64, activation="a16", dtype="float16", progress=False)
    p = problem(Q4_K, 64, 4096, 4096)
    kernel, config = chosen(p)
    candidates = [str(config) for config, _ in prefill_sm80.PREFILL_SM80.ranked(p)]
    assert (kernel, config) == ("prefill_sm80", min(candidates, key=truth.__getitem__))
    assert config != str(prefill_sm80.PREFILL_SM80.ranked(p)[0][0])
    prefill_sm80.sm80_configs_for.cache_clear()


def test_rounds_begin_with_the_best_predictions(bench):
    """Whenever the tuner stops, every product has its most promising configs."""
    qgemm.tune(shaped(Q4_0, 4096, 4096), (16, 64), activation="a16", dtype="float16", minutes=4 / 60, progress=False)
    firsts = [problem(Q4_0, m, 4096, 4096) for m in (16, 64)]
    expected = [(p.m, *tuner.candidates(p)[i].name) for i in (0, 1) for p in firsts]
    assert bench.calls == expected
    assert tuner.candidates(firsts[0])[0].name == chosen(firsts[0]._replace(times=None))


def test_the_fastest_are_timed_again_side_by_side(bench):
    """A first time that met a slow phase of the GPU does not decide."""
    p = problem(Q4_0, 512, 4096, 4096)
    first, second = [c.name for c in tuner.candidates(p)[:2]]
    times = {first: iter([10.0, 10.2]), second: iter([10.1, 9.0])}
    bench.us_of = lambda p, candidate: next(times[candidate.name]) if candidate.name in times else 99.0
    qgemm.tune(shaped(Q4_0, 4096, 4096), 512, activation="a16", dtype="float16", progress=False)
    assert chosen(problem(Q4_0, 512, 4096, 4096)) == second
    timed_twice = [name for name, count in Counter(bench.calls).items() if count > 1]
    assert sorted(timed_twice) == sorted([(512, *first), (512, *second)])  # others are slower by more than 5%
    bench.calls.clear()
    bench.us_of = lambda p, candidate: 10.0
    qgemm.tune(shaped(Q4_0, 4096, 8192), 512, activation="a16", dtype="float16", progress=False)
    assert sum(count > 1 for count in Counter(bench.calls).values()) == tuner.MAX_NEAR < len(set(bench.calls))


def test_a_config_that_fails_is_never_chosen(bench):
    default = chosen(problem(Q4_0, 512, 4096, 4096))
    bench.us_of = lambda p, candidate: None if candidate.name == default else 10.0
    qgemm.tune(shaped(Q4_0, 4096, 4096), 512, activation="a16", dtype="float16", progress=False)
    assert chosen(problem(Q4_0, 512, 4096, 4096)) != default


def test_an_interrupt_keeps_what_was_timed_and_the_next_run_goes_on(bench):
    """Ctrl-C at any time: nothing is timed twice."""
    w, count = shaped(Q4_0, 4096, 4096), 0

    def interrupt():
        nonlocal count
        count += 1
        if count == 7:
            raise KeyboardInterrupt

    bench.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        qgemm.tune(w, (1, 64), activation="a16", dtype="float16", progress=False)
    before = list(bench.calls)
    assert len(before) == 6
    assert sum(len(times) for row in tuned.read(MACHINE) for times in row.us.values()) == 6
    bench.calls.clear()
    done = qgemm.tune(w, (1, 64), activation="a16", dtype="float16", progress=False)
    assert done.finished
    assert not set(before) & set(bench.calls[: done.configs])
    bench.calls.clear()
    assert qgemm.tune(w, (1, 64), activation="a16", dtype="float16", progress=False).configs == 0
    assert not bench.calls


def test_every_shape_has_a_part_of_the_time(bench):
    """Largest first; a shape that needs less leaves its time to the next."""
    tensors = {f"w{i}": shaped(Q4_K, n, 4096) for i, n in enumerate((1024, 14336, 4096))}
    qgemm.tune(tensors, activation="a16", dtype="float16", minutes=0.5, progress=False)
    assert [w.shape[0] for w in bench.matrices] == [14336, 4096, 1024]
    assert {row.key.n for row in tuned.read(MACHINE)} == {14336, 4096, 1024}


def test_a_shape_that_lacks_times_is_not_finished(bench):
    """Whatever comes after it: here a shape that an earlier run has finished."""
    first, last = (shaped(Q4_0, n, 4096) for n in (4096, 1024))
    options = {"activation": "a16", "dtype": "float16", "progress": False}
    assert qgemm.tune(last, 512, **options).finished
    assert not qgemm.tune([first, last], 512, minutes=2 / 60, **options).finished
    assert qgemm.tune([first, last], 512, **options).finished


def test_products_of_float64_are_those_of_float32(bench):
    """Kernels read a float64 x as float32, and both are timed once."""
    done = qgemm.tune(shaped(Q4_0, 4096, 4096), 16, activation="a16", dtype=["float64", "float32"], progress=False)
    assert done.products == 1
    assert {row.key.x for row in tuned.read(MACHINE)} == {"float"}


@pytest.mark.parametrize("damage", ["bit", "cut", "json", "driver", "kernels", "row", "nan", "empty"])
def test_a_file_that_does_not_fit_is_passed_over(bench, damage, monkeypatch, tmp_path):
    """Damaged, or of another driver or other kernels: the cost model chooses, and the next run starts anew."""
    qgemm.tune(shaped(Q4_0, 4096, 4096), 64, activation="a16", dtype="float16", progress=False)
    (path,) = (tmp_path / "cache").iterdir()
    assert path.suffix == ".times"
    data = path.read_bytes()
    document = json.loads(compiled.unsealed(data))
    assert document["gpu"] == MACHINE.gpu
    if damage == "bit":
        path.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    elif damage == "cut":
        path.write_bytes(data[:-1])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "json":
        path.write_bytes(compiled.sealed(b'{"gpu": '))
    elif damage in ("driver", "kernels"):
        path.write_bytes(compiled.sealed(json.dumps({**document, damage: "another"}).encode()))
    else:
        rows = [{**document["rows"][0], "n": -1}] if damage == "row" else document["rows"]
        text = json.dumps({**document, "rows": rows})
        path.write_bytes(compiled.sealed(text.replace('"settled": true', '"settled": NaN', 1).encode()))
        if damage == "nan":
            text = json.dumps({**document, "rows": [{**rows[0], "us": {"decode": {"": float("nan")}}}]})
            path.write_bytes(compiled.sealed(text.encode()))
    tuned._times.values.clear()
    p = problem(Q4_0, 64, 4096, 4096)
    assert p.timed() is None
    assert chosen(p) == chosen(p._replace(times=None))
    assert qgemm.tune(shaped(Q4_0, 4096, 4096), 64, activation="a16", dtype="float16", progress=False).configs


@pytest.mark.parametrize("foreign", ["file", "folder"])
def test_a_file_that_others_may_have_written_is_passed_over(bench, foreign, tmp_path):
    """With a warning, as a compiled kernel is."""
    qgemm.tune(shaped(Q4_0, 4096, 4096), 64, activation="a16", dtype="float16", progress=False)
    (path,) = (tmp_path / "cache").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    os.chmod(path if foreign == "file" else path.parent, 0o777)
    tuned._times.values.clear()
    with pytest.warns(RuntimeWarning, match="others may write to it"):
        assert problem(Q4_0, 64, 4096, 4096).timed() is None


def test_without_a_folder_times_are_kept_by_nobody(bench, tmp_path):
    (tmp_path / "cache").write_text("")
    done = qgemm.tune(shaped(Q4_0, 4096, 4096), 64, activation="a16", dtype="float16", progress=False)
    assert not done.stored


def test_other_numbers_of_rows_are_predicted_from_timed_ones():
    """The next timed number's error of the prediction corrects that of a smaller one; the largest serves all beyond."""
    key = Key("q4_0", "a16", "half", 4096, 4096)
    p = Problem(Q4_0, "a16", 300, 4096, 4096, 89, sms=128)
    kernel = prefill_sm80.PREFILL_SM80
    predicted = {m: {str(c): us for c, us in kernel.ranked(p._replace(m=m))} for m in (300, 512, 4096, 8192)}
    first, second = [name for name in predicted[300] if all(name in table for table in predicted.values())][:2]
    us = {512: {first: 50.0, second: 40.0}, 4096: {first: 300.0, second: 301.0}}
    times = Times([Row(key, m, {kernel.name: us[m]}) for m in us])
    for m, timed_m in ((300, 512), (512, 512), (513, 4096), (8192, 4096)):
        other = p._replace(m=m, times=times)
        assert other.timed().m == timed_m
        corrected = {str(config): us for config, us in kernel.timed(other)}
        table = predicted.get(m) or {str(c): us for c, us in kernel.ranked(p._replace(m=m))}
        ratios = {name: table[name] / predicted[timed_m][name] for name in (first, second)}
        assert corrected == pytest.approx({name: us[timed_m][name] * ratios[name] for name in ratios})


def test_shipped_times_serve_products_that_were_not_tuned_here():
    """`qgemm routes` says which of the two chose."""
    key, other = Key("q4_0", "a16", "half", 4096, 4096), Key("q4_0", "a16", "half", 8192, 4096)
    shipped = [Row(k, 16, {"decode": {"a": 5.0}}) for k in (key, other)]
    times = Times([Row(key, 16, {"decode": {"b": 6.0}})], shipped)
    assert times.serving(key, 9) == (16, {"decode": {"b": 6.0}}, HERE)
    assert times.serving(other, 9) == (16, {"decode": {"a": 5.0}}, SHIPPED)
    assert times.serving(key._replace(gated=True), 9) is None


@settings(max_examples=50)
@given(st.lists(st.tuples(
    st.builds(Key, st.sampled_from(["q4_0", "q4_k"]), st.just("a16"), st.just("half"), st.integers(1, 3), st.just(32)),
    st.integers(1, 9),
    st.dictionaries(st.sampled_from("ab"), st.dictionaries(st.sampled_from("cd"), st.floats(1, 9), min_size=1),
                    min_size=1),
), max_size=6))  # fmt: skip
def test_rows_survive_their_file(parts):
    rows = [Row(*part) for part in parts]
    assert list(rows_of(json.loads(json.dumps(list(map(as_json, rows)))))) == rows
    for row in rows:
        least = min(us for times in row.us.values() for us in times.values())
        assert min(us for times in worth(row.us).values() for us in times.values()) == least


def test_the_public_function_refuses_what_it_does_not_know(bench):
    w = shaped(Q4_0, 64, 256)
    for wrong in ({"activation": "a9"}, {"m": 0}, {"activation": ["a16", "a9"]}):
        with pytest.raises(qgemm.UnsupportedError):
            qgemm.tune(w, progress=False, **wrong)
    for minutes in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="minutes"):
            qgemm.tune(w, minutes=minutes)
    for wrong in ({"tensors": [1]}, {"tensors": w, "dtype": "int8"}):
        with pytest.raises(TypeError):
            qgemm.tune(**wrong)


def test_candidates_print_apart():
    """A file names a config as it prints: two of a problem never print alike."""
    for fmt in (Q4_0, Q4_K, qgemm.FORMATS["q8_0"], qgemm.FORMATS["q2_k"], qgemm.FORMATS["iq4_nl"]):
        for sm in (75, 80, 89, 90, 120):
            for activation in ("a16", "a8", "a8_g256"):
                for m in (1, 8, 16, 64, 4096):
                    p = Problem(fmt, activation, m, 4096, 4096, sm, outputs=(Output(4096, "float16"),))
                    if not any(row.may_serve(p) for row in routes.ROUTES):
                        continue
                    names = [candidate.name for candidate in tuner.candidates(p)]
                    assert len(names) == len(set(names))
                    assert names[0] == chosen(p)


def test_compilations_of_a_round_run_on_all_cores(bench, monkeypatch):
    """Every template of a candidate, for each type of x that its kernel may read, before the first launch."""
    compiled_units = []
    monkeypatch.setattr(tuner, "compiles", lambda *unit: compiled_units.append(unit) or True)
    monkeypatch.setattr(tuning, "run_all", parallel.run_all)
    qgemm.tune(shaped(Q4_0, 4096, 4096), 1, activation="a8", dtype="float16", progress=False)
    p = problem(Q4_0, 1, 4096, 4096, "a8")
    for candidate in tuner.candidates(p):
        if candidate.config is not None:
            for x in candidate.kernel.reads(p):
                unit = candidate.kernel.template(p._replace(x=x), candidate.config)
                assert (routes.source_of(candidate.kernel.name), Q4_0, unit) in compiled_units


def test_exact_products_of_few_rows_stay_exact():
    """A kernel that rounds weights takes the place of another such kernel only, unless x has many rows."""
    for sm, m, activation in itertools.product((80, 89, 90, 120), (1, 8, 9, 16, 17), ("a16", "a8")):
        rows = routes.alternatives(Problem(Q4_0, activation, m, 4096, 4096, sm))
        kernels = [row.kernel for row in rows]
        assert m > 16 or kernels[0].rounds or not any(kernel.rounds for kernel in kernels)
        assert m <= 16 or any(kernel.rounds for kernel in kernels)


def test_codes_take_the_times_of_their_source():
    """Scaled rows come from bf16; codes from any type, whose kernels need not be the same."""
    rows = [Row(Key("q4_0", "a16", x, 64, 256), 8, {"decode": {x: 1.0}}) for x in ("half", "bf16")]
    rows += [Row(Key("q4_0", "a8", x, 64, 256), 8, {kernel: {x: 1.0}}) for x, kernel in (("half", "a"), ("bf16", "b"))]
    p = Problem(Q4_0, "a16", 8, 64, 256, 89, times=Times(rows))
    assert p._replace(x=SCALED_ROWS).timed().us == {"decode": {"bf16": 1.0}}
    assert p._replace(x="half").timed().us == {"decode": {"half": 1.0}}
    codes = p._replace(x=Q8_1, activation="a8")
    assert codes.timed().us == codes.timed("a").us == {"a": {"half": 1.0}}
    assert codes.timed("b").us == {"b": {"bf16": 1.0}}
    assert codes.timed("c") is None


def test_without_cupy_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(cuda, "require", lambda who: None)
    with pytest.raises(qgemm.UnsupportedError, match=r"tuning needs CuPy, torch alone multiplies: pip install"):
        qgemm.tune(qgemm.quantize(np.zeros((64, 64), np.float32), "q4_0"), progress=False)

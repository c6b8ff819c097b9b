"""The benchmarks without launches: rows and their file, measurements, loops, the command line."""

from __future__ import annotations

import json
import os
import re

import numpy as np
import pytest
import readme
from measured import made_up, plane_row, refused_benchmarks, row, run_benchmarks
from strategies import FORMATS, over_formats

import qgemm
from benchmarks import baselines, command, cpu, encode, gpu, host, results, sweep
from benchmarks.report import tables
from qgemm.cli import timing, weights
from qgemm.cuda.jit import nvrtc

# ---------------------------------------------------------------- rows and their file


def test_percentiles():
    assert timing.quantiles(range(11)) == (5, 1, 9)
    assert timing.quantiles([2.0]) == (2, 2, 2)
    assert timing.quantiles([3, 1, 2, 100]).us == 2.5


def test_rates():
    """4096 x 4096 in 4.5 bits is 9.44 MB; 2 * 4096^2 operations."""
    assert row(us=10.0)["gbs"] == 943.7
    assert row(us=10.0)["tflops"] == 3.36


def test_merging_replaces_rows_measured_again():
    old = made_up(rows=[row(m=1, us=5.0), row(m=16, us=6.0)], host_us={"a16": 1.0, "a8": 2.0})
    new = made_up(rows=[row(m=16, us=4.0), row(m=2, us=3.0)], host_us={"a8": 3.0}, date="2026-02-01")
    both = results.merge(old, new)
    assert [(merged_row["M"], merged_row["us"]) for merged_row in both["rows"]] == [(1, 5.0), (2, 3.0), (16, 4.0)]
    assert (both["host_us"], both["date"]) == ({"a16": 1.0, "a8": 3.0}, "2026-02-01")
    assert results.merge(both, new) == both


def test_types_of_x_have_rows_of_their_own():
    """A row without a type is of float16, and is replaced by one that says so."""
    old = made_up(rows=[row(m=1, us=5.0), row(m=2)])
    new = made_up(rows=[row(m=1, us=4.0, x="float16"), row(m=1, us=6.0, x="bfloat16")])
    both = results.merge(old, new)["rows"]
    cases = [(merged_row["M"], results.x_of(merged_row), merged_row["us"]) for merged_row in both]
    assert cases == [(1, "bfloat16", 6.0), (1, "float16", 4.0), (2, "float16", 8.0)]
    assert [results.speedup(merged_row) for merged_row in both] == [4.0, 6.0, 3.0]


def test_merging_keeps_rates_of_packing():
    rate = {"gbs": 1.0, "share": 0.5}
    both = results.merge(made_up(), made_up(pack={"q6_k": rate, "q8_0": rate}))
    assert both["pack"] == {**made_up()["pack"], "q6_k": rate, "q8_0": rate}


def test_merging_keeps_rows_of_planes():
    old = made_up(planes=[plane_row("kbit2"), plane_row("kbit4")])
    both = results.merge(old, made_up(planes=[plane_row("kbit4", share=0.5), plane_row("kbit3")]))
    assert both["planes"] == [plane_row("kbit2"), plane_row("kbit3"), plane_row("kbit4", share=0.5)]


def test_rows_of_other_devices_are_dropped():
    assert results.merge(made_up(device="NVIDIA L4"), made_up()) == made_up()


def test_rows_of_other_kernels_say_so():
    """They get a stamp once; packing and sweeps, which cannot hold a stamp, are dropped."""
    old = made_up(rows=[row(m=1), row(m=2)], kernels_sha256="def", date="2026-01-30", sweep={"q4_0 a16 1x1": {"16": 1}})
    both = results.merge(old, made_up(rows=[row(m=2, us=5.0)]))
    stamp = {"kernels_sha256": "def", "date": "2026-01-30"}
    assert both["rows"] == [{**stamp, **row(m=1)}, row(m=2, us=5.0)]
    assert (both["kernels_sha256"], both["sweep"]) == ("abc", {})
    later = results.merge(both, made_up(rows=[row(m=4)], kernels_sha256="ghi"))
    assert [merged_row.get("kernels_sha256") for merged_row in later["rows"]] == ["def", "abc", None]
    assert "Some rows of Q4_0, the last of 2026-01-31, were measured" in "".join(tables.before(tables.Rows(later)))
    assert not list(tables.before(tables.Rows(made_up())))


def test_sources_hash_sees_every_kernel_and_host_module(tmp_path, monkeypatch):
    (tmp_path / "formats").mkdir()
    monkeypatch.setattr(results, "kernels_dir", lambda: tmp_path)
    seen = {results.sources_sha256()}
    for name in ("a.cu", "formats/b.cuh"):
        for text in ("one", "two"):
            (tmp_path / name).write_text(text)
            seen.add(results.sources_sha256())
    monkeypatch.setattr(results, "HOST", results.HOST[1:])
    seen.add(results.sources_sha256())
    assert len(seen) == 6


def test_the_file_comes_back(tmp_path):
    path = tmp_path / "new" / "h200.json"
    results.write(path, made_up())
    assert results.load(path) == made_up()
    assert path.read_text().count("\n") > len(made_up()["rows"])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": 3}', '{"rows": [{"format": "q4_0"}]}'])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(qgemm.QgemmError, match="no benchmark results"):
        results.load(path)


@pytest.mark.parametrize(("device", "stem"), [("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 4090", "geforce_rtx_4090")])
def test_file_names(device, stem):
    assert results.file_stem(device) == stem


def test_saving_writes_into_a_folder_and_merges(tmp_path):
    command.save(None, True, made_up())
    command.save(tmp_path, True, made_up(rows=[row(m=1)]))
    command.save(tmp_path, True, made_up(rows=[row(m=2)]))
    assert [saved_row["M"] for saved_row in results.load(tmp_path / "h200.json")["rows"]] == [1, 2]
    command.save(tmp_path, False, made_up(rows=[row(m=2)]))
    assert len(results.load(tmp_path / "h200.json")["rows"]) == 1


def test_table_for_a_terminal():
    text = results.table([row(), row(m=16, x="bfloat16", graph=False)])
    assert "decode (no graph)" in text
    assert [line.split()[:4] for line in text.splitlines()[1:]] == [
        ["q4_0", "a16", "float16", "4096x4096"],
        ["q4_0", "a16", "bfloat16", "4096x4096"],
    ]


def test_each_option_prints_its_table():
    """A table with times and speed-ups for each option that was set, and none for the others."""
    assert not list(results.short_tables(made_up()))
    rows = [row(), row(m=16, dequantize_us=80.0)]
    measured = made_up(rows=rows, mma=[row(m=64, us=12.0)], sustained=[row(m=64, us=9.6)])
    tables = [text.splitlines() for text in results.short_tables(measured)]
    assert [lines[0] for lines in tables] == ["decoding W to float16, then cuBLAS", *results.LISTS.values()]
    assert [lines[2].split()[4:] for lines in tables] == [
        ["16", "80.0", "24.0", "0.30"],
        ["64", "9.6", "24.0", "2.50"],
        ["64", "12.0", "24.0", "2.00"],
    ]
    assert {len(lines) for lines in tables} == {3}


# ---------------------------------------------------------------- measurements


@over_formats(FORMATS)
def test_random_blocks_are_tame(fmt):
    """Every format gives finite weights that differ, and a product of K = 16384 stays inside float16."""
    if fmt.levels is None:
        pytest.skip("no decoder")
    blocks = weights.random_blocks(fmt, 32, 512, np.random.default_rng(0))
    w = qgemm.Tensor(fmt, (32, 512), blocks).dequantize()
    assert len(np.unique(w)) > 8
    assert 0 < 6 * np.sqrt(16384) * np.sqrt((w.astype(np.float64) ** 2).mean()) < 65504


def test_a_sweep_sees_both_sides_of_tile_edges():
    counts = sweep.counts()
    assert {16, 17, 24, 31, 32, 33, 127, 128, 129, 255, 256, 257, 504, 512} <= set(counts)
    assert counts == sorted(set(counts))
    assert (counts[0], counts[-1]) == (16, 512)


def test_the_steepest_rise_of_a_sweep():
    """M are ordered as numbers, not as text."""
    assert sweep.steepest({"16": 2.0, "104": 6.0, "24": 2.5, "96": 4.0}) == (1.6, 96)


def test_copies_exceed_the_bytes_to_rotate():
    assert timing.copies_of(100, 300) == 3
    assert timing.copies_of(101, 300) == 3
    assert timing.copies_of(99, 300) == 4
    assert timing.copies_of(1000, 300) == 2


@pytest.mark.parametrize("count", [1, 2, 3, 31, 32, 40])
def test_a_rotation_uses_all_weights_equally(count):
    turns = timing.rotation(range(count), nbytes=1 << 25)
    assert len(turns) * (1 << 25) >= timing.LOOP_US * timing.BYTES_A_US
    assert {turns.count(i) for i in range(count)} == {len(turns) // count}
    assert timing.rotation(range(count), 1, timing.LOOP_US * timing.OPERATIONS_A_US) == list(range(count))
    assert len(timing.rotation(range(count), nbytes=1)) < timing.MAX_CALLS + count


class Stream:
    """The part of CuPy's streams that `capture` uses; `refuses` makes calls fail while capturing, as a library may."""

    def __init__(self, refuses: bool) -> None:
        self.refuses, self.capturing, self.called = refuses, False, 0

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def synchronize(self):
        assert not self.capturing

    def begin_capture(self):
        self.capturing = True

    def end_capture(self):
        assert self.capturing
        self.capturing = False
        return self

    def launch(self, stream):
        assert stream is self

    def call(self):
        if self.capturing and self.refuses:
            raise NotImplementedError
        self.called += 1


def test_capture():
    stream = Stream(refuses=False)
    loop = timing.capture(stream, [stream.call] * 3)
    assert (loop.calls, loop.graph, stream.called, stream.capturing) == (3, True, 7, False)
    loop.replay()
    assert stream.called == 7


def test_refused_captures_are_called():
    stream = Stream(refuses=True)
    loop = timing.capture(stream, [stream.call] * 3)
    assert (loop.calls, loop.graph, stream.called, stream.capturing) == (3, False, 4, False)
    loop.replay()
    assert stream.called == 7


# ---------------------------------------------------------------- command line


@pytest.mark.parametrize(
    "words",
    ["--formats q4_9", "--activations a4", "--shapes 4096", "--shapes 1x2x3", "--m 0", "--m 1,,2", "--repeats x",
     "--cpu --gpu"],
)  # fmt: skip
def test_bad_options(words, capsys):
    refused_benchmarks(capsys, *words.split())


def test_options():
    words = "--formats q4_0,Q8_0 --activations a8 --shapes 64x32,128x96 --m 1,4 --merge"
    args = command.parser().parse_args(words.split())
    assert [str(fmt) for fmt in args.formats] == ["Q4_0", "Q8_0"]
    assert (args.activations, args.shapes, args.m, args.merge) == (["a8"], [(64, 32), (128, 96)], [1, 4], True)
    assert qgemm.FORMATS["q4_0"] in command.weight_formats()


def test_all_measurements_are_printed(monkeypatch, capsys):
    rows = [row(), row(m=16, dequantize_us=80.0)]
    lists = {name: [row(m=64)] for name in results.LISTS}
    slowest = {"a16": 10.5, "a8": 11.5}
    measured = made_up(rows=rows, host_slowest_us=slowest, sweep={"q4_0 a16 1x1": {"16": 1.0, "24": 1.1}}, **lists)
    monkeypatch.setattr(gpu, "run", lambda options, save: (measured, ["q4_0 a8: too large"]))
    words = ["--mma", "--sustained", "--dequantize", "--sweep"]
    assert command.run_gpu(command.parser().parse_args(words)) == 1
    out, err = capsys.readouterr()
    assert "a16 7.0 (slowest CPU 10.5), a8 9.0 (slowest CPU 11.5)" in out
    assert results.table(rows) in out
    for text in results.short_tables(measured):
        assert text in out
    assert "too large" in err


@pytest.mark.skipif(qgemm.backends()["cuda"].available, reason="there is a GPU")
@pytest.mark.parametrize("mode", ["--gpu", "--encode"])
def test_without_a_gpu_it_says_why(mode, capsys):
    assert qgemm.backends()["cuda"].detail in refused_benchmarks(capsys, mode, status=1)


# ---------------------------------------------------------------- on a CPU

SMALL = ["--cpu", "--shapes", "64x256", "--m", "1,2", "--repeats", "1"]


def test_the_cpu_beside_the_gguf_package(capsys, tmp_path):
    """Milliseconds, GB/s and the ratio; the project's own goals are not shown."""
    status, out, err = run_benchmarks(capsys, *SMALL, "--formats", "q4_0,q4_k,kbit4", "--out", tmp_path / "x.json")
    assert (status, err) == (0, "")
    assert out.startswith("64 x 256, ")
    head, *lines = out.split("\n\n")[1].splitlines()
    assert re.split("  +", head) == ["job", "format", "ms", "GB/s", "gguf ms", "times as fast"]
    rows = [re.split("  +", line) for line in lines]
    products = ["a16 M=1", "a8 M=1", "a16 M=2", "a8 M=2"]
    assert [(cells[0], cells[1]) for cells in rows] == [
        *((job, "q4_0") for job in ["encode", "decode", *products]),
        *((job, "q4_k") for job in ["encode", "decode", *products]),
        *((job, "kbit4") for job in ["encode", "decode", "a16 M=1", "a16 M=2"]),
    ]
    alone = [cells[:2] for cells in rows if cells[4:] == ["-", "-"]]  # operations that the gguf package lacks
    assert alone == [["encode", "q4_k"], *(cells[:2] for cells in rows if cells[1] == "kbit4")]
    written = json.loads((tmp_path / "x.json").read_text())
    assert [row["nbytes"] for row in written[:3]] == [4 * 64 * 256, 4 * 64 * 256, 64 * 8 * 18]
    assert all(row["gbs"] == pytest.approx(row["nbytes"] / row["qgemm_ms"] / 1e6) for row in written)
    assert "goal" not in out


def test_goals_of_the_cpu(monkeypatch, capsys):
    rows = [cpu.Row("encode", "q4_0", 2.0, 1.0, 1.0, 1000), cpu.Row("a16 M=1", "kbit4", 2.0, None, 0.0, 1000)]
    monkeypatch.setattr(cpu, "run", lambda options: rows)
    assert run_benchmarks(capsys, *SMALL)[0] == 0
    status, out, err = run_benchmarks(capsys, *SMALL, "--goals")
    assert (status, err) == (1, "1 of 1 goals missed\n")
    assert out.split("\n\n")[1].splitlines()[0].endswith("times as fast  goal")


@pytest.mark.parametrize(
    "words", ["--cpu --sweep", "--convert --m 1", "--convert --merge", "--cpu --merge", "--convert --formats q4_0"]
)
def test_options_that_would_be_ignored_are_refused(words, capsys):
    assert "says nothing to a benchmark of" in refused_benchmarks(capsys, *words.split())


def test_formats_that_need_an_importance_are_only_decoded_and_multiplied():
    names = [job.name for job in cpu.jobs(qgemm.FORMATS["iq1_s"], (64, 256), cpu.Options(m=(1,)))]
    assert names == ["decode", "a16 M=1", "a8 M=1"]


def test_goals_of_encoding(tmp_path, capsys):
    """A row below its goal counts as missed; the document's table shows all rows."""
    rows = [encode.Row("f16", "q4_0", 5.0, 2500.0, 0.6), encode.Row("f16", "kbit4", 4.9, 0.0, 0.0)]
    goals, none = (command.parser().parse_args(words) for words in (["--goals"], []))
    assert command.check_goals(goals, rows) == 1
    assert "1 of 2 goals missed" in capsys.readouterr().err
    assert command.check_goals(none, rows) == 0
    assert capsys.readouterr() == ("", "")
    assert "q4_0    5.0         2500   0.60     5" in encode.table(rows, goals=True)
    assert encode.table(rows).splitlines()[1].endswith("q4_0    5.0         2500   0.60")
    path = tmp_path / "encode.json"
    path.write_text(json.dumps({"device": "GPU", "rows": [row._asdict() for row in rows]}))
    assert "| F16 | Q4_0 5 (60%), KBIT4 5 |" in readme.encode_table(path)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system cannot say")
def test_a_thread_runs_on_one_cpu_and_then_on_all_again():
    before = os.sched_getaffinity(0)
    for core in host.some_cpus():
        with host.running_on(core):
            assert os.sched_getaffinity(0) == {core}
        assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(("count", "timed"), [(1, 1), (16, 16), (17, 9), (128, 16), (384, 16)])
def test_cpus_of_a_large_machine_are_sampled(count, timed, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)), raising=False)
    cpus = host.some_cpus()
    assert len(set(cpus)) == timed <= host.MAX_CPUS
    assert cpus[-1] >= count - count // timed - 1


def test_without_affinity_any_cpu_is_timed(monkeypatch):
    """Calls are timed once: a system that cannot list its CPUs cannot choose one either."""
    for name in ("sched_getaffinity", "sched_setaffinity"):
        monkeypatch.delattr(os, name, raising=False)
    took = iter((3.0, 4.0))
    monkeypatch.setattr(host, "typical", lambda call, wait: call())
    measured = host.on_each_cpu({"a16": lambda: next(took)}, wait=lambda: None)
    assert measured == {"host_us": {"a16": 3.0}, "host_slowest_us": {"a16": 3.0}}
    assert next(took) == 4.0


def test_a_typical_call_is_timed_without_waiting(monkeypatch):
    """The median of calls of 3 us, between waits of 1000 us, is 3 us."""
    clock = [0.0]

    def takes(seconds):
        clock[0] += seconds

    monkeypatch.setattr(host, "perf_counter", lambda: clock[0])
    waits = []
    us = host.typical(lambda: takes(3e-6), lambda: (takes(1e-3), waits.append(1)))
    assert us == pytest.approx(3.0)
    assert len(waits) > host.CALLS // host.QUEUE


@pytest.mark.compiles
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a", "sm_120"])
def test_reading_kernels_compile(arch):
    """Every kernel that a GPU of this architecture reads by has its entry point."""
    cubin = nvrtc.compile_cubin(baselines.READERS.read_text(), arch).cubin
    sm = int(arch.removeprefix("sm_").rstrip("a"))
    for reader in baselines.CANDIDATES:
        assert (f".text.{reader.name}\0".encode() in cubin) == (sm >= reader.least)
        assert reader.shared in (0, baselines.BULK)
    source = baselines.READERS.read_text()
    stages, nbytes = map(int, re.search(r"STAGES = (\d+), STAGE_BYTES = (\d+);", source).groups())
    assert stages * nbytes == baselines.BULK

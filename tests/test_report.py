"""The report of the benchmark: targets, tables for the documents, plots."""

from __future__ import annotations

import itertools
import re
from xml.etree import ElementTree

import pytest
from measured import made_up, plane_row, row

from benchmarks import results
from benchmarks.report import plots, svg, tables
from benchmarks.report import targets as report

SHAPES = ((4096, 4096), (8192, 8192), (28672, 8192))


# ---------------------------------------------------------------- report


def test_verdicts():
    target = report.Target("", 2.0, 3.0, ())
    assert [target.verdict(value) for value in (None, 1.9, 2.0, 3.0)] == ["-", "MISS", "must", "aim"]
    upper = report.Target("", 8.0, None, (), at_most=True)
    assert [upper.verdict(value) for value in (8.1, 8.0)] == ["MISS", "must"]


def test_targets_show_misses():
    text = report.targets_table(made_up())
    lines = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in text.splitlines()[1:-2])
    assert lines["q4_0 4096x4096 M=1: speed-up over cuBLAS"].split() == ["2.30", "3.10", "3.00", "must", "3.00", "must"]
    assert lines["q4_0 8192x8192 M=1: speed-up over cuBLAS"].split()[-1] == "MISS"
    assert lines["q4_0 8192x8192 M=4: speed-up over cuBLAS"].split() == ["2.90", "3.40", "-", "-"]
    assert lines["q8_0 28672x8192 M=1: share of memory speed"].split() == [
        "0.83",
        "0.92",
        "0.75",
        "MISS",
        "0.75",
        "MISS",
    ]
    assert lines["us of the host for a call"].split() == ["8.00", "7.00", "must", "9.00", "MISS"]
    assert re.search(r"\d+ are missed, \d+ are not measured$", text)


def test_targets_of_many_rows():
    """Rows of one activation count once; other formats are measured by q4_0, a sweep by its steepest rise."""
    rows = [
        row(fmt, activation, m, (8192, 8192), us=us)
        for m in (64, 256)
        for fmt, activation, us in (("q4_0", "a16", 8), ("q4_0", "a8", 40), ("q4_k", "a16", 9))
    ]
    measured = made_up(rows=rows, sweep={"q4_0 a16 8192x8192": {"16": 8.0, "24": 8.0, "32": 12.0}})
    lines = [re.split(r" {2,}", line.strip()) for line in report.targets_table(measured).splitlines()]
    name = "q4_0 8192x8192 M=256: speed-up over cuBLAS"
    assert [name, "1.05", "1.12", "3.00", "aim"] in lines
    assert [name, "0.90", "0.60", "MISS"] in lines
    assert ["q4_k 8192x8192 M=256: time over that of q4_0", "1.10", "1.12", "MISS"] in lines
    assert ["q4_k 8192x8192 M=64: share of memory speed over that of q4_0", "0.90", "0.89", "MISS"] in lines
    assert ["q4_0 a16 8192x8192 M<=32: time over that of the M before", "1.25", "1.50", "MISS"] in lines
    assert ["q4_k 8192x8192 M=16: share of memory speed over that of q4_0", "0.90", "-"] in lines
    assert ["q4_k 28672x8192 M=4096: time over that of q4_0", "1.10", "-"] in lines


def test_targets_of_bfloat16():
    """A bound on the time over that by float16, looser for few rows of K-quants; cuBLAS of its type for many rows."""
    cases = (("q4_k", 16, 8.7), ("q4_k", 32, 8.7), ("q4_0", 16, 8.7), ("q4_0", 512, 8.2), ("q6_k", 1024, 25.0))
    pairs = [(row(fmt, m=m), row(fmt, m=m, us=us, x="bfloat16")) for fmt, m, us in cases]
    rows = [*itertools.chain(*pairs), row("mxfp4", m=4096), row("q4_0", "a8", m=2)]
    verdicts = {target.name: target.verdict(target.measured[0]) for target in report.targets(made_up(rows=rows))}
    over = {name: verdict for name, verdict in verdicts.items() if name.endswith("by bfloat16 over that by float16")}
    assert list(over.values()) == ["must", "MISS", "MISS", "must", "MISS", "-"]
    beside = {name: verdict for name, verdict in verdicts.items() if name.endswith("speed-up over cuBLAS in bfloat16")}
    assert list(beside.values()) == ["must", "MISS", "-"]


def test_targets_of_kbit():
    """At most a time over reading, at least a speed-up and a share of reading."""
    rows = [row("kbit4", m=m, shape=(8192, 8192), us=us) for m, us in ((1, 7.5), (8, 8.0), (64, 12.0), (1024, 30.0))]
    planes = [plane_row("kbit4"), plane_row("kbit4", "dequantize_codebook")]
    by_name = {target.name: target for target in report.targets(made_up(rows=rows, planes=planes))}
    verdicts = {
        "kbit4 8192x8192 M=1: time over reading": "must",
        "kbit4 8192x8192 M=8: time over reading": "MISS",
        "kbit4 8192x8192 M=64: speed-up over cuBLAS": "must",
        "kbit4 8192x8192 M=1024: speed-up over cuBLAS": "MISS",
        "kbit4 quantize_codebook of float16: share of reading as many bytes": "must",
        "kbit4 dequantize_codebook of float16: share of reading as many bytes": "MISS",
    }
    assert {name: by_name[name].verdict(by_name[name].measured[0]) for name in verdicts} == verdicts


def test_kbit_tables(tmp_path):
    path = tmp_path / "h200.json"
    assert "Not measured yet" in tables.kbit_tables(path)
    rows = [row(fmt, m=m, shape=shape) for fmt in ("kbit2", "kbit4") for m in (1, 64) for shape in SHAPES[:2]]
    planes = [plane_row("kbit4"), plane_row("kbit2", share=0.7), plane_row("kbit4", "dequantize_codebook")]
    by_bfloat16 = row("kbit2", m=1, shape=SHAPES[1], us=16.0, x="bfloat16")
    results.write(path, made_up(rows=[*rows[1:], by_bfloat16, row(shape=(64, 64))], planes=planes))
    text = tables.kbit_tables(path)
    assert "| N x K | KBIT2 | KBIT4 |" in text
    assert "| 4096x4096 | – / – | 8.0 (1.33) / – |\n| 8192x8192 | 8.0 (1.33) / 16.0 (2.67) | 8.0" in text
    assert "in float16 at M = 1 / 8 / 64 / 1024:" in text
    assert "| 8192x8192 | 3.00 / – / 3.00 / – | 3.00 / – / 3.00 / – |" in text
    assert "in bfloat16 at M = 1 / 8 / 64 / 1024:" in text
    assert "| 8192x8192 | 1.50 / – / – / – | – / – / – / – |" in text
    assert "64x64" not in text
    assert "reaches 65% to 70% of the speed of reading the same bytes, decoding 65% to 65%" in text


def test_speed_table(tmp_path):
    path = tmp_path / "h200.json"
    assert "Not measured yet" in tables.speed_table(path)
    by_bfloat16 = [row(m=16, shape=SHAPES[0], us=9.6, x="bfloat16"), row("q8_0", shape=SHAPES[0], us=10, x="bfloat16")]
    results.write(path, made_up(rows=[*made_up()["rows"], *by_bfloat16]))
    text = tables.speed_table(path)
    assert "NVIDIA H200 (1980 MHz, memory 3201 MHz), driver 580.1, CUDA 13.0, 2026-01-31" in text
    assert "| M | 4096x4096 | 8192x8192 | 28672x8192 |" in text
    assert "x and y float16 / bfloat16" in text
    sections = text.split("\n\n")
    for activation, speed, shared in (("a16", "2.50", "60%"), ("a8", "–", "–")):
        speeds, shares = (
            i for i, section in enumerate(sections) if section.startswith("S") and f"`{activation}`" in section
        )
        assert f"| 16 | 3.00 / {speed} | 3.00 / – | 3.00 / – |" in sections[speeds + 1]
        assert f"| Q8_0 | 75% / {shared} | 75% / – | 75% / – |" in sections[shares + 1]
    assert "power limit" not in text
    busy = [
        row(us=8.4, cublas_fp16_us=25.2),
        row(m=16, us=9.2),
        row(m=32),
    ]  # the last one has no row of a GPU with pauses
    results.write(path, made_up(sustained=busy))
    assert "at M = 1 to 16 products then take up to 15% longer, those of cuBLAS up to 5%." in tables.speed_table(path)


def test_speed_of_all_formats_at_one_shape(tmp_path):
    """Formats that have a row for every M."""
    path = tmp_path / "h200.json"
    rows = [
        row(fmt, m=m, shape=tables.LARGE[0], us=us)
        for fmt, us in (("q4_k", 8.0), ("q6_k", 12.0), ("kbit4", 6.0))
        for m in (1, *tables.OTHERS_M)
    ]
    results.write(path, made_up(rows=[*rows, row("q5_0", shape=tables.LARGE[0])]))
    counts = len(tables.OTHERS_M) + 1
    lines = [line for line in tables.speed_table(path).splitlines() if line.count("|") == counts + 2]
    assert [line for line in lines if line.startswith("| Q")] == [
        f"| {fmt} |{times * counts}" for fmt, times in (("Q4_K", " 3.00 / – |"), ("Q6_K", " 2.00 / – |"))
    ]
    results.write(path, made_up())
    assert "by format and M" not in tables.speed_table(path)


def test_speed_of_rivals_and_of_other_kernels(tmp_path):
    """Decoding first as a sentence, the kernels without wgmma as a table, the slowest CPU if it is known."""
    path = tmp_path / "h200.json"
    rows = [row(dequantize_us=80.0), row(activation="a8", m=16, dequantize_us=88.0), row(m=64)]
    mma = [row(activation=activation, m=64, us=us) for activation, us in (("a16", 12.0), ("a8", 20.0))]
    mma.append(row(m=64, us=15.0, x="bfloat16"))
    results.write(path, made_up(rows=rows, mma=mma, host_slowest_us={"a16": 9.5, "a8": 11.0}))
    text = tables.speed_table(path)
    assert "then multiplying by cuBLAS, costs 10 to 11 times as much time, at M = 1, 16." in text
    assert "`a16`:\n\n| M | 4096x4096 |\n| --- | --: |\n| 64 | 2.00 / 1.60 |" in text
    assert "`a8`:\n\n| M | 4096x4096 |\n| --- | --: |\n| 64 | 1.20 / – |" in text
    assert "7.0 us for `a16`, 9.0 us for `a8` on its fastest CPU, 9.5 us for `a16`, 11.0 us for `a8` on its" in text
    results.write(path, made_up())
    text = tables.speed_table(path)
    assert "prefill_sm80" not in text
    assert "then cuBLAS" not in text
    assert "costs the host 7.0 us for `a16`, 9.0 us for `a8`." in text


def test_decode_steps(tmp_path):
    """A row for each mixture, a column for each number of tokens; each cell has a target."""
    base = {"model": "llama-3-8b", "bytes": 4, "read_us": 1000.0}
    steps = [{**base, "types": types, "M": m, "us": us} for types, m, us in (("q4_0", 1, 1200.0), ("q4_0", 8, 1500.0))]
    path = tmp_path / "h200.json"
    by_bfloat16 = {**steps[0], "x": "bfloat16", "us": 1300.0}
    results.write(path, made_up(steps=[*steps, by_bfloat16, {**steps[1], "types": "q8_0"}]))
    lines = "| Q4_0 | 1200 (1.20) / 1300 (1.30) | 1500 (1.50) / – |\n| Q8_0 | – / – | 1500 (1.50) / – |"
    assert lines in tables.speed_table(path)
    verdict_of = {target.name: target.verdict(target.measured[0]) for target in report.targets(results.load(path))}
    verdicts = [verdict_of[f"llama-3-8b q4_0 M={m}: a step over reading its bytes"] for m in (1, 8)]
    assert verdicts == ["must", "MISS"]
    assert verdict_of["llama-3-8b q4_0 M=1: a step by bfloat16 over float16"] == "MISS"


def test_host_times_of_calls(tmp_path):
    """A row for each call, a column for each library; calls with a target are compared with their baseline."""
    measured = (("cupy", 6.0), ("torch", 5.0))
    calls = [
        {"library": library, "call": "M = 1, out", "us": us, "beside": "torch.mm(out=)", "beside_us": 10.0}
        for library, us in measured
    ]
    calls.append({"library": "torch", "call": "M = 16, out", "us": 7.0, "beside": "torch.mm(out=)", "beside_us": 10.0})
    path = tmp_path / "h200.json"
    results.write(path, made_up(calls=calls))
    text = tables.speed_table(path)
    assert "| call | cupy | torch | beside |" in text
    assert "| M = 1, out | 6.0 (0.60) | 5.0 (0.50) | torch.mm(out=) |\n| M = 16, out | – | 7.0 (0.70) |" in text
    verdict_of = {target.name: target.verdict(target.measured[0]) for target in report.targets(results.load(path))}
    verdicts = {"cupy M = 1": "MISS", "torch M = 1": "must"}
    for name, verdict in verdicts.items():
        assert verdict_of[f"{name}, out: time of the host over that of torch.mm(out=)"] == verdict
    assert not any("M = 16, out" in name for name in verdict_of)


def test_report_draws_beside_the_file(tmp_path, capsys):
    path = tmp_path / "h200.json"
    results.write(path, made_up(rows=[row(), row(activation="a8", m=16)]))
    assert report.main(path) == 1
    assert "are missed" in capsys.readouterr().out
    for plot in plots.PLOTS:
        ElementTree.parse(tmp_path / f"h200_{plot}.svg")


def test_committed_plots_are_current():
    if not tables.RESULTS.exists():
        pytest.skip("no results yet")
    for plot, drawing in plots.plots(results.load(tables.RESULTS)).items():
        path = tables.RESULTS.with_name(f"{tables.RESULTS.stem}_{plot}.svg")
        assert path.read_text() == drawing, "run python -m benchmarks --report"


@pytest.mark.parametrize(
    "drawing",
    [
        svg.lines([svg.Panel("a < b & c", ["1"], [svg.Series("only", [0.5])])] * 2, "ratio", mark=1),
        svg.bars(svg.Panel("", ["x", "y"], [svg.Series("<q>", [1.0, None], [2.0, None])] * 9), "GB/s"),
        svg.lines([svg.Panel("nothing", ["1", "2"], [svg.Series("", [None, None])])], "ratio", mark=1),
    ],
)
def test_svg_is_well_formed_and_in_its_frame(drawing):
    root = ElementTree.fromstring(drawing)
    width, height = float(root.get("width")), float(root.get("height"))
    for element in root.iter():
        for name, limit in (("x", width), ("cx", width), ("y", height), ("cy", height)):
            assert 0 <= float(element.get(name, 0)) <= limit
    style = root.find("{http://www.w3.org/2000/svg}style").text
    for colour in re.findall(r'class="(\w+)"', drawing):
        assert style.count(f".{colour}{{") == 2, "a colour for light, one for dark"


@pytest.mark.parametrize(("step", "nice"), [(0.03, 0.1), (0.1, 0.1), (0.6, 1), (1, 1), (3, 5), (7, 10), (731, 1000)])
def test_nice_steps(step, nice):
    assert svg.nice(step) == pytest.approx(nice)

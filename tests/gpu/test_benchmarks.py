"""Small runs of the benchmark on a GPU."""

from __future__ import annotations

import importlib.util

from helpers import cupy

import qgemm
from benchmarks import encode, gpu, results, step, sweep

# ---------------------------------------------------------------- on a GPU


def test_a_small_run_of_encoding():
    rows = encode.run(2, (256, 512))
    assert [(row.source, row.format) for row in rows] == list(encode.PAIRS)
    assert all(row.gbs > 0 and (row.share > 0) == qgemm.FORMATS[row.format].integer for row in rows)


def test_a_step_of_a_small_model(monkeypatch):
    """Every layer's products, on formats of a mixture."""
    for name, size in {"HIDDEN": 256, "KEYS": 128, "INNER": 512, "VOCABULARY": 1024, "LAYERS": 8}.items():
        monkeypatch.setattr(step, name, size)
    monkeypatch.setattr("qgemm.cuda.timing.REST", 0)
    rows = list(step.rows(cupy().cuda.Stream(non_blocking=True), 3))
    assert [(row["types"], row["M"], row["x"]) for row in rows] == [
        (types, m, x) for types in step.HEADS for m in step.M for x in results.X_TYPES
    ]
    weights = 8 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 512 * 256) + 1024 * 256
    assert rows[0]["bytes"] == weights * 18 // 32
    assert rows[-1]["bytes"] == weights * 34 // 32
    assert min(row[name] for row in rows for name in ("us", "read_us")) > 0


def test_a_small_run(tmp_path, monkeypatch):
    monkeypatch.setattr("qgemm.cuda.timing.REST", 0)
    monkeypatch.setattr(gpu, "SUSTAINED_S", 1e-3)
    formats = [qgemm.FORMATS[name] for name in ("q4_0", "kbit3")]
    options = gpu.Options(formats, ("a16", "a8"), [(256, 512)], (1, 64), 3, True, True, True, True, rotate=1 << 20)
    saved = []
    measured, failures = gpu.run(options, saved.append)
    assert (failures, saved) == ([], [measured])
    pairs = ("q4_0", "a16"), ("q4_0", "a8"), ("kbit3", "a16")
    assert set(map(results.key, measured["rows"])) == {
        (*pair, m, 256, 512, x) for pair in pairs for m in options.m for x in results.X_TYPES
    }
    for found_row in measured["rows"]:
        assert found_row["p10"] <= found_row["us"] <= found_row["p90"]
        names = ["us", "stream_us"] + ["dequantize_us"] * (found_row["M"] in gpu.DEQUANTIZE_M)
        assert min(results.dense_us(found_row), *map(found_row.__getitem__, names)) > 0
    assert list(map(results.key, measured["sustained"])) == list(map(results.key, measured["rows"]))
    assert min(min(row["us"], results.dense_us(row)) for row in measured["sustained"]) > 0
    assert set(measured["host_us"]) == {"a16", "a8"}
    assert all(measured["host_us"][name] <= us for name, us in measured["host_slowest_us"].items())
    by_mma = [(row["x"], row["format"], row["kernel"], row["M"]) for row in measured["mma"]]
    kernels = ("q4_0", "prefill_sm80", 64), ("q4_0", "prefill_sm80_a8", 64), ("kbit3", "prefill_sm80", 64)
    assert by_mma == [(x, *kernel) for x in results.X_TYPES for kernel in kernels]
    assert min(min(row["us"], results.dense_us(row)) for row in measured["mma"]) > 0
    assert measured["pack"]["q4_0"]["gbs"] > 0
    torch_is_there = importlib.util.find_spec("torch") is not None
    assert {row["library"] for row in measured["calls"]} == ({"cupy", "torch"} if torch_is_there else set())
    assert min((row[name] for row in measured["calls"] for name in ("us", "beside_us")), default=1) > 0
    swept = {name: list(map(int, times)) for name, times in measured["sweep"].items()}
    assert swept == dict.fromkeys((f"{fmt} {activation} 256x512" for fmt, activation in pairs), sweep.counts())
    assert len(measured["planes"]) == 6
    assert min(found_row["share"] for found_row in measured["planes"]) > 0
    results.write(tmp_path / "x.json", measured)

"""Rows and results files as the benchmarks write them, with made-up numbers."""

from __future__ import annotations

import re

from benchmarks import command, results
from qgemm.arguments import ACTIVATIONS

SHAPES = ((4096, 4096), (8192, 8192), (28672, 8192))


def run_benchmarks(capsys, *words):
    """Runs `python -m benchmarks` in this process -> (exit code, stdout, stderr)."""
    status = command.main([str(word) for word in words])
    return status, *capsys.readouterr()


def refused_benchmarks(capsys, *words, status=2):
    """Runs a command line that fails -> its single line on stderr."""
    code, out, err = run_benchmarks(capsys, *words)
    assert (code, out) == (status, "")
    assert re.fullmatch(r"qgemm: error: [^\n]+\n", err)
    return err


def row(fmt="q4_0", activation="a16", m=1, shape=(4096, 4096), **values):
    """Without x= as rows of earlier files, which were all of float16."""
    n, k = shape
    fields = {"format": fmt, "activation": activation, "M": m, "N": n, "K": k, "us": 8.0, "p10": 7.5, "p90": 9.0}
    fields[results.DENSE_US[values.get("x", "float16")]] = 24.0
    fields.update(stream_us=6.0, route="decode", graph=True, cublas_via="torch", error=1e-4)
    return results.rates({**fields, **values}, n * k * 9 // 16)


def made_up(**values):
    """A small results file: two formats, three shapes, two M; 3 times as fast as cuBLAS, reading is 4 times as fast."""
    rows = [
        row(fmt, activation, m, shape)
        for fmt in ("q4_0", "q8_0")
        for activation in ACTIVATIONS
        for m in (1, 16)
        for shape in SHAPES
    ]
    facts = {"device": "NVIDIA H200", "driver": "580.1", "cuda": "13.0", "clocks": {"sm_mhz": 1980, "mem_mhz": 3201}}
    facts.update(kernels_sha256="abc", date="2026-01-31", read_gbs=4390.0, host_us={"a16": 7.0, "a8": 9.0})
    facts["pack"] = {"q4_0": {"gbs": 3000.0, "share": 0.7}, "q8_0": {"gbs": 3300.0, "share": 0.76}}
    return {**facts, "rows": rows, **values}


def plane_row(fmt, kernel="quantize_codebook", share=0.65):
    return {"format": fmt, "kernel": kernel, "dtype": "float16", "us": 50.0, "gbs": 2800.0, "share": share}

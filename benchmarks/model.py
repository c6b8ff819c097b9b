"""The results file of whole models: rows of `qgemm bench --model` on a GPU, each with the digest of its sources."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from qgemm.backend import backends
from qgemm.cli import bench_model, model_bench
from qgemm.errors import QgemmError

from . import results
from .results import Results, Row

KEY = ("model", "types", "layers", "road", "dtype", "variant", "batch", "prompt")  # identifies a row of the file


def run(args: argparse.Namespace, path: Path | None) -> list[Row]:
    """Measure --model; after each row the file has it, beside rows of the same GPU that this run does not replace."""
    device = backends()["cuda"].facts["device"]
    old = load(path) if path is not None and path.exists() else {}
    rows = {key(row): row for row in old["rows"]} if old.get("device") == device else {}
    stamp = {
        "versions": model_bench.versions(),
        "kernels_sha256": results.sources_sha256(),
        "date": time.strftime("%Y-%m-%d"),
    }
    measured = []
    for row in bench_model.model_rows(args, "cuda"):
        measured.append({**row, **stamp})
        rows[key(row)] = measured[-1]
        if path is not None:
            results.write(path, {"device": device, "rows": list(rows.values())})
    return measured


def key(row: Row) -> tuple[object, ...]:
    """The values that identify a row."""
    return tuple(row[name] for name in KEY)


def load(path: Path) -> Results:
    """The results in a file; QgemmError if it holds others."""
    try:
        document = json.loads(path.read_text())
        if "device" in document and all(set(KEY) <= set(row) for row in document["rows"]):
            return dict(document)
    except (ValueError, KeyError, TypeError):
        pass
    raise QgemmError(f"{path}: holds no results of whole models")

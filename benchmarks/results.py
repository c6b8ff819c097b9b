"""Benchmark results: rows, percentiles, and the JSON file in which the rows of several runs meet."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import qgemm
from qgemm.cuda.jit.sources import kernels_dir
from qgemm.errors import QgemmError
from qgemm.files.atomic import write_file
from qgemm.text import columns, json_lines

Row = dict[str, Any]
Results = dict[str, Any]

KEY = ("format", "activation", "M", "N", "K")  # what a row is about; a file has one row for each
PARTS = ("host_us", "host_slowest_us", "pack", "sweep")  # besides the rows, of which each measurement replaces some
SUSTAINED = "sustained"  # what rows take on a GPU that never rests
MMA = "mma"  # what they take by the kernels of GPUs without wgmma
LISTS = {SUSTAINED: "without a rest, at the power limit", MMA: "by the kernels of sm_80 to sm_89"}  # beside the rows
CALLS = "calls"  # what they cost the host
STEPS = "steps"  # all linear layers of a model, for the tokens of one step
EXPERTS = "experts"  # layers of experts
EXPERTS_HOST = "experts_host"  # what the calls of such layers cost the host
KEYS = {  # of lists in a file
    "rows": KEY,
    **dict.fromkeys(LISTS, KEY),
    "planes": ("format", "kernel", "dtype"),
    CALLS: ("library", "call"),
    STEPS: ("model", "types", "M"),
    EXPERTS: ("model", "types", "M", "skew"),
    EXPERTS_HOST: ("call",),
}
OF_SOURCES = ("kernels_sha256", "date")  # of a whole file, and of a row that was measured with other sources
HOST = ("cuda/**/*", "tensor.py", "ops.py")  # in qgemm/: what builds and launches the kernels


def rates(row: Row, packed: int) -> Row:
    """The row with gbs, packed bytes a second in 1e9, and tflops, 2 M N K operations a second in 1e12."""
    operations = 2 * row["M"] * row["N"] * row["K"]
    return {**row, "gbs": round(packed / row["us"] / 1e3, 1), "tflops": round(operations / row["us"] / 1e6, 2)}


def sources_sha256() -> str:
    """SHA-256 of the kernels and of the host modules that build and launch them: rows of one hash are comparable."""
    package, kernels = Path(qgemm.__file__).parent, kernels_dir()
    files = {f"kernels/{p.relative_to(kernels).as_posix()}": p for p in kernels.rglob("*.cu*")}
    host = (p for pattern in HOST for p in package.glob(pattern) if p.suffix in (".py", ".json"))
    files.update((f"qgemm/{p.relative_to(package).as_posix()}", p) for p in host)
    digest = hashlib.sha256()
    for name in sorted(files, key=lambda name: name.split("/")):
        digest.update(f"{name}\0".encode() + files[name].read_bytes() + b"\0")
    return digest.hexdigest()


def key(row: Row) -> tuple[Any, ...]:
    """What tells a row from the others of its file."""
    return tuple(row[name] for name in KEY)


def merge(old: Results, new: Results) -> Results:
    """The new results, and of those of the same device what they do not replace.

    Rows of other sources stay with what tells them apart, OF_SOURCES; the rest of other sources is dropped.
    """
    if old.get("device") != new["device"]:
        return new
    same = old.get("kernels_sha256") == new["kernels_sha256"]
    stamp = {} if same else {name: old[name] for name in OF_SOURCES}
    both: Results = {name: {**(old.get(name, {}) if same else {}), **new.get(name, {})} for name in PARTS}
    for name, fields in KEYS.items():
        kept = [{**stamp, **row} for row in old.get(name, [])]
        rows = {tuple(row[field] for field in fields): row for row in [*kept, *new.get(name, [])]}
        both[name] = [rows[k] for k in sorted(rows)]
    return {**new, **both}


def merge_lists(old: Results, new: Results, names: Sequence[str]) -> Results:
    """The old results with rows of some lists replaced by the new ones of the same device.

    All else stays as it is; rows that were measured with other sources than the file's newest say so, OF_SOURCES.
    """
    if old.get("device") != new["device"]:
        return new
    same = old.get("kernels_sha256") == new["kernels_sha256"]
    stamp = {} if same else {name: new[name] for name in OF_SOURCES}
    merged = dict(old)
    for name in names:
        found = [*old.get(name, []), *({**row, **stamp} for row in new[name])]
        rows = {tuple(row[field] for field in KEYS[name]): row for row in found}
        merged[name] = [rows[k] for k in sorted(rows)]
    return merged


def earlier(row: Row) -> bool:
    """Whether a row was measured with other sources than its file's newest."""
    return "kernels_sha256" in row


def file_stem(device: str) -> str:
    """'NVIDIA H200' -> 'h200': the results file of a GPU is called after it."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower().removeprefix("nvidia")).strip("_")


def load(path: Path) -> Results:
    """The results in a file; QgemmError if it holds something else."""
    try:
        found = json.loads(path.read_text())
        if "device" in found and all(set(KEY) <= set(row) for row in found.get("rows", [])):
            return dict(found)
    except (ValueError, KeyError, TypeError):
        pass
    raise QgemmError(f"{path}: holds no benchmark results")


def write(path: Path, results: Results) -> None:
    """Replace the file: a row a line, so that a diff shows what changed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, ("\n".join(json_lines(results)) + "\n").encode())


def speedup(row: Row) -> float:
    """How many times faster than cuBLAS in float16, in the same run."""
    return float(row["cublas_fp16_us"] / row["us"])


def share(row: Row) -> float:
    """The least time of reading the packed bytes over the time taken: 1 is the speed of memory."""
    return float(row["stream_us"] / row["us"])


def table(rows: Sequence[Row]) -> str:
    """The rows for a terminal."""
    head = ("format", "act", "N x K", "M", "us", "p10", "p90", "cuBLAS us", "ratio", "read us", "share", "GB/s",
            "TFLOP/s", "route")  # fmt: skip
    cells = [head]
    for row in rows:
        shape = f"{row['N']}x{row['K']}"
        graph = "" if row["graph"] else " (no graph)"
        numbers = (f"{row[name]:.1f}" for name in ("us", "p10", "p90", "cublas_fp16_us"))
        cells.append((
            row["format"], row["activation"], shape, str(row["M"]), *numbers, f"{speedup(row):.2f}",
            f"{row['stream_us']:.1f}", f"{share(row):.2f}", f"{row['gbs']:.0f}", f"{row['tflops']:.1f}",
            row["route"] + graph,
        ))  # fmt: skip
    return columns("<<<>>>>>>>>>><", cells)


def short_tables(found: Results) -> Iterator[str]:
    """What was measured beside the rows, for a terminal: a heading and a table each."""
    decoded = [{**row, "us": row["dequantize_us"]} for row in found["rows"] if "dequantize_us" in row]
    for heading, rows in {
        "decoding W to float16, then cuBLAS": decoded,
        **{heading: found.get(name, []) for name, heading in LISTS.items()},
    }.items():
        if rows:
            cells = [("format", "act", "N x K", "M", "us", "cuBLAS us", "ratio")]
            for row in rows:
                numbers = f"{row['us']:.1f}", f"{row['cublas_fp16_us']:.1f}", f"{speedup(row):.2f}"
                cells.append((row["format"], row["activation"], f"{row['N']}x{row['K']}", str(row["M"]), *numbers))
            yield f"{heading}\n{columns('<<<>>>>', cells)}"

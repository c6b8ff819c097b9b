"""Benchmark results: rows, and the JSON file that collects the rows of several runs."""

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

X_TYPES = ("float16", "bfloat16")  # types of x, which y shares
X_TYPE = X_TYPES[0]  # where a row names none
DENSE_US = {"float16": "cublas_fp16_us", "bfloat16": "cublas_bf16_us"}  # the dense product of the same type, by x
KEY = ("format", "activation", "M", "N", "K", "x")  # identifies a row in its file
PARTS = (
    "host_us",
    "host_slowest_us",
    "pack",
    "sweep",
)  # dictionaries, of whose keys a run replaces some
SUSTAINED = "sustained"  # times of rows on a GPU without pauses
MMA = "mma"  # times of rows by the kernels of GPUs without wgmma
LISTS = {SUSTAINED: "without pauses, at the power limit", MMA: "by the kernels of sm_80 to sm_89"}  # beside the rows
CALLS = "calls"  # host times of calls
STEPS = "steps"  # all linear layers of a model in a decode step
EXPERTS = "experts"  # layers of experts
EXPERTS_HOST = "experts_host"  # host times of the calls of layers of experts
KEYS = {  # fields that identify a row, for each list of a file
    "rows": KEY,
    **dict.fromkeys(LISTS, KEY),
    "planes": ("format", "kernel", "dtype"),
    CALLS: ("library", "call"),
    STEPS: ("model", "types", "M", "x"),
    EXPERTS: ("model", "types", "M", "skew", "x"),
    EXPERTS_HOST: ("call",),
}
STAMP = ("kernels_sha256", "date")  # every file has it, and rows that were measured with other sources
HOST = ("cuda/**/*", "tensor.py", "ops.py")  # in qgemm/: modules that build and launch the kernels


def rates(row: Row, packed: int) -> Row:
    """The row with gbs, packed bytes a second in 1e9, and tflops, 2 * M * N * K operations a second in 1e12."""
    operations = 2 * row["M"] * row["N"] * row["K"]
    return {**row, "gbs": round(packed / row["us"] / 1e3, 1), "tflops": round(operations / row["us"] / 1e6, 2)}


def sources_sha256() -> str:
    """SHA-256 of the kernels and of the host modules that build and launch them; rows of one digest are comparable."""
    package, kernels = Path(qgemm.__file__).parent, kernels_dir()
    files = {f"kernels/{p.relative_to(kernels).as_posix()}": p for p in kernels.rglob("*.cu*")}
    host = (p for pattern in HOST for p in package.glob(pattern) if p.suffix in (".py", ".json"))
    files.update((f"qgemm/{p.relative_to(package).as_posix()}", p) for p in host)
    digest = hashlib.sha256()
    for name in sorted(files, key=lambda name: name.split("/")):
        digest.update(f"{name}\0".encode() + files[name].read_bytes() + b"\0")
    return digest.hexdigest()


def key(row: Row, fields: Sequence[str] = KEY) -> tuple[Any, ...]:
    """The values that identify a row in its list, of which `fields` are the fields of the key."""
    return tuple(row.get(name, X_TYPE) if name == "x" else row[name] for name in fields)


def x_of(row: Row) -> str:
    """The type of x and y of a row."""
    return str(row.get("x", X_TYPE))


def merge(old: Results, new: Results) -> Results:
    """The new results, together with the old ones of the same device that they do not replace.

    Old rows of other sources stay with their STAMP; other old results of other sources are dropped.
    """
    if old.get("device") != new["device"]:
        return new
    same = old.get("kernels_sha256") == new["kernels_sha256"]
    stamp = {} if same else {name: old[name] for name in STAMP}
    both: Results = {name: {**(old.get(name, {}) if same else {}), **new.get(name, {})} for name in PARTS}
    for name, fields in KEYS.items():
        old_rows = [{**stamp, **row} for row in old.get(name, [])]
        rows = {key(row, fields): row for row in [*old_rows, *new.get(name, [])]}
        both[name] = [rows[k] for k in sorted(rows)]
    return {**new, **both}


def merge_lists(old: Results, new: Results, names: Sequence[str]) -> Results:
    """The old results, with rows of the named lists replaced by new ones of the same device.

    Everything else stays; rows measured with other sources than those of the file get a STAMP.
    """
    if old.get("device") != new["device"]:
        return new
    same = old.get("kernels_sha256") == new["kernels_sha256"]
    stamp = {} if same else {name: new[name] for name in STAMP}
    merged = dict(old)
    for name in names:
        every_row = [*old.get(name, []), *({**row, **stamp} for row in new[name])]
        rows = {key(row, KEYS[name]): row for row in every_row}
        merged[name] = [rows[k] for k in sorted(rows)]
    return merged


def earlier(row: Row) -> bool:
    """Whether a row was measured with older sources than its file."""
    return "kernels_sha256" in row


def file_stem(device: str) -> str:
    """The name of a GPU's results file without its suffix: 'NVIDIA H200' -> 'h200'."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower().removeprefix("nvidia")).strip("_")


def load(path: Path) -> Results:
    """The results in a file; QgemmError if its content is something else."""
    try:
        content = json.loads(path.read_text())
        if "device" in content and all({*KEY} - {"x"} <= set(row) for row in content.get("rows", [])):
            return dict(content)
    except (ValueError, KeyError, TypeError):
        pass
    raise QgemmError(f"{path}: holds no benchmark results")


def write(path: Path, results: Results) -> None:
    """Replace the file, with a line for each row, so that diffs are readable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, ("\n".join(json_lines(results)) + "\n").encode())


def dense_us(row: Row) -> float:
    """The time of cuBLAS by weights of the type of x, in the same run."""
    return float(row[DENSE_US[x_of(row)]])


def speedup(row: Row) -> float:
    """Speed relative to cuBLAS in the type of x in the same run."""
    return dense_us(row) / float(row["us"])


def share(row: Row) -> float:
    """The time to only read the packed bytes over the time of the product: 1 is the speed of memory."""
    return float(row["stream_us"] / row["us"])


def table(rows: Sequence[Row]) -> str:
    """The rows for a terminal."""
    head = ("format", "act", "x", "N x K", "M", "us", "p10", "p90", "cuBLAS us", "ratio", "read us", "share", "GB/s",
            "TFLOP/s", "route")  # fmt: skip
    cells = [head]
    for row in rows:
        shape = f"{row['N']}x{row['K']}"
        graph = "" if row["graph"] else " (no graph)"
        numbers = (f"{us:.1f}" for us in (row["us"], row["p10"], row["p90"], dense_us(row)))
        cells.append((
            row["format"], row["activation"], x_of(row), shape, str(row["M"]), *numbers, f"{speedup(row):.2f}",
            f"{row['stream_us']:.1f}", f"{share(row):.2f}", f"{row['gbs']:.0f}", f"{row['tflops']:.1f}",
            row["route"] + graph,
        ))  # fmt: skip
    return columns("<<<<" + 10 * ">" + "<", cells)


def short_tables(results: Results) -> Iterator[str]:
    """The measurements beside the rows for a terminal, each with a heading and a table."""
    decoded = [{**row, "us": row["dequantize_us"]} for row in results["rows"] if "dequantize_us" in row]
    for heading, rows in {
        "decoding W to float16, then cuBLAS": decoded,
        **{heading: results.get(name, []) for name, heading in LISTS.items()},
    }.items():
        if rows:
            cells = [("format", "act", "x", "N x K", "M", "us", "cuBLAS us", "ratio")]
            for row in rows:
                shape, numbers = f"{row['N']}x{row['K']}", (row["us"], dense_us(row))
                times = (f"{us:.1f}" for us in numbers)
                cells.append((
                    row["format"], row["activation"], x_of(row), shape, str(row["M"]), *times, f"{speedup(row):.2f}",
                ))  # fmt: skip
            yield f"{heading}\n{columns('<<<<>>>>', cells)}"

"""Add reports of `qgemm tune --report` to the times that qgemm ships, qgemm/cuda/configs/gpus/GPU.json.

A config that the kernels no longer have is ignored by products; a report of other kernels than these is refused, since
its times would choose by measurements of other code.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from qgemm.cuda.configs import gpu_path, shipped
from qgemm.cuda.jit import sources
from qgemm.cuda.times import as_json, merged, rows_of, worth
from qgemm.errors import QgemmError
from qgemm.files.json_parser import parse_object
from qgemm.text import json_lines


def merge(report: Path) -> Path:
    """Add a report to the file of its GPU -> that file; QgemmError for a report that does not fit."""
    document: dict[str, Any] = parse_object(report.read_bytes(), lambda rule: QgemmError(f"{report}: {rule}"))
    gpu = document.get("gpu")
    if not isinstance(gpu, str) or not gpu:
        raise QgemmError(f"{report}: names no GPU")
    if document.get("kernels") != sources.digest():
        raise QgemmError(f"{report}: is of other kernels than this checkout")
    try:
        rows = merged(rows_of(shipped(gpu)), rows_of(document.get("rows")))
    except ValueError as error:
        raise QgemmError(f"{report}: {error}") from None
    path = gpu_path(gpu)
    path.parent.mkdir(exist_ok=True)
    facts = {"gpu": gpu, "driver": document.get("driver"), "kernels": document["kernels"]}
    lines = json_lines({**facts, "rows": [as_json(row._replace(us=worth(row.us))) for row in rows]})
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def main() -> int:
    """Merge every report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT")
    for report in parser.parse_args().reports:
        try:
            print(f"{report}: added to {merge(report)}")
        except (OSError, QgemmError) as error:
            print(f"merge_times: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

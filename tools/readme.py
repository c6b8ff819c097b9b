"""Write the generated tables of README.md: formats and routes, from the registry and the dispatch
table, and speed, from the results file of a GPU.

`tools/readme.py` rewrites the file; a test fails while it and the code differ.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import report

from qgemm import FORMATS
from qgemm.block import Format
from qgemm.routes import ANY, ROUTES

README = Path(__file__).parents[1] / "README.md"


def formats_table() -> str:
    """One row a format, from its record and the first line of its module."""
    rows = [
        "| format | weights / block | bytes / block | bits / weight | w = | quantize | A8 | GPU tiles |",
        "|---|--:|--:|--:|---|---|---|---|",
    ]
    for fmt in sorted(FORMATS.values(), key=lambda fmt: (fmt.plain, fmt.bpw)):
        rows.append(
            f"| {fmt} | {fmt.weights} | {fmt.block_bytes} | {fmt.bpw:g} | {formula(fmt)} | "
            f"{tick(fmt.encode is not None)} | {tick(fmt.integer)} | {tick(bool(fmt.slots))} |"
        )
    return "\n".join(rows)


def tick(yes: bool) -> str:
    """A table cell."""
    return "yes" if yes else "no"


def formula(fmt: Format) -> str:
    """How a weight is computed from its block, derived from the fields and the zero."""
    if fmt.plain:
        return "the number itself"
    if fmt.codebook is not None:
        return "absmax * codebook[q]"
    fields = fmt.dtype.names or ()
    scale = "2^(e - 128)" if "e" in fields else "d * sc" if "scales" in fields else "d"
    zero = fmt.decode_levels(np.zeros(1, fmt.dtype)).zero
    minimum = " + m" if "m" in fields else " - dmin * m" if "dmin" in fields else ""
    return f"{scale} * {f'(q - {zero})' if zero else 'q'}{minimum}"


def routes_table() -> str:
    """One row a route, in the order in which they are tried."""
    rows = ["| kernel | activations | x | M up to | GPUs | formats | what it does |", "|---|---|---|--:|---|---|---|"]
    for row in ROUTES:
        most = "any" if row.most == ANY else row.most
        rows.append(
            f"| `{row.kernel}` | {', '.join(row.activations)} | {', '.join(row.types)} | {most} | {row.gpus} "
            f"| {row.formats.label} | {row.what} |"
        )
    return "\n".join(rows)


TABLES = {"formats": formats_table, "routes": routes_table, "speed": report.speed_table}


def generated(text: str) -> str:
    """README text with every table between `<!-- NAME -->` and `<!-- /NAME -->` made anew."""
    for name, table in TABLES.items():
        body = f"<!-- {name} -->\n{table()}\n<!-- /{name} -->"
        text, count = re.subn(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _, body=body: body, text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"README.md needs one pair of markers <!-- {name} --> <!-- /{name} -->, has {count}")
    return text


if __name__ == "__main__":
    README.write_text(generated(README.read_text()))

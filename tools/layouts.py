"""The table of docs/formats.md: each type's blocks in one line, from the registry.

Of types that the gguf package decodes the registry knows no more than a block's size: their fields and formulas are
here, and a test holds them against that size.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from qgemm import FORMATS
from qgemm.codec.format import Format


class Layout(NamedTuple):
    """How a weight is computed, and the fields of a block."""

    formula: str
    dtype: np.dtype


BORROWED = {
    "iq1_s": Layout("d * (2 * sc + 1) * (grid[q] + delta)", np.dtype("<f2, (32,)u1, (8,)<u2")),
    "iq1_m": Layout("d * (2 * sc + 1) * (grid[q] + delta)", np.dtype("(32,)u1, (16,)u1, (8,)u1")),
    "iq2_xxs": Layout("d * (sc + 1/2) / 4 * sign * grid[q]", np.dtype("<f2, (32,)<u2")),
    "iq2_xs": Layout("d * (sc + 1/2) / 4 * sign * grid[q]", np.dtype("<f2, (32,)<u2, (8,)u1")),
    "iq2_s": Layout("d * (sc + 1/2) / 4 * sign * grid[q]", np.dtype("<f2, (64,)u1, (8,)u1, (8,)u1")),
    "iq3_xxs": Layout("d * (sc + 1/2) / 2 * sign * grid[q]", np.dtype("<f2, (96,)u1")),
    "iq3_s": Layout("d * (2 * sc + 1) * sign * grid[q]", np.dtype("<f2, (64,)u1, (8,)u1, (32,)u1, (4,)u1")),
}
NAMES = {  # of the fields above, in their order
    "iq1_s": "d qs qh", "iq1_m": "qs qh scales", "iq2_xxs": "d qs", "iq2_xs": "d qs scales",
    "iq2_s": "d qs qh scales", "iq3_xxs": "d qs", "iq3_s": "d qs qh signs scales",
}  # fmt: skip


def layout_of(fmt: Format) -> Layout:
    """That of a format: its own, or the one above."""
    if fmt.name not in BORROWED or not fmt.decoded_by:
        return Layout(fmt.formula or "the number itself", fmt.dtype)
    formula, dtype = BORROWED[fmt.name]
    names = NAMES[fmt.name].split()
    return Layout(fmt.formula or formula, np.dtype([(name, dtype[i]) for i, name in enumerate(names)]))


def fields_of(dtype: np.dtype) -> str:
    """The fields of a block in their order: name, and type where it is no byte, and how many."""
    if dtype.names is None:
        return dtype.name
    found = []
    for name in dtype.names:
        field = dtype[name]
        kind = "" if field.base.itemsize == 1 else f"{field.base.kind}{8 * field.base.itemsize}"
        count = int(np.prod(field.shape)) if field.shape else 1
        number = str(count) if field.shape or not kind else ""
        found.append(f"{name} {'x'.join(part for part in (number, kind) if part)}")
    return ", ".join(found)


def table() -> str:
    """One row a type, by its size."""
    rows = [
        "| type | id | weights | group | bytes | bits | w = | fields of a block, in order |",
        "|---|--:|--:|--:|--:|--:|---|---|",
    ]
    for fmt in sorted(FORMATS.values(), key=lambda fmt: (fmt.plain, fmt.bpw)):
        formula, dtype = layout_of(fmt)
        group = "" if fmt.decoded_by or fmt.plain else str(fmt.group)
        number = "" if fmt.ggml_type is None else str(fmt.ggml_type)
        rows.append(
            f"| {fmt} | {number} | {fmt.weights} | {group} | {fmt.block_bytes} | {fmt.bpw:g} | {formula} "
            f"| {fields_of(dtype)} |"
        )
    return "\n".join(rows)

"""The table of docs/formats.md: each type's blocks in one line, from the registry."""

from __future__ import annotations

import numpy as np

from qgemm import FORMATS


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
        formula = fmt.formula or "the number itself"
        group = "" if fmt.plain else str(fmt.group)
        number = "" if fmt.ggml_type is None else str(fmt.ggml_type)
        rows.append(
            f"| {fmt} | {number} | {fmt.weights} | {group} | {fmt.block_bytes} | {fmt.bpw:g} | {formula} "
            f"| {fields_of(fmt.dtype)} |"
        )
    return "\n".join(rows)

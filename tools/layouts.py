"""The table of docs/formats.md: a row for the block layout of each format, from the registry."""

from __future__ import annotations

import numpy as np

from qgemm import FORMATS


def fields_of(dtype: np.dtype) -> str:
    """The fields of a block in their order: name, and count and type unless it is a single byte."""
    if dtype.names is None:
        return dtype.name
    fields = []
    for name in dtype.names:
        field = dtype[name]
        kind = "" if field.base.itemsize == 1 else f"{field.base.kind}{8 * field.base.itemsize}"
        count = int(np.prod(field.shape)) if field.shape else 1
        number = str(count) if field.shape or not kind else ""
        fields.append(f"{name} {'x'.join(part for part in (number, kind) if part)}")
    return ", ".join(fields)


def table() -> str:
    """A row for each format, by size."""
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

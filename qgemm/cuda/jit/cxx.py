"""C++ that dtypes become: types, lists, members of a struct."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

C_TYPES = {"<u8": "u64", "<u4": "u32", "<f4": "float", "<f2": "half", "<u2": "u16", "|u1": "u8", "|i1": "signed char"}


def offset_of(dtype: Any, name: str) -> int:
    """Where a field of a dtype begins."""
    return int(dtype.fields[name][1])


def listed(values: Iterable[Any]) -> str:
    """An initializer."""
    return f"{{{', '.join(map(str, values))}}}"


def struct_members(fields: list[tuple[str, Any]]) -> str:
    """C++ members of M16_TILES row groups each, and a copy of some row groups of a whole one."""
    names = [name for name, _ in fields]
    dims = ("".join(f"[{n}]" for n in dtype.shape[1:]) for _, dtype in fields)
    declared = [
        f"{C_TYPES[dtype.base.str]} {name}[M16_TILES]{dim};" for (name, dtype), dim in zip(fields, dims, strict=True)
    ]
    copies = [f"copy({name}, from.{name}[first], sizeof({name}));" for name in names]
    return f"""{" ".join(declared)}
    // Fill from the row groups of a whole one that start at `first`: copy(to, from, bytes), once or once a field.
    template <class Whole, class Copy>
    __device__ void copy_from(const Whole& from, int first, Copy copy) {{
        if constexpr (M16_TILES == WARPS) {{ copy(this, &from, sizeof(*this)); }} else {{ {" ".join(copies)} }}
    }}"""

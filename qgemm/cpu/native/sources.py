"""The C files of kernels/cpu/, and the macros and flags that turn one into a library."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Source(NamedTuple):
    """A library: kernels/cpu/NAME.c, and its words of the compiler's command: macros, flags."""

    name: str
    words: tuple[str, ...] = ()

    @property
    def file(self) -> Path:
        """The C file."""
        return folder() / f"{self.name}.c"


def source_of(name: str, definitions: Mapping[str, str], flags: Sequence[str] = ()) -> Source:
    """kernels/cpu/NAME.c with these macros, and flags after all others."""
    return Source(name, (*(f"-D{macro}={text}" for macro, text in definitions.items()), *flags))


def folder() -> Path:
    """kernels/cpu: beside the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).parents[2]
    inside = package / "kernels"
    return (inside if inside.is_dir() else package.parent / "kernels") / "cpu"


@cache
def digest() -> str:
    """The hash of all C files and headers of the folder: a library may include any of them."""
    total = hashlib.sha256()
    root = folder()
    for path in sorted(root.rglob("*.[ch]"), key=Path.as_posix):
        total.update(repr((path.relative_to(root).as_posix(), path.read_bytes())).encode())
    return total.hexdigest()

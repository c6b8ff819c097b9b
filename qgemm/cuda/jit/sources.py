"""Where the CUDA sources are, and which of them a translation unit includes."""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
MAX_HEADERS = 1024  # headers of kernels/ and of formats whose includes and digests are cached


def kernels_dir() -> Path:
    """Where the CUDA sources are: beside the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).parents[2]
    inside = package / "kernels"
    return inside if inside.is_dir() else package.parent / "kernels"


def kernel_path(kernel: str) -> str:
    """The path below kernels/ of NAME.cu, which lies in the folder of its subject; NAME.cu itself if there is none."""
    file = f"{kernel}.cu"
    return _kernel_paths(kernels_dir()).get(file, file)


def kernel_text(kernel: str) -> str:
    """The source of a kernel, by its name."""
    return (kernels_dir() / kernel_path(kernel)).read_text()


@cache
def _kernel_paths(folder: Path) -> dict[str, str]:
    """File name -> path below `folder` of every kernel."""
    return {path.name: path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*.cu"))}


@cache
def digest() -> str:
    """SHA-256 of all CUDA sources: measured times hold for one digest."""
    folder, digest = kernels_dir(), hashlib.sha256()
    for path in sorted(folder.rglob("*.cu*")):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def closure(source: str, headers: Mapping[str, str]) -> dict[str, str]:
    """All that a unit includes with quotes, however deeply: path below kernels/, or name in `headers` -> content.

    headers: those made in memory, by the name in an #include; they come before files. An #include in a comment or
    behind an #if counts as well: one header too many costs a compilation, one too few would serve a stale kernel. A
    file that is not there is left out; if it is needed, compiling fails.
    """
    folder, texts = str(kernels_dir()), dict[str, str]()
    todo = list(_included("", source))
    while todo:
        names = todo.pop()
        for name in names:
            text = headers.get(name) if name in headers else _text(folder, name)
            if text is not None:
                if name not in texts:
                    texts[name] = text
                    todo.extend(_included(posixpath.dirname(name), text))
                break
    return dict(sorted(texts.items()))


@lru_cache(maxsize=MAX_HEADERS)
def _included(folder: str, text: str) -> tuple[tuple[str, str], ...]:
    """For each #include of a file in `folder`, the two paths it may mean: beside that file, or below kernels/."""
    return tuple(
        (posixpath.normpath(posixpath.join(folder, name)), posixpath.normpath(name)) for name in INCLUDE.findall(text)
    )


@cache
def _text(folder: str, name: str) -> str | None:
    """A file's content; None if there is none. Read once a process."""
    path = Path(folder, name)
    return path.read_text() if path.is_file() else None

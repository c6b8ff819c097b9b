"""Shared by the adapters: reversible changes of another package, and errors for missing packages."""

from __future__ import annotations

from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from typing import Any


class Patched:
    """Changes of another package; `undo()`, or the end of a with block, reverts them."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a class or module, or the value of a key of a dict."""
        if isinstance(owner, dict):
            self._stack.callback(owner.__setitem__, name, owner[name])
            owner[name] = value
        else:
            self._stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

    def undo(self) -> None:
        """Revert all changes; a second call does nothing."""
        self._stack.close()

    def __enter__(self) -> Patched:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()


def needs(label: str, package: str, oldest: str, error: ImportError, extra: str = "") -> ImportError:
    """The error of an adapter whose package failed to import: not installed, or of another version."""
    install = f"pip install '{package}>={oldest}', or this project with its extra [{extra or package}]"
    try:
        installed = version(package)
    except PackageNotFoundError:
        return ImportError(f"{label} needs {package} {oldest} or later, which is not installed: {install}")
    return ImportError(
        f"{label} needs {package} {oldest} or later and what it needs, this is {installed} ({error}): {install}"
    )

"""Compiled code, cached by content in a folder that only this user may write to, since its contents are executed.

The folder is $QGEMM_CACHE_DIR, else $XDG_CACHE_HOME/qgemm, else ~/.cache/qgemm. A folder or a file that belongs to
another user, or that others may write to, is ignored with a warning. Without a usable folder every process compiles
anew.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from qgemm.errors import QgemmError
from qgemm.system import system

from .private import NotPrivate, open_folder, read_private, write_private

_warned: set[str] = set()


def load_or_make(name: str, make: Callable[[], bytes], valid: Callable[[bytes], bool] = lambda data: True) -> bytes:
    """The data of a cache entry, made and stored if missing. valid: whether data under this name is the entry."""
    with ExitStack() as closing:
        folder = _open_cache(closing)
        data = None if folder is None else _entry(folder, name)
        if data is not None and valid(data):
            return data
        data = make()
        if folder is not None:
            with suppress(OSError, QgemmError):  # read-only home, full disk: slower, not wrong
                write_private(folder, name, sealed(data))
        return data


def sealed(data: bytes) -> bytes:
    """A file of the cache: the SHA-256 of the data, which reveals damage, then the data."""
    return hashlib.sha256(data).digest() + data


def unsealed(entry: bytes) -> bytes:
    """The data of a file of the cache; ValueError if it is damaged."""
    digest, data = entry[:32], entry[32:]
    if hashlib.sha256(data).digest() != digest:
        raise ValueError("a damaged cache entry")
    return data


def cache_dir() -> Path | None:
    """The folder of compiled code, None for a user without a home; looked up only when code is needed."""
    if chosen := os.environ.get("QGEMM_CACHE_DIR"):
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base, "qgemm")
    try:
        return Path.home() / ".cache" / "qgemm"
    except RuntimeError:  # no $HOME, and a uid without an account
        return None


def _open_cache(closing: ExitStack) -> int | None:
    """The descriptor of the cache's folder, until `closing`; None if there is no trusted one."""
    path = cache_dir()
    if path is None:
        _warn("each process compiles its own kernels", "this user has no home folder for them")
        return None
    try:
        folder = open_folder(str(path))
    except NotPrivate as reason:
        _warn("the cache of compiled kernels is passed over", reason)
        return None
    except OSError:  # a read-only home
        return None
    closing.callback(system.close, folder)
    return folder


def _entry(folder: int, name: str) -> bytes | None:
    """The data of an entry; None if it is missing, damaged, or may have been written by someone else."""
    try:
        entry = read_private(folder, name)
        return None if entry is None else unsealed(entry)
    except NotPrivate as reason:
        _warn("a compiled kernel is passed over and compiled anew", reason)
    except (OSError, ValueError):
        pass
    return None


def _warn(effect: str, reason: object) -> None:
    """Warn once per process, regardless of warning filters."""
    if effect not in _warned:
        _warned.add(effect)
        text = f"{effect}: {reason}; set QGEMM_CACHE_DIR to a folder to which only you can write"
        warnings.warn(text, RuntimeWarning, stacklevel=5)

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
from contextlib import ExitStack
from pathlib import Path

from qgemm.errors import QgemmError
from qgemm.system import system

from .private import NotPrivate, open_folder, read_private, write_private

CODE = "a compiled kernel is passed over and compiled anew"  # the effect of an entry of someone else

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
            _store(folder, name, data)
        return data


def load(name: str, effect: str) -> bytes | None:
    """The data of a cache entry; None if it is missing or damaged, and if someone else may have written it, with a
    warning of this effect."""
    with ExitStack() as closing:
        folder = _open_cache(closing)
        return None if folder is None else _entry(folder, name, effect)


def store(name: str, data: bytes) -> bool:
    """Store a cache entry in place of an old one; whether that was possible."""
    with ExitStack() as closing:
        folder = _open_cache(closing)
        return folder is not None and _store(folder, name, data)


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


def _store(folder: int, name: str, data: bytes) -> bool:
    try:
        write_private(folder, name, sealed(data))
    except (OSError, QgemmError):  # read-only home, full disk: slower, not wrong
        return False
    return True


def _entry(folder: int, name: str, effect: str = CODE) -> bytes | None:
    """The data of an entry; None if it is missing, damaged, or may have been written by someone else."""
    try:
        entry = read_private(folder, name)
        return None if entry is None else unsealed(entry)
    except NotPrivate as reason:
        _warn(effect, reason)
    except (OSError, ValueError):
        pass
    return None


def _warn(effect: str, reason: object) -> None:
    """Warn once per process, regardless of warning filters."""
    if effect not in _warned:
        _warned.add(effect)
        text = f"{effect}: {reason}; set QGEMM_CACHE_DIR to a folder to which only you can write"
        warnings.warn(text, RuntimeWarning, stacklevel=5)

"""Compiled code, cached by content in a folder to which only this user may write: what is in it is run.

The folder is $QGEMM_CACHE_DIR, else $XDG_CACHE_HOME/qgemm, else ~/.cache/qgemm. A folder or a file that belongs to
someone else, or that others may write to, is passed over with a warning. Where there is no folder and none can be made
or written to, every process compiles anew.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from qgemm.errors import QgemmError

from .private import NotPrivate, open_folder, read_private, write_private

_warned: set[str] = set()


def kept(name: str, make: Callable[[], bytes], own: Callable[[bytes], bool] = lambda found: True) -> bytes:
    """The bytes of an entry: from the cache, or made, and kept there. own: whether what has this name there is it."""
    with ExitStack() as closing:
        folder = _open_cache(closing)
        found = None if folder is None else _entry(folder, name)
        if found is not None and own(found):
            return found
        made = make()
        if folder is not None:
            with suppress(OSError, QgemmError):  # read-only home, full disk: slower, not wrong
                write_private(folder, name, sealed(made))
        return made


def sealed(data: bytes) -> bytes:
    """A file of the cache: SHA-256 of the rest, by which a damaged one is known; the rest."""
    return hashlib.sha256(data).digest() + data


def unsealed(entry: bytes) -> bytes:
    """The inverse of sealed; ValueError if the entry is damaged."""
    digest, data = entry[:32], entry[32:]
    if hashlib.sha256(data).digest() != digest:
        raise ValueError("a damaged cache entry")
    return data


def cache_dir() -> Path | None:
    """The folder of compiled code, asked for only when some is needed; None for a user who has no home."""
    if chosen := os.environ.get("QGEMM_CACHE_DIR"):
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base, "qgemm")
    try:
        return Path.home() / ".cache" / "qgemm"
    except RuntimeError:  # no $HOME, and a uid that no account has
        return None


def _open_cache(closing: ExitStack) -> int | None:
    """The descriptor of the cache's folder, until `closing`; None if there is none that can be trusted."""
    path = cache_dir()
    if path is None:
        _warn("each process compiles its own kernels", "this user has no home folder for them")
        return None
    try:
        folder = open_folder(str(path))
    except NotPrivate as why:
        _warn("the cache of compiled kernels is passed over", why)
        return None
    except OSError:  # a read-only home
        return None
    closing.callback(os.close, folder)
    return folder


def _entry(folder: int, name: str) -> bytes | None:
    """What an entry holds; None if there is none, it is damaged, or someone else may have written it."""
    try:
        entry = read_private(folder, name)
        return None if entry is None else unsealed(entry)
    except NotPrivate as why:
        _warn("a compiled kernel is passed over and compiled anew", why)
    except (OSError, ValueError):
        pass
    return None


def _warn(what: str, why: object) -> None:
    """Once in a process, whatever the filters of warnings say."""
    if what not in _warned:
        _warned.add(what)
        text = f"{what}: {why}; set QGEMM_CACHE_DIR to a folder to which only you can write"
        warnings.warn(text, RuntimeWarning, stacklevel=5)

"""Compiled kernels, cached by content: CuPy's cache would serve a stale cubin after a header was edited."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from qgemm.errors import QgemmError
from qgemm.files.private import NotPrivate, open_folder, read_private, write_private

from .nvrtc import Compiled, compile_cubin, nvrtc_version, options_for
from .sources import closure

_warned: set[str] = set()


def cached(source: str, arch: str, headers: Mapping[str, str] | None = None) -> Compiled:
    """A unit compiled for an arch, with ptxas' report: from the cache, or compiled into it.

    The key is everything the compiler reads: source, the headers it includes (the others of kernels/ do not matter),
    arch, options, version. The cache is $QGEMM_CACHE_DIR, else $XDG_CACHE_HOME/qgemm, else ~/.cache/qgemm. What
    is in it is run, so only this user may write to it: a folder or a file that belongs to someone else, or that others
    may write to, is passed over with a warning. Where there is no folder and none can be made or written to, every
    process compiles anew.
    """
    name = f"{key(source, arch, headers)}.cubin"
    with ExitStack() as closing:
        folder = _open_cache(closing)
        found = None if folder is None else _entry(folder, name)
        if found is not None:
            return found
        made = compile_cubin(source, arch, headers)
        if folder is not None:
            with suppress(OSError, QgemmError):  # read-only home, full disk: slower, not wrong
                write_private(folder, name, packed(made))
        return made


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


def _entry(folder: int, name: str) -> Compiled | None:
    """The kernel in a file of the cache; None if there is none, it is damaged, or someone else may have written it."""
    try:
        entry = read_private(folder, name)
        return None if entry is None else unpacked(entry)
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
        warnings.warn(text, RuntimeWarning, stacklevel=4)


def cached_cubin(source: str, arch: str, headers: Mapping[str, str] | None = None) -> bytes:
    """The machine code alone, as a GPU loads it."""
    return cached(source, arch, headers).cubin


def key(source: str, arch: str, headers: Mapping[str, str] | None = None) -> str:
    """The name of a unit's entry: SHA-256 of all that its compilation depends on."""
    facts = (source, closure(source, headers or {}), options_for(arch), nvrtc_version())
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def packed(made: Compiled) -> bytes:
    """An entry: SHA-256 of the rest, by which a damaged one is known; the report's size in 4 bytes; report; cubin."""
    report = made.report.encode()
    rest = len(report).to_bytes(4, "little") + report + made.cubin
    return hashlib.sha256(rest).digest() + rest


def unpacked(entry: bytes) -> Compiled:
    """The inverse of packed; ValueError if the entry is damaged."""
    digest, rest = entry[:32], entry[32:]
    if hashlib.sha256(rest).digest() != digest:
        raise ValueError("a damaged cache entry")
    end = 4 + int.from_bytes(rest[:4], "little")
    return Compiled(rest[end:], rest[4:end].decode())


def cache_dir() -> Path | None:
    """The folder of compiled kernels, asked for only when a kernel is needed; None for a user who has no home."""
    if chosen := os.environ.get("QGEMM_CACHE_DIR"):
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base, "qgemm")
    try:
        return Path.home() / ".cache" / "qgemm"
    except RuntimeError:  # no $HOME, and a uid that no account has
        return None

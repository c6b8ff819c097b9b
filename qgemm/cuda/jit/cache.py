"""Compiled kernels, cached by content: CuPy's cache would serve a stale cubin after a header was edited."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from .nvrtc import OPTIONS, Compiled, compile_cubin, nvrtc_version
from .sources import closure


def cached(source: str, arch: str, headers: Mapping[str, str] | None = None) -> Compiled:
    """A unit compiled for an arch, with ptxas' report: from the cache, or compiled into it.

    The key is everything the compiler reads: source, the headers it includes (the others of kernels/ do not matter),
    arch, options, version. The cache is $QGEMM_CACHE_DIR, else $XDG_CACHE_HOME/qgemm, else ~/.cache/qgemm; where it
    cannot be written, every process compiles anew.
    """
    path = cache_dir() / f"{key(source, arch, headers)}.cubin"
    try:
        return unpacked(path.read_bytes())
    except (OSError, ValueError):
        pass  # not compiled yet, or damaged
    made = compile_cubin(source, arch, headers)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(packed(made))
        os.replace(file.name, path)
    except OSError:
        pass  # read-only home: slower, not wrong
    return made


def cached_cubin(source: str, arch: str, headers: Mapping[str, str] | None = None) -> bytes:
    """The machine code alone, as a GPU loads it."""
    return cached(source, arch, headers).cubin


def key(source: str, arch: str, headers: Mapping[str, str] | None = None) -> str:
    """The name of a unit's entry: SHA-256 of all that its compilation depends on."""
    facts = (source, closure(source, headers or {}), arch, OPTIONS, nvrtc_version())
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


def cache_dir() -> Path:
    """The folder of compiled kernels; asked for only when a kernel is needed."""
    if chosen := os.environ.get("QGEMM_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qgemm"

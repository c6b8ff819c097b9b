"""Compiled kernels, cached by content: CuPy's cache would return a stale cubin after a change of a header."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache

from qgemm.files.compiled import load_or_make

from .nvrtc import Compiled, compile_cubin, nvrtc_version, options_for
from .sources import MAX_HEADERS, closure


def cached(source: str, arch: str, headers: Mapping[str, str] | None = None) -> Compiled:
    """A unit compiled for an arch, with ptxas' report: from the cache, or compiled into it.

    The key is everything that the compiler reads: source, the headers that it includes, arch, options, version.
    """
    return fetched(source, arch, headers)[0]


def fetched(source: str, arch: str, headers: Mapping[str, str] | None) -> tuple[Compiled, bool]:
    """A unit compiled for an arch, and whether this call compiled it rather than the cache had it."""
    compiled: list[Compiled] = []

    def make() -> bytes:
        compiled.append(compile_cubin(source, arch, headers))
        return packed(compiled[0])

    entry = load_or_make(f"{key(source, arch, headers)}.cubin", make)
    return (compiled[0], True) if compiled else (unpacked(entry), False)


def key(source: str, arch: str, headers: Mapping[str, str] | None = None) -> str:
    """The name of a unit's entry: SHA-256 of all that its compilation depends on."""
    included = {name: _digest(text) for name, text in closure(source, headers or {}).items()}
    facts = (source, included, options_for(arch), nvrtc_version())
    return hashlib.sha256(repr(facts).encode()).hexdigest()


@lru_cache(maxsize=MAX_HEADERS)
def _digest(text: str) -> str:
    """SHA-256 of a header, which many units include."""
    return hashlib.sha256(text.encode()).hexdigest()


def packed(compiled: Compiled) -> bytes:
    """A cache entry of a unit: the report's size in 4 bytes, report, cubin."""
    report = compiled.report.encode()
    return len(report).to_bytes(4, "little") + report + compiled.cubin


def unpacked(entry: bytes) -> Compiled:
    """The inverse of packed."""
    end = 4 + int.from_bytes(entry[:4], "little")
    return Compiled(entry[end:], entry[4:end].decode())

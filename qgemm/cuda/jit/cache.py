"""Compiled kernels, cached by content: CuPy's cache would serve a stale cubin after a header was edited."""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import cache
from pathlib import Path

from .nvrtc import OPTIONS, compile_cubin, nvrtc_version
from .sources import kernels_dir


def cached_cubin(source: str, arch: str) -> bytes:
    """The cubin of a source for an arch, from the cache or compiled into it.

    The cache is $QGEMM_CACHE_DIR, else $XDG_CACHE_HOME/qgemm, else ~/.cache/qgemm; where it cannot be written,
    every process compiles anew. An entry starts with the SHA-256 of its cubin, so that a damaged one is replaced.
    """
    facts = (source, sources_digest(), arch, OPTIONS, nvrtc_version())
    path = cache_dir() / f"{hashlib.sha256(repr(facts).encode()).hexdigest()}.cubin"
    try:
        digest, cubin = path.read_bytes()[:32], path.read_bytes()[32:]
        if hashlib.sha256(cubin).digest() == digest:
            return cubin
    except OSError:
        pass  # not compiled yet
    cubin, _ = compile_cubin(source, arch)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(cubin).digest() + cubin)
        os.replace(file.name, path)
    except OSError:
        pass  # read-only home: slower, not wrong
    return cubin


def cache_dir() -> Path:
    """The folder of compiled kernels; asked for only when a kernel is needed."""
    if chosen := os.environ.get("QGEMM_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qgemm"


@cache
def sources_digest() -> str:
    """SHA-256 of every file in kernels/: an edited header never meets a stale cubin."""
    folder, digest = kernels_dir(), hashlib.sha256()
    for path in sorted(folder.rglob("*.cu*")):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()

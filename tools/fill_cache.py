"""Filling the cache of compiled kernels for a GPU that may be elsewhere: how far it is, what it took."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from qgemm.backend import backends
from qgemm.codec.format import Format
from qgemm.cuda.jit import cache, codegen, nvrtc
from qgemm.cuda.kernels.routes import source_of
from qgemm.files.compiled import cache_dir
from qgemm.formats import FORMATS
from qgemm.tensor import Tensor
from qgemm.text import binary_size

TENTHS = 10  # lines of progress where stderr is no terminal


class Filled(NamedTuple):
    """One kernel: whether it was compiled now, its bytes in the cache, why it is not there ("" if it is)."""

    new: bool
    size: int
    error: str


def fill(kernel: str, fmt: Format | None, template: codegen.Template, arch: str) -> Filled:
    """Put one kernel into the cache, if it is not there."""
    source, headers = codegen.compose(source_of(kernel), fmt, **template), codegen.headers(fmt)
    folder = cache_dir()
    if folder is None:
        return Filled(False, 0, "there is no folder for it: set QGEMM_CACHE_DIR")
    entry = folder / f"{cache.key(source, arch, headers)}.cubin"
    there = entry.exists()
    try:
        cache.cached(source, arch, headers)
        return Filled(not there, entry.stat().st_size, "")
    except nvrtc.CompileError as error:
        return Filled(False, 0, str(error))
    except OSError as error:
        return Filled(False, 0, f"cannot be kept in {folder}: {error.strerror}")


def arch_here() -> str:
    """NVRTC's name of this machine's GPU, "" without one."""
    cuda = backends()["cuda"]
    return str(cuda.facts["arch"]) if cuda.available else ""


def progress(done: Iterable[Any], total: int, what: str) -> Iterator[Any]:
    """What is done as it comes: a bar on a terminal, elsewhere a line at each tenth."""
    if sys.stderr.isatty():
        yield from tqdm(done, total=total, delay=1)
        return
    start = time.monotonic()
    for count, one in enumerate(done, 1):
        yield one
        if count * TENTHS // total > (count - 1) * TENTHS // total:
            print(f"{count} of {total} {what}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def summary(found: list[Filled], seconds: float, where: Path | None) -> str:
    """What is in the cache now, and what that took."""
    new, kept = sum(one.new for one in found), [one for one in found if not one.error]
    size = binary_size(sum(one.size for one in kept))
    return f"{len(kept)} of {len(found)} kernels are in {where}: {size}, {new} of them compiled in {seconds:.0f} s"


def formats_of(tensors: Iterable[Tensor]) -> str:
    """The formats of a model's matrices with a kernel, for a message."""
    names = {each.format.name for each in tensors if each.ndim > 1 and each.format.tiled}
    return ", ".join(str(fmt) for fmt in FORMATS.values() if fmt.name in names) or "no format that has kernels"

"""Filling the cache of compiled kernels, for a GPU of this or another machine, with progress and a summary."""

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

TENTHS = 10  # lines of progress if stderr is no terminal


class Filled(NamedTuple):
    """One kernel: whether it was compiled now, its bytes in the cache, its error or ""."""

    new: bool
    size: int
    error: str


def fill(kernel: str, fmt: Format | None, template: codegen.Template, arch: str) -> Filled:
    """Compile one kernel into the cache unless it is there."""
    source, headers = codegen.compose(source_of(kernel), fmt, **template), codegen.headers(fmt)
    folder = cache_dir()
    if folder is None:
        return Filled(False, 0, "there is no cache folder: set QGEMM_CACHE_DIR")
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
    """NVRTC's name of this machine's architecture, "" without a GPU."""
    cuda = backends()["cuda"]
    return str(cuda.facts["arch"]) if cuda.available else ""


def progress(done: Iterable[Any], total: int, noun: str) -> Iterator[Any]:
    """The items of `done`, with a bar on a terminal, or a line at each tenth elsewhere."""
    if sys.stderr.isatty():
        yield from tqdm(done, total=total, delay=1)
        return
    start = time.monotonic()
    for count, item in enumerate(done, 1):
        yield item
        if count * TENTHS // total > (count - 1) * TENTHS // total:
            print(f"{count} of {total} {noun}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def summary(kernels: list[Filled], seconds: float, where: Path | None) -> str:
    """The number and size of the kernels in the cache, and the time to compile them."""
    new, cached = sum(kernel.new for kernel in kernels), [kernel for kernel in kernels if not kernel.error]
    size = binary_size(sum(kernel.size for kernel in cached))
    return f"{len(cached)} of {len(kernels)} kernels are in {where}: {size}, {new} of them compiled in {seconds:.0f} s"


def formats_of(tensors: Iterable[Tensor]) -> str:
    """The formats of a model's matrices with a kernel, for a message."""
    names = {tensor.format.name for tensor in tensors if tensor.ndim > 1 and tensor.format.tiled}
    return ", ".join(str(fmt) for fmt in FORMATS.values() if fmt.name in names) or "no format that has kernels"

"""Filling the cache of compiled kernels before they are needed: those of a model, how far it is, what it took."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from qgemm.arguments import ACTIVATIONS
from qgemm.backend import backends
from qgemm.codec.format import Format
from qgemm.cuda.jit import cache, codegen, nvrtc
from qgemm.cuda.kernels.panels import DEQUANTIZE
from qgemm.cuda.kernels.routes import TYPE_NAMES, common_variants, route
from qgemm.cuda.kernels.transforms import DEQUANTIZE_TILES, PACK
from qgemm.cuda.problem import TUNED_SMS, TYPES, Output, Problem
from qgemm.files.compiled import cache_dir
from qgemm.formats import FORMATS
from qgemm.tensor import Tensor
from qgemm.text import binary_size

# Rows of x that are asked for: where few change the kernel each, then where a cost model may choose another config.
ROWS = (*range(1, 129), *range(136, 513, 8), *range(576, 4097, 64))
TENTHS = 10  # lines of progress where stderr is no terminal

Key = tuple[str, str, tuple[tuple[str, Any], ...]]  # kernel, name of a format ("" for none), template


class Filled(NamedTuple):
    """One kernel: whether it was compiled now, its bytes in the cache, why it is not there ("" if it is)."""

    new: bool
    size: int
    error: str


def needed(tensors: Iterable[Tensor], sm: int, sms: int = TUNED_SMS) -> set[Key]:
    """Every kernel that uploading these tensors, and products with any number of rows up to 4096, ask for.

    sm, sms: compute capability (90 is 9.0) and multiprocessors of the GPU. x and y are of any type.
    """
    matrices = {(each.format, *each.shape[-2:]) for each in tensors if each.ndim > 1 and each.format.slots}
    found = {("", name, tuple(template.items())) for name, template in common_variants()}
    for fmt in {fmt for fmt, *_ in matrices}:
        found |= {(fmt.name, PACK.name, tuple(template.items())) for template in PACK.variants(fmt)}
    for (fmt, n, k), activation, x, m in product(matrices, ACTIVATIONS, TYPES, ROWS):
        if activation == "a16" or fmt.integer:
            asked = _asked(Problem(fmt, activation, m, n, k, sm, x, sms=sms))
            found |= {(fmt.name, name, tuple(template.items())) for name, template in asked}
    return {(kernel, name, template) for name, kernel, template in found}


def _asked(p: Problem) -> Iterator[tuple[str, codegen.Template]]:
    """The (kernel, template) that a product asks for: of the config that is chosen, of any where products are fused."""
    kernel = route(p).kernel
    if kernel is DEQUANTIZE:
        yield from ((DEQUANTIZE_TILES.name, template) for template in DEQUANTIZE_TILES.variants(p.format))
        return
    for source in kernel.reads(p):
        for out in TYPE_NAMES if kernel.out_in_template else TYPE_NAMES[:1]:
            asked = p._replace(x=source, outputs=(Output(p.n, out),))
            configs = kernel.configs(asked) if kernel.products > 1 else [kernel.choose(asked)]
            yield from ((kernel.name, kernel.template(asked, config)) for config in configs)


def fill(kernel: str, fmt: Format | None, template: codegen.Template, arch: str) -> Filled:
    """Put one kernel into the cache, if it is not there."""
    source, headers = codegen.compose(kernel, fmt, **template), codegen.headers(fmt)
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
    names = {each.format.name for each in tensors if each.ndim > 1 and each.format.slots}
    return ", ".join(str(fmt) for fmt in FORMATS.values() if fmt.name in names) or "no format that has kernels"

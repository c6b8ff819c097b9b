"""prepare: what a model's products would compile at their first use, compiled before, on all cores."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from operator import index
from typing import NamedTuple

from numpy.typing import DTypeLike
from tqdm import tqdm

from .arguments import KINDS, Activation, unknown_activation
from .backend import backend, backends
from .codec.format import float_name
from .errors import UnsupportedError
from .packed import Packed
from .tensor import Tensor
from .views import View

DTYPES = ("float16", "bfloat16", "float32")  # of x


class Prepared(NamedTuple):
    """What `prepare` did: how many kernels are ready, how many of them it compiled, and the seconds that it took.

    On a CPU a library of C counts as a kernel.
    """

    kernels: int
    compiled: int
    seconds: float

    def __str__(self) -> str:
        """E.g. "267 kernels are ready, 12 of them compiled now, in 1.3 s"."""
        return f"{self.kernels} kernels are ready, {self.compiled} of them compiled now, in {self.seconds:.1f} s"


def prepare(
    tensors: Mapping[str, Packed] | Iterable[Packed] | Packed,
    m: int | Iterable[int] | None = None,
    *,
    activation: Activation | None = None,
    dtype: DTypeLike | None = None,
    progress: bool | None = None,
) -> Prepared:
    """Compile and load now what products by these weights would compile at their first use, on all cores.

    >>> with qgemm.open("model.gguf") as model:
    ...     qgemm.prepare(model, m=(1, 512), dtype="float16")

    tensors: of an opened file, or any Tensors and DeviceTensors. Kernels are for the GPU on which a DeviceTensor lies,
    for Tensors the current one if this machine has any, else the CPU.
    m: how many rows x will have, a number or several; without it any from 1 to 4096. activation: "a16", as that of
    products, or another of qgemm.matmul. dtype: of x; without it float16, bfloat16 and float32.
    progress: whether a bar is drawn on stderr; without a choice where stderr is a terminal.

    The first error of a compiler is raised, and what was not begun is left. Raises TypeError for what is no tensor and
    UnsupportedError for a number of rows below 1 or an unknown activation or dtype.
    """
    start = time.perf_counter()
    if isinstance(tensors, Packed):
        tensors = [tensors]
    given = list(tensors.values() if isinstance(tensors, Mapping) else tensors)
    given = [each.tensor if isinstance(each, View) else each for each in given]
    for each in given:
        if not isinstance(each, Packed):
            raise TypeError(f"tensors must be Tensors or DeviceTensors, got {type(each).__name__}")
    if activation is not None and activation not in KINDS:
        raise unknown_activation(activation)
    on_gpu = any(not isinstance(each, Tensor) for each in given) or backends()["cuda"].available
    found = backend("cuda" if on_gpu else "cpu").preparation(
        given,
        _rows(m),
        ("a16" if activation is None else activation,),
        DTYPES if dtype is None else (float_name(dtype),),
    )
    compiled = _run(found, progress)
    return Prepared(len(found), compiled, time.perf_counter() - start)


def _rows(m: int | Iterable[int] | None) -> Sequence[int] | None:
    if m is None:
        return None
    try:
        rows = sorted({index(each) for each in (m if isinstance(m, Iterable) else [m])})
    except TypeError:
        rows = []
    if not rows or rows[0] < 1:
        raise UnsupportedError(f"m is a number of rows of x from 1 on, or several, got {m!r}")
    return rows


def _run(tasks: Sequence[Callable[[], bool]], progress: bool | None) -> int:
    """All tasks on as many threads as there are cores, and how many compiled; after an error or Ctrl-C none is begun.

    The threads live for one call only, and end before it returns.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        try:
            futures = [pool.submit(task) for task in tasks]
            hidden = None if progress is None else not progress
            with tqdm(as_completed(futures), "kernels", len(futures), disable=hidden, leave=False, delay=1) as bar:
                return sum(done.result() for done in bar)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise

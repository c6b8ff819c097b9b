"""tune: the session of the tuner on the current device, with its bar, and the file that keeps its times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import fmean

from qgemm.backend import Tuned
from qgemm.errors import UnsupportedError
from qgemm.packed import Packed
from qgemm.parallel import run_all
from qgemm.version import pip_install

from .clock import GpuClock
from .driver import tuned
from .problem import gpu
from .tensor import DeviceTensor
from .times import Row
from .tuner import Job, Tuner, batches_of


def tune(
    weights: Iterable[Packed], rows: Sequence[int], activations: Sequence[str], dtypes: Sequence[str], seconds: float,
    progress: bool | None,
) -> Tuned:  # fmt: skip
    """Time the configs of products by these weights for some seconds, after the times that an earlier run kept."""
    try:
        import cupy
    except ImportError:
        raise UnsupportedError(f"tuning needs CuPy, torch alone multiplies: {pip_install('cuda13')}") from None
    from tqdm import tqdm

    start, device = time.monotonic(), int(cupy.cuda.runtime.getDevice())
    machine, weights, stored = tuned.machine(device), list(weights), list[bool]()

    def save(timed: list[Row]) -> None:
        stored.append(tuned.write(machine, timed))
        for w in weights:
            if isinstance(w, DeviceTensor):
                w.plans.clear()  # the launches of earlier products

    batches = batches_of(weights, gpu(device), rows, activations, dtypes, tuned.read(machine))
    tuner = Tuner(batches, GpuClock(), save)
    missing, hidden = tuner.missing, None if progress is None else not progress
    compile_all: Callable[..., int] = partial(run_all, progress=progress)
    with tqdm(None, "configs", missing, disable=hidden, leave=False) as bar:

        def advance(job: Job) -> None:
            bar.set_postfix_str(title(job), refresh=False)
            bar.update()

        finished = tuner.run(compile_all, advance, time.monotonic, start + seconds)
    done = [job for job in tuner.jobs if job.us]
    changed = [job for job in done if job.gain > 1]
    return Tuned(
        products=len(done), configs=missing - tuner.missing, changed=len(changed),
        gain=fmean(job.gain for job in changed) if changed else 1.0, finished=finished, stored=all(stored),
        seconds=time.monotonic() - start,
    )  # fmt: skip


def title(job: Job) -> str:
    """A product in the bar, e.g. "q4_k 4096x4096 M=16"."""
    p = job.problem
    return f"{p.format.name} {p.n}x{p.k} M={p.m}"

"""Products on a GPU: grouped into launches by route and format, with x staged as each kernel reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np

from qgemm.arguments import NO_EPILOGUE, Epilogue
from qgemm.arrays import current_stream
from qgemm.codec.format import Format

from .activations import DeviceActivations, aligned, dequantized, quantized, rounded, rows_of
from .kernels.activations import quantize_launch, workspace
from .kernels.decode import DECODE_A8, quantizes_inside
from .kernels.kernel import Kernel, Launchable
from .kernels.routes import launch, route
from .problem import C_TYPES, Output, Problem, c_type, gpu
from .problem import Q8_1 as BLOCKS
from .tensor import DeviceTensor


class Product(NamedTuple):
    """One product of a call: its weights, its output, and what is added to it."""

    w: DeviceTensor
    y: Any
    epilogue: Epilogue


class Job(NamedTuple):
    """Products that share a launch: of one format, by one kernel."""

    kernel: Kernel
    products: list[Product]


def multiply(x: Any, products: Sequence[Product], activation: str) -> Launchable | None:
    """All products of x, a CuPy array [..., K] or DeviceActivations, on the current stream.

    Returns all launches as one, if they serve every call of these shapes and types: see launch_cache.py.
    """
    import cupy

    k, m, prepared = x.shape[-1], prod(x.shape[:-1]), isinstance(x, DeviceActivations)
    if m == 0:
        return None
    if not prepared and any(x.size and y.size and cupy.may_share_memory(x, y) for _, y, _ in products):
        x = x.copy()
    if k == 0:
        for p in products:
            _add_after(p, lambda acc: acc.fill(0))
        return None
    jobs = _jobs([p for p in products if p.w.shape[0]], activation, m, c_type(x.dtype))
    stage = _Stage(x, k, m, jobs, products)
    made = [_run(job, *stage.x_for(job.kernel, activation), k, m, activation) for job in jobs]
    in_order = len(products) == sum(len(job.products) for job in jobs) and all(
        a is b for a, b in zip(products, (p for job in jobs for p in job.products), strict=True)
    )
    direct = not prepared and x.dtype.name in C_TYPES and all(_direct(p.y) for p in products)
    if not (direct and in_order and all(made)) or (activation == "a8" and not stage.few):
        return None
    quantize = quantize_launch(products[0].w.device, c_type(x.dtype), k, m) if stage.blocks is not None else None
    return _all_of([one for one in made if one], [len(job.products) for job in jobs], quantize, k, m)


class _Stage:
    """x as the kernels of a call read it, each form made once, when the first asks for it."""

    def __init__(self, x: Any, k: int, m: int, jobs: Sequence[Job], products: Sequence[Product]) -> None:
        self.few = all(job.kernel.products > 1 for job in jobs)
        weights, sm = sum(p.w.shape[0] * k for p in products), gpu(products[0].w.device).sm
        self.inside = self.few and len(jobs) == 1 and quantizes_inside(m, k, weights, sm)
        self.blocks: DeviceActivations | None = None
        self._x, self._k, self._m = x, k, m
        self._values: Any = None

    def x_for(self, kernel: Kernel, activation: str) -> tuple[Any, str]:
        """An array, and what kernels call its type."""
        x, prepared = self._x, isinstance(self._x, DeviceActivations)
        if activation == "a16" or (self.inside and not prepared and kernel is DECODE_A8):
            rows = self._rows(lambda: rows_of(x, self._k))
            return rows, c_type(rows.dtype)
        if not kernel.takes_q8_1:
            rows = self._rows(lambda: dequantized(x) if prepared else rounded(rows_of(x, self._k)))
            return rows, c_type(rows.dtype)
        if prepared:
            return aligned(x.data), BLOCKS
        if self.blocks is None:
            room = workspace(current_stream(), self._k, self._m) if self.few else None
            self.blocks = quantized(x, x, room)
        return self.blocks.data, BLOCKS

    def _rows(self, make: Callable[[], Any]) -> Any:
        if self._values is None:
            self._values = aligned(make())
        return self._values


def _jobs(products: Sequence[Product], activation: str, m: int, x: str) -> list[Job]:
    """The products by kernel and format: as many in a job as a launch of it takes."""
    groups: dict[tuple[Kernel, Format], list[Product]] = {}
    for p in products:
        kernel = route(Problem(p.w.format, activation, m, *p.w.shape, gpu(p.w.device).sm, x)).kernel
        groups.setdefault((kernel, p.w.format), []).append(p)
    return [
        Job(kernel, some[start : start + kernel.products])
        for (kernel, _), some in groups.items()
        for start in range(0, len(some), kernel.products)
    ]


def _run(job: Job, x: Any, source: str, k: int, m: int, activation: str) -> Launchable | None:
    """Compute a job, and give its launch if it can be used again."""
    import cupy

    if not job.kernel.adds:
        (p,) = job.products
        _add_after(p, lambda acc: _enter(job.kernel, [Product(p.w, acc, NO_EPILOGUE)], x, source, k, m, activation))
        return None
    direct = [p if _direct(p.y) else p._replace(y=cupy.empty(p.y.shape, np.float32)) for p in job.products]
    made = _enter(job.kernel, direct, x, source, k, m, activation)
    for p, computed in zip(job.products, direct, strict=True):
        if computed is not p:
            p.y[...] = computed.y
    return made


def _enter(
    kernel: Kernel, products: Sequence[Product], x: Any, source: str, k: int, m: int, activation: str
) -> Launchable:
    """Launch a kernel on the current stream -> the launch."""
    made = launch(kernel, problem_of(kernel, products, source, k, m, activation))
    made(current_stream(), x.data.ptr, *pointers_of(products))
    return made


def problem_of(kernel: Kernel, products: Sequence[Product], source: str, k: int, m: int, activation: str) -> Problem:
    """What a kernel is launched for: products of weights of one format by M rows of x, whose type it calls `source`."""
    w = products[0].w
    outputs = tuple(
        Output(p.w.shape[0], p.y.dtype.name, *("" if a is None else a.dtype.name for a in p.epilogue)) for p in products
    )
    exponent = 0 if kernel.adds else w.exponent  # the others bring a whole matrix into the range of float16
    n, on = sum(output.n for output in outputs), gpu(w.device)
    return Problem(w.format, activation, m, n, k, on.sm, source, outputs, exponent, on.device, on.sms)


def pointers_of(products: Sequence[Product]) -> list[int]:
    """The pointers of a launch behind that of x: w, y, bias and residual of each product, 0 for none."""
    pointers: list[int] = []
    for p in products:
        pointers += [p.w.pointer, p.y.data.ptr, *(0 if a is None else a.data.ptr for a in p.epilogue)]
    return pointers


def _direct(y: Any) -> bool:
    """Whether kernels can store into y as it is."""
    return bool(y.flags.c_contiguous) and y.dtype.name in C_TYPES


def _add_after(p: Product, compute: Callable[[Any], Any]) -> None:
    """y = a product + epilogue, by a kernel that does not add."""
    import cupy

    n = p.w.shape[0]
    direct = _direct(p.y) and not p.epilogue.given
    acc = p.y.reshape(-1, n) if direct else cupy.empty((p.y.size // n if n else 0, n), np.float32)
    if acc.size:
        compute(acc)
    if not direct:
        total = acc.reshape(p.y.shape)
        for added in p.epilogue:
            if added is not None:
                total += added
        p.y[...] = total


def _all_of(
    launches: Sequence[Launchable], counts: Sequence[int], quantize: Launchable | None, k: int, m: int
) -> Launchable:
    """A call's launches as one, on a stream and pointers to x and to each product's arrays."""
    if quantize is None and len(launches) == 1:
        return launches[0]
    ends = np.cumsum([0, *(4 * count for count in counts)]).tolist()
    parts = [slice(*pair) for pair in pairwise(ends)]

    def run(stream: int, x: int, *pointers: int) -> None:
        if quantize is not None:
            blocks = workspace(stream, k, m).data.ptr
            quantize(stream, x, blocks)
            x = blocks
        for one, part in zip(launches, parts, strict=True):
            one(stream, x, *pointers[part])

    return run

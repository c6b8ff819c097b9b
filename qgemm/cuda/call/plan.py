"""Launches of a call: products of weights of one format share a launch where the kernel computes several.

x is brought once into every form that a kernel of the call reads. Products by experts are described and launched by the
same classes and functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

from qgemm.codec.format import Format
from qgemm.codec.group_activations import FORMAT as GROUPED
from qgemm.codec.group_activations import GROUP_COLUMNS
from qgemm.codec.q8_1_f32 import FORMAT as ACTIVATIONS
from qgemm.cuda.driver.tuned import times_of
from qgemm.cuda.driver.workspace import workspace
from qgemm.cuda.kernels.activations import (
    dequantize_launch,
    quantize_groups_launch,
    quantize_launch,
    round_launch,
    scale_launch,
)
from qgemm.cuda.kernels.add_epilogue import gate_launch
from qgemm.cuda.kernels.kernel import Kernel, Launchable, half_rows
from qgemm.cuda.kernels.routes import launch, route
from qgemm.cuda.layout import group_activations, q8_1_k_blocks, scaled_rows
from qgemm.cuda.layout.tile import tiles_shape
from qgemm.cuda.problem import C_TYPES, EIGHT_BITS, ITEMSIZE, Q8_1, SCALED_ROWS, ExpertStride, Output, Problem, gpu
from qgemm.cuda.tensor import DeviceExperts, DeviceTensor

from .arrays import ABSOLUTE, NOTHING, SIZES, Array, Call, Pointer

SCRATCH = "scratch"  # the use of workspaces for small scratch memory
SCRATCH_BYTES = 1 << 20  # the largest scratch memory in a workspace of the stream; larger is allocated for each call
MAX_SCRATCH = 4  # pieces of scratch memory of a call in workspaces, and of one that is replayed


class Source(NamedTuple):
    """x as a call has it: M rows of K values of a type by NumPy's name, or their blocks of codes.

    prepared: the activation that the blocks are for, "" of values.
    """

    m: int
    k: int
    dtype: str
    prepared: str = ""


class Product(NamedTuple):
    """One product of a call: weights, their N rows from `row` on, its output, and the arrays that are added to it.

    w: a matrix, or experts, whose pointers are those of expert 0. gate: see Output.
    """

    w: DeviceTensor | DeviceExperts
    n: int
    y: Array = NOTHING
    bias: Array = NOTHING
    residual: Array = NOTHING
    gate: str = ""
    row: int = 0

    @property
    def output(self) -> Output:
        """Sizes and types, in the form that kernels are launched by."""
        return Output(self.n, self.y.dtype, self.bias.dtype, self.residual.dtype, self.gate)

    @property
    def tiles(self) -> Pointer:
        """The pointer to the weights."""
        fmt, k = self.w.format, self.w.shape[-1]
        skipped = self.row * k * fmt.block_bytes if fmt.plain else prod(tiles_shape(fmt, self.row, k))
        return Pointer(ABSOLUTE, self.w.pointer + skipped)

    @property
    def stride(self) -> ExpertStride:
        """Bytes from one expert to the next."""
        return ExpertStride(int(self.w.data.shape[1]), self.w.shape[-2])

    def pointers(self, element: int = 0) -> tuple[Pointer, Pointer, Pointer, Pointer]:
        """Pointers to w, y, bias and residual, NULL for none; element: the first of y and residual."""
        return self.tiles, self.y.element(element), self.bias.element(self.row), self.residual.element(element)


class Served(NamedTuple):
    """The problem of a product, and the kernel that computes it."""

    problem: Problem
    kernel: Kernel


class Form(NamedTuple):
    """x in a form that kernels read. kind: the name that they give its type.

    transform: prepares the launch that computes it from the call's x; None where kernels read that. nbytes: of the
    form, in scratch memory.
    """

    kind: str
    transform: Callable[[], Launchable] | None = None
    nbytes: int = 0


def problem(w: DeviceTensor | DeviceExperts, source: Source, activation: str = "a16") -> Problem:
    """A product x @ w.T of the call's x, without an output yet."""
    facts, x, (n, k) = gpu(w.device), C_TYPES[source.dtype], w.shape[-2:]
    p = Problem(w.format, activation, source.m, n, k, facts.sm, x, (), w.exponent, facts.device, facts.sms)
    return p._replace(times=times_of(facts.device))


def served(w: DeviceTensor | DeviceExperts, source: Source, activation: str) -> Served:
    """A product by w with the kernel of the first route that serves it."""
    product = problem(w, source, activation)
    return Served(product, route(product).kernel)


def gated_pair(call: Call, pair: Sequence[Product], y: Array, function: str, fused: bool) -> tuple[Product, Product]:
    """The two products of y = function(first product) * (second product), as kernels compute them.

    fused: in one launch, which stores y alone. Else the gate's values lie between them in scratch memory, in float32.
    """
    gate, up = pair
    if fused:
        return gate._replace(y=y, gate=function), up._replace(y=NOTHING)
    values = _sums(call, y)
    return gate._replace(y=values), up._replace(y=y, residual=values, gate=function)


def launch_gated(
    call: Call, kernels: Sequence[Served], pair: Sequence[Product], y: Array, function: str, source: Source, x: Pointer
) -> None:
    """y = function(first product) * (second product).

    Kernels for few tokens apply the gate in their epilogue, in one launch where both weights have one format. Kernels
    with one product per launch store both products, and a third launch applies the gate: in their epilogue the gate
    keeps the tensor cores waiting, 246 us instead of 171 without it (512 tokens, 14336x4096 twice, q4_0, H200).
    """
    if kernels[0].kernel.products > 1:
        fused = share_launch(kernels)
        launch_products(call, kernels, gated_pair(call, pair, y, function, fused), source, x, fused)
        return
    apart = [p._replace(y=_sums(call, y)) for p in pair]
    launch_products(call, kernels, apart, source, x)
    gate, up = apart
    step = gate_launch(call.device, function, y.dtype, source.m * up.n)
    enter(call, step, up.y.pointer, y.pointer, NOTHING.pointer, gate.y.pointer)


def _sums(call: Call, y: Array) -> Array:
    """Scratch memory for float32 sums of y's shape."""
    size = call.nbytes[y.pointer.base] // SIZES[y.dtype]
    return Array(None, scratch(call, size * SIZES["float32"]), "float32")


def launch_products(
    call: Call, kernels: Sequence[Served], products: Sequence[Product], source: Source, x: Pointer, gated: bool = False
) -> None:
    """Launch products by weights that share a device and K, each by the kernel that serves it.

    gated: the first of two products, which share a launch, is the gate of the second.
    """
    first, jobs = kernels[0].problem, _jobs(kernels)
    inside = _quantizes_x(jobs, kernels, source)
    forms: dict[str, Pointer] = {}
    transforms: list[tuple[Callable[[], Launchable], Pointer]] = []
    launches: list[tuple[Launchable, Sequence[Pointer]]] = []
    for kernel, indices in jobs:
        form = _form(kernel, first, source, inside)
        if form.transform is None:
            forms[form.kind] = x
        elif form.kind not in forms:
            forms[form.kind] = scratch(call, form.nbytes)
            transforms.append((form.transform, forms[form.kind]))
        outputs, problems = [products[i].output for i in indices], [kernels[i].problem for i in indices]
        p = problem_of_launch(kernel, problems, outputs, form.kind, gated)
        arrays = [pointer for i in indices for pointer in products[i].pointers()]
        launches.append((prepared(call, kernel, p), [forms[form.kind], *arrays]))
    for transform, values in transforms:
        enter(call, transform(), x, values)
    for step, arguments in launches:
        enter(call, step, *arguments)


def problem_of_launch(
    kernel: Kernel, products: Sequence[Problem], outputs: Sequence[Output], kind: str, gated: bool = False
) -> Problem:
    """The problem of a launch of a kernel: products by weights of one format of x, whose type it calls `kind`."""
    n, first = sum(output.n for output in outputs), products[0]
    exponent = first.exponent if kernel.uses_exponent else 0
    return first._replace(n=n, x=kind, outputs=tuple(outputs), exponent=exponent, gated=gated)


def prepared(call: Call, kernel: Kernel, p: Problem) -> Launchable:
    """The launch of the kernel of a product."""
    call.kernels.append((kernel, p))
    return launch(kernel, p)


def enter(call: Call, step: Launchable, *pointers: Pointer) -> None:
    """Launch on the stream of the call, and record it."""
    step(call.stream, *[call.addresses[base] + offset for base, offset in pointers])
    call.launches.append((step, pointers))


def scratch(call: Call, nbytes: int) -> Pointer:
    """Memory that lives as long as the call: a small one lies in a workspace, locked until everything is launched."""
    if nbytes <= SCRATCH_BYTES and len(call.scratch) < MAX_SCRATCH:
        space = workspace(call.device, call.stream, f"{SCRATCH} {len(call.scratch)}", capacity(nbytes))
        space.lock.acquire()
        call.locks.append(space.lock)
        address = space.pointer
    else:
        call.memory.append(call.library.scratch(nbytes, call.device)())
        address = call.library.pointer(call.memory[-1])
    call.scratch.append(nbytes)
    for facts, value in ((call.addresses, address), (call.nbytes, nbytes), (call.alignments, 1)):
        facts.append(value)
    return Pointer(len(call.addresses) - 1)


def scaled(call: Call, x: Pointer, m: int, k: int, spare: int = 0) -> Pointer:
    """M rows of K bf16 as ScaledRows, in scratch memory with `spare` rows more."""
    rows = scratch(call, scaled_rows.nbytes(m + spare, k))
    enter(call, scale_launch(call.device, k, m), x, rows)
    return rows


def capacity(nbytes: int) -> int:
    """The size of the workspace for scratch memory: one of few, since workspaces are never freed."""
    return 1 << max(nbytes - 1, 0).bit_length()


def share_launch(kernels: Sequence[Served]) -> bool:
    """Whether products are one launch."""
    return len(_jobs(kernels)) == 1


def _jobs(kernels: Sequence[Served]) -> list[tuple[Kernel, tuple[int, ...]]]:
    """The indices of the products by kernel and format: as many in a job as a launch of it computes."""
    groups: dict[tuple[Kernel, Format], list[int]] = {}
    for index, (p, kernel) in enumerate(kernels):
        groups.setdefault((kernel, p.format), []).append(index)
    return [
        (kernel, tuple(indices[start : start + kernel.products]))
        for (kernel, _), indices in groups.items()
        for start in range(0, len(indices), kernel.products)
    ]


def _quantizes_x(jobs: Sequence[tuple[Kernel, Sequence[int]]], kernels: Sequence[Served], source: Source) -> bool:
    """Whether the one launch of a call quantizes x itself."""
    quantizes = jobs[0][0].quantizes
    if len(jobs) > 1 or source.prepared or quantizes is None:
        return False
    return quantizes(kernels[0].problem._replace(n=sum(p.n for p, _ in kernels)))


def _form(kernel: Kernel, p: Problem, source: Source, inside: bool) -> Form:
    """x as a kernel reads it: the call's x, if the kernel reads its type or, `inside`, quantizes it itself."""
    m, k, x, activation, device = p.m, p.k, p.x, p.activation, p.device
    if activation in GROUP_COLUMNS and not source.prepared:
        GROUPED.blocks_in(k, "activations")
    if activation == "a16" and x != "half" and kernel.reads is half_rows:
        return Form(SCALED_ROWS, partial(scale_launch, device, k, m), scaled_rows.nbytes(m, k))
    if activation == "a16" or inside:
        return Form(x)
    if activation in GROUP_COLUMNS and source.prepared:
        return Form(EIGHT_BITS)
    if activation in GROUP_COLUMNS:
        nbytes = group_activations.nbytes(m, k, GROUP_COLUMNS[activation])
        return Form(EIGHT_BITS, partial(quantize_groups_launch, device, x, k, m, activation), nbytes)
    if not source.prepared:
        ACTIVATIONS.blocks_in(k, "activations")
    if kernel.takes_q8_1:
        if source.prepared:
            return Form(Q8_1)
        return Form(Q8_1, partial(quantize_launch, device, x, k, m), q8_1_k_blocks.nbytes(m, k))
    decoded = source.dtype if source.dtype == "float16" else "float32"
    kind, nbytes = C_TYPES[decoded], m * k * ITEMSIZE[decoded]
    if source.prepared:
        return Form(kind, partial(dequantize_launch, device, kind, k, m), nbytes)
    return Form(kind, partial(round_launch, device, x, kind, k, m), nbytes)

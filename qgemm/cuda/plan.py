"""Plan: all launches of a call, from what does not change between calls; a call adds a stream and pointers.

Products of weights of one format share a launch where the kernel takes several; x is brought once into each form that
a kernel of the call reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from qgemm.codec.format import Format
from qgemm.codec.group_activations import FORMAT as GROUPED
from qgemm.codec.group_activations import GROUPS
from qgemm.codec.q8_1_f32 import FORMAT as ACTIVATIONS

from .driver.workspace import workspace
from .kernels.activations import dequantize_launch, quantize_groups_launch, quantize_launch, round_launch
from .kernels.decode import DECODE_A8, quantizes_inside
from .kernels.kernel import Kernel, Launchable
from .kernels.routes import launch, route
from .layout import group_activations, q8_1_k_blocks
from .libraries import Library
from .problem import C_TYPES, EIGHT_BITS, ITEMSIZE, Q8_1, Output, Problem, gpu
from .tensor import DeviceTensor

ARRAYS = 4  # pointers of a product: w, y, bias, residual


class Source(NamedTuple):
    """x as a call gives it: M rows of K values of a type that kernels know, by NumPy's name, or their blocks of codes.

    prepared: the activation that the blocks are for, "" of values.
    """

    m: int
    k: int
    dtype: str
    prepared: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of x."""
        return codes_nbytes(self.prepared, self.m, self.k) if self.prepared else self.m * self.k * ITEMSIZE[self.dtype]


def codes_nbytes(activation: str, m: int, k: int) -> int:
    """Bytes of M rows of K activations as blocks of codes."""
    group = GROUPS.get(activation)
    return group_activations.nbytes(m, k, group) if group else q8_1_k_blocks.nbytes(m, k)


class Served(NamedTuple):
    """A product, and the kernel that computes it."""

    problem: Problem
    kernel: Kernel


class Form(NamedTuple):
    """x as kernels read it, of the type that they call `kind`.

    transform: prepares the launch that makes it of the call's x; None where that is read as it is. nbytes: of the form.
    kept: whether it lies in a workspace of the stream, else in memory of its own.
    """

    kind: str
    transform: Callable[[], Launchable] | None = None
    nbytes: int = 0
    kept: bool = False


class Step(NamedTuple):
    """One launch: of a form of x, with the pointers of some of the call's products."""

    form: Form
    launch: Launchable
    pick: Callable[[tuple[int, ...]], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Plan:
    """enter: launches everything on a raw stream handle, a pointer to x and ARRAYS pointers of each product.

    x_nbytes, y_nbytes: bytes of x and of each y.
    """

    enter: Launchable
    x_nbytes: int
    y_nbytes: tuple[int, ...]


class Call(NamedTuple):
    """What a plan is entered with: a raw stream handle, the address of x, and ARRAYS pointers of each product."""

    stream: int
    x: int
    pointers: Sequence[int]


def launched(call: Call, plan: Callable[..., Plan], *of: Any) -> Plan:
    """The plan of a call that is the first of its kind, made by plan_of or gated_plan_of, and entered."""
    made = plan(*of)
    made.enter(call.stream, call.x, *call.pointers)
    return made


def problem(w: DeviceTensor, source: Source, activation: str) -> Problem:
    """A product x @ w.T of x as it is given, whose outputs are not known yet."""
    on, x = gpu(w.device), C_TYPES[source.dtype]
    return Problem(w.format, activation, source.m, *w.shape, on.sm, x, (), w.exponent, on.device, on.sms)


def served(w: DeviceTensor, source: Source, activation: str) -> Served:
    """A product by w with the kernel of the first route that serves it."""
    asked = problem(w, source, activation)
    return Served(asked, route(asked).kernel)


def plan_of(
    products: Sequence[Served], outputs: Sequence[Output], source: Source, library: Library, gated: bool = False
) -> Plan:
    """The launches of products by weights that share a device and K; scratch memory is the library's.

    gated: the first of two products, which share a launch, is the gate of the second.
    """
    first, jobs = products[0].problem, _jobs(products)
    few = all(kernel.products > 1 for kernel, _ in jobs)
    total = sum(p.n * p.k for p, _ in products)
    inside = len(jobs) == 1 and few and quantizes_inside(source.m, source.k, total, first.sm)
    forms: dict[str, Form] = {}
    steps = []
    for kernel, indices in jobs:
        alone = len(products) == 1 and kernel.quantizes is not None and kernel.quantizes(first)
        form = _form(kernel, source, first.activation, first.device, few, inside or alone)
        form = forms.setdefault(form.kind if form.transform else "", form)
        asked = [products[i].problem for i in indices]
        p = problem_of_launch(kernel, asked, [outputs[i] for i in indices], form.kind, gated)
        steps.append(Step(form, launch(kernel, p), _picking(indices, len(products))))
    sizes = tuple(source.m * output.n * ITEMSIZE[output.y] for output in outputs if output.y)
    return Plan(_entering(steps, first.device, library), source.nbytes, sizes)


def gated_plan_of(
    products: Sequence[Served],
    y: str,
    biases: Sequence[str],
    function: str,
    source: Source,
    library: Library,
) -> Plan:
    """The launches of function(x @ gate.T + bias) * (x @ up.T + bias) by kernels that add.

    Its pointers are those of both products, with one y; y, biases: NumPy's names of types, "" for no bias. One launch
    computes both where it can. Otherwise the first goes to scratch memory, float32, from where the second is gated.
    """
    (n, device), (first, second) = (products[0].problem.n, products[0].problem.device), biases
    sizes = (source.m * n * ITEMSIZE[y],)
    if len(_jobs(products)) == 1:
        outputs = Output(n, y, first, "", function), Output(n, "", second)
        return replace(plan_of(products, outputs, source, library, gated=True), y_nbytes=sizes)
    outputs = Output(n, "float32", first), Output(n, y, second, "float32", function)
    both = plan_of(products, outputs, source, library)
    scratch, pointer = library.scratch(source.m * n * ITEMSIZE["float32"], device), library.pointer

    def enter(stream: int, x: int, *pointers: int) -> None:
        gate, _, bias, _, up, y, up_bias, _ = pointers
        room = scratch()  # freed behind these launches: both libraries free in the order of the stream
        both.enter(stream, x, gate, pointer(room), bias, 0, up, y, up_bias, pointer(room))

    return Plan(enter, source.nbytes, sizes)


def problem_of_launch(
    kernel: Kernel, asked: Sequence[Problem], outputs: Sequence[Output], kind: str, gated: bool = False
) -> Problem:
    """What a kernel is launched for: products of weights of one format by x, whose type it calls `kind`."""
    n, first = sum(output.n for output in outputs), asked[0]
    exponent = 0 if kernel.adds else first.exponent  # the others bring a whole matrix into the range of float16
    return first._replace(n=n, x=kind, outputs=tuple(outputs), exponent=exponent, gated=gated)


def _jobs(products: Sequence[Served]) -> list[tuple[Kernel, tuple[int, ...]]]:
    """The indices of the products by kernel and format: as many in a job as a launch of it takes."""
    groups: dict[tuple[Kernel, Format], list[int]] = {}
    for index, (asked, kernel) in enumerate(products):
        groups.setdefault((kernel, asked.format), []).append(index)
    return [
        (kernel, tuple(some[start : start + kernel.products]))
        for (kernel, _), some in groups.items()
        for start in range(0, len(some), kernel.products)
    ]


def _form(kernel: Kernel, source: Source, activation: str, device: int, few: bool, inside: bool) -> Form:
    """x as a kernel reads it: as it is for A16 and, `inside`, where the kernel quantizes it itself."""
    m, k, given = source.m, source.k, C_TYPES[source.dtype]
    if activation in GROUPS:
        if source.prepared:
            return Form(EIGHT_BITS)
        GROUPED.blocks_in(k, "activations")
        if inside:
            return Form(given)
        return Form(
            EIGHT_BITS, partial(quantize_groups_launch, device, given, k, m, activation), codes_nbytes(activation, m, k)
        )
    if activation == "a16" or (inside and not source.prepared and kernel is DECODE_A8):
        return Form(given)
    if kernel.takes_q8_1:
        if source.prepared:
            return Form(Q8_1)
        ACTIVATIONS.blocks_in(k, "activations")
        return Form(Q8_1, partial(quantize_launch, device, given, k, m), codes_nbytes(activation, m, k), few)
    decoded = source.dtype if source.dtype == "float16" else "float32"
    kind, nbytes = C_TYPES[decoded], m * k * ITEMSIZE[decoded]
    if source.prepared:
        return Form(kind, partial(dequantize_launch, device, kind, k, m), nbytes)
    ACTIVATIONS.blocks_in(k, "activations")
    return Form(kind, partial(round_launch, device, given, kind, k, m), nbytes)


def _picking(indices: tuple[int, ...], count: int) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    """What takes the pointers of some of `count` products out of those of all."""
    if indices == tuple(range(count)):
        return tuple
    return itemgetter(*(ARRAYS * index + array for index in indices for array in range(ARRAYS)))


def _entering(steps: Sequence[Step], device: int, library: Library) -> Launchable:
    """All steps as one call. A single launch of x as it is needs nothing around it."""
    if len(steps) == 1 and steps[0].form.transform is None:
        return steps[0].launch
    groups = [_of_form(form, some, device, library) for form, some in _by_form(steps)]

    def enter(stream: int, x: int, *pointers: int) -> None:
        for group in groups:
            group(stream, x, pointers)

    return enter


def _by_form(steps: Iterable[Step]) -> list[tuple[Form, list[Step]]]:
    groups: dict[int, tuple[Form, list[Step]]] = {}
    for step in steps:
        groups.setdefault(id(step.form), (step.form, []))[1].append(step)
    return list(groups.values())


def _of_form(form: Form, steps: Sequence[Step], device: int, library: Library) -> Callable[..., None]:
    """The launches that read one form of x, behind the one that makes it."""
    transform, pairs = form.transform, [(step.launch, step.pick) for step in steps]

    def as_given(stream: int, x: int, pointers: tuple[int, ...]) -> None:
        for one, pick in pairs:
            one(stream, x, *pick(pointers))

    if transform is None:
        return as_given
    make, scratch, pointer = transform(), library.scratch(form.nbytes, device), library.pointer

    def kept(stream: int, x: int, pointers: tuple[int, ...]) -> None:
        room = workspace(device, stream, "activations", form.nbytes)
        with room.lock:
            make(stream, x, room.pointer)
            as_given(stream, room.pointer, pointers)

    def made(stream: int, x: int, pointers: tuple[int, ...]) -> None:
        room = scratch()  # freed behind these launches: both libraries free in the order of the stream
        make(stream, x, pointer(room))
        as_given(stream, pointer(room), pointers)

    return kept if form.kept else made

"""The kernels that the products of a model need: `qgemm.prepare` compiles them before the first token."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

from qgemm.arguments import ACTIVATIONS
from qgemm.codec.format import Format
from qgemm.codec.group_activations import GROUP_COLUMNS, multiplies
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.problem import TUNED_SMS, TYPES, Output, Problem, Routed
from qgemm.cuda.times import Times

from .kernel import Kernel
from .routes import PLAIN, ROUTES, TYPE_NAMES, Grouping, alternatives, common_variants, extra_units, route
from .transforms import PACK

ROWS = range(1, 4097)  # rows of x: from one token to a long prompt
PREPARED_TOP_K = 8  # experts of a token, at most, in the models that are prepared

Key = tuple[str, Format | None, tuple[tuple[str, Any], ...]]  # kernel, the format that it is for, template


def needed(
    tensors: Iterable[Any],
    sm: int,
    sms: int = TUNED_SMS,
    rows: Sequence[int] = ROWS,
    activations: Sequence[str] = ACTIVATIONS,
    types: Sequence[str] = TYPES,
    times: Times | None = None,
) -> set[Key]:
    """Every kernel that uploading these tensors, and products with any of these numbers of rows of x, need.

    tensors: on the host or on a GPU; one with three axes holds experts, multiplied together or singly. sm, sms: compute
    capability (90 is 9.0) and multiprocessors of the GPU. types: the kernels' names of the types of x; y has any type.
    Weights may share a launch with more weights of their format. times: of the GPU, whose configs are needed as well.
    """
    shapes: dict[Format, set[tuple[int, ...]]] = defaultdict(set)
    experts: dict[Format, set[tuple[int, ...]]] = defaultdict(set)
    for tensor in tensors:
        fmt = tensor.format.on_device
        if tensor.ndim > 1 and (fmt.tiled or PLAIN.holds(fmt)):
            shapes[fmt].add(tuple(tensor.shape[-2:]))
            if tensor.ndim == 3 and "a16" in activations:
                experts[fmt].add(tuple(tensor.shape))
    keys = {_key(name, None, template) for name, template in common_variants(sm)}
    for fmt, matrices in shapes.items():
        if fmt.tiled:
            keys |= {_key(PACK.name, fmt, template) for template in PACK.variants(fmt)}
        for (kernel, x, _), (activation, group) in _forms(fmt, sm, sorted(set(rows)), activations, types).items():
            for n, k in matrices:
                p = Problem(fmt, activation, group[0], n, k, sm, x, sms=sms)
                keys |= {_key(kernel.name, fmt, template) for template in _templates(kernel, p, group)}
        keys |= {_key(name, fmt, template) for name, template in extra_units(fmt, sm, activations)}
        for (n, k), activation, x in product(matrices if times else (), activations, types):
            if multiplies(activation, fmt):
                keys |= set(_timed(Problem(fmt, activation, 1, n, k, sm, x, sms=sms, times=times), rows))
    for fmt, matrices in experts.items():
        for x, (e, n, k) in product(types, matrices):
            p = Problem(fmt, "a16", 1, n, k, sm, x, (Output(n),), sms=sms, routed=Routed(experts=e))
            keys |= set(_by_slots(p, rows))
            keys |= set(_by_tiles(p, max(rows)))
    return keys


def _timed(p: Problem, rows: Sequence[int]) -> Iterator[Key]:
    """The kernels that the times of the GPU may choose for any of these numbers of rows: all that were timed for it."""
    serving = {row.m: row for m in rows if (row := p._replace(m=m).timed()) is not None}
    for m, row in serving.items():
        of_m = p._replace(m=m)
        for kernel in (other.kernel for other in alternatives(of_m) if other.kernel.name in row.us):
            for source, config in product(kernel.reads(of_m), [config for config, _ in kernel.timed(of_m)]):
                for out in kernel.outs(source) or TYPE_NAMES[:1] if config is not None else ():
                    yield _key(kernel.name, p.format, kernel.template(
                        of_m._replace(x=source, outputs=(Output(p.n, out),)), config
                    ))  # fmt: skip


def _by_slots(p: Problem, rows: Sequence[int]) -> Iterator[Key]:
    """The kernels for tokens that look their experts up."""
    kernel = next((row.kernel for row in ROUTES if row.grouping is Grouping.SLOTS and row.fits(p)), None)
    if kernel is not None:
        for form in kernel.forms(p):
            for config in kernel.chosen(form, rows):
                yield _key(kernel.name, p.format, kernel.template(form, config))


def _by_tiles(p: Problem, rows: int) -> Iterator[Key]:
    """The kernels for tokens that are sorted by expert, with token tiles up to twice the mean load of an expert."""
    assert p.routed is not None
    load = rows * PREPARED_TOP_K / p.routed.experts
    for row in ROUTES:
        for tokens in (tokens for tokens in row.tokens if tokens <= max(row.tokens[0], 2 * load)):
            of_tiles = p._replace(routed=p.routed._replace(tokens=tokens))
            if row.fits(of_tiles):
                (kind,) = row.kernel.reads(of_tiles)
                for form in row.kernel.forms(of_tiles._replace(x=kind)):
                    for config in row.kernel.configs(form):
                        yield _key(row.kernel.name, p.format, row.kernel.template(form, config))


def _forms(
    fmt: Format, sm: int, rows: Sequence[int], activations: Sequence[str], types: Sequence[str]
) -> dict[tuple[Kernel, str, str], tuple[str, list[int]]]:
    """The kernels that multiply by weights of a format -> an activation, and the rows of x.

    A key is the kernel, the type of x that it reads and, if that has groups, the activation. Activations that bring x
    into one form share a key, since they need the same templates.
    """
    forms: dict[tuple[Kernel, str, str], tuple[str, set[int]]] = {}
    for activation, x in product(activations, types):
        if not multiplies(activation, fmt):
            continue
        for group in _alike(rows):
            p = Problem(fmt, activation, group[0], 1, 1, sm, x)
            kernel = route(p).kernel
            for source in kernel.reads(p):
                key = kernel, source, activation if activation in GROUP_COLUMNS else ""
                forms.setdefault(key, (activation, set()))[1].update(group)
    return {form: (activation, sorted(group)) for form, (activation, group) in forms.items()}


def _alike(rows: Sequence[int]) -> Iterator[Sequence[int]]:
    """Numbers of rows, in order, in groups that the route table and all token tiles treat alike."""
    start = 0
    for limit in sorted({limit for row in ROUTES for limit in (*row.tokens, row.max_rows)}):
        end = bisect_left(rows, limit + 1)
        if start < end:
            yield rows[start:end]
        start = end


def _templates(kernel: Kernel, p: Problem, rows: Sequence[int]) -> Iterator[Template]:
    """The templates for a problem of these numbers of rows, alone and as a gate, for each type of y.

    A config of the kernels that fuse products serves several token tiles; of other kernels each config has its own.
    """
    for group in _alike(rows) if kernel.products > 1 else (rows,):
        of_group = p._replace(m=group[0])
        for out in kernel.outs(p.x) or TYPE_NAMES[:1]:
            for form in kernel.forms(of_group._replace(outputs=(Output(p.n, out),))):
                yield from (kernel.template(form, config) for config in kernel.chosen(form, group))


def _key(kernel: str, fmt: Format | None, template: Template) -> Key:
    return kernel, fmt, tuple(template.items())

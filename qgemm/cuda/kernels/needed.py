"""Which kernels a model's products ask for: what is compiled before the first token."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

from qgemm.arguments import ACTIVATIONS
from qgemm.codec.format import Format
from qgemm.codec.group_activations import GROUPS, multiplies
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.problem import TUNED_SMS, TYPES, Output, Problem, Routed

from . import gemm_sm90_s8
from .kernel import Kernel
from .moe_decode import MOE_DECODE
from .panels import DEQUANTIZE
from .routes import ROUTES, TYPE_NAMES, common_variants, route
from .transforms import DEQUANTIZE_TILES, PACK

ROWS = range(1, 4097)  # of x: from one token to a long prompt
MAX_TOP_K = 8  # experts of a token, of models that are prepared

Key = tuple[str, Format | None, tuple[tuple[str, Any], ...]]  # kernel, the format that it is for, template


def needed(
    tensors: Iterable[Any],
    sm: int,
    sms: int = TUNED_SMS,
    rows: Sequence[int] = ROWS,
    activations: Sequence[str] = ACTIVATIONS,
    types: Sequence[str] = TYPES,
) -> set[Key]:
    """Every kernel that uploading these tensors, and products with any of these numbers of rows of x, ask for.

    tensors: of the host or on a GPU; of three axes they are experts, multiplied together or one alone. sm, sms: compute
    capability (90 is 9.0) and multiprocessors of the GPU. types: kernels' names of those of x; y is of any type.
    Weights of a format may share a launch with more of it.
    """
    shapes: dict[Format, set[tuple[int, ...]]] = defaultdict(set)
    experts: dict[Format, set[tuple[int, ...]]] = defaultdict(set)
    for each in tensors:
        if each.ndim > 1 and each.format.tiled:
            shapes[each.format].add(tuple(each.shape[-2:]))
        if each.ndim == 3 and each.format.tiled and "a16" in activations:
            experts[each.format].add(tuple(each.shape))
    found = {_key(name, None, template) for name, template in common_variants(sm)}
    for fmt, matrices in shapes.items():
        found |= {_key(PACK.name, fmt, template) for template in PACK.variants(fmt)}
        for (kernel, x, _), (activation, some) in _forms(fmt, sm, sorted(set(rows)), activations, types).items():
            if kernel is DEQUANTIZE:
                found |= {_key(DEQUANTIZE_TILES.name, fmt, each) for each in DEQUANTIZE_TILES.variants(fmt)}
                continue
            for n, k in matrices:
                p = Problem(fmt, activation, some[0], n, k, sm, x, sms=sms)
                found |= {_key(kernel.name, fmt, template) for template in _templates(kernel, p, some)}
        found |= {_key(name, fmt, template) for name, template in gemm_sm90_s8.variants(fmt, sm, activations)}
    for fmt, matrices in experts.items():
        for x, (e, n, k) in product(types, matrices):
            p = Problem(fmt, "a16", 1, n, k, sm, x, (Output(n),), sms=sms, routed=Routed(experts=e))
            if any(row.fits(p) for row in ROUTES):
                found |= {
                    _key(MOE_DECODE.name, fmt, MOE_DECODE.template(form, config))
                    for form in MOE_DECODE.forms(p)
                    for config in MOE_DECODE.chosen(form, rows)
                }
            found |= set(_grouped(p, max(rows)))
    return found


def _grouped(p: Problem, rows: int) -> Iterator[Key]:
    """What tokens sorted by expert ask for, with token tiles for the load of an expert at most."""
    assert p.routed is not None
    load = rows * MAX_TOP_K / p.routed.experts
    for row in ROUTES:
        for tokens in (tokens for tokens in row.tokens if tokens <= max(row.tokens[0], 2 * load)):
            of_tiles = p._replace(routed=p.routed._replace(tokens=tokens))
            if row.fits(of_tiles):
                for form in row.kernel.forms(of_tiles):
                    for config in row.kernel.configs(form):
                        yield _key(row.kernel.name, p.format, row.kernel.template(form, config))


def _forms(
    fmt: Format, sm: int, rows: Sequence[int], activations: Sequence[str], types: Sequence[str]
) -> dict[tuple[Kernel, str, str], tuple[str, list[int]]]:
    """The kernels that multiply by weights of a format, with the type in which they read x, and the activation where x
    has groups: activation, rows of x.

    Where other activations bring x into one form they ask for the same.
    """
    found: dict[tuple[Kernel, str, str], tuple[str, set[int]]] = {}
    for activation, x in product(activations, types):
        if not multiplies(activation, fmt):
            continue
        for some in _alike(rows):
            p = Problem(fmt, activation, some[0], 1, 1, sm, x)
            kernel = route(p).kernel
            for source in kernel.reads(p):
                found.setdefault((kernel, source, activation if activation in GROUPS else ""), (activation, set()))[
                    1
                ].update(some)
    return {form: (activation, sorted(some)) for form, (activation, some) in found.items()}


def _alike(rows: Sequence[int]) -> Iterator[Sequence[int]]:
    """Numbers of rows, in order, as those that the route table and every token tile of it treat alike."""
    start = 0
    for most in sorted({most for row in ROUTES for most in (*row.tokens, row.most)}):
        end = bisect_left(rows, most + 1)
        if start < end:
            yield rows[start:end]
        start = end


def _templates(kernel: Kernel, p: Problem, rows: Sequence[int]) -> Iterator[Template]:
    """What is compiled for a problem of these numbers of rows, for each type of y.

    A config of the kernels that fuse products is for several token tiles; of the others each has its own.
    """
    for tile in _alike(rows) if kernel.products > 1 else (rows,):
        of_tile = p._replace(m=tile[0])
        for out in kernel.outs(p.x) or TYPE_NAMES[:1]:
            asked = of_tile._replace(outputs=(Output(p.n, out),))
            yield from (kernel.template(asked, config) for config in kernel.chosen(asked, tile))


def _key(kernel: str, fmt: Format | None, template: Template) -> Key:
    return kernel, fmt, tuple(template.items())

"""dot_floats: few rows of x by float weights of any type; products are exact, sums in float32. Two records:

gemv_floats  one matrix, where x has another type than W, which cuBLAS would have to convert
moe_floats   experts, each token by those that its ids name
"""

from __future__ import annotations

from collections.abc import Sequence

from qgemm.cuda.driver.launch import Launch
from qgemm.cuda.jit.codegen import PLAIN_TYPES, Template
from qgemm.cuda.jit.load import load
from qgemm.cuda.jit.twins import TYPE_CODES, ExpertProducts, Types
from qgemm.cuda.problem import Problem, Routed

from .decode import MAX_SLOTS, MAX_TOP_K, forms_of_slots, slots_of
from .kernel import Kernel, Launchable, Ranked

SOURCE = "dot_floats"
WARPS = 8  # rows of W of a CTA


def configs(p: Problem) -> tuple[int]:
    """A config is the number of warps."""
    return (WARPS,)


def ranked(p: Problem) -> list[Ranked]:
    """The one config."""
    return [(WARPS, None)]


def chosen(p: Problem, rows: Sequence[int]) -> tuple[int]:
    """The one config, for any number of rows."""
    return (WARPS,)


def template(p: Problem, warps: int) -> Template:
    """The constants of a config."""
    summed = p.routed is not None and p.routed.summed
    return {"In": p.x, "GATED": int(p.gated), "SUMMED": int(summed), "WARPS": warps}


def launch_by_slots(p: Problem, warps: int) -> Launch:
    """The launch; its pointers are ids and weights, x, then w, y, bias and residual of each product."""
    assert p.routed is not None
    return _prepare(p, warps, p.routed, slots_of(p))


def launch(p: Problem, warps: int) -> Launchable:
    """The launch for one matrix; its pointers are x, then w, y, bias and residual of each product."""
    enter = _prepare(p, warps, Routed(), p.m).enter

    def run(stream: int, *pointers: int) -> None:
        enter(stream, 0, 0, *pointers)

    return run


def differs(p: Problem) -> bool:
    """Whether x has another type than W."""
    return p.x != PLAIN_TYPES[p.format.name]


def _prepare(p: Problem, warps: int, routed: Routed, slots: int) -> Launch:
    arguments = ExpertProducts(
        expert_bytes=routed.stride.nbytes, expert_rows=routed.stride.rows, experts=routed.experts, top_k=routed.top_k,
        wide_ids=routed.ids == "int64", weights_type=TYPE_CODES.get(routed.weights, 0), x_of_slots=routed.x_of_slots,
    )  # fmt: skip
    products = arguments.products
    products.k, products.m = p.k, 1
    for size, output in zip(products.of, p.outputs, strict=False):
        size.n, size.types = output.n, Types.from_names(*output[1:])
    grid = -(-p.outputs[0].n // warps), slots
    function = load(SOURCE, p.format, **template(p, warps))
    return Launch(function, grid, 32 * warps, 0, (arguments,), arguments, 3 + 4 * len(p.outputs))


GEMV_FLOATS = Kernel("gemv_floats", configs, ranked, chosen, template, launch, SOURCE, adds=True)
MOE_FLOATS = Kernel(
    "moe_floats", configs, ranked, chosen, template, launch_by_slots, SOURCE, products=2, adds=True,
    forms=forms_of_slots, max_slots=MAX_SLOTS, max_top_k=MAX_TOP_K,
)  # fmt: skip

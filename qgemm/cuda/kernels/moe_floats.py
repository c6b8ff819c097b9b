"""moe_floats: products by experts of floats, each token by the experts that its ids name; sums in float32."""

from __future__ import annotations

from collections.abc import Sequence

from qgemm.cuda.driver.launch import Launch
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.jit.load import load
from qgemm.cuda.jit.twins import TYPE_CODES, ExpertProducts, Types
from qgemm.cuda.problem import Problem, Routed

from .decode import MAX_SLOTS, MAX_TOP_K, forms_of_slots, slots_of
from .kernel import Kernel, Ranked

NAME = "moe_floats"
WARPS = 8  # rows of W of a CTA


def configs(p: Problem) -> tuple[int]:
    """A config is the number of warps."""
    return (WARPS,)


def ranked(p: Problem) -> list[Ranked]:
    """The one config."""
    return [(WARPS, None)]


def chosen(p: Problem, rows: Sequence[int]) -> tuple[int]:
    """The same for any number of rows."""
    return (WARPS,)


def template(p: Problem, warps: int) -> Template:
    """The constants of a config."""
    summed = p.routed is not None and p.routed.summed
    return {"In": p.x, "GATED": int(p.gated), "SUMMED": int(summed), "WARPS": warps}


def launch(p: Problem, warps: int) -> Launch:
    """The launch; its pointers are ids and weights, x, then w, y, bias and residual of each product."""
    routed = p.routed or Routed()
    arguments = ExpertProducts(
        expert_bytes=routed.stride.nbytes, expert_rows=routed.stride.rows, experts=routed.experts, top_k=routed.top_k,
        wide_ids=routed.ids == "int64", weights_type=TYPE_CODES.get(routed.weights, 0), x_of_slots=routed.x_of_slots,
    )  # fmt: skip
    products = arguments.products
    products.k, products.m = p.k, 1
    for size, output in zip(products.of, p.outputs, strict=False):
        size.n, size.types = output.n, Types.from_names(*output[1:])
    grid = -(-p.outputs[0].n // warps), slots_of(p)
    function = load(NAME, p.format, **template(p, warps))
    return Launch(function, grid, 32 * warps, 0, (arguments,), arguments, 3 + 4 * len(p.outputs))


MOE_FLOATS = Kernel(
    NAME, configs, ranked, chosen, template, launch, products=2, adds=True, forms=forms_of_slots, max_slots=MAX_SLOTS,
    max_top_k=MAX_TOP_K,
)  # fmt: skip

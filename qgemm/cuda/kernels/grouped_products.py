"""Products by experts over rows that are sorted by expert: the part of their launches that sm_80 and sm_90 share.

moe_sort lists token tiles on the device, so the host knows only the largest number of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.jit.twins import GATE_CODES, TYPE_CODES, GroupedProducts, StreamK, Types
from qgemm.cuda.problem import Output, Problem

from .kernel import x_pitch

POINTERS = 11  # pointers of GroupedProducts, which a call writes
GATES = ("silu", "swiglu_oai")  # gates of the models that are prepared; others compile at first use


def forms(p: Problem) -> Iterator[Problem]:
    """The problems with sources of their own: a product, and for each of GATES a gate with the product it gates."""
    yield p
    for gate in GATES:
        yield p._replace(gated=True, outputs=(Output(p.n, "float32", gate=gate), Output(p.n)))


def gate_template(p: Problem) -> Template:
    """The constants of the gate."""
    return {"GATED": int(p.gated), "GATE": GATE_CODES[p.outputs[0].gate] if p.gated else 0}


def grouped_products(
    p: Problem, stream_k: StreamK, rows_of_x: int = 0, factor: float = 0, unit: float = 0
) -> GroupedProducts:
    """The parameters of a launch, without its pointers. factor, unit: see GroupedProducts."""
    assert p.routed is not None
    first, second = p.outputs if len(p.outputs) == 2 else (p.outputs[0], Output(p.n))
    products = GroupedProducts(
        expert_bytes=p.routed.stride.nbytes, expert_rows=p.routed.stride.rows, n=p.n, k=p.k,
        rows_of_x=rows_of_x, x_pitch=x_pitch(p), tiles_are_known=p.routed.ids_are_known, stream_k=stream_k,
        factor=factor, unit=unit,
    )  # fmt: skip
    products.epilogue.types = Types.from_names(first.y, "", "")
    products.bias_types[:] = [TYPE_CODES.get(output.bias, 0) for output in (first, second)]
    return products

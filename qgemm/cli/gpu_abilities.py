"""The abilities of GPUs by the route table, in a module of its own: importing the kernels takes long."""

from __future__ import annotations

from functools import cache

from qgemm.arguments import ACTIVATIONS
from qgemm.codec.format import Format
from qgemm.cuda.kernels.routes import ANY, ROUTES, route
from qgemm.cuda.problem import Problem
from qgemm.errors import UnsupportedError

from .abilities import Ability, row_of

MANY = 1 << 20  # tokens: stands for any M beyond the limits of the table's rows


@cache
def on_cuda(fmt: Format, sm: int, ndim: int = 2) -> Ability:
    """Abilities of the CUDA backend on compute capability sm (90 is 9.0), by the route table; needs no GPU."""
    if fmt.levels is None or ndim == 1:
        return Ability(note="no codec" if fmt.levels is None else "no matrix")
    products: dict[str, list[str]] = {
        activation: kernels for activation in ACTIVATIONS if (kernels := _kernels(fmt, activation, sm))
    }
    if not products:
        return Ability(note="no kernel")
    return Ability(True, products, "of each [i]" if ndim > 2 else "")


def served(fmt: Format, activation: str, sm: int | None = None) -> list[str]:
    """Every kernel of the table that serves this format for some M, on any GPU or on compute capability sm."""
    rows = (row for row in ROUTES if sm is None or row.runs_on(sm))
    names = (row.kernel.name for row in rows if activation in row.activations and row.formats.holds(fmt))
    return list(dict.fromkeys(names))


def _kernels(fmt: Format, activation: str, sm: int) -> list[str]:
    """The kernels that the table picks, in the order of growing M."""
    names = []
    for m in sorted({MANY if row.max_rows == ANY else row.max_rows for row in ROUTES}):
        try:
            names.append(route(Problem(fmt, activation, m, 1, row_of(fmt), sm)).kernel.name)
        except UnsupportedError:
            continue
    return list(dict.fromkeys(names))

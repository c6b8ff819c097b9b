"""Kernel: the record of one kernel, all that the rest of the house knows of it.

A kernel is a file in kernels/, a module here that defines its record, and its rows in the route table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.problem import C_TYPES, Problem

# On a raw stream handle, pointers to x and to w, y, bias and residual of each product (0 for none).
Launchable = Callable[..., None]
Ranked = tuple[Any, float | None]  # a config and its predicted us


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel that multiplies.

    name: of its file and its entry point, and what `qgemm routes` prints.
    takes: whether it can compute a problem; the route table says which of those that can does.
    configs: every config for a problem's format, types and GPU, whatever its sizes.
    ranked: the configs that can serve a problem, the one to choose first, each with its predicted us (None where a
        table and no cost model decides).
    chosen: (problem, numbers of rows of x) -> the configs that it chooses for any of them, of this problem or where
        products by more weights of its format share the launch.
    template: (problem, config) -> the constants and types that its source is compiled with.
    launch: (problem, config) -> the launch, on the current device.
    source: the file and the entry point, if other than the name.
    reads: the kernels' names of the types in which it may get x, where that is not the problem's.
    products: how many of a problem's format it computes in one launch.
    adds: whether it adds bias and residual itself.
    takes_q8_1: whether "a8" gives it Q8_1 blocks; otherwise the values that they decode to.
    outs: type of x as it reads it -> NumPy's names of the types of y that its source is compiled for, each alone; ()
        where it stores any.
    forms: problem -> those that it computes by other sources: the problem alone, or with what its source depends on
        beside format, types and sizes. routed: whether its problems are those of experts; grouped: of sorted rows.
    quantizes: whether it quantizes x of a problem itself, where no other product of the call reads x; None: never.
    """

    name: str
    takes: Callable[[Problem], bool]
    configs: Callable[[Problem], Iterable[Any]]
    ranked: Callable[[Problem], Sequence[Ranked]]
    chosen: Callable[[Problem, Sequence[int]], Iterable[Any]]
    template: Callable[[Problem, Any], Template]
    launch: Callable[[Problem, Any], Launchable]
    source: str = ""
    reads: Callable[[Problem], tuple[str, ...]] = lambda problem: (problem.x,)
    products: int = 1
    adds: bool = False
    takes_q8_1: bool = False
    outs: Callable[[str], tuple[str, ...]] = lambda x: ()
    forms: Callable[[Problem], Iterable[Problem]] = lambda problem: (problem,)
    routed: bool = False
    grouped: bool = False
    quantizes: Callable[[Problem], bool] | None = None

    def stores(self, x: str, y: str) -> bool:
        """Whether it stores y of this type, by NumPy's name, for x of this type, by the kernels'."""
        return y in (self.outs(x) or C_TYPES)

    def choose(self, problem: Problem) -> Any:
        """The config for a problem."""
        return self.ranked(problem)[0][0]

    def __repr__(self) -> str:
        return f"<Kernel {self.name}>"

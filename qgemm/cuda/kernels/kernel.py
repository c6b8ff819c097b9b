"""Kernel: the record of one kernel that multiplies. Other modules know a kernel by its record alone.

A kernel is a file in kernels/, a module here that defines its record, and its rows in the route table. Several records
may share a file: then the policies in their templates tell the kernels apart.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from qgemm.codec.format import Format
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.layout import scaled_rows
from qgemm.cuda.problem import C_TYPES, SCALED_ROWS, Problem

from .expert_tiles import Size

# Called with a raw stream handle, a pointer to x, and pointers to w, y, bias and residual of each product, 0 for none.
Launchable = Callable[..., None]
Ranked = tuple[Any, float | None]  # a config and its predicted us
ExtraUnits = Callable[[Format | None, int, Collection[str]], Iterable[tuple[str, Template]]]
TokenTile = Callable[[tuple[Size, ...], int, int, int, int], int]


def _ratio(us: float | None, other: float | None) -> float:
    return us / other if us and other else 1.0


def _no_units(fmt: Format | None, sm: int, activations: Collection[str]) -> tuple[()]:
    return ()


def half_rows(problem: Problem) -> tuple[str, ...]:
    """The form of x for kernels that multiply only halves: rows of other types are scaled."""
    return (problem.x if problem.x == "half" else SCALED_ROWS,)


def x_pitch(problem: Problem) -> int:
    """Elements from a row of x to the next, as a kernel of half_rows reads it."""
    return scaled_rows.pitch(problem.k) if problem.x == SCALED_ROWS else problem.k


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel that multiplies. Which problems it serves is said by the route table alone.

    name: the name that `qgemm routes` prints.
    configs: every config for a problem's format, types and GPU, whatever its sizes.
    ranked: the configs that can serve a problem, best first, each with its predicted us (None if a table decides).
    chosen: (problem, numbers of rows of x) -> the configs that it chooses for any of these numbers, whether this W has
        the launch alone or shares it with more weights of its format.
    template: (problem, config) -> the constants and types that its source is compiled with.
    launch: (problem, config) -> the launch, on the current device.
    source: the file and the entry point, if other than the name.
    reads: problem -> the types of x that it may read, by the kernels' names, if other than the problem's.
    products: the number of products of one format that a launch computes.
    adds: whether it adds bias and residual itself.
    uses_exponent: whether the exponent of a problem, which brings all of W into the range of half, has a use.
    rounds: whether it rounds weights to the type of x before it multiplies.
    takes_q8_1: whether x of "a8" comes as Q8_1 blocks; otherwise as the values that they decode to.
    outs: type of x as the kernel reads it -> NumPy's names of the types of y, for each of which its source is compiled
        anew; () if one source stores any type.
    forms: problem -> the problems of its sizes that other sources compute: a gate, a sum over experts.
    quantizes: whether it quantizes x of a problem itself, if no other launch of the call reads x; None: never.
    extra_units: (format, compute capability, activations) -> (kernel, template) pairs that its launches need beside
        those of `configs`; without a format, those that know no format.
    token_tile: (products of a layer, slots, experts, multiprocessors, compute capability) -> the best token tile of a
        kernel of sorted rows, 0 if looking up the expert of each slot is faster.
    max_slots, max_top_k: limits of a kernel that looks experts up, the slots of a launch and the experts of a sum.
    """

    name: str
    configs: Callable[[Problem], Iterable[Any]]
    ranked: Callable[[Problem], Sequence[Ranked]]
    chosen: Callable[[Problem, Sequence[int]], Iterable[Any]]
    template: Callable[[Problem, Any], Template]
    launch: Callable[[Problem, Any], Launchable]
    source: str = ""
    reads: Callable[[Problem], tuple[str, ...]] = lambda problem: (problem.x,)
    products: int = 1
    adds: bool = False
    uses_exponent: bool = False
    rounds: bool = False
    takes_q8_1: bool = False
    outs: Callable[[str], tuple[str, ...]] = lambda x: ()
    forms: Callable[[Problem], Iterable[Problem]] = lambda problem: (problem,)
    quantizes: Callable[[Problem], bool] | None = None
    extra_units: ExtraUnits = _no_units
    token_tile: TokenTile | None = None
    max_slots: int = 0
    max_top_k: int = 0

    def stores(self, x: str, y: str) -> bool:
        """Whether it stores y of this type, by NumPy's name, for x of this type, by the kernels' name."""
        return y in (self.outs(x) or C_TYPES)

    def choose(self, problem: Problem) -> Any:
        """The config for a problem: the fastest by the times of its GPU, without any the first of `ranked`."""
        timed = self.timed(problem)
        return timed[0][0] if timed else self.ranked(problem)[0][0]

    def timed(self, problem: Problem) -> list[tuple[Any, float]]:
        """The configs that were timed on the problem's GPU and can serve it, with their us, the fastest first.

        For another number of rows of x than the timed one, the predicted time times the factor by which the prediction
        for the timed number was wrong; where a table ranks the configs, the time itself.
        """
        row = problem.timed(self.name)
        if row is None:
            return []
        measured, rows = row.us[self.name], problem._replace(m=row.m)
        predicted = {} if row.m == problem.m else {str(config): us for config, us in self.ranked(rows)}
        times = [
            (config, measured[name] * _ratio(us, predicted.get(name)))
            for config, us in self.ranked(problem)
            if (name := str(config)) in measured and us != inf
        ]
        return sorted(times, key=lambda pair: pair[1])

    def __repr__(self) -> str:
        return f"<Kernel {self.name}>"

"""The abilities of each backend by format, by the rules that products follow; nothing is compiled or multiplied."""

from __future__ import annotations

from math import lcm
from typing import NamedTuple

from qgemm.arguments import KINDS, Activation
from qgemm.backend import Status
from qgemm.codec.format import Format
from qgemm.codec.group_activations import multiplies
from qgemm.cpu.native import products as native
from qgemm.formats.q8_1 import FORMAT as Q8_1
from qgemm.tensor import Tensor

COMPILED, NUMPY = "c", "numpy"  # the kernels of the CPU


class Ability(NamedTuple):
    """Abilities of a backend for a tensor. products: by activation, the kernels from small to large M."""

    dequantize: bool = False
    products: dict[str, list[str]] = {}  # noqa: RUF012 never written to
    note: str = ""

    def __str__(self) -> str:
        """For example "a16: gemv_simt, dequantize; a8: gemv_dp4a, dequantize"; on the CPU, with one kernel, "a16, a8,
        a8_g256, dequantize"."""
        if not self.products or any(names in ([COMPILED], [NUMPY]) for names in self.products.values()):
            text = ", ".join([*self.products, *["dequantize"] * self.dequantize])
        else:
            text = "; ".join(f"{activation}: {', '.join(names)}" for activation, names in self.products.items())
        return f"{text} ({self.note})" if text and self.note else text or self.note


def on_cpu(fmt: Format, ndim: int = 2) -> Ability:
    """Abilities of the CPU backend for tensors of `ndim` axes."""
    if fmt.levels is None:
        return Ability(note="no codec")
    products: dict[str, list[str]] = {
        kind: [COMPILED if native.has_kernel(fmt, kind) else NUMPY]
        for kind in KINDS
        if ndim > 1 and multiplies(kind, fmt)
    }
    return Ability(True, products, "of each [i]" if ndim > 2 else "")


def cpu_kernel(w: Tensor, activation: Activation) -> str:
    """The kernel that multiplied by these weights on the CPU."""
    return COMPILED if native.multiplies([native.Product(w, None)], activation) else NUMPY


def cuda_sm(cuda: Status) -> int | None:
    """The compute capability of this machine's GPU (90 is 9.0); None without a usable GPU."""
    return int("".join(filter(str.isdigit, cuda.facts["arch"]))) if cuda.available else None


def row_of(fmt: Format) -> int:
    """The shortest row that holds whole blocks of weights and of activations."""
    return lcm(fmt.weights, Q8_1.weights)

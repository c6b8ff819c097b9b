"""The abilities of each backend by format, asked of the library itself so that they cannot drift from it."""

from __future__ import annotations

from functools import cache
from math import lcm
from typing import NamedTuple

import numpy as np

from qgemm.arguments import KINDS, Activation
from qgemm.backend import Status
from qgemm.codec.format import Format
from qgemm.cpu.native.library import reason
from qgemm.cpu.native.products import Product, multiplies
from qgemm.errors import UnsupportedError
from qgemm.formats.q8_1 import FORMAT as Q8_1
from qgemm.ops import matmul
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
    """Abilities of the CPU backend for tensors of `ndim` axes, tested by multiplying one row of blocks."""
    return _on_cpu(fmt, ndim, reason())


@cache
def _on_cpu(fmt: Format, ndim: int, disabled: str) -> Ability:
    """The same; disabled: why there is no compiled code, "" if there may be."""
    if fmt.levels is None:
        return Ability(note="no codec")
    k = row_of(fmt)
    w = Tensor(fmt, (1, k), np.zeros((1, k // fmt.weights), fmt.dtype))
    products: dict[str, list[str]] = {}
    for activation in KINDS if ndim > 1 else ():
        try:
            matmul(np.zeros((1, k), np.float32), w, activation)
        except UnsupportedError:
            continue
        products[activation] = [cpu_kernel(w, activation)]
    return Ability(True, products, "of each [i]" if ndim > 2 else "")


def cpu_kernel(w: Tensor, activation: Activation) -> str:
    """The kernel of products on the CPU by these weights."""
    return COMPILED if multiplies([Product(w, None)], activation) else NUMPY


def cuda_sm(cuda: Status) -> int | None:
    """The compute capability of this machine's GPU (90 is 9.0); None without a usable GPU."""
    return int("".join(filter(str.isdigit, cuda.facts["arch"]))) if cuda.available else None


def row_of(fmt: Format) -> int:
    """The shortest row that holds whole blocks of weights and of activations."""
    return lcm(fmt.weights, Q8_1.weights)

"""Problem: the products of one launch on a GPU, built once and handed from the route to the launch."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from qgemm.codec.format import Format

from .devices import facts
from .times import Key, Timed, Times

C_TYPES = {"float32": "float", "float16": "half", "bfloat16": "bf16"}  # NumPy's names -> the kernels'
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes of each
TYPES = tuple(C_TYPES.values())
Q8_1 = "Activations"  # the kernels' name of x in Q8_1 blocks (qgemm/cuda/layout/q8_1_k_blocks.py)
SCALED_ROWS = "ScaledRows"  # halves with a power of two for each row (qgemm/cuda/layout/scaled_rows.py)
EIGHT_BITS = "signed char"  # the kernels' name of x in codes of eight bits (cuda/layout/group_activations.py)
TUNED_SMS = 132  # multiprocessors of the GPU that configs were measured on


class Output(NamedTuple):
    """One product of a launch: N, and NumPy's names of the types of y, bias and residual ("" for none).

    gate: the function of the residual that multiplies the product, if it is not added; in a gated problem that function
    belongs to the first product.
    """

    n: int
    y: str = "float32"
    bias: str = ""
    residual: str = ""
    gate: str = ""


class ExpertStride(NamedTuple):
    """From an expert of a tensor to the next: bytes of its tiles, and rows, as many as its biases have."""

    nbytes: int
    rows: int


class Routed(NamedTuple):
    """Which experts of weights [E, N, K] multiply each token of a problem, by ids [T, top_k].

    ids, weights: NumPy's names of the types of the ids and of the router's weights, "" for none. x_of_slots: whether x
    is [T, top_k, K]. summed: whether y is the sum over a token's experts. stride: between the tensor's experts, which
    may hold more than the N rows of the problem. tokens: rows of a token tile where the rows of x and y lie sorted by
    expert, and M of the problem counts rows; 0 where they lie as ids do. ids_are_known: whether the launch before reads
    the same ids.
    """

    experts: int = 1
    top_k: int = 1
    ids: str = "int32"
    weights: str = ""
    x_of_slots: bool = False
    summed: bool = False
    stride: ExpertStride = ExpertStride(0, 0)
    tokens: int = 0
    ids_are_known: bool = False


class Problem(NamedTuple):
    """Products y [m, n] = x [m, k] @ w [n, k].T of weights of one format that share x and a launch.

    n: the sum over all products. sm: the compute capability, 90 is 9.0. x: the kernels' name of the type of x as the
    kernel reads it. exponent: 2^-exponent brings all weights into the range of float16. sms: multiprocessors.
    gated: the first of two products is the gate of the second, and their joint result alone is stored.
    routed: how the m tokens meet experts, of which w is one; None for one matrix.
    times: measured times of the GPU, which choose kernel and config where they have the product; None to predict.
    """

    format: Format
    activation: str
    m: int
    n: int
    k: int
    sm: int
    x: str = "half"
    outputs: tuple[Output, ...] = ()
    exponent: int = 0
    device: int = 0
    sms: int = TUNED_SMS
    gated: bool = False
    routed: Routed | None = None
    times: Times | None = None

    def __str__(self) -> str:
        return f"{self.format} {self.activation} of {self.x} M={self.m} N={self.n} K={self.k} on sm_{self.sm}"

    @property
    def out(self) -> str:
        """The kernels' name of the type of y, for kernels that compute one product."""
        return C_TYPES[self.outputs[0].y] if self.outputs else "float"

    def timed(self, kernel: str = "") -> Timed | None:
        """The measured times that serve this problem, of this kernel or any.

        Codes may come from x of any type: then those of the first type that was timed.
        """
        if self.times is None or self.routed is not None:
            return None
        for x in (self.x,) if self.x in TYPES else ("bf16",) if self.x == SCALED_ROWS else ("half", "bf16", "float"):
            key = Key(self.format.name, self.activation, x, self.n, self.k, self.gated)
            row = self.times.serving(key, self.m)
            if row is not None and (not kernel or kernel in row.us):
                return row
        return None


class Gpu(NamedTuple):
    """The facts of a device that problems depend on: number, compute capability (90 is 9.0), multiprocessors."""

    device: int
    sm: int
    sms: int


@cache
def gpu(device: int) -> Gpu:
    """A CUDA device."""
    _, (major, minor), sms = facts(device)
    return Gpu(device, 10 * major + minor, sms)


def c_type(dtype: np.dtype[Any]) -> str:
    """The type in which kernels read an array of this dtype; other dtypes are converted to float."""
    return C_TYPES.get(dtype.name, "float")

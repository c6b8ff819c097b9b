"""Problem: one launch's worth of products on a GPU, built once and handed from the route to the launch."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from qgemm.codec.format import Format

C_TYPES = {"float32": "float", "float16": "half", "bfloat16": "bf16"}  # NumPy's names -> the kernels'
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes of each
TYPES = tuple(C_TYPES.values())
Q8_1 = "Activations"  # the kernels' name of x in Q8_1 blocks (qgemm/cuda/layout/q8_1_k_blocks.py)
EIGHT_BITS = "signed char"  # of codes of eight bits (qgemm/cuda/layout/group_activations.py)
TUNED_SMS = 132  # multiprocessors of the GPU that configs were measured on


class Output(NamedTuple):
    """One product of a launch: N, and NumPy's names of the types of y, bias and residual ("" for none).

    gate: the function of the residual that multiplies the product, where it is not added; of a gated problem, of the
    first product.
    """

    n: int
    y: str = "float32"
    bias: str = ""
    residual: str = ""
    gate: str = ""


class ExpertStride(NamedTuple):
    """From an expert of a tensor to the next: bytes of its tiles, and rows, which its biases have."""

    nbytes: int
    rows: int


class Routed(NamedTuple):
    """Which experts of weights [E, N, K] each token of a problem meets, by ids [T, top_k].

    ids, weights: NumPy's names of the types of the ids and of the router's weights, "" for none. x_of_slots: whether x
    is [T, top_k, K]. summed: whether y is the sum over a token's experts. stride: of the tensor's experts, which may
    hold more than the N rows of the problem. tokens: where the rows of x and y lie sorted by expert, so many of an
    expert make a token tile, and M of the problem counts rows; 0 where they lie as ids do. ids_are_known: whether the
    launch before reads the same ids.
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

    n: of all products together. sm: the compute capability, 90 is 9.0. x: the kernels' name of the type of x as the
    kernel reads it. exponent: 2^-exponent brings all weights into the range of float16. sms: multiprocessors.
    gated: the first of two products is the gate of the second, and only what they make together is stored.
    routed: how the m tokens meet experts, of which w is one; None for one matrix.
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

    def __str__(self) -> str:
        return f"{self.format} {self.activation} of {self.x} M={self.m} N={self.n} K={self.k} on sm_{self.sm}"

    @property
    def out(self) -> str:
        """The kernels' name of the type of y, for kernels that compute one product."""
        return C_TYPES[self.outputs[0].y] if self.outputs else "float"


class Gpu(NamedTuple):
    """What problems depend on of a device: its number, compute capability (90 is 9.0) and multiprocessors."""

    device: int
    sm: int
    sms: int


@cache
def gpu(device: int) -> Gpu:
    """A CUDA device."""
    import cupy

    found = cupy.cuda.Device(device)
    return Gpu(device, int(found.compute_capability), int(found.attributes["MultiProcessorCount"]))


def c_type(dtype: np.dtype[Any]) -> str:
    """The type in which kernels read an array of this dtype; what they do not know is converted to float."""
    return C_TYPES.get(dtype.name, "float")

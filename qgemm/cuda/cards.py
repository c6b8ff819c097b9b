"""Cards: GPUs by their data sheets, and predicted times for them, also for cards that nobody has timed.

The cost models were fitted on an H200: they count the work of a CTA in us of its SMs. On another card a product lasts
as long as the slowest of three:

    instructions   the cost model's us for the card's number of SMs, times the ratio of the clocks
    tensor cores   2 M N K operations at MMA_SHARE of the card's rate for their type
    memory         packed W, x and y at READ_SHARE of the card's bandwidth

The shares are assumptions. docs/gpus.md compares the predictions with published numbers.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, NamedTuple

from qgemm.cuda.configs import read
from qgemm.errors import UnsupportedError
from qgemm.text import close_to

from .kernels.kernel import Kernel
from .kernels.panels import CUBLAS, DEQUANTIZE
from .kernels.routes import route
from .layout import tile as tiles
from .problem import Problem

# Clock of the H200, on which the cost models were fitted, by its data sheet. There it ran at 1980 MHz; other cards run
# faster than their data sheets say in about the same proportion.
FITTED_MHZ = 1830
READ_SHARE = 0.9  # part of the data sheet's bandwidth; the read kernel reaches 0.91 on an H200
MMA_SHARE = 0.9  # part of the data sheet's rate of tensor cores
CUBLAS_SHARE = 0.8  # part of the tensor cores' rate that cuBLAS reaches: 765 of 989 TFLOP/s on an H200
LAUNCH_US = 2.0  # fixed us of kernels whose configs are ranked by a table, without times
HALF_BYTES = 2


class Card(NamedTuple):
    """A row of configs/cards.json, which explains the columns. source: the data sheet."""

    name: str
    sm: int
    sms: int
    mhz: int
    memory_gbs: float
    l2_mb: float
    shared_kb: int
    fp16: float
    fp16_sums: float
    int8: float
    fp8: float
    measured: int
    source: str

    def rate(self, activation: str) -> float:
        """TFLOP/s or TOP/s of the operands of an activation: e4m3, int8, or float16."""
        return {"a16": self.fp16, "e4m3_g256": self.fp8}.get(activation, self.int8)

    def __str__(self) -> str:
        """E.g. "RTX 4090: sm_89, 128 SMs, 1008 GB/s, 165.2 TFLOP/s of float16, 660.6 TOP/s of int8"."""
        rates = f"{self.fp16:g} TFLOP/s of float16, {self.int8:g} TOP/s of int8"
        return f"{self.name}: sm_{self.sm}, {self.sms} SMs, {self.memory_gbs:g} GB/s, {rates}"


class Prediction(NamedTuple):
    """The kernel and config of a product on a card, the predicted us, and the slowest of the three that limit it."""

    kernel: Kernel
    config: Any
    us: float
    limit: str


@cache
def cards() -> tuple[Card, ...]:
    """All cards of the table."""
    table = read("cards")
    return tuple(Card._make([*facts, table["sources"][source]]) for *facts, source in table["cards"])


def card(name: str) -> Card:
    """The card with a name, in any case, also with NVIDIA and GeForce; UnsupportedError lists those that are close."""
    by_name = {_plain(card.name): card for card in cards()}
    plain = _plain(name)
    if plain not in by_name:
        near = close_to(plain, by_name) or f"; there are {', '.join(card.name for card in cards())}"
        raise UnsupportedError(f"no card {name!r} in qgemm/cuda/configs/cards.json{near}")
    return by_name[plain]


def on_card(p: Problem, card: Card) -> Problem:
    """A problem on a card."""
    return p._replace(sm=card.sm, sms=card.sms, times=None)


def predicted(p: Problem, card: Card) -> Prediction:
    """The kernel and config that the routes choose for a product on a card, and the predicted time."""
    return ranked(p, card)[0]


def ranked(p: Problem, card: Card) -> list[Prediction]:
    """The configs of the kernel that the routes choose on a card, in their order, with times predicted for the card."""
    p = on_card(p, card)
    kernel = route(p).kernel
    pairs = kernel.ranked(p._replace(x=kernel.reads(p)[0]))
    return [Prediction(kernel, config, *slowest(p, card, kernel, us)) for config, us in pairs]


def slowest(p: Problem, card: Card, kernel: Kernel, fitted_us: float | None) -> tuple[float, str]:
    """The predicted us of a kernel on a card, and the limit. fitted_us: the cost model's, None without one."""
    packed = -(-p.n // tiles.ROWS) * -(-p.k // tiles.columns(p.format)) * tiles.tile_dtype(p.format).itemsize
    nbytes, operations = packed + HALF_BYTES * p.m * (p.n + p.k), 2.0 * p.m * p.n * p.k
    if kernel in (DEQUANTIZE, CUBLAS):  # writes W in half, which cuBLAS reads
        decoding = (packed + 2 * HALF_BYTES * p.n * p.k) / (card.memory_gbs * 1e3 * READ_SHARE)
        return 2 * LAUNCH_US + decoding + operations / (card.fp16 * 1e6 * CUBLAS_SHARE), "cuBLAS"
    rounds = kernel.rounds or p.activation == "a16"  # "a8" of a kernel that rounds multiplies float16
    limits = {
        "memory": nbytes / (card.memory_gbs * 1e3 * READ_SHARE),
        "tensor cores": operations / (card.rate("a16" if rounds else p.activation) * 1e6 * MMA_SHARE),
        "instructions": (fitted_us or 0.0) * FITTED_MHZ / card.mhz,
    }
    limit = max(limits, key=limits.__getitem__)
    return limits[limit] + (0.0 if fitted_us else LAUNCH_US), limit


def _plain(name: str) -> str:
    words = re.split(r"[^a-z0-9]+", name.lower())
    return " ".join(word for word in words if word and word not in ("nvidia", "geforce"))

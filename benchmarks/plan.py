"""The rows that README's and the documents' tables come from, in order of their importance.

Thinned against a full grid: no table, plot, goal or test reads "a8" of other formats than q4_0 and q8_0 at more than
one token, other formats than q4_0 at 2, 4, 8 and 128 tokens, or rarely used formats on more shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import NamedTuple

from qgemm.arguments import Activation
from qgemm.formats import format_named

from .results import X_TYPES, Row

SHAPES = ((8192, 8192), (28672, 8192), (4096, 4096), (14336, 4096), (4096, 14336))  # (N, K)
SQUARE, TALL, SMALL = SHAPES[:3]
M = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
OTHERS_M = (16, 32, 64, 256, 512, 1024, 4096)
MANY = (256, 512, 1024, 4096)
SOME = (1, 16, 64, 256, 1024)
BESIDE_LLAMA_CPP = (1, 8, 32, 64, 128, 256, 1024, 4096)

MAIN = ("q4_0", "q4_k", "q6_k", "mxfp4", "q8_0", "q5_k", "q4_1", "q5_0", "q5_1")
TYPES = (
    "iq4_nl", "iq4_xs", "nvfp4", "q2_k", "q3_k", "iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_s", "iq1_m",
    "tq1_0", "tq2_0", "q1_0", "q2_0",
)  # fmt: skip
GROUPS = (
    "u4_g128", "u4z_g128", "u8_g128", "u2_g128", "u3_g128", "u1_g128", "u5_g128", "u6_g128", "s7_1of2", "f8_e4m3_g128",
)  # fmt: skip
KBIT = ("kbit2", "kbit3", "kbit4", "kbit5")
KBIT_SHAPES = (SQUARE, TALL, SMALL, (14336, 4096), (5120, 2048), (2048, 5120), (2048, 512))

PRODUCTS, EIGHT_BITS, GROUPS_FILE, TYPES_FILE = "", "_eight_bits", "_groups", "_types"  # ends of files' names
FILES = (PRODUCTS, EIGHT_BITS, GROUPS_FILE, TYPES_FILE)


class Case(NamedTuple):
    """A product: the values that identify its row."""

    format: str
    activation: Activation
    m: int
    n: int
    k: int
    x: str

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.n, self.k

    @property
    def row(self) -> Row:
        """The fields of a row that identify it."""
        return {
            "format": self.format,
            "activation": self.activation,
            "M": self.m,
            "N": self.n,
            "K": self.k,
            "x": self.x,
        }

    def __str__(self) -> str:
        return f"{format_named(self.format)} {self.activation} {self.x} M={self.m} N={self.n} K={self.k}"


class Block(NamedTuple):
    """All products of some formats, activations, shapes and numbers of rows of x, and the files that show them."""

    files: tuple[str, ...]
    formats: tuple[str, ...]
    activations: tuple[Activation, ...]
    shapes: tuple[tuple[int, int], ...]
    m: tuple[int, ...]

    def cases(self, types: tuple[str, ...]) -> Iterator[Case]:
        """Its products, by shape, then by M."""
        for (n, k), m, name, activation, x in product(self.shapes, self.m, self.formats, self.activations, types):
            yield Case(name, activation, m, n, k, x)


COMMON = (
    Block((PRODUCTS,), ("q4_0",), ("a16", "a8"), SHAPES, M),
    Block((PRODUCTS,), MAIN[1:], ("a16",), SHAPES, OTHERS_M),
    Block((PRODUCTS,), MAIN[1:], ("a16", "a8"), (SQUARE, TALL), (1,)),
    Block((PRODUCTS,), ("q8_0",), ("a16", "a8"), (SQUARE,), BESIDE_LLAMA_CPP),
    Block((EIGHT_BITS,), ("q4_0", "q4_k", "mxfp4"), ("a16", "a8_g256"), SHAPES, MANY),
    Block((EIGHT_BITS,), ("mxfp4",), ("e4m3_g256",), SHAPES, MANY),
)
RARE = (
    Block((PRODUCTS,), KBIT, ("a16",), KBIT_SHAPES, (1, 8, 64, 1024)),
    Block((PRODUCTS,), KBIT, ("a16",), (SQUARE,), (4096,)),
    Block((TYPES_FILE,), ("q4_0", *TYPES), ("a16",), (SQUARE,), SOME),
    Block((TYPES_FILE,), ("q4_0", *TYPES), ("a16",), (TALL,), (1, 16, 64, 256)),
    Block((GROUPS_FILE,), ("q4_0", "nvfp4", *GROUPS), ("a16",), (SQUARE, (14336, 4096)), (*SOME, 4096)),
    Block((EIGHT_BITS,), tuple(sorted({*MAIN, *TYPES} - {"q4_0", "q4_k", "mxfp4"})), ("a8_g256",), (SQUARE,), MANY),
)


# Measured in another way as well: see gpu.Extras.
DEQUANTIZED = frozenset(Block((), ("q4_0",), ("a16",), (SQUARE,), (1, 16, 64)).cases(X_TYPES[:1]))
BY_MMA = frozenset(Block((), ("q4_0",), ("a16", "a8"), (SQUARE, TALL, SMALL), M[4:]).cases(X_TYPES))
WITHOUT_PAUSES = frozenset(Block((), ("q4_0",), ("a16",), (SQUARE,), (64, 128, 256, 1024)).cases(X_TYPES[:1]))
SWEPT = SQUARE, TALL, SMALL  # shapes of sweeps over M, "q4_0" by "a16" of float16


def files_of_cases() -> dict[Case, tuple[str, ...]]:
    """Every product of the plan, with the ends of the names of the files that show it, in order of importance."""
    files: dict[Case, tuple[str, ...]] = {}
    for block in (*COMMON, *RARE):
        for case in block.cases(X_TYPES):
            files[case] = (*files.get(case, ()), *(end for end in block.files if end not in files.get(case, ())))
    return files


def by_shape(blocks: Iterable[Block], without: Iterable[Block] = ()) -> dict[tuple[int, int], dict[int, list[Case]]]:
    """The products of blocks by shape and by the number of rows of x, `without` those of other blocks."""
    others = {case for block in without for case in block.cases(X_TYPES)}
    shapes: dict[tuple[int, int], dict[int, list[Case]]] = {shape: {} for shape in SHAPES}
    for case in dict.fromkeys(case for block in blocks for case in block.cases(X_TYPES)):
        if case not in others:
            shapes.setdefault(case.shape, {}).setdefault(case.m, []).append(case)
    return {shape: dict(sorted(by_m.items())) for shape, by_m in shapes.items() if by_m}

"""The dispatch table of the GPU: which kernel computes which product. `qgemm routes` prints it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

from .block import Format
from .errors import UnsupportedError

ANY = 1 << 62

SPLITS = 4  # groups of four warps that share a strip of tiles in the fused kernels
TYPES = ("float", "half", "bf16")  # C++ names of the float types that kernels read and write


class Formats(NamedTuple):
    """A set of formats with the word that the table prints for it."""

    label: str
    holds: Callable[[Format], bool]


TILED = Formats("tiled", lambda fmt: bool(fmt.slots))
PLAIN = Formats("plain", lambda fmt: fmt.plain and fmt.levels is not None)


class Problem(NamedTuple):
    """One product y [m, n] = x [m, k] @ w [n, k].T on a GPU of compute capability sm (90 is 9.0)."""

    format: Format
    activation: str
    m: int
    n: int
    k: int
    sm: int

    def __str__(self) -> str:
        return f"{self.format} {self.activation} M={self.m} N={self.n} K={self.k} on sm_{self.sm}"


class Route(NamedTuple):
    """One row: `kernel` serves these formats and activations up to `most` rows of x, from compute capability `least`.

    tokens: the sizes of its token tile, of which the smallest that holds M is taken; () if it has none.
    """

    kernel: str
    activations: tuple[str, ...]
    most: int
    least: int
    formats: Formats
    tokens: tuple[int, ...]
    what: str

    def fits(self, p: Problem) -> bool:
        """Whether this row serves the problem."""
        return (
            p.activation in self.activations
            and p.m <= self.most
            and p.sm >= self.least
            and self.formats.holds(p.format)
        )


ROUTES = (
    #      kernel      activations     m <=  sm >=  formats  tokens        what it does
    Route("fused",    ("a16",),        8,    75,    TILED,   (1, 2, 4, 8), "decodes in registers, float32 sums"),
    Route("fused_a8", ("a8",),         8,    75,    TILED,   (1, 2, 4, 8), "integer dots (dp4a) with Q8_1 activations"),
    Route("unpack",   ("a16", "a8"),   ANY,  75,    TILED,   (),           "decodes row panels, then cuBLAS"),
    Route("cublas",   ("a16",),        ANY,  75,    PLAIN,   (),           "cuBLAS on the weights as they are"),
)  # fmt: skip


def route(p: Problem) -> Route:
    """The first row that fits; UnsupportedError prints the problem and where routes live."""
    for row in ROUTES:
        if row.fits(p):
            return row
    raise UnsupportedError(f"no kernel for {p}; the table is ROUTES in qgemm/routes.py (`qgemm routes` prints it)")


def variants(fmt: Format) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every (kernel, template) that the table can ask for with this format: what CI compiles."""
    for row in ROUTES:
        if not row.formats.holds(fmt) or row.kernel == "cublas":
            continue
        if row.kernel == "unpack":
            yield from ((row.kernel, {"Out": out}) for out in TYPES)
            continue
        for tokens, out in product(row.tokens, TYPES):
            size: dict[str, str | int] = {"TOKENS": tokens, "SPLITS": SPLITS}
            if "a8" in row.activations:
                yield row.kernel, {"Out": out, **size}
            else:
                yield from ((row.kernel, {"In": source, "Out": out, **size}) for source in TYPES)


def common_variants() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every (kernel, template) that knows no format."""
    yield from (("quantize_activations", {"In": source}) for source in TYPES)

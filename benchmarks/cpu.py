"""The CPU benchmark: the CPU backend beside the gguf package, which has the same formats.

Each row alternates between both and reports the medians of their times, so that a busy machine slows both.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray
from tqdm import tqdm

from qgemm.arguments import ACTIVATIONS
from qgemm.backend import backend
from qgemm.cli.timing import alternate
from qgemm.cli.weights import random_blocks
from qgemm.codec.format import Format
from qgemm.codec.group_activations import multiplies
from qgemm.formats import FORMATS
from qgemm.ops import matmul, quantize
from qgemm.tensor import Tensor
from qgemm.text import columns

from .goals import OVER_GGUF

USUAL = tuple(FORMATS[name] for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "f16", "bf16"))
SHAPE = (4096, 4096)  # (N, K)
M = (1, 8, 64, 512)
REPEATS = 7
EXPLAINED = """\
GB/s: the packed weights that a product reads, the float32 weights that encode reads and decode writes.
gguf: the gguf package with NumPy, which decodes all weights before a product."""


class Options(NamedTuple):
    """What to measure."""

    formats: Sequence[Format] = USUAL
    activations: Sequence[str] = ACTIVATIONS
    shapes: Sequence[tuple[int, int]] = (SHAPE,)
    m: Sequence[int] = M
    repeats: int = REPEATS


class Job(NamedTuple):
    """One comparison to run: theirs is None if the gguf package lacks the operation."""

    name: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any] | None
    nbytes: int  # moved by one call
    goal: float = 0.0  # least gguf / qgemm; 0 where there is no goal


class Row(NamedTuple):
    """One comparison: milliseconds of qgemm and of the gguf package, bytes moved, and the project's own goal."""

    job: str
    format: str
    qgemm_ms: float
    gguf_ms: float | None
    goal: float = 0.0
    nbytes: int = 0

    @property
    def ratio(self) -> float | None:
        """Speed relative to the gguf package."""
        return None if self.gguf_ms is None else self.gguf_ms / self.qgemm_ms

    @property
    def gbs(self) -> float:
        """Bytes moved a second, in 1e9."""
        return self.nbytes / self.qgemm_ms / 1e6

    @property
    def missed(self) -> bool:
        """Whether it is slower than its goal."""
        return self.ratio is not None and self.ratio < self.goal

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {**self._asdict(), "gbs": self.gbs, "ratio": self.ratio}


def run(options: Options = Options()) -> list[Row]:  # noqa: B008 never written to
    """All rows, with a bar on stderr."""
    every = [(fmt, shape) for shape, fmt in product(options.shapes, options.formats)]
    with tqdm(every, disable=None, leave=False) as bar:
        return [row for fmt, shape in bar for row in rows(fmt, shape, options)]


def rows(fmt: Format, shape: tuple[int, int], options: Options) -> Iterator[Row]:
    """Encode, decode and products of one random matrix."""
    size = "" if len(options.shapes) == 1 else " {}x{}".format(*shape)
    for job in jobs(fmt, shape, options):
        calls = [job.ours, *[job.theirs] * (job.theirs is not None)]
        ours, theirs = [*alternate(*calls, repeats=options.repeats), None][:2]  # type: ignore[arg-type]
        assert ours is not None
        yield Row(job.name + size, fmt.name, ours, theirs, job.goal, job.nbytes)


def jobs(fmt: Format, shape: tuple[int, int], options: Options) -> Iterator[Job]:
    """The comparisons for one format; UnsupportedError if K does not fit it."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(shape, dtype=np.float32)
    encodes = fmt.encode is not None and not fmt.encoding.needs_importance
    w = quantize(weights, fmt) if encodes else Tensor(fmt, shape, random_blocks(fmt, *shape, rng))
    packed = w.blocks.view(np.uint8)
    least = 0.0 if fmt.plain else 1.0
    if encodes:
        theirs = able(gguf.quantize, weights, fmt)
        yield Job("encode", lambda: quantize(weights, fmt), theirs, weights.nbytes, least if theirs else 0.0)
    decode = able(gguf.dequantize, packed, fmt)
    yield Job("decode", w.dequantize, decode, weights.nbytes)
    for m in options.m:
        x = rng.standard_normal((m, shape[1]), dtype=np.float32)
        dense = None if decode is None else lambda x=x: x @ decode().T
        goal = {1: OVER_GGUF.get(fmt.name, 0.0), 512: least if decode else 0.0}.get(m, 0.0)
        for activation in options.activations:
            if multiplies(activation, fmt):
                ours = lambda x=x, activation=activation: matmul(x, w, activation)  # noqa: E731
                yield Job(f"{activation} M={m}", ours, dense, w.nbytes, goal if activation == "a16" else 0.0)


def able(
    codec: Callable[[NDArray[Any], GGMLQuantizationType], Any], values: NDArray[Any], fmt: Format
) -> Callable[[], Any] | None:
    """A call of the gguf package's codec on all values; None if it has none, tried on the first row."""
    if fmt.ggml_type is None:
        return None
    kind = GGMLQuantizationType(fmt.ggml_type)
    try:
        codec(values[:1], kind)
    except NotImplementedError:
        return None
    return lambda: codec(values, kind)


def table(rows: Sequence[Row], size: str, goals: bool = False) -> str:
    """The rows for a terminal, below a line with the size and the machine; goals: with the project's own goals."""
    head = ("job", "format", "ms", "GB/s", "gguf ms", "times as fast", *["goal"] * goals)
    cells = []
    for row in rows:
        theirs = ("-", "-") if row.gguf_ms is None else (f"{row.gguf_ms:.2f}", f"{row.ratio:.2f}")
        goal = [f"{row.goal:.1f}" if row.goal else ""] * goals
        cells.append((row.job, row.format, f"{row.qgemm_ms:.2f}", f"{row.gbs:.3g}", *theirs, *goal))
    machine = f"{size}, {platform.machine()}, {backend('cpu').status().detail}"
    return f"{machine}\n\n{columns('<<>>>>>', [head, *cells])}"

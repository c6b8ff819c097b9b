"""A decode step: all linear layers and the head of a Llama-3-8B in one CUDA graph, beside reading the same bytes.

Q, K and V are one call of `matmul_many`, gate and up one of `gated`. Inputs of layers are fixed arrays, so that the
graph has only products; their order in the stream is their only dependency. Steps by x of each type take turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from qgemm.cli.random_models import HEADS, types_of
from qgemm.cli.timing import capture, compare
from qgemm.cli.weights import random_blocks, repeated_rows
from qgemm.codec.float_types import float_dtype
from qgemm.formats import FORMATS
from qgemm.ops import gated, matmul, matmul_many
from qgemm.tensor import Tensor

from . import baselines
from .results import X_TYPES, Row

MODEL = "llama-3-8b"
HIDDEN, KEYS, INNER, VOCABULARY, LAYERS = 4096, 1024, 14336, 128256, 32
M = 1, 8  # tokens
DRAWN = 256  # random rows of each matrix, which repeats them


def rows(
    stream: Any, repeats: int, types: Sequence[str] = X_TYPES, mixtures: Iterable[str] = tuple(HEADS)
) -> Iterator[Row]:
    """For each mixture, number of tokens and type of x: us of a step, and read_us of one read of its packed bytes."""
    import cupy

    for mixture in mixtures:
        step = Step(mixture)
        buffer = cupy.zeros(step.nbytes // 16 * 16, cupy.uint8)
        for m in M:
            loops = [capture(stream, [partial(step, Arrays.random(m, x))]) for x in types]
            *times, read = compare(stream, [*loops, baselines.read(stream, [buffer])], repeats)
            for x, time in zip(types, times, strict=True):
                yield {
                    "model": MODEL,
                    "types": mixture,
                    "M": m,
                    "x": x,
                    "us": time.us,
                    "read_us": read.us,
                    "bytes": step.nbytes,
                }
        del step, buffer, loops
        cupy.get_default_memory_pool().free_all_blocks()


class Arrays(NamedTuple):
    """The arrays [M, ...] of a step, all of one type: inputs, and outputs of each size."""

    hidden: Any
    inner: Any
    ys: list[Any]
    keys: list[Any]
    gated: Any
    logits: Any

    @classmethod
    def random(cls, m: int, x: str) -> Arrays:
        """Random inputs of M tokens in a type."""
        import cupy

        rng, dtype = np.random.default_rng(m), float_dtype(x)
        hidden, inner = (cupy.asarray(rng.standard_normal((m, k), np.float32)).astype(dtype) for k in (HIDDEN, INNER))
        sizes = (3, HIDDEN), (2, KEYS), (1, INNER), (1, VOCABULARY)
        ys, keys, (gated_inner,), (logits,) = ([cupy.empty((m, n), dtype) for _ in range(count)] for count, n in sizes)
        return cls(hidden, inner, ys, keys, gated_inner, logits)


class Step:
    """The weights of a model: for each layer Q, K, V; the attention's output; gate, up; down."""

    def __init__(self, mixture: str) -> None:
        self._bases: dict[tuple[str, int], Any] = {}
        self.nbytes = 0
        self.layers = []
        for layer in range(LAYERS):
            base, v, down = types_of(mixture, layer, LAYERS)
            matrix = partial(self._matrix, shift=layer)
            self.layers.append((
                [matrix(base, HIDDEN, HIDDEN), matrix(base, KEYS, HIDDEN), matrix(v, KEYS, HIDDEN)],
                matrix(base, HIDDEN, HIDDEN),
                [matrix(base, INNER, HIDDEN), matrix(base, INNER, HIDDEN)],
                matrix(down, HIDDEN, INNER),
            ))  # fmt: skip
        self.head = self._matrix(HEADS[mixture], VOCABULARY, HIDDEN, 0)

    def _matrix(self, name: str, n: int, k: int, shift: int) -> Any:
        fmt = FORMATS[name]
        if (name, k) not in self._bases:
            blocks = random_blocks(fmt, DRAWN, k, np.random.default_rng(0))
            self._bases[name, k] = Tensor(fmt, (DRAWN, k), blocks).to_device()
        self.nbytes += n * k // fmt.weights * fmt.block_bytes
        return repeated_rows(self._bases[name, k], (n, k), shift)

    def __call__(self, arrays: Arrays) -> None:
        """All products of a step."""
        for qkv, output, gate_up, down in self.layers:
            matmul_many(arrays.hidden, qkv, outs=[arrays.ys[0], *arrays.keys])
            matmul(arrays.hidden, output, out=arrays.ys[1])
            gated(arrays.hidden, *gate_up, out=arrays.gated)
            matmul(arrays.inner, down, out=arrays.ys[2])
        matmul(arrays.hidden, self.head, out=arrays.logits)

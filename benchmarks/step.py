"""A decode step: all linear layers and the head of a Llama-3-8B in one CUDA graph, beside reading as many bytes.

Q, K and V are one call of `matmul_many`, gate and up one of `gated`. Inputs of layers are fixed arrays of float16, so
that the graph holds products alone; they depend on one another only by their order in the stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from qgemm.cli.timing import capture, compare
from qgemm.cli.weights import random_blocks, repeated_rows
from qgemm.formats import FORMATS
from qgemm.ops import gated, matmul, matmul_many
from qgemm.tensor import Tensor

from . import baselines
from .results import Row

MODEL = "llama-3-8b"
HIDDEN, KEYS, INNER, VOCABULARY, LAYERS = 4096, 1024, 14336, 128256, 32
M = 1, 8  # tokens
DRAWN = 256  # rows of each matrix that are drawn, and repeated


class Types(NamedTuple):
    """The formats of a layer's matrices: as llama-quantize would choose them for a mixture."""

    most: str
    v: str
    down: str


def types_of(mixture: str, layer: int, layers: int = LAYERS) -> Types:
    """q4_k_m has v and down in q6_k in the first and last eighth of the layers and in each third between."""
    if mixture != "q4_k_m":
        return Types(mixture, mixture, mixture)
    eighth = layers // 8
    more = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
    return Types("q4_k", *(["q6_k" if more else "q4_k"] * 2))


HEADS = {"q4_0": "q4_0", "q4_k_m": "q6_k", "q8_0": "q8_0"}  # mixture -> format of the output matrix


def rows(stream: Any, repeats: int) -> Iterator[Row]:
    """For each mixture and number of tokens: us of a step, read_us of reading its packed bytes in one piece."""
    import cupy

    for mixture in HEADS:
        step = Step(mixture)
        buffer = cupy.zeros(step.nbytes // 16 * 16, cupy.uint8)
        for m in M:
            loop = capture(stream, [partial(step, Arrays.of(m))])
            taken, least = compare(stream, [loop, baselines.read(stream, [buffer])], repeats)
            yield {"model": MODEL, "types": mixture, "M": m, "us": taken.us, "read_us": least.us, "bytes": step.nbytes}
        del step, buffer, loop
        cupy.get_default_memory_pool().free_all_blocks()


class Arrays(NamedTuple):
    """What the products of a step read and write, of float16 [M, ...]: inputs, and outputs of each size."""

    hidden: Any
    inner: Any
    ys: list[Any]
    keys: list[Any]
    gated: Any
    logits: Any

    @classmethod
    def of(cls, m: int) -> Arrays:
        """Random inputs of M tokens."""
        import cupy

        rng = np.random.default_rng(m)
        hidden, inner = (
            cupy.asarray(rng.standard_normal((m, k), np.float32).astype(np.float16)) for k in (HIDDEN, INNER)
        )
        sizes = (3, HIDDEN), (2, KEYS), (1, INNER), (1, VOCABULARY)
        ys, keys, (gated_inner,), (logits,) = (
            [cupy.empty((m, n), np.float16) for _ in range(count)] for count, n in sizes
        )
        return cls(hidden, inner, ys, keys, gated_inner, logits)


class Step:
    """The weights of a model: for each layer Q, K, V; the attention's output; gate, up; down."""

    def __init__(self, mixture: str) -> None:
        self._bases: dict[tuple[str, int], Any] = {}
        self.nbytes = 0
        self.layers = []
        for layer in range(LAYERS):
            most, v, down = types_of(mixture, layer)
            made = partial(self._matrix, shift=layer)
            self.layers.append((
                [made(most, HIDDEN, HIDDEN), made(most, KEYS, HIDDEN), made(v, KEYS, HIDDEN)],
                made(most, HIDDEN, HIDDEN),
                [made(most, INNER, HIDDEN), made(most, INNER, HIDDEN)],
                made(down, HIDDEN, INNER),
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

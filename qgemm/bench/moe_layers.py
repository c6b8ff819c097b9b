"""Layers of experts that are measured: the sizes of models, random weights of them, random routing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.format import Blocks, Format
from qgemm.cuda.tensor import DeviceExperts
from qgemm.cuda.upload import tiles_nbytes
from qgemm.experts import moe
from qgemm.formats import FORMATS
from qgemm.routing import Function
from qgemm.tensor import Tensor

from .weights import random_blocks, repeated_rows

DRAWN = 256  # rows of a matrix that are drawn, and repeated
ROTATE = 300_000_000  # bytes of experts that the calls of a loop meet at least
MAX_CALLS = 24  # of a loop
MODERATE = 0.1  # standard deviation of weights, about, at most


class Model(NamedTuple):
    """The layer of a model: E experts, top_k of a token, K values of a token, F between the products."""

    name: str
    format: str
    experts: int
    top_k: int
    k: int
    f: int
    activation: Function = "swiglu"
    biases: bool = False

    @property
    def expert_bytes(self) -> int:
        """Packed, of the three matrices of an expert."""
        fmt = FORMATS[self.format]
        return 3 * self.k * self.f // fmt.weights * fmt.block_bytes

    def operations(self, tokens: int) -> int:
        """Multiplications and additions of so many tokens."""
        return 6 * tokens * self.top_k * self.k * self.f


MODELS = (
    Model("gpt-oss-120b", "mxfp4", 128, 4, 2880, 2880, "swiglu_oai", True),
    Model("qwen3-30b-a3b", "q4_0", 128, 8, 2048, 768),
    Model("qwen3-30b-a3b", "q4_k", 128, 8, 2048, 768),
    Model("mixtral-8x7b", "q4_0", 8, 2, 4096, 14336),
)


class Weights(NamedTuple):
    """Experts on the GPU, and biases or None."""

    gate: DeviceExperts
    up: DeviceExperts
    down: DeviceExperts
    biases: tuple[Any, ...] | None


class Routing(NamedTuple):
    """The experts of the tokens of a call, on the host and on the GPU, and the router's weights."""

    ids: NDArray[np.int32]
    on_gpu: Any
    weights: Any


def layer(model: Model, w: Weights, x: Any, routing: Routing, y: Any) -> Any:
    """The public function."""
    return moe(
        x, (w.gate, w.up), w.down, routing.on_gpu, routing.weights, model.activation, biases=w.biases, out=y
    )  # fmt: skip


def packed(model: Model) -> Weights:
    """Random experts, the rows of each in another order."""
    import cupy

    fmt, rng = FORMATS[model.format], np.random.default_rng(0)
    gate, up, down = (
        _experts(fmt, model.experts, n, k, shift, rng)
        for shift, (n, k) in enumerate(((model.f, model.k), (model.f, model.k), (model.k, model.f)))
    )
    biases: tuple[Any, ...] | None = None
    if model.biases:
        made = [rng.standard_normal((model.experts, n), np.float32) / 8 for n in (model.f, model.f, model.k)]
        biases = tuple(cupy.asarray(bias.astype(np.float32)) for bias in made)
    cupy.cuda.Device().synchronize()
    return Weights(gate, up, down, biases)


def _experts(fmt: Format, e: int, n: int, k: int, shift: int, rng: np.random.Generator) -> DeviceExperts:
    import cupy

    base = Tensor(fmt, (DRAWN, k), moderate(fmt, random_blocks(fmt, DRAWN, k, rng))).to_device()
    data = cupy.empty((e, tiles_nbytes(fmt, n, k)), np.uint8)
    for expert in range(e):
        one = repeated_rows(base, (n, k), shift + expert)
        flat = one.data.reshape(-1).view(np.uint8)
        data[expert, : flat.size] = flat
        data[expert, flat.size :] = one.row_absmax.view(np.uint8)
    return DeviceExperts(fmt, (e, n, k), data)


def moderate(fmt: Format, blocks: Blocks) -> Blocks:
    """Blocks whose float scales are divided by a power of two where weights are larger than those of a layer.

    Random factors of super-blocks make weights of some units, and two products one behind the other leave float16.
    """
    factor = 2.0 ** min(0, round(np.log2(MODERATE / fmt.dequantize(blocks).std())))
    for name in fmt.scale_fields:
        blocks[name] = (blocks[name].astype(np.float32) * factor).astype(blocks[name].dtype)
    return blocks


def rotating(model: Model, t: int, rng: np.random.Generator, skew: bool) -> Iterator[Routing]:
    """Routings whose experts together are more than the L2 cache holds."""
    import cupy

    met = 0
    for _ in range(MAX_CALLS):
        ids = np.argsort(rng.random((t, model.experts)), axis=1)[:, : model.top_k].astype(np.int32)
        if skew:
            ids[: t // 2][~(ids[: t // 2] == 0).any(axis=1), 0] = 0
        weights = rng.random((t, model.top_k), np.float32) + np.float32(0.1)
        weights /= weights.sum(axis=1, keepdims=True)
        yield Routing(ids, cupy.asarray(ids), cupy.asarray(weights))
        met += len(np.unique(ids))
        if met * model.expert_bytes > ROTATE:
            return

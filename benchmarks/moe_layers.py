"""The layers of experts to measure: sizes of models, random weights, random routing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.cli.weights import random_blocks, repeated_rows
from qgemm.codec.format import Blocks, Format
from qgemm.cuda.tensor import DeviceExperts
from qgemm.cuda.upload import tiles_nbytes
from qgemm.experts import moe
from qgemm.formats import FORMATS
from qgemm.routing import Function
from qgemm.tensor import Tensor

DRAWN = 256  # random rows of a matrix, which repeats them
ROTATE = 300_000_000  # least bytes of experts that the calls of a loop select
MAX_CALLS = 24  # calls of a loop
MODERATE = 0.1  # approximate upper limit of the standard deviation of weights


class Model(NamedTuple):
    """The layer of a model: number of experts, experts of a token (top_k), values of a token (k), inner size (f)."""

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
        """Packed bytes of the three matrices of an expert."""
        fmt = FORMATS[self.format]
        return 3 * self.k * self.f // fmt.weights * fmt.block_bytes

    def operations(self, tokens: int) -> int:
        """Multiplications and additions for a number of tokens."""
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
    """The expert ids of a call's tokens, on the host and on the GPU, and the router's weights."""

    ids: NDArray[np.int32]
    on_gpu: Any
    weights: Any


def layer(model: Model, w: Weights, x: Any, routing: Routing, y: Any) -> Any:
    """The layer by the public function."""
    return moe(
        x, (w.gate, w.up), w.down, routing.on_gpu, routing.weights, model.activation, biases=w.biases, out=y
    )  # fmt: skip


def packed(model: Model) -> Weights:
    """Random experts, whose rows are the same in different orders."""
    import cupy

    fmt, rng = FORMATS[model.format], np.random.default_rng(0)
    gate, up, down = (
        _experts(fmt, model.experts, n, k, shift, rng)
        for shift, (n, k) in enumerate(((model.f, model.k), (model.f, model.k), (model.k, model.f)))
    )
    biases: tuple[Any, ...] | None = None
    if model.biases:
        random_biases = [rng.standard_normal((model.experts, n), np.float32) / 8 for n in (model.f, model.f, model.k)]
        biases = tuple(cupy.asarray(bias.astype(np.float32)) for bias in random_biases)
    cupy.cuda.Device().synchronize()
    return Weights(gate, up, down, biases)


def _experts(fmt: Format, e: int, n: int, k: int, shift: int, rng: np.random.Generator) -> DeviceExperts:
    import cupy

    base = Tensor(fmt, (DRAWN, k), moderate(fmt, random_blocks(fmt, DRAWN, k, rng))).to_device()
    data = cupy.empty((e, tiles_nbytes(fmt, n, k)), np.uint8)
    for expert in range(e):
        matrix = repeated_rows(base, (n, k), shift + expert)
        flat = matrix.data.reshape(-1).view(np.uint8)
        data[expert, : flat.size] = flat
        data[expert, flat.size :] = matrix.row_absmax.view(np.uint8)
    return DeviceExperts(fmt, (e, n, k), data)


def moderate(fmt: Format, blocks: Blocks) -> Blocks:
    """Blocks with their float scales divided by a power of two if the weights are larger than those of real layers.

    Random factors of super-blocks give weights of several units, with which two consecutive products overflow float16.
    """
    factor = 2.0 ** min(0, round(np.log2(MODERATE / fmt.dequantize(blocks).std())))
    for name in fmt.scale_fields:
        blocks[name] = (blocks[name].astype(np.float32) * factor).astype(blocks[name].dtype)
    return blocks


def rotating(model: Model, t: int, rng: np.random.Generator, skew: bool) -> Iterator[Routing]:
    """Routings whose experts together exceed the L2 cache."""
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

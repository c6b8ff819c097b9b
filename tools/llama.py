"""A decoder of the llama architecture on the tensors of a .gguf file, in NumPy or CuPy around products by qgemm.

    model = Llama(file.metadata, {name: place(tensor, PACKED) for name, tensor in file.items()}, PACKED)
    cache = model.cache(length)
    logits = model.forward(ids, cache)          ids [T] -> [T, vocabulary], the next T positions

Every matrix product is a call of `Products`: of packed blocks by qgemm, or of decoded float32 arrays by NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import qgemm

EMBEDDING, HEAD, FINAL_NORM, ROPE_FACTORS = (
    "token_embd.weight",
    "output.weight",
    "output_norm.weight",
    "rope_freqs.weight",
)


class Products(NamedTuple):
    """Matrix products of one kind of weights, on one device.

    xp: the array namespace, numpy or cupy. put: a tensor of the file -> a weight of the kind that the others multiply.
    many: x, weights -> list of products. gated: x, gate, up -> silu(x @ gate.T) * (x @ up.T).
    """

    name: str
    xp: Any
    put: Callable[[qgemm.Tensor], Any]
    matmul: Callable[[Any, Any], Any]
    many: Callable[[Any, Sequence[Any]], list[Any]]
    gated: Callable[[Any, Any, Any], Any]


def silu_gated(x: Any, gate: Any, up: Any) -> Any:
    """silu(x @ gate.T) * (x @ up.T) of float32 arrays."""
    g = x @ gate.T
    return g / (1 + np.exp(-g)) * (x @ up.T)


PACKED = Products("cpu", np, lambda tensor: tensor, qgemm.matmul, qgemm.matmul_many, qgemm.gated)
DECODED = Products(
    "NumPy",
    np,
    lambda tensor: tensor.dequantize(),
    lambda x, w: x @ w.T,
    lambda x, weights: [x @ w.T for w in weights],
    silu_gated,
)


def packed_on_gpu() -> Products:
    """PACKED on the current CUDA device."""
    import cupy

    return PACKED._replace(name="cuda", xp=cupy, put=lambda tensor: tensor.to_device())


class Config(NamedTuple):
    """Sizes of a model, from the metadata of its file."""

    blocks: int
    context: int
    heads: int
    kv_heads: int
    head_size: int
    epsilon: float
    rope_base: float

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Config:
        """ValueError for another architecture, or for rotary positions that are scaled."""
        architecture = metadata.get("general.architecture")
        if architecture != "llama":
            raise ValueError(f"the architecture is {architecture!r}; this model is 'llama'")
        scaling = metadata.get("llama.rope.scaling.type", "none")
        if scaling != "none":
            raise ValueError(f"rotary positions are scaled ({scaling!r}); this model does not scale them")
        value = {key.removeprefix("llama."): v.item() for key, v in metadata.items() if isinstance(v, np.generic)}
        heads, width = value["attention.head_count"], value["embedding_length"]
        return cls(
            value["block_count"], value["context_length"], heads, value.get("attention.head_count_kv", heads),
            value.get("attention.key_length", width // heads), value["attention.layer_norm_rms_epsilon"],
            value.get("rope.freq_base", 10000.0),
        )  # fmt: skip


class Cache:
    """Keys and values of the positions so far: float32 [blocks, KV heads, capacity, head size] each."""

    def __init__(self, config: Config, capacity: int, xp: Any) -> None:
        shape = config.blocks, config.kv_heads, capacity, config.head_size
        self.keys, self.values, self.length = xp.zeros(shape, np.float32), xp.zeros(shape, np.float32), 0


class Llama:
    """The model. weights: by the names of the file, each as `place` puts it."""

    def __init__(self, metadata: Mapping[str, Any], weights: Mapping[str, Any], products: Products) -> None:
        self.config, self.weights, self.products = Config.from_metadata(metadata), weights, products
        self.head = weights.get(HEAD, None)
        if self.head is None:  # tied to the embedding
            self.head = (
                products.put(weights[EMBEDDING]) if isinstance(weights[EMBEDDING], qgemm.Tensor) else weights[EMBEDDING]
            )
        half = np.arange(0, self.config.head_size, 2, dtype=np.float32) / self.config.head_size
        frequencies = 1 / np.float32(self.config.rope_base) ** half
        if ROPE_FACTORS in weights:
            frequencies = frequencies / np.asarray(weights[ROPE_FACTORS])
        self.frequencies = products.xp.asarray(frequencies, dtype=np.float32)

    def cache(self, capacity: int) -> Cache:
        """An empty cache for that many positions."""
        return Cache(self.config, min(capacity, self.config.context), self.products.xp)

    def forward(self, ids: Sequence[int], cache: Cache, last: bool = False) -> Any:
        """Token ids [T], the positions after those of the cache -> logits [T, vocabulary]; last: [1, vocabulary]."""
        xp, first, count = self.products.xp, cache.length, len(ids)
        if first + count > cache.keys.shape[2]:
            raise ValueError(f"{first + count} positions, the cache has {cache.keys.shape[2]}")
        x = self._embed(ids)
        angles = xp.arange(first, first + count, dtype=np.float32)[:, None, None] * self.frequencies
        rotation = (xp.cos(angles) + 1j * xp.sin(angles)).astype(np.complex64)  # [T, 1, head size / 2]
        for block in range(self.config.blocks):
            x = x + self._attention(block, self._norm(x, f"blk.{block}.attn_norm.weight"), rotation, cache)
            x = x + self._feed_forward(block, self._norm(x, f"blk.{block}.ffn_norm.weight"))
        cache.length = first + count
        return self.products.matmul(self._norm(x[-1:] if last else x, FINAL_NORM), self.head)

    def _embed(self, ids: Sequence[int]) -> Any:
        """Rows of the embedding [T, width]; a packed one stays on the host, where its rows are decoded."""
        rows = self.weights[EMBEDDING][np.asarray(ids)]
        return self.products.xp.asarray(rows.dequantize() if isinstance(rows, qgemm.Tensor) else rows)

    def _norm(self, x: Any, name: str) -> Any:
        squares = (x * x).sum(axis=-1, keepdims=True) / np.float32(x.shape[-1])
        return x / self.products.xp.sqrt(squares + np.float32(self.config.epsilon)) * self.weights[name]

    def _attention(self, block: int, x: Any, rotation: Any, cache: Cache) -> Any:
        c, xp, count, end = self.config, self.products.xp, len(x), cache.length + len(x)
        names = (f"blk.{block}.attn_{kind}.weight" for kind in ("q", "k", "v"))
        q, k, v = self.products.many(x, [self.weights[name] for name in names])
        keys, values = cache.keys[block, :, :end], cache.values[block, :, :end]
        keys[:, cache.length :] = rotated(k.reshape(count, c.kv_heads, -1), rotation).swapaxes(0, 1)
        values[:, cache.length :] = v.reshape(count, c.kv_heads, -1).swapaxes(0, 1)
        # Heads that share keys are rows of one product: [KV heads, heads / KV heads * T, head size].
        q = rotated(q.reshape(count, c.heads, -1), rotation).swapaxes(0, 1).reshape(c.kv_heads, -1, c.head_size)
        scores = (q @ keys.swapaxes(1, 2)).reshape(c.heads, count, end) / np.float32(c.head_size**0.5)
        if count > 1:
            later = xp.arange(end) > xp.arange(cache.length, end)[:, None]
            scores = xp.where(later, np.float32(-np.inf), scores)
        shares = xp.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        mixed = shares.reshape(c.kv_heads, -1, end) @ values
        mixed = mixed.reshape(c.heads, count, c.head_size).swapaxes(0, 1).reshape(count, -1)
        return self.products.matmul(mixed, self.weights[f"blk.{block}.attn_output.weight"])

    def _feed_forward(self, block: int, x: Any) -> Any:
        gate, up, down = (self.weights[f"blk.{block}.ffn_{kind}.weight"] for kind in ("gate", "up", "down"))
        return self.products.matmul(self.products.gated(x, gate, up), down)


def rotated(x: Any, rotation: Any) -> Any:
    """Rotary positions of x [T, heads, head size]: neighbours are a complex number in files of this architecture."""
    return (x.view(np.complex64) * rotation).view(np.float32)


def place(tensor: qgemm.Tensor, products: Products) -> Any:
    """A tensor of the file as `Llama` wants it: vectors as float32 arrays, matrices as `products` multiply them.

    A packed embedding stays on the host, which decodes one row a token.
    """
    if tensor.ndim == 1:
        return products.xp.asarray(tensor.dequantize())
    return tensor if tensor.name == EMBEDDING and products is not DECODED else products.put(tensor)


def load(file: Mapping[str, qgemm.Tensor], metadata: Mapping[str, Any], products: Products) -> Llama:
    """The model of an open file."""
    return Llama(metadata, {name: place(tensor, products) for name, tensor in file.items()}, products)

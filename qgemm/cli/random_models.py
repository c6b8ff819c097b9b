"""Random .gguf files in the sizes of real models, for `qgemm bench --model`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qgemm.files.gguf.writer import write
from qgemm.formats import FORMATS
from qgemm.tensor import Tensor

from .weights import random_blocks

SMALL = 1 / 32  # magnitude of products: weights of some formats have a mean, so that gated sums grow with K
DRAWN = 64  # random rows of each matrix, which repeats them
HEADS = {"q4_0": "q4_0", "q4_k_m": "q6_k", "q8_0": "q8_0"}  # mixture -> format of the output matrix


class Types(NamedTuple):
    """The formats of a layer's matrices, as llama-quantize chooses them for a mixture. base: all but v and down."""

    base: str
    v: str
    down: str


def types_of(mixture: str, layer: int, layers: int) -> Types:
    """q4_k_m has v and down in q6_k in the first and last eighth of the layers, and in every third layer between."""
    if mixture != "q4_k_m":
        return Types(mixture, mixture, mixture)
    eighth = layers // 8
    six_bits = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
    return Types("q4_k", *(["q6_k" if six_bits else "q4_k"] * 2))


class Sizes(NamedTuple):
    """A model: its architecture by GGUF's name, its sizes by the names of transformers."""

    architecture: str
    hidden_size: int
    intermediate_size: int  # the size of one expert in a mixture of experts
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float
    num_experts: int = 0
    num_experts_per_tok: int = 0

    @property
    def matrices(self) -> dict[str, tuple[int, ...]]:
        """(N, K), or (experts, N, K), of the packed weights of a layer, by their names in GGUF."""
        heads, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        hidden, inner = self.hidden_size, self.intermediate_size
        experts, suffix = ((self.num_experts,), "_exps") if self.num_experts else ((), "")
        return {
            "attn_q": (heads, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden),
            "attn_output": (hidden, heads), f"ffn_gate{suffix}": (*experts, inner, hidden),
            f"ffn_up{suffix}": (*experts, inner, hidden), f"ffn_down{suffix}": (*experts, hidden, inner),
        }  # fmt: skip

    @property
    def layer_weights(self) -> int:
        """Weights in the matrices of a layer."""
        return sum(int(np.prod(shape)) for shape in self.matrices.values())

    @property
    def weights(self) -> int:
        """Weights in all matrices, including the token embedding and the head."""
        return self.num_hidden_layers * self.layer_weights + 2 * self.vocab_size * self.hidden_size

    @property
    def norms(self) -> dict[str, int]:
        """Lengths of a layer's vectors."""
        head_norms = {"attn_q_norm": self.head_dim, "attn_k_norm": self.head_dim}
        both = {"attn_norm": self.hidden_size, "ffn_norm": self.hidden_size}
        return {**both, **(head_norms if self.architecture.startswith("qwen3") else {})}


MODELS = {
    "llama-3-8b": Sizes("llama", 4096, 14336, 32, 32, 8, 128, 128256, 5e5),
    "qwen3-8b": Sizes("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, 1e6),
    "qwen3-30b-a3b": Sizes("qwen3moe", 2048, 768, 48, 32, 4, 128, 151936, 1e6, 128, 8),
}


def write_file(path: Path, sizes: Sizes, mixture: str) -> int:
    """Write a .gguf file with random weights, the same in every layer -> its size in bytes.

    Norms scale the inputs of matrices so that float16 holds all products and their sum over the layers.
    """
    rng, layers = np.random.default_rng(0), sizes.num_hidden_layers
    drawn: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def matrix(name: str, shape: tuple[int, ...]) -> Tensor:
        if (name, shape) not in drawn:
            blocks = random_blocks(FORMATS[name], DRAWN, shape[-1], rng)
            drawn[name, shape] = Tensor(FORMATS[name], shape, np.resize(blocks, (*shape[:-1], blocks.shape[1])))
        return drawn[name, shape]

    tensors: dict[str, Any] = {}
    for layer in range(layers):
        types = types_of(mixture, layer, layers)
        for name, shape in sizes.matrices.items():
            fmt = types.v if name == "attn_v" else types.down if name.startswith("ffn_down") else types.base
            tensors[f"blk.{layer}.{name}.weight"] = matrix(fmt, shape)
        if sizes.num_experts:
            router = rng.standard_normal((sizes.num_experts, sizes.hidden_size), np.float32)
            tensors[f"blk.{layer}.ffn_gate_inp.weight"] = router
    base, width = types_of(mixture, 0, layers).base, sizes.hidden_size
    tensors["token_embd.weight"] = matrix(base, (sizes.vocab_size, width))
    largest = max(magnitude(w) for w in drawn.values())
    scale = np.float32(SMALL / (largest * np.sqrt(width)))
    for layer in range(layers):
        for name, length in sizes.norms.items():
            value = np.float32(1) if name.endswith(("q_norm", "k_norm")) else scale
            tensors[f"blk.{layer}.{name}.weight"] = np.full(length, value)
    tensors["output_norm.weight"] = np.full(width, scale, np.float32)
    tensors["output.weight"] = matrix(HEADS[mixture], (sizes.vocab_size, width))
    write(path, tensors, metadata(sizes))
    return path.stat().st_size


def magnitude(w: Tensor) -> float:
    """The mean magnitude of the weights that were drawn."""
    return float(np.abs(w.format.dequantize(w.blocks.reshape(-1, w.blocks.shape[-1])[:DRAWN])).mean())


def metadata(sizes: Sizes) -> dict[str, Any]:
    """The metadata of a file of these sizes."""
    facts: dict[str, Any] = {
        "context_length": 8192, "embedding_length": sizes.hidden_size, "block_count": sizes.num_hidden_layers,
        "feed_forward_length": sizes.intermediate_size, "attention.head_count": sizes.num_attention_heads,
        "attention.head_count_kv": sizes.num_key_value_heads, "attention.key_length": sizes.head_dim,
        "attention.value_length": sizes.head_dim, "rope.dimension_count": sizes.head_dim,
        "rope.freq_base": sizes.rope_theta, "attention.layer_norm_rms_epsilon": 1e-5, "vocab_size": sizes.vocab_size,
    }  # fmt: skip
    if sizes.num_experts:
        facts["expert_count"], facts["expert_used_count"] = sizes.num_experts, sizes.num_experts_per_tok
        facts["expert_feed_forward_length"] = sizes.intermediate_size
    arch = sizes.architecture
    return {"general.architecture": arch, **{f"{arch}.{name}": value for name, value in facts.items()}}

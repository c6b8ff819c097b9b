"""A BERT of two blocks with random weights, and six sentences for it: large enough to tell a wrong model."""

from __future__ import annotations

import bert
import numpy as np
from bert import Config

TINY = Config(blocks=2, context=20, width=64, feed_forward=128, heads=4, epsilon=1e-12)
VOCABULARY = 50
BLOCK = {  # the arrays of a block: checkpoint's name, GGUF's, shape of the weight
    "attention.self.query": ("attn_q", (64, 64)),
    "attention.self.key": ("attn_k", (64, 64)),
    "attention.self.value": ("attn_v", (64, 64)),
    "attention.output.dense": ("attn_output", (64, 64)),
    "attention.output.LayerNorm": ("attn_output_norm", (64,)),
    "intermediate.dense": ("ffn_up", (128, 64)),
    "output.dense": ("ffn_down", (64, 128)),
    "output.LayerNorm": ("layer_output_norm", (64,)),
}


def checkpoint() -> dict[str, np.ndarray]:
    """Random arrays under the names that a checkpoint has, large enough to tell a wrong model from a right one."""
    rng = np.random.default_rng(1)
    arrays = {
        "embeddings.word_embeddings.weight": rng.normal(size=(VOCABULARY, 64)),
        "embeddings.position_embeddings.weight": rng.normal(size=(20, 64)),
        "embeddings.token_type_embeddings.weight": rng.normal(size=(2, 64)),
        "embeddings.LayerNorm.weight": rng.normal(size=64),
        "embeddings.LayerNorm.bias": rng.normal(size=64),
        "embeddings.position_ids": np.arange(20)[None],
        "pooler.dense.weight": rng.normal(size=(64, 64)),
        "pooler.dense.bias": rng.normal(size=64),
    }
    for block in range(TINY.blocks):
        for name, (_, shape) in BLOCK.items():
            at = f"encoder.layer.{block}.{name}"
            arrays[f"{at}.weight"] = rng.normal(size=shape) * (0.2 if len(shape) == 2 else 1)
            arrays[f"{at}.bias"] = rng.normal(size=shape[0])
    return {name: a if a.dtype.kind == "i" else a.astype(np.float32) for name, a in arrays.items()}


def weights() -> dict[str, np.ndarray]:
    """The weights under the names of GGUF."""
    return bert.gguf_names(checkpoint(), TINY.blocks)


def tokens() -> tuple[np.ndarray, np.ndarray]:
    """Six padded sentences."""
    rng = np.random.default_rng(2)
    lengths = np.array([7, 3, 12, 1, 5, 12])
    mask = (np.arange(12) < lengths[:, None]).astype(np.int64)
    return rng.integers(0, VOCABULARY, mask.shape) * mask, mask

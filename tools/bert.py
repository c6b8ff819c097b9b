"""A BERT for the demo: sentence embeddings from weights with GGUF's names, packed by qgemm or plain arrays.

    weights = pack(gguf_names(arrays, config.blocks), "q4_0")   a checkpoint's arrays -> tensors of a .gguf file
    qgemm.write(path, weights, metadata(config, "q4_0"))
    Bert(config, weights).embed(ids, mask)                      each linear layer is one `multiply(x, w)`

The model uses an array namespace `xp`, NumPy or CuPy. Its only special case for packed weights is the token table,
whose rows are decoded when they are looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt
from typing import Any, NamedTuple

import gguf
import numpy as np

import qgemm

TOKENS, POSITIONS, TYPES = "token_embd.weight", "position_embd.weight", "token_types.weight"
MEAN_POOLING = 1

FIELDS = (
    # Config          config.json                GGUF
    ("blocks",       "num_hidden_layers",       "bert.block_count"),
    ("context",      "max_position_embeddings", "bert.context_length"),
    ("width",        "hidden_size",             "bert.embedding_length"),
    ("feed_forward", "intermediate_size",       "bert.feed_forward_length"),
    ("heads",        "num_attention_heads",     "bert.attention.head_count"),
    ("epsilon",      "layer_norm_eps",          "bert.attention.layer_norm_epsilon"),
)  # fmt: skip


class Config(NamedTuple):
    """The sizes of a BERT, from config.json or the metadata of a .gguf file."""

    blocks: int
    context: int
    width: int
    feed_forward: int
    heads: int
    epsilon: float

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> Config:
        """From a parsed config.json."""
        return cls(**{field: config[key] for field, key, _ in FIELDS})

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Config:
        """From the metadata of a .gguf file."""
        return cls(**{field: metadata[key].item() for field, _, key in FIELDS})


# ---- weights and metadata of a .gguf file


def gguf_names(arrays: Mapping[str, np.ndarray], blocks: int) -> dict[str, np.ndarray]:
    """A checkpoint's arrays by GGUF's names; arrays without such a name (pooler, position ids) are left out."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, blocks)
    renamed = {names.get_name(name, (".weight", ".bias")): array for name, array in arrays.items()}
    return {name: array for name, array in renamed.items() if name}


def pack(weights: Mapping[str, np.ndarray], fmt: str) -> dict[str, qgemm.Tensor | np.ndarray]:
    """Quantize the matrices. Norms, biases and the two small tables, which are only added, stay float32."""
    small = (POSITIONS, TYPES)
    return {name: qgemm.quantize(w, fmt) if w.ndim == 2 and name not in small else w for name, w in weights.items()}


def metadata(config: Config, fmt: str) -> dict[str, Any]:
    """The GGUF keys of a BERT with mean pooling, in the types that GGUF requires."""
    return {
        "general.architecture": "bert",
        "general.type": "model",
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
        "general.file_type": int(gguf.LlamaFileType[f"MOSTLY_{fmt.upper()}"]),
        **{key: getattr(config, field) for field, _, key in FIELDS},
        "bert.attention.causal": False,
        "bert.pooling_type": MEAN_POOLING,
    }


# ---- the model


class Bert:
    """Embeds sentences.

    weights: matrices in the type that `multiply` accepts; vectors and small tables as arrays of xp; the token table as
    a Tensor or a NumPy array, because it stays on the host.
    multiply: x [..., K], w (N, K) -> x @ w.T [..., N].
    prepare: applied once to activations before their products, e.g. `qgemm.quantize_activations`.
    """

    def __init__(
        self,
        config: Config,
        weights: Mapping[str, Any],
        *,
        xp: Any = np,
        multiply: Callable[[Any, Any], Any] = qgemm.matmul,
        prepare: Callable[[Any], Any] = lambda x: x,
    ) -> None:
        self.config, self.weights, self.xp = config, weights, xp
        self.multiply, self.prepare = multiply, prepare

    def embed(self, ids: np.ndarray, mask: np.ndarray) -> Any:
        """Token ids [batch, T] and their mask (1 a token, 0 padding) -> unit vectors [batch, width]."""
        mask = self.xp.asarray(mask, np.float32)
        x = self._norm(self._look_up(ids), "token_embd_norm")
        for block in range(self.config.blocks):
            prefix = f"blk.{block}."
            x = self._norm(x + self._attention(x, mask, prefix), prefix + "attn_output_norm")
            x = self._norm(x + self._feed_forward(x, prefix), prefix + "layer_output_norm")
        mean = (x * mask[..., None]).sum(1) / mask.sum(1)[:, None]
        return mean / self.xp.sqrt((mean * mean).sum(-1, keepdims=True))

    def _look_up(self, ids: np.ndarray) -> Any:
        """Token + position + type, [batch, T, width]; the type of all tokens of a single sentence is 0."""
        rows = self.weights[TOKENS][ids]
        tokens = rows.dequantize() if isinstance(rows, qgemm.Tensor) else rows
        return self.xp.asarray(tokens) + self.weights[POSITIONS][: ids.shape[1]] + self.weights[TYPES][0]

    def _attention(self, x: Any, mask: Any, prefix: str) -> Any:
        """softmax(q k.T / sqrt(width of a head)) v for each head, over tokens that are not padding."""
        batch, tokens, width = x.shape
        shared = self.prepare(x)

        def heads(name: str) -> Any:  # [batch, heads, T, width of a head]
            y = self._linear(shared, prefix + name)
            return y.reshape(batch, tokens, self.config.heads, -1).swapaxes(1, 2)

        q, k, v = heads("attn_q"), heads("attn_k"), heads("attn_v")
        scores = q @ k.swapaxes(2, 3) / sqrt(width // self.config.heads)
        scores = self.xp.where(mask[:, None, None, :] > 0, scores, np.float32(-np.inf))
        e = self.xp.exp(scores - scores.max(-1, keepdims=True))
        mixed = (e / e.sum(-1, keepdims=True)) @ v
        return self._linear(self.prepare(mixed.swapaxes(1, 2).reshape(x.shape)), prefix + "attn_output")

    def _feed_forward(self, x: Any, prefix: str) -> Any:
        up = gelu(self._linear(self.prepare(x), prefix + "ffn_up"), self.xp)
        return self._linear(self.prepare(up), prefix + "ffn_down")

    def _linear(self, x: Any, name: str) -> Any:
        return self.multiply(x, self.weights[name + ".weight"]) + self.weights[name + ".bias"]

    def _norm(self, x: Any, name: str) -> Any:
        x = x - x.mean(-1, keepdims=True)
        x /= self.xp.sqrt((x * x).mean(-1, keepdims=True) + self.config.epsilon)
        return x * self.weights[name + ".weight"] + self.weights[name + ".bias"]


def gelu(x: Any, xp: Any = np) -> Any:
    """x * (1 + erf(x / sqrt(2))) / 2."""
    return x * (1 + erf(x / sqrt(2), xp)) / 2


def erf(x: Any, xp: Any = np) -> Any:
    """The error function, which NumPy lacks: Abramowitz and Stegun 7.1.26, off by at most 1.5e-7."""
    t = 1 / (1 + 0.3275911 * xp.abs(x))
    series = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    return xp.sign(x) * (1 - series * xp.exp(-x * x))

"""Nomic BERT by the keys of the model's own code: the dense model is that of transformers, the mixture llama.cpp's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from class_folders import TOKENS, converted, digest, folder, tensors_of
from files import safetensors
from numpy.testing import assert_allclose, assert_array_equal

from qgemm.errors import CheckpointError

E, H, F, X, LAYERS, V = 64, 4, 96, 4, 3, 64
CODE: dict[str, Any] = {
    "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "n_embd": E, "n_head": H, "n_layer": 2,
    "n_inner": F, "n_positions": 8192, "max_trained_positions": 2048, "vocab_size": V, "type_vocab_size": 2,
    "activation_function": "swiglu", "causal": False, "prenorm": False, "qkv_proj_bias": False, "mlp_fc1_bias": False,
    "mlp_fc2_bias": False, "layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "rotary_scaling_factor": None,
    "moe_every_n_layers": -1, "num_experts": 8,
}  # fmt: skip
MIXTURE = {
    **CODE, "n_layer": LAYERS, "n_positions": 2048, "activation_function": "gelu", "qkv_proj_bias": True,
    "mlp_fc1_bias": True, "mlp_fc2_bias": True, "layer_norm_epsilon": 1e-5, "rotary_emb_base": 10000,
    "type_vocab_size": 1, "moe_every_n_layers": 2, "num_experts": X, "moe_top_k": 2,
    "moe_normalize_expert_weights": False, "num_shared_experts": 0,
}  # fmt: skip
# The vector of the last of TOKENS that llama.cpp 0c1e57098 computes with the file.
VECTOR = json.loads((Path(__file__).parent / "data" / "nomic_mixture.json").read_text(encoding="utf-8"))


def mixture_tensors() -> dict[str, np.ndarray]:
    """The tensors of a mixture, whose second layer has experts."""
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (V, E), "embeddings.token_type_embeddings.weight": (1, E),
        "emb_ln.weight": (E,), "emb_ln.bias": (E,),
    }  # fmt: skip
    for i in range(LAYERS):
        layer = {"attn.Wqkv": (3 * E, E), "attn.out_proj": (E, E), "norm1": (E,), "norm2": (E,)}
        layer |= {} if i % 2 else {"mlp.fc1": (F, E), "mlp.fc2": (E, F)}
        for name, shape in layer.items():
            shapes |= {f"encoder.layers.{i}.{name}.weight": shape, f"encoder.layers.{i}.{name}.bias": shape[:1]}
        if i % 2:
            experts = {"router.layer.weight": (X, E), "experts.mlp.w1": (X * F, E), "experts.mlp.w2": (X * F, E)}
            shapes |= {f"encoder.layers.{i}.mlp.{name}": shape for name, shape in experts.items()}
    rng = np.random.default_rng(0)
    return {
        name: (name.endswith(("norm1.weight", "norm2.weight", "ln.weight")) + 0.1 * rng.standard_normal(shape)).astype(
            np.float16
        )
        for name, shape in shapes.items()
    }


def mixture(path: Path, tensors: dict[str, np.ndarray] | None = None, **config: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**MIXTURE, **config}))
    safetensors(path / "model.safetensors", mixture_tensors() if tensors is None else tensors)
    return path


def vector_of(tensors: dict[str, np.ndarray]) -> np.ndarray:
    """The vector of the last of TOKENS, by the formulas of the model."""
    w = {name: values.astype(np.float64) for name, values in tensors.items()}

    def product(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def softmax(x: np.ndarray) -> np.ndarray:
        x = np.exp(x - x.max(-1, keepdims=True))
        return x / x.sum(-1, keepdims=True)

    def gelu(x: np.ndarray) -> np.ndarray:
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def rotated(x: np.ndarray) -> np.ndarray:  # [tokens, H, D]
        half = x.shape[-1] // 2
        angles = np.arange(len(x))[:, None, None] * 10000.0 ** (-np.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)

    def experts(x: np.ndarray, stem: str) -> np.ndarray:
        scores = softmax(x @ w[f"{stem}.router.layer.weight"].T)
        first, second = (w[f"{stem}.experts.mlp.{name}"].reshape(X, F, E) for name in ("w1", "w2"))
        y = np.zeros_like(x)
        for token, row in enumerate(scores):
            for expert in np.argsort(row)[-2:]:
                y[token] += row[expert] * (gelu(first[expert] @ x[token]) @ second[expert])
        return y

    x = norm(w["embeddings.word_embeddings.weight"][TOKENS] + w["embeddings.token_type_embeddings.weight"][0], "emb_ln")
    for i in range(LAYERS):
        stem = f"encoder.layers.{i}"
        q, k, v = np.split(product(x, f"{stem}.attn.Wqkv").reshape(len(x), 3 * H, -1), 3, axis=1)
        scores = np.einsum("thd,shd->hts", rotated(q), rotated(k)) / np.sqrt(E // H)
        y = np.einsum("hts,shd->thd", softmax(scores), v).reshape(len(x), E)
        x = norm(x + product(y, f"{stem}.attn.out_proj"), f"{stem}.norm1")
        mlp = f"{stem}.mlp"
        y = experts(x, mlp) if i % 2 else product(gelu(product(x, f"{mlp}.fc1")), f"{mlp}.fc2")
        x = norm(x + y, f"{stem}.norm2")
    return x[-1]


def test_keys_of_the_models_own_code(tmp_path):
    """They give the file of the config class of transformers, besides the trained context."""
    plain = {key: None for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                                   "max_position_embeddings", "rope_parameters", "head_dim", "hidden_act",
                                   "layer_norm_eps")}  # fmt: skip
    expected, keys = converted(folder(tmp_path / "m", "NomicBertModel"), tmp_path / "y.gguf")
    tensors, metadata = converted(folder(tmp_path / "m", "NomicBertModel", **(plain | CODE)), tmp_path / "y.gguf")
    assert digest(tensors) == digest(expected)
    keys = {key: value for key, value in keys.items() if not key.endswith(("key_length", "value_length"))}
    assert metadata == {**keys, "nomic-bert.context_length": 2048}
    prefixed = {f"nomic_bert.{key}": w for key, w in tensors_of("NomicBertModel").items()}
    tensors, _ = converted(folder(tmp_path / "m", "NomicBertForMaskedLM", prefixed), tmp_path / "y.gguf")
    assert digest(tensors) == digest(expected)


def test_vector_of_a_mixture(tmp_path):
    stored = mixture_tensors()
    assert_allclose(vector_of(stored), VECTOR, rtol=0, atol=2e-3)
    bias = {"encoder.layers.1.mlp.experts.bias": np.ones(E, np.float16)}
    tensors, metadata = converted(mixture(tmp_path / "m", stored | bias), tmp_path / "y.gguf")
    assert metadata["general.architecture"] == "nomic-bert-moe"
    keys = {"context_length": 512, "moe_every_n_layers": 2, "expert_count": X, "expert_used_count": 2}
    assert {key: metadata[f"nomic-bert-moe.{key}"] for key in keys} == keys
    first, second = (stored[f"encoder.layers.1.mlp.experts.mlp.{name}"].reshape(X, F, E) for name in ("w1", "w2"))
    assert_array_equal(tensors["blk.1.ffn_up_exps.weight"], first.astype(np.float32))
    assert_array_equal(tensors["blk.1.ffn_down_exps.weight"], second.swapaxes(1, 2).astype(np.float32))
    assert len(tensors) == len(stored)


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ({"activation_function": "swiglu"}, "activation_function: 'swiglu' is not gelu"),
        ({"rotary_emb_fraction": 0.5}, "rotary_emb_fraction"),
        ({"rotary_emb_base": None}, "rotary_emb_base: 'None' is needed"),
        ({"prenorm": True}, "prenorm: 'True' is not false"),
        ({"qkv_proj_bias": False}, "qkv_proj_bias"),
        ({"moe_normalize_expert_weights": True}, "moe_normalize_expert_weights"),
        ({"num_experts": 3}, r"experts\.mlp\.w1': has shape \(384, 64\), not 3 matrices of 96 rows"),
    ],
)
def test_values_that_the_file_cannot_express_are_refused(config, rule, tmp_path):
    with pytest.raises(CheckpointError, match=rule):
        converted(mixture(tmp_path / "m", **config), tmp_path / "y.gguf")

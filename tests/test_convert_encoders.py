"""Encoders: tensors of Bert and XLM-RoBERTa, and how Sentence Transformers pool the vectors of tokens."""

from __future__ import annotations

import json
from pathlib import Path

import hf_folders
import numpy as np
import pytest
from class_folders import converted, digest, folder, tensors_of
from gguf import PoolingType
from numpy.testing import assert_array_equal
from tokenizer_folders import bpe

from qgemm.errors import CheckpointError


def test_heads_are_left_out_and_names_of_old_checkpoints_read(tmp_path):
    expected, _ = converted(folder(tmp_path / "m", "BertModel"), tmp_path / "y.gguf")
    old = {
        "bert." + key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): w
        for key, w in tensors_of("BertModel").items()
    }
    heads = {f"cls.predictions.{key}": np.ones(64, np.float16) for key in ("bias", "transform.LayerNorm.gamma")}
    tensors, _ = converted(folder(tmp_path / "m", "BertForMaskedLM", {**old, **heads}), tmp_path / "y.gguf")
    assert digest(tensors) == digest(expected)


@pytest.mark.parametrize("name", ["BertModel", "XLMRobertaModel", "ModernBertModel"])
def test_tokens_see_those_after_them(name, tmp_path):
    """Without the key llama.cpp masks them, as in a model that predicts the next token."""
    _, metadata = converted(folder(tmp_path / "m", name), tmp_path / "y.gguf")
    assert metadata[f"{metadata['general.architecture']}.attention.causal"] == np.bool_(False)


def test_positions_before_the_first_are_left_out(tmp_path):
    path = folder(tmp_path / "m", "XLMRobertaModel")
    tensors, metadata = converted(path, tmp_path / "y.gguf")
    positions = tensors_of("XLMRobertaModel")["embeddings.position_embeddings.weight"].astype(np.float32)
    assert_array_equal(tensors["position_embd.weight"], positions[2:])
    assert metadata["bert.context_length"] == 126
    for padding in (127, [1]):
        with pytest.raises(CheckpointError, match=r"pad_token_id: .* is not a number below max_position_embeddings"):
            converted(folder(tmp_path / "m", "XLMRobertaModel", pad_token_id=padding), tmp_path / "y.gguf")


def pooled(path: Path, **pooling: object) -> dict:
    """The metadata of the file of a folder of Sentence Transformers."""
    folder(path, "BertModel")
    (path / "1_Pooling").mkdir(exist_ok=True)
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return converted(path, path.parent / "y.gguf")[1]


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, PoolingType.MEAN),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, PoolingType.CLS),
        ({"pooling_mode_lasttoken": True}, PoolingType.LAST),
        ({"pooling_mode": "mean"}, PoolingType.MEAN),
    ],
)
def test_pooling(pooling, kind, tmp_path):
    assert pooled(tmp_path / "m", **pooling)["bert.pooling_type"] == kind


def test_pooling_of_a_decoder(tmp_path):
    """Qwen3-Embedding is a decoder with a folder of Sentence Transformers."""
    path = hf_folders.folder(tmp_path / "m", "Qwen3ForCausalLM")
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    assert converted(path, tmp_path / "y.gguf")[1]["qwen3.pooling_type"] == PoolingType.LAST


def test_no_pooling_without_its_config(tmp_path):
    assert "bert.pooling_type" not in converted(folder(tmp_path / "m", "BertModel"), tmp_path / "y.gguf")[1]


@pytest.mark.parametrize(
    ("pooling", "name"),
    [
        ({"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "pooling_mode_mean_tokens, "),
        ({"pooling_mode": ["cls", "mean"]}, "cls"),
        ({}, "''"),
    ],
)
def test_other_pooling_is_refused(pooling, name, tmp_path):
    with pytest.raises(CheckpointError, match=rf"1_Pooling/config\.json: pooling by .*{name}.* is not known"):
        pooled(tmp_path / "m", **pooling)


def test_periods_of_modern_bert(tmp_path):
    """The first layer of a period has full attention; older configs name the period and the bases of both kinds."""
    kinds = ["full_attention", "sliding_attention"] * 2 + ["full_attention"]
    _, metadata = converted(folder(tmp_path / "m", "ModernBertModel", layer_types=kinds), tmp_path / "y.gguf")
    assert metadata["modern-bert.attention.sliding_window_pattern"] == 2
    older = {"layer_types": None, "rope_parameters": None, "global_attn_every_n_layers": 4, "local_rope_theta": 20000.0}
    _, metadata = converted(folder(tmp_path / "m", "ModernBertModel", **older), tmp_path / "y.gguf")
    assert metadata["modern-bert.attention.sliding_window_pattern"] == 4
    assert metadata["modern-bert.rope.freq_base"] == 160000
    assert metadata["modern-bert.rope.freq_base_swa"] == 20000
    with pytest.raises(CheckpointError, match=r"layer_types: .* have full attention elsewhere"):
        converted(folder(tmp_path / "m", "ModernBertModel", layer_types=["sliding_attention"] * 5), tmp_path / "y.gguf")


def test_first_and_last_tokens_of_modern_bert(tmp_path):
    path = folder(tmp_path / "m", "ModernBertModel")
    document = bpe()
    document["post_processor"] = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}]}
    (path / "tokenizer.json").write_text(json.dumps(document))
    (path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False, "add_eos_token": False}))
    _, metadata = converted(path, tmp_path / "y.gguf")
    assert [bool(metadata[f"tokenizer.ggml.add_{role}_token"]) for role in ("bos", "eos", "sep")] == [True] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act: 'relu'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type: 'relative_key'"),
        ({"is_decoder": True}, "is_decoder"),
    ],
)
def test_values_that_the_file_cannot_express_are_refused(change, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        converted(folder(tmp_path / "m", "BertModel", **change), tmp_path / "y.gguf")

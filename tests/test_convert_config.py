"""Keys of a model's config: each is written, has a rule, or has no effect; values that no rule allows are refused."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from class_folders import CLASSES as CLASSES_MADE
from config_classes import CLASSES, classified
from gguf import MODEL_ARCH_NAMES, GGUFWriter
from hf_folders import CONFIG, folder, tensors_of

import qgemm
from qgemm.converter.architectures import ARCHITECTURES
from qgemm.converter.config_keys import check_config
from qgemm.converter.config_rules import READ_ELSEWHERE, check_rules
from qgemm.converter.hf_folder import config_of, metadata_of
from qgemm.errors import CheckpointError

# Published model -> the keys of its config.json that describe the model.
PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "published_configs.json").read_text(encoding="utf-8")
)
PHI3 = {"type": "longrope", "long_factor": [2.0] * 8, "short_factor": [1.0] * 8}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_key_of_a_config_class_is_classified(architecture):
    assert set(CLASSES[architecture]) - classified(architecture) == set()


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_of_published_models_are_read(name):
    """Their keys say more than those of a config class: sizes by layer, kinds of an older name, keys of other code."""
    config, architecture = config_of(name, PUBLISHED[name])
    writer = GGUFWriter(None, MODEL_ARCH_NAMES[architecture.kind])
    architecture.keys(config, writer)
    assert metadata_of(writer)[f"{MODEL_ARCH_NAMES[architecture.kind]}.block_count"] == config.need("num_hidden_layers")


def test_both_factors_of_yarn_are_refused():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "mscale": 1.0}
    model = {"architectures": ["LlamaForCausalLM"], **CONFIG}
    assert config_of("x", {**model, "rope_scaling": yarn})
    with pytest.raises(CheckpointError, match=r"mscale: '1\.0' is set, and so is mscale_all_dim"):
        config_of("x", {**model, "rope_scaling": {**yarn, "mscale_all_dim": 0.5}})


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rules_have_the_defaults_of_the_config_class(architecture):
    defaults = CLASSES[architecture]
    for key, rule in ARCHITECTURES[architecture].rules.items():
        if key in defaults:
            assert (rule.default or None) == (defaults[key] or None), key


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_values_of_any_type_are_compared_or_refused(architecture):
    """A rule compares values whose type `check_config` has checked; nothing but a CheckpointError is raised."""
    record = ARCHITECTURES[architecture]
    base = CLASSES_MADE[architecture]["config"] if architecture in CLASSES_MADE else CONFIG
    for key in {*record.rules, *record.aliases, *READ_ELSEWHERE}:
        for value in (-1, 0.5, 2**64, float("nan"), float("inf"), "x", "", [], [1], [[]], ["x"], {}, {"a": 1}, True):
            values = {**base, key: value}
            with suppress(CheckpointError):
                check_config("config.json", values)
                check_rules(record.config("config.json", values), record.rules, record.read_rotary)


@pytest.mark.parametrize(
    ("architecture", "change", "message"),
    [
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "hidden_act: 'gelu' is not silu"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: '0.5' rotates a part"),
        ("LlamaForCausalLM", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: '0.5'"),
        ("Qwen2ForCausalLM", {"rope_scaling": {"type": "default", "mrope_section": [8]}}, "mrope_section: .* is set"),
        ("MistralForCausalLM", {"sliding_window": 511}, "sliding_window: '511' is a window below max_position_emb"),
        ("MistralForCausalLM", {"max_position_embeddings": 8192}, r"sliding_window: '4096' .*\(the default, since"),
        ("MixtralForCausalLM", {"sliding_window": 64}, "sliding_window: '64'"),
        ("Qwen2ForCausalLM", {"use_sliding_window": True}, "use_sliding_window: 'True' is not false"),
        ("Qwen2ForCausalLM", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: .* without full"),
        ("Qwen3ForCausalLM", {"attention_bias": True}, "attention_bias: 'True'"),
        ("Qwen3MoeForCausalLM", {"norm_topk_prob": False}, "norm_topk_prob: 'False' is not true"),
        ("Qwen3MoeForCausalLM", {"norm_topk_prob": None}, r"norm_topk_prob: 'False' is not true.*the default"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [0]}, r"mlp_only_layers: '\[0\]' is set"),
        ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 2}, "decoder_sparse_step: '2' is not 1"),
        ("Gemma3ForCausalLM", {"query_pre_attn_scalar": 17}, "query_pre_attn_scalar: '17' differs from head_dim"),
        ("Gemma3ForCausalLM", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar: '256' differs .*the default"),
        ("Gemma3ForCausalLM", {"hidden_activation": "gelu"}, "hidden_activation: 'gelu'"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention: 'True'"),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 5}, "sliding_window_pattern: '5' is not 6"),
        ("Gemma3ForCausalLM", {"layer_types": ["full_attention"] * 2}, "layer_types: .* in one layer of six"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: '50.0'"),
        ("Phi3ForCausalLM", {"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ("GptOssForCausalLM", {"swiglu_limit": 6.0}, r"swiglu_limit: '6\.0' is not 7"),
        ("GptOssForCausalLM", {"swiglu_alpha": 1.0}, r"swiglu_alpha: '1\.0'"),
        ("GptOssForCausalLM", {"attention_bias": False}, "attention_bias: 'False'"),
        ("GptOssForCausalLM", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False,
                                               "original_max_position_embeddings": 64}}, "truncate: 'False'"),
        ("Gemma3ForCausalLM", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
         "sliding_attention: rope_type: 'linear'"),
    ],
)  # fmt: skip
def test_values_that_the_file_cannot_express_are_refused(architecture, change, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        metadata(tmp_path, architecture, **change)
    assert not (tmp_path / "y.gguf").exists()


@pytest.mark.parametrize(
    ("architecture", "change"),
    [
        ("LlamaForCausalLM", {"hidden_act": "swish", "attention_dropout": 0.1, "partial_rotary_factor": 1.0}),
        ("MistralForCausalLM", {"sliding_window": 512}),
        ("Qwen2ForCausalLM", {"sliding_window": 64, "use_sliding_window": False, "max_window_layers": 1}),
        ("Gemma3ForCausalLM", {"layer_types": ["sliding_attention"] * 2, "_sliding_window_pattern": 6}),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 1, "layer_types": ["full_attention"] * 2}),
        ("GptOssForCausalLM", {"layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
def test_values_of_the_same_result_are_accepted(architecture, change, tmp_path):
    assert metadata(tmp_path, architecture, **change)


def test_defaults_of_the_config_class_are_written(tmp_path):
    """A key that the config leaves out has no default of llama.cpp in its place."""
    for architecture, base in (("MixtralForCausalLM", 1e6), ("GptOssForCausalLM", 150000)):
        name = "llama" if architecture == "MixtralForCausalLM" else "gpt-oss"
        assert metadata(tmp_path, architecture, rope_theta=None)[f"{name}.rope.freq_base"] == base
    keys = metadata(tmp_path, "GptOssForCausalLM", rope_scaling=None)
    assert (keys["gpt-oss.rope.scaling.type"], keys["gpt-oss.rope.scaling.factor"]) == ("yarn", 32)
    long = metadata(tmp_path, "Phi3ForCausalLM", rope_scaling=PHI3, original_max_position_embeddings=None)
    assert long["phi3.rope.scaling.original_context_length"] == 4096


def metadata(tmp_path: Path, architecture: str, **change: object) -> dict[str, Any]:
    """The metadata of the .gguf file of a folder whose config differs; None leaves a key out."""
    path = folder(tmp_path / "m", architecture, tensors_of(architecture), **change)
    qgemm.convert(path, tmp_path / "y.gguf", "f16", force=True)
    with qgemm.open(tmp_path / "y.gguf", copy=True) as file:
        return dict(file.metadata)

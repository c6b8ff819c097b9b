"""Keys of a model's config: each is written, has a rule, or has no effect; values that no rule allows are refused."""

from __future__ import annotations

import json
import math
import re
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import class_folders
import numpy as np
import pytest
from class_folders import CLASSES as CLASSES_MADE
from config_classes import CLASSES, classified
from gguf import MODEL_ARCH_NAMES, GGUFWriter
from hf_folders import CONFIG, FOLDERS, folder, tensors_of

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
        ("LlamaForCausalLM", {"rope_scaling": None, "rope_parameters": {"partial_rotary_factor": 0.5}},
         "partial_rotary_factor: '0.5'"),
        ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
         "rope_scaling: .*llama3.* ignores rope_parameters"),
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
        ("Qwen3ForCausalLM", {"num_key_value_heads": 8}, "num_key_value_heads: '8' does not divide num_attention_head"),
        ("LlamaForCausalLM", {"num_attention_heads": 3}, "num_key_value_heads: '2' does not divide .* 3"),
        ("Qwen3ForCausalLM", {"head_dim": 3}, "head_dim: '3' is odd, and rotary embeddings rotate pairs"),
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
    "name", ["Qwen3_5ForCausalLM", "Qwen3NextForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM"]
)
def test_a_hybrid_model_has_layers_of_both_kinds(name):
    """libllama aborts on others."""
    base = CLASSES_MADE[name]["config"]
    for kind in {*base["layer_types"]}:
        with pytest.raises(CheckpointError, match=r"layer_types: .* are not (both|linear)"):
            described({**base, "layer_types": [kind] * len(base["layer_types"])})


def test_old_configs_of_lfm2_list_layers_with_attention():
    """The file is that of the config that lists the kinds of all layers."""
    base = CLASSES_MADE["Lfm2ForCausalLM"]["config"]
    old = {key: value for key, value in base.items() if key != "layer_types"}
    assert described({**old, "full_attn_idxs": [1]}) == described(base)


def test_sections_of_rotary_dimensions_fit_a_head():
    """libllama aborts on others."""
    base = CLASSES_MADE["Qwen3_5ForCausalLM"]["config"]
    assert described({**base, "head_dim": 32})
    with pytest.raises(CheckpointError, match=r"mrope_section: '\[11, 11, 10\]' has more dimensions than a head, 16"):
        described({**base, "head_dim": 16})


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("architecture", "factors", "allowed"),
    [
        ("DeepseekV3ForCausalLM", {"mscale_all_dim": 1.0}, False),
        ("DeepseekV3ForCausalLM", {"mscale": 1.0, "mscale_all_dim": 0.5}, False),
        ("DeepseekV3ForCausalLM", {"mscale": 0.5, "mscale_all_dim": 0.5}, True),
        ("DeepseekV2ForCausalLM", {"mscale": 0.7}, True),  # alone it has no effect
        ("Ministral3ForCausalLM", {"mscale": 0.5, "mscale_all_dim": 0.5}, False),
        ("Ministral3ForCausalLM", {"mscale_all_dim": 1.0}, False),
        ("Ministral3ForCausalLM", {"mscale": 1.0, "mscale_all_dim": 0.5}, True),
        ("Ministral3ForCausalLM", {"mscale": 0.5}, True),
    ],
)
def test_factors_of_yarn_that_llama_cpp_computes(architecture, factors, allowed):
    values = {**CLASSES_MADE[architecture]["config"], "rope_parameters": {**YARN, **factors}}
    if allowed:
        assert config_of("x", values)
        return
    with pytest.raises(CheckpointError, match=r"rope_parameters: .* has mscale other than"):
        config_of("x", values)


@pytest.mark.parametrize(
    ("architecture", "settings", "ratio"),
    [
        ("LlamaForCausalLM", {}, None),
        ("LlamaForCausalLM", {"attention_factor": 1 + 0.1 * math.log(4)}, None),
        ("LlamaForCausalLM", {"attention_factor": 0.7}, 0.7 / (1 + 0.1 * math.log(4))),
        ("LlamaForCausalLM", {"attention_factor": 0.7, "factor": 0.5}, 0.7),
        ("DeepseekV3ForCausalLM", {"attention_factor": 0.7, "mscale": 0.5, "mscale_all_dim": 0.5}, 0.7),
        (
            "Ministral3ForCausalLM",
            {"attention_factor": 0.7, "mscale": 1.0, "mscale_all_dim": 0.5},
            0.7 / (1 + 0.1 * math.log(4)) * (1 + 0.05 * math.log(4)),
        ),
    ],
)
def test_the_factor_of_attention_is_one_that_llama_cpp_reads(architecture, settings, ratio):
    """It multiplies the usual one by attn_factor, and overwrites yarn_attn_factor."""
    base = CLASSES_MADE[architecture]["config"] if architecture in CLASSES_MADE else {"architectures": [architecture]}
    values = {**CONFIG, **base, "rope_parameters": {**YARN, **settings}}
    config, record = config_of("x", values)
    writer = GGUFWriter(None, name := MODEL_ARCH_NAMES[record.kind])
    record.keys(config, writer)
    assert metadata_of(writer).get(f"{name}.rope.scaling.attn_factor") == (ratio and np.float32(ratio))


@pytest.mark.parametrize(
    ("settings", "factor"),
    [({"factor": 2.0}, math.sqrt(1 + math.log(2) / math.log(128))), ({"factor": 2.0, "attention_factor": 1.5}, 1.5)],
)
def test_the_factor_of_attention_of_longrope(settings, factor, tmp_path):
    keys = metadata(tmp_path, "Phi3ForCausalLM", rope_scaling={**PHI3, **settings})
    assert keys["phi3.rope.scaling.attn_factor"] == np.float32(factor)


@pytest.mark.parametrize(
    ("settings", "keys"),
    [({}, []), ({"beta_fast": 32.0}, []), ({"beta_fast": 8, "beta_slow": 2}, ["beta_fast", "beta_slow"])],
)
def test_keys_of_yarn_that_llama_cpp_does_not_read_are_named(settings, keys, tmp_path):
    rope = {"rope_scaling": None, "rope_parameters": {**YARN, **settings}}
    path = folder(tmp_path / "m", "LlamaForCausalLM", tensors_of("LlamaForCausalLM"), **rope)
    notes = qgemm.convert(path, tmp_path / "y.gguf", "f16").notes
    assert [note.split()[0] for note in notes if "of yarn" in note] == keys
    path = class_folders.folder(tmp_path / "m", "Ministral3ForCausalLM", rope_parameters={**YARN, **settings})
    assert not any("of yarn" in note for note in qgemm.convert(path, tmp_path / "y.gguf", "f16", force=True).notes)


# Keys that the shapes of the tensors decide, or without which llama.cpp has the default of the config class.
BY_SHAPES = {
    "num_attention_heads", "num_key_value_heads", "head_dim", "num_experts", "num_local_experts", "n_routed_experts",
    "moe_num_experts", "q_lora_rank", "tie_word_embeddings", "rope_theta",
}  # fmt: skip


@pytest.mark.parametrize("architecture", [*CLASSES_MADE, *FOLDERS])
def test_a_key_that_is_left_out_has_the_default_of_its_class(architecture):
    """It becomes the same metadata and shapes, or is needed."""
    base = (
        CLASSES_MADE[architecture]["config"]
        if architecture in CLASSES_MADE
        else {"architectures": [architecture], **CONFIG, **FOLDERS[architecture][0]}
    )
    part = base.get("text_config") or base
    for key in sorted(part.keys() & CLASSES[architecture].keys() - BY_SHAPES - READ_ELSEWHERE):
        default = CLASSES[architecture][key]
        if default is None:
            continue
        part_left_out = {name: value for name, value in part.items() if name != key}
        documents = [part_left_out, {**part_left_out, key: default}]
        if part is not base:
            documents = [{**base, "text_config": document} for document in documents]
        with suppress(CheckpointError):
            assert described(documents[0]) == described(documents[1]), key


def described(document: dict[str, Any]) -> tuple[str, list[dict[str, str]]]:
    """The metadata and the tensors of the layers that a config describes."""
    config, record = config_of("x", document)
    writer = GGUFWriter(None, MODEL_ARCH_NAMES[record.kind])
    record.keys(config, writer)
    layers = range(config.need("num_hidden_layers"))
    return str(metadata_of(writer)), [dict(record.shapes(config, i, dense)) for i in layers for dense in (True, False)]


@pytest.mark.parametrize("architecture", ["CohereForCausalLM", "Cohere2ForCausalLM", "NemotronForCausalLM"])
def test_a_scaling_of_rotary_embeddings_is_in_force(architecture):
    """llama.cpp's type "none" switches the factor off."""
    values = {**CLASSES_MADE[architecture]["config"], "rope_parameters": None, "rope_theta": 1e4}
    assert "'none'" in described(values)[0]
    scaled = described({**values, "rope_scaling": {"rope_type": "linear", "factor": 2.0}})[0]
    assert "'linear'" in scaled
    assert "'none'" not in scaled


def test_the_greedy_router_of_deepseek_2_has_no_groups():
    values = {**CLASSES_MADE["DeepseekV2ForCausalLM"]["config"], "n_group": 2, "topk_group": 1}
    assert "expert_group" not in described(values)[0]
    values = {**CLASSES_MADE["DeepseekV3ForCausalLM"]["config"], "n_group": 2, "topk_group": 1}
    assert "expert_group_used_count" in described(values)[0]


def test_settings_of_rotary_embeddings_replace_the_defaults_under_the_other_key():
    model = {"architectures": ["GptOssForCausalLM"], **CONFIG, **FOLDERS["GptOssForCausalLM"][0], "rope_scaling": None}
    factor = r"scaling\.factor': (np\.float32\()?%s"  # NumPy 2 prints the type
    assert re.search(factor % "32.0", described(model)[0])
    assert re.search(factor % "4.0", described({**model, "rope_parameters": YARN})[0])


def test_empty_settings_of_rotary_embeddings_hide_no_others():
    values = {"architectures": ["LlamaForCausalLM"], **CONFIG, "rope_parameters": {}}
    assert "'linear'" in described({**values, "rope_scaling": {"rope_type": "linear", "factor": 2.0}})[0]


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


BIASES = {
    f"model.layers.{i}.self_attn.{name}_proj.bias": 64 // n
    for i in (0, 1)
    for name, n in (("q", 1), ("k", 2), ("v", 2))
}


@pytest.mark.parametrize(
    ("stated", "names", "value", "message"),
    [
        (True, BIASES, 1, ""),
        (True, list(BIASES)[:4], 1, r"blk\.1\.attn_k\.bias.* is missing, and attention_bias of the config is true"),
        (True, (), 1, r"blk\.0\.attn_q\.bias.* is missing"),
        (False, BIASES, 1, r"blk\.0\.attn_q\.bias.* is there, and attention_bias of the config is not true"),
        (False, BIASES, [0] * 31 + [1], r"blk\.0\.attn_q\.bias.* is there"),
        (False, BIASES, 0, ""),  # as AutoGPTQ writes them
        (None, BIASES, 1, r"blk\.0\.attn_q\.bias.* is there, and attention_bias of the config is not true"),
    ],
)
def test_biases_are_those_that_the_config_states(stated, names, value, message, tmp_path):
    biases = {name: np.resize(np.float16(value), BIASES[name]) for name in names}
    tensors = {**tensors_of("LlamaForCausalLM"), **biases}
    path = folder(tmp_path / "m", "LlamaForCausalLM", tensors, attention_bias=stated)
    with pytest.raises(CheckpointError, match=message) if message else nullcontext():
        qgemm.convert(path, tmp_path / "y.gguf", "f16")


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

"""Each class of tests/data/model_classes.json becomes the file that is recorded there, with llama.cpp's layout."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from class_folders import CLASSES, converted, digest, folder, plain, tensors_of
from gguf import MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES
from numpy.testing import assert_array_equal

from qgemm.converter.architectures import ARCHITECTURES
from qgemm.errors import CheckpointError


@pytest.mark.parametrize("name", CLASSES)
def test_keys_and_tensors(name, tmp_path):
    """Keys and tensors are those with which llama.cpp computed the recorded logits, tested in tests/with_torch.

    The gguf package lists every tensor under the architecture.
    """
    tensors, metadata = converted(folder(tmp_path / "m", name), tmp_path / "y.gguf")
    assert {key: list(w.shape) for key, w in tensors.items()} == CLASSES[name]["file"]
    assert json.loads(json.dumps(plain(metadata))) == CLASSES[name]["keys"]
    assert digest(tensors) == CLASSES[name]["digest"]
    kind = ARCHITECTURES[name].kind
    assert metadata["general.architecture"] == MODEL_ARCH_NAMES[kind]
    layouts = {TENSOR_NAMES[tensor] for tensor in MODEL_TENSORS[kind]}
    for key in tensors:
        parts = re.sub(r"\.(weight|bias|scale)$", "", key).split(".")
        assert ".".join(["{bid}" if part.isdigit() else part for part in parts]) in layouts, key


def weights(name: str, stem: str) -> np.ndarray:
    return tensors_of(name)[stem].astype(np.float32)


@pytest.mark.parametrize("part", ["weight", "bias"])
@pytest.mark.parametrize(
    ("name", "stem"),
    [("GPTNeoXForCausalLM", "gpt_neox.layers.1.attention"), ("BloomForCausalLM", "transformer.h.1.self_attention")],
)
def test_queries_keys_and_values_of_each_head_are_separated(name, stem, part, tmp_path):
    tensors, _ = converted(folder(tmp_path / "m", name), tmp_path / "y.gguf")
    heads = weights(name, f"{stem}.query_key_value.{part}").reshape(4, 3, 16, -1)
    rows = np.concatenate([heads[:, i].reshape(64, -1) for i in range(3)])
    assert_array_equal(tensors[f"blk.1.attn_qkv.{part}"], rows.reshape(tensors[f"blk.1.attn_qkv.{part}"].shape))


def test_groups_of_falcon_are_separated(tmp_path):
    tensors, _ = converted(folder(tmp_path / "m", "FalconForCausalLM"), tmp_path / "y.gguf")
    groups = weights("FalconForCausalLM", "transformer.h.0.self_attention.query_key_value.weight").reshape(2, 4, 16, 64)
    queries, keys, values = groups[:, :2], groups[:, 2], groups[:, 3]
    rows = np.concatenate([part.reshape(-1, 64) for part in (queries, keys, values)])
    assert_array_equal(tensors["blk.0.attn_qkv.weight"], rows)


def test_matrices_of_gpt2_are_transposed(tmp_path):
    tensors, _ = converted(folder(tmp_path / "m", "GPT2LMHeadModel"), tmp_path / "y.gguf")
    for old, new in (("attn.c_attn", "attn_qkv"), ("attn.c_proj", "attn_output"), ("mlp.c_fc", "ffn_up")):
        stored = weights("GPT2LMHeadModel", f"transformer.h.1.{old}.weight")
        assert_array_equal(tensors[f"blk.1.{new}.weight"], stored.T)


def test_keys_and_values_of_latent_attention(tmp_path):
    """k_b is transposed, so that scores are products of latent vectors."""
    tensors, _ = converted(folder(tmp_path / "m", "DeepseekV3ForCausalLM"), tmp_path / "y.gguf")
    both = weights("DeepseekV3ForCausalLM", "model.layers.1.self_attn.kv_b_proj.weight").reshape(4, 16 + 24, 32)
    assert_array_equal(tensors["blk.1.attn_k_b.weight"], both[:, :16].swapaxes(1, 2))
    assert_array_equal(tensors["blk.1.attn_v_b.weight"], both[:, 16:])


def test_experts_of_granite_are_separated(tmp_path):
    tensors, _ = converted(folder(tmp_path / "m", "GraniteMoeForCausalLM"), tmp_path / "y.gguf")
    both = weights("GraniteMoeForCausalLM", "model.layers.1.block_sparse_moe.input_linear.weight")
    assert_array_equal(tensors["blk.1.ffn_gate_exps.weight"], both[:, :96])
    assert_array_equal(tensors["blk.1.ffn_up_exps.weight"], both[:, 96:])


def test_norms_of_nemotron_are_stored_as_one_less(tmp_path):
    tensors, _ = converted(folder(tmp_path / "m", "NemotronForCausalLM"), tmp_path / "y.gguf")
    stored = weights("NemotronForCausalLM", "model.layers.1.input_layernorm.weight")
    assert_array_equal(tensors["blk.1.attn_norm.weight"], stored + np.float32(1))
    assert_array_equal(
        tensors["blk.1.attn_norm.bias"], weights("NemotronForCausalLM", "model.layers.1.input_layernorm.bias")
    )


def test_heads_of_values_repeat_the_heads_of_keys(tmp_path):
    """Qwen 3.5's are grouped by the heads of keys: 0 0 1 1 of a checkpoint are 0 1 0 1 in the file."""
    name = "Qwen3_5ForCausalLM"
    tensors, _ = converted(folder(tmp_path / "m", name), tmp_path / "y.gguf")
    stored = weights(name, "model.layers.0.linear_attn.in_proj_qkv.weight")
    values = stored[64:].reshape(2, 2, 16, 64).swapaxes(0, 1).reshape(64, 64)
    assert_array_equal(tensors["blk.0.attn_qkv.weight"], np.concatenate([stored[:64], values]))
    columns = weights(name, "model.layers.0.linear_attn.out_proj.weight").reshape(64, 2, 2, 16)
    assert_array_equal(tensors["blk.0.ssm_out.weight"], columns.swapaxes(1, 2).reshape(64, 64))
    logarithms = weights(name, "model.layers.0.linear_attn.A_log").reshape(2, 2).T.ravel()
    assert_array_equal(tensors["blk.0.ssm_a"], -np.exp(logarithms))


def test_a_fused_projection_of_linear_attention_is_split(tmp_path):
    name = "Qwen3NextForCausalLM"
    tensors, _ = converted(folder(tmp_path / "m", name), tmp_path / "y.gguf")
    stored = weights(name, "model.layers.0.linear_attn.in_proj_qkvz.weight").reshape(2, 96, 64)
    parts = np.split(stored, [16, 32, 64], axis=1)
    query, key, value, gate = (part.reshape(-1, 64) for part in parts)
    assert_array_equal(tensors["blk.0.attn_qkv.weight"], np.concatenate([query, key, value]))
    assert_array_equal(tensors["blk.0.attn_gate.weight"], gate)


def test_numbers_of_layers_become_keys(tmp_path):
    name = "ApertusForCausalLM"
    _, metadata = converted(folder(tmp_path / "m", name), tmp_path / "y.gguf")
    numbers = [weights(name, f"model.layers.{i}.mlp.act_fn.alpha_p")[0] for i in range(2)]
    assert metadata["xielu.alpha_p"].tolist() == numbers
    tensors = tensors_of(name)
    del tensors["model.layers.1.mlp.act_fn.beta"]
    with pytest.raises(CheckpointError, match=r"act_fn\.beta': is missing in some layers"):
        converted(folder(tmp_path / "m", name, tensors), tmp_path / "y.gguf")


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_of_qwen3_vl_are_read_both_ways(transposed, tmp_path):
    """Files of transformers 4 have them transposed."""
    name = "Qwen3VLMoeForConditionalGeneration"
    source = tensors_of(name)
    both = source["model.language_model.layers.1.mlp.experts.gate_up_proj"].astype(np.float32)
    if transposed:
        source = {key: w.swapaxes(1, 2).copy() if "experts" in key else w for key, w in source.items()}
    tensors, _ = converted(folder(tmp_path / "m", name, source), tmp_path / "y.gguf")
    assert_array_equal(tensors["blk.1.ffn_up_exps.weight"], both[:, 48:])


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    name = "Glm4MoeForCausalLM"
    extra = {"model.layers.2.eh_proj.weight": np.ones((64, 128), np.float16)}
    path = folder(tmp_path / "m", name, {**tensors_of(name), **extra}, num_nextn_predict_layers=1)
    tensors, _ = converted(path, tmp_path / "y.gguf")
    assert {key: list(w.shape) for key, w in tensors.items()} == CLASSES[name]["file"]
    with pytest.raises(CheckpointError, match=r"layers\.2\.eh_proj\.weight': has no name"):
        converted(folder(path, name, {**tensors_of(name), **extra}, num_nextn_predict_layers=0), tmp_path / "y.gguf")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 1, 0, 1]}, "no_rope_layers"),
        ("Qwen2MoeForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob: 'True' is not false"),
        ("Olmo3ForCausalLM", {"layer_types": ["full_attention"] * 4}, "layer_types"),
        ("CohereForCausalLM", {"use_qk_norm": True}, "use_qk_norm"),
        ("Cohere2ForCausalLM", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ("Starcoder2ForCausalLM", {"sliding_window": 64}, "sliding_window: '64' is a window below"),
        ("StableLmForCausalLM", {"qk_layernorm": True}, "qk_layernorm"),
        ("Exaone4ForCausalLM", {"sliding_window": 64}, "sliding_window"),
        ("Ernie4_5_MoeForCausalLM", {"moe_layer_end_index": 0}, "moe_layer_end_index"),
        ("Exaone4ForCausalLM", {"sliding_window": 0}, "sliding_window: '0'"),
        ("Glm4MoeForCausalLM", {"n_group": 2}, "n_group"),
        ("Glm4MoeForCausalLM", {"use_qk_norm": None}, r"attn_k_norm\.weight': is no tensor of a model"),
        ("Glm4MoeForCausalLM", {"attention_bias": None}, r"attn_q\.bias': is there, and attention_bias"),
        ("StableLmForCausalLM", {"use_parallel_residual": True}, r"ffn_norm\.bias': is no tensor of a model"),
        ("StableLmForCausalLM", {"use_qkv_bias": None}, r"attn_q\.bias': is there, and use_qkv_bias"),
        ("PhimoeForCausalLM", {"lm_head_bias": False}, r"output\.bias': is there, and lm_head_bias"),
        ("PhimoeForCausalLM", {"attention_bias": None}, r"attn_q\.bias': is there, and attention_bias"),
        ("PhimoeForCausalLM", {"router_jitter_noise": 0.1}, "router_jitter_noise: '0.1' is not 0.01"),
        ("DeepseekV3ForCausalLM", {"topk_group": 0}, "topk_group: '0' leaves no group"),
        ("DeepseekV3ForCausalLM", {"head_dim": 2}, "head_dim: '2' is not qk_rope_head_dim"),
        ("DeepseekV2ForCausalLM", {"head_dim": 2}, "head_dim: '2' is not qk_rope_head_dim"),
        ("DeepseekV2ForCausalLM", {"topk_method": "group_limited_greedy"}, "topk_method"),
        ("DeepseekV3ForCausalLM", {"rope_interleave": False}, "rope_interleave"),
        ("DeepseekV3ForCausalLM", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0,
                                   "mscale_all_dim": 0.5, "original_max_position_embeddings": 32}}, "mscale"),
        ("GPTBigCodeForCausalLM", {"multi_query": False}, "multi_query"),
        ("FalconForCausalLM", {"alibi": True}, "alibi"),
        ("BloomForCausalLM", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection"),
        ("HunYuanDenseV1ForCausalLM", {"attention_bias": True}, "attention_bias"),
        ("PhiForCausalLM", {"hidden_act": "silu"}, "hidden_act: 'silu'"),
        ("DeepseekV2ForCausalLM", {"num_hidden_layers": 25}, "q_lora_rank: 'None' is null in a model of other layers"),
        ("Dots1ForCausalLM", {"num_key_value_heads": 2}, "num_key_value_heads: '2' is not num_attention_heads"),
        ("Qwen3NextForCausalLM", {"layer_types": ["full_attention", "linear_attention"] * 2}, "layer_types"),
        ("Qwen3_5ForCausalLM", {"linear_value_head_dim": 32}, "linear_value_head_dim: '32' differs"),
        ("Lfm2MoeForCausalLM", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("HunYuanMoEV1ForCausalLM", {"moe_topk": [1, 2]}, r"moe_topk: '\[1, 2\]' differs by layer"),
        ("Llama4ForCausalLM", {"attention_chunk_size": 64}, "attention_chunk_size: '64' is not 8192"),
        ("Llama4ForCausalLM", {"use_qk_norm": False}, "use_qk_norm"),
        ("Llama4ForCausalLM", {"moe_layers": [0, 2]}, "moe_layers"),
        ("Ministral3ForCausalLM", {"sliding_window": 64}, "sliding_window: '64'"),
        ("ApertusForCausalLM", {"hidden_act": "silu"}, "hidden_act"),
        ("MiniCPMForCausalLM", {"sparse_config": {"kernel_size": 32}}, "sparse_config"),
        ("MiniCPMForCausalLM", {"rope_scaling": {"rope_type": "longrope"}}, "rope_type: 'longrope' is not known"),
        ("InternLM3ForCausalLM", {"rope_scaling": {"rope_type": "cubic"}}, "rope_type: 'cubic'"),
        ("Gemma4ForCausalLM", {"layer_types": ["full_attention"] * 5 + ["sliding_attention"]}, "layer_types"),
        ("Gemma4ForCausalLM", {"per_layer_config": {"2": {"head_dim": 32}}}, "per_layer_config"),
        ("Gemma4ForCausalLM", {"enable_moe_block": False}, r"blk\.0\.ffn_down_exps\.weight': is no tensor"),
        ("Gemma4ForConditionalGeneration", {"text_config": CLASSES["Gemma4ForConditionalGeneration"]["config"][
            "text_config"] | {"attention_k_eq_v": True}}, r"blk\.2\.attn_v\.weight': is no tensor"),
        ("Gemma4ForConditionalGeneration", {"text_config": CLASSES["Gemma4ForConditionalGeneration"]["config"][
            "text_config"] | {"num_kv_shared_layers": 2}}, "num_kv_shared_layers: '2' follow layers"),
        ("Gemma4ForConditionalGeneration", {"text_config": CLASSES["Gemma4ForConditionalGeneration"]["config"][
            "text_config"] | {"vocab_size_per_layer_input": 60}}, "vocab_size_per_layer_input: '60' differs"),
        ("Gemma3nForCausalLM", {"num_kv_shared_layers": 2}, "num_kv_shared_layers: '2' leaves other than 20 layers"),
        ("Gemma3nForCausalLM", {"activation_sparsity_pattern": [0.95] * 21}, "activation_sparsity_pattern"),
        ("Gemma3nForCausalLM", {"final_logit_softcapping": 20.0}, "final_logit_softcapping"),
        ("Gemma3nForCausalLM", {"intermediate_size": [96] * 20 + [192]}, "intermediate_size: .* differs by layer"),
    ],
)  # fmt: skip
def test_values_that_the_file_cannot_express_are_refused(name, change, message, tmp_path: Path):
    with pytest.raises(CheckpointError, match=message):
        converted(folder(tmp_path / "m", name, **change), tmp_path / "y.gguf")
    assert not (tmp_path / "y.gguf").exists()


def test_tensors_of_gemma_3n(tmp_path):
    """Streams are stacked, tokens without embeddings get rows of zeros, and so do shared keys, which nobody reads."""
    name = "Gemma3nForCausalLM"
    stored = tensors_of(name)
    tensors, _ = converted(folder(tmp_path / "m", name), tmp_path / "y.gguf")
    for new, old in (("altup_proj", "altup_projections"), ("altup_unembd_proj", "altup_unembed_projections")):
        parts = [stored[f"model.{old}.{i}.weight"] for i in range(3)]
        assert_array_equal(tensors[f"{new}.weight"], np.stack(parts).astype(np.float32))
    embeddings = stored["model.embed_tokens_per_layer.weight"].astype(np.float32)
    assert_array_equal(tensors["per_layer_token_embd.weight"], np.pad(embeddings, [(0, 4), (0, 0)]))
    assert "model.layers.20.self_attn.k_proj.weight" not in stored
    assert not tensors["blk.20.attn_k.weight"].any()
    extra = {"model.layers.20.self_attn.k_proj.weight": np.ones((32, 64), np.float16)}
    tensors, _ = converted(folder(tmp_path / "m", name, stored | extra), tmp_path / "y.gguf")
    assert tensors["blk.20.attn_k.weight"].all()


def test_the_text_part_of_gemma_3n_that_sees_and_hears(tmp_path):
    text = "Gemma3nForCausalLM"
    path = folder(tmp_path / "text", text)
    values = CLASSES[text]["config"]
    config = {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": values}
    stored = {key.replace("model.", "model.language_model.", 1): w for key, w in tensors_of(text).items()}
    others = ("vision_tower.timm_model.conv.weight", "audio_tower.conformer.0.weight", "embed_audio.embedding.weight")
    stored |= {f"model.{key}": np.ones((2, 2), np.float16) for key in others}
    seeing = folder(tmp_path / "seeing", text, stored, **(dict.fromkeys(values) | config))
    tensors, metadata = converted(seeing, tmp_path / "y.gguf")
    expected_tensors, expected = converted(path, tmp_path / "y.gguf")
    assert digest(tensors) == digest(expected_tensors)
    assert json.dumps(plain(metadata)) == json.dumps(plain(expected))


def test_factors_of_gemma_4(tmp_path):
    """A quarter of the pairs of a head of 32 is rotated where attention is full; scales of experts stay."""
    name = "Gemma4ForCausalLM"
    tensors, _ = converted(folder(tmp_path / "m", name), tmp_path / "y.gguf")
    assert_array_equal(tensors["rope_freqs.weight"], np.float32([1.0] * 4 + [1e30] * 12))
    rope = CLASSES[name]["config"]["rope_parameters"]
    scaled = {**rope, "full_attention": {**rope["full_attention"], "factor": 8.0}}
    stretched, _ = converted(folder(tmp_path / "m", name, rope_parameters=scaled), tmp_path / "y.gguf")
    assert_array_equal(stretched["rope_freqs.weight"], np.float32([8.0] * 4 + [1e30] * 12))
    for new, old in (("ffn_gate_inp.scale", "router.scale"), ("ffn_down_exps.scale", "router.per_expert_scale")):
        assert_array_equal(tensors[f"blk.3.{new}"], weights(name, f"model.layers.3.{old}"))


def test_the_base_of_hunyuan_is_scaled(tmp_path):
    rope = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10000.0}
    path = folder(tmp_path / "m", "HunYuanDenseV1ForCausalLM", rope_parameters=rope)
    _, metadata = converted(path, tmp_path / "y.gguf")
    assert metadata["hunyuan-dense.rope.freq_base"] == np.float32(10000.0 * 1000.0 ** (16 / 14))
    assert "hunyuan-dense.rope.scaling.type" not in metadata

"""A .gguf model becomes a Hugging Face folder: the tensors of the folder that it came from, and a config for them."""

from __future__ import annotations

import json
import re
from contextlib import suppress

import class_folders
import numpy as np
import pytest
from files import model, safetensors
from helpers import normal
from hf_folders import FOLDERS, LLAMA3, D, E, F, G, H, folder, tensors_of
from ml_dtypes import bfloat16

import qgemm
from qgemm.converter.gguf_to_folder import INVERSES
from qgemm.errors import CheckpointError, QgemmError

CLASSES = sorted({inverse.name for classes in INVERSES.values() for inverse in classes})
DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": bfloat16}


def there_and_back(path, source, kind="f16"):
    """The file that a folder becomes, and the folder that the file becomes."""
    qgemm.convert(source, path / "m.gguf", kind)
    done = qgemm.convert(path / "m.gguf", path / "back", kind, layout="huggingface")
    assert any("has no tokenizer" in note for note in done.notes)
    return path / "back"


def assert_same_tensors(folder, other):
    with qgemm.load(folder) as a, qgemm.load(other) as b:
        assert set(a) == set(b)
        for name in a:
            assert (a[name].format, a[name].shape) == (b[name].format, b[name].shape)
            assert a[name].blocks.tobytes() == b[name].blocks.tobytes(), name


def keys_of(path):
    with qgemm.open(path) as file:
        return {key: np.asarray(value).tolist() for key, value in file.metadata.items() if key != "general.name"}


def source_of(path, name, kind="f32"):
    """A folder of a class with random tensors."""
    folder_of, tensors = (folder, tensors_of(name)) if name in FOLDERS else (
        class_folders.folder, class_folders.tensors_of(name)
    )  # fmt: skip
    return folder_of(path, name, {key: w.astype(DTYPES[kind]) for key, w in tensors.items()})


@pytest.mark.parametrize("name", CLASSES)
def test_there_and_back(name, tmp_path):
    """Tensors have the same bytes, and the folder becomes the same file."""
    source = source_of(tmp_path / "m", name)
    back = there_and_back(tmp_path, source, "f32")
    assert_same_tensors(source, back)
    assert sorted(path.name for path in back.iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((back / "config.json").read_text())
    assert config["architectures"] == [name]
    qgemm.convert(back, tmp_path / "again.gguf", "f32")
    assert keys_of(tmp_path / "again.gguf") == keys_of(tmp_path / "m.gguf")
    assert (tmp_path / "again.gguf").read_bytes()[-4096:] == (tmp_path / "m.gguf").read_bytes()[-4096:]


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma3ForCausalLM", "GraniteMoeForCausalLM", "GPT2LMHeadModel"])
def test_there_and_back_in_16_bits(name, kind, tmp_path):
    source = source_of(tmp_path / "m", name, kind)
    back = there_and_back(tmp_path, source, kind)
    assert_same_tensors(source, back)
    assert json.loads((back / "config.json").read_text())["dtype"] == np.dtype(DTYPES[kind]).name


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("LlamaForCausalLM", {"rope_scaling": None}),
        ("LlamaForCausalLM", {"rope_scaling": {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192}}),
        ("LlamaForCausalLM", {"rope_scaling": {**LLAMA3, "factor": 16.0, "high_freq_factor": 1.0,
                                               "original_max_position_embeddings": 8192}}),
        ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
        ("Qwen2ForCausalLM", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                                               "original_max_position_embeddings": 128}}),
        ("Qwen3ForCausalLM", {"tie_word_embeddings": True, "rope_theta": 1e6, "rms_norm_eps": 1e-6}),
        ("Phi3ForCausalLM", {"rope_scaling": None, "partial_rotary_factor": 0.5, "sliding_window": None}),
    ],
)  # fmt: skip
def test_settings_come_back(name, config, tmp_path):
    tensors = tensors_of(name)
    if config.get("tie_word_embeddings"):
        del tensors["lm_head.weight"]
    source = folder(tmp_path / "m", name, tensors, **config)
    back = there_and_back(tmp_path, source)
    assert_same_tensors(source, back)
    written = json.loads((back / "config.json").read_text())
    for key, value in config.items():
        assert written.get(key) == value, key
    qgemm.convert(back, tmp_path / "again.gguf", "f16")
    assert keys_of(tmp_path / "again.gguf") == keys_of(tmp_path / "m.gguf")


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias"])
def test_biases_of_llama_come_back(key, tmp_path):
    rows = {"self_attn.q_proj": H * D, "self_attn.k_proj": G * D, "self_attn.v_proj": G * D, "self_attn.o_proj": E}
    if key == "mlp_bias":
        rows = {"mlp.gate_proj": F, "mlp.up_proj": F, "mlp.down_proj": E}
    biases = {
        f"model.layers.{i}.{module}.bias": normal(n).astype(np.float16) for i in range(2) for module, n in rows.items()
    }
    source = folder(tmp_path / "m", "LlamaForCausalLM", {**tensors_of("LlamaForCausalLM"), **biases}, **{key: True})
    back = there_and_back(tmp_path, source)
    assert_same_tensors(source, back)
    assert json.loads((back / "config.json").read_text())[key] is True
    qgemm.convert(tmp_path / "m.gguf", tmp_path / "less.gguf", "f16", drop=[r"blk\.1\.(attn_q|ffn_gate)\.bias"])
    with pytest.raises(CheckpointError, match=r"bias': is (not the one that a Llama|missing, and attention_bias)"):
        qgemm.convert(tmp_path / "less.gguf", tmp_path / "other", "f16", layout="huggingface")


def test_quantized_tensors_are_decoded(run, tmp_path):
    source = folder(tmp_path / "m", "LlamaForCausalLM")
    qgemm.convert(source, tmp_path / "m.gguf", "q8_0")
    assert run("convert", tmp_path / "m.gguf", tmp_path / "back", "f32", "--layout", "huggingface")[0] == 0
    name = "model.layers.0.self_attn.v_proj.weight"  # its rows keep their order
    with qgemm.open(tmp_path / "m.gguf") as file, qgemm.load(tmp_path / "back") as back:
        np.testing.assert_array_equal(back[name].dequantize(), file["blk.0.attn_v.weight"].dequantize())
    with pytest.raises(QgemmError, match="exists"):
        qgemm.convert(tmp_path / "m.gguf", tmp_path / "back", "f32", layout="huggingface")


def test_quantized_experts_are_decoded_one_by_one(tmp_path):
    source = source_of(tmp_path / "m", "Qwen2MoeForCausalLM")
    qgemm.convert(source, tmp_path / "m.gguf", "q8_0")
    qgemm.convert(tmp_path / "m.gguf", tmp_path / "back", "f32", layout="huggingface")
    with qgemm.open(tmp_path / "m.gguf") as file, qgemm.load(tmp_path / "back") as back:
        for part in ("gate", "up", "down"):
            experts = file[f"blk.1.ffn_{part}_exps.weight"].dequantize()
            for i, expert in enumerate(experts):
                name = f"model.layers.1.mlp.experts.{i}.{part}_proj.weight"
                np.testing.assert_array_equal(back[name].dequantize(), expert)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    source = source_of(tmp_path / "m", "Glm4MoeForCausalLM")
    qgemm.convert(source, tmp_path / "m.gguf", "f32")
    with qgemm.open(tmp_path / "m.gguf", copy=True) as file:
        tensors = {name: tensor.dequantize() for name, tensor in file.items()}
        metadata = dict(file.metadata)
    metadata |= {"glm4moe.block_count": np.uint32(3), "glm4moe.nextn_predict_layers": np.uint32(1)}
    tensors |= {"blk.2.nextn.eh_proj.weight": normal(64, 128), "blk.2.attn_norm.weight": normal(64)}
    model(tmp_path / "further.gguf", tensors, metadata)
    done = qgemm.convert(tmp_path / "further.gguf", tmp_path / "back", "f32", layout="huggingface")
    assert_same_tensors(source, tmp_path / "back")
    assert any("predict further tokens: blk.2" in note for note in done.notes)


def test_keys_of_llama_cpps_own_converter(tmp_path):
    """It writes one group of experts, both epsilons of Nemotron, no head size of GLM, and a matrix of one row."""
    for name, values in (
        ("Dots1ForCausalLM", {"dots1.expert_group_count": 1, "dots1.expert_group_used_count": 1}),
        ("NemotronForCausalLM", {"nemotron.attention.layer_norm_rms_epsilon": np.float32(1e-5)}),
        ("GlmForCausalLM", {"chatglm.attention.key_length": None, "chatglm.attention.value_length": None}),
        ("Qwen2MoeForCausalLM", {}),
    ):
        source = source_of(tmp_path / name, name)
        qgemm.convert(source, tmp_path / "m.gguf", "f32", force=True)
        with qgemm.open(tmp_path / "m.gguf", copy=True) as file:
            tensors = {key: tensor.dequantize() for key, tensor in file.items()}
            metadata = {key: value for key, value in file.metadata.items() if values.get(key, value) is not None}
        tensors = {key: w[None] if key.endswith("inp_shexp.weight") else w for key, w in tensors.items()}
        model(tmp_path / "x.gguf", tensors, {**metadata, **{key: v for key, v in values.items() if v is not None}})
        qgemm.convert(tmp_path / "x.gguf", tmp_path / f"{name}-back", "f32", layout="huggingface")
        assert_same_tensors(source, tmp_path / f"{name}-back")


def test_a_part_of_a_fused_tensor_is_missing(tmp_path):
    qgemm.convert(source_of(tmp_path / "m", "GraniteMoeForCausalLM"), tmp_path / "m.gguf", "f16")
    qgemm.convert(tmp_path / "m.gguf", tmp_path / "part.gguf", "f16", drop=[r"blk\.1\.ffn_up_exps"])
    with pytest.raises(
        CheckpointError, match=r"ffn_gate_exps\.weight': is no part of model\.layers\.1\.block_sparse_moe"
    ):
        qgemm.convert(tmp_path / "part.gguf", tmp_path / "back", "f16", layout="huggingface")


@pytest.mark.parametrize(
    ("name", "tensor", "shape", "rule"),
    [
        ("Qwen2MoeForCausalLM", "blk.1.ffn_gate_exps.weight", (64,), r"has shape \(64,\), where 3 axes are needed"),
        ("GptOssForCausalLM", "blk.1.ffn_up_exps.weight", (64,), r"has shape \(64,\), where 2 or 3 axes are needed"),
        ("GptOssForCausalLM", "blk.1.ffn_up_exps.weight", (2, 96, 64), "does not fit the other parts of"),
        ("DeepseekV3ForCausalLM", "blk.1.attn_k_b.weight", (64,), r"has shape \(64,\), where 2 or 3 axes are needed"),
        ("DeepseekV3ForCausalLM", "blk.1.attn_k_b.weight", (4, 32, 8), "is no part|has 128 rows"),
        ("GPT2LMHeadModel", "blk.1.attn_qkv.weight", (64,), "where 2 axes are needed"),
        ("BloomForCausalLM", "blk.1.attn_qkv.weight", (191, 64), "has 191 rows, not 4 groups of 3 heads"),
        ("LlamaForCausalLM", "blk.1.attn_q.weight", (63, 64), "has 63 rows, not 4 heads of pairs"),
    ],
)
def test_tensors_of_other_shapes(name, tensor, shape, rule, tmp_path):
    qgemm.convert(source_of(tmp_path / "m", name), tmp_path / "m.gguf", "f32")
    with qgemm.open(tmp_path / "m.gguf", copy=True) as file:
        tensors = {key: values.dequantize() for key, values in file.items()}
        model(tmp_path / "x.gguf", {**tensors, tensor: normal(*shape)}, dict(file.metadata))
    with pytest.raises(CheckpointError, match=rule):
        qgemm.convert(tmp_path / "x.gguf", tmp_path / "back", "f32", layout="huggingface")


@pytest.mark.parametrize("key", ["block_count", "nextn_predict_layers", "attention.head_count", "expert_count",
                                 "rope.dimension_count", "attention.key_length_mla"])  # fmt: skip
@pytest.mark.parametrize("value", [0, -1, 2**32 - 1, 1.5, float("inf"), float("nan"), "x", [1, 2], True])
@pytest.mark.parametrize("name", ["DeepseekV3ForCausalLM", "Exaone4ForCausalLM"])
def test_keys_of_any_value_are_refused(name, key, value, files, tmp_path):
    """The file may be refused or, where the value fits, become a folder; no other error is raised."""
    path = tmp_path / "x.gguf"
    path.write_bytes(files[name])
    architecture = {"DeepseekV3ForCausalLM": "deepseek2", "Exaone4ForCausalLM": "exaone4"}[name]
    with suppress(QgemmError):
        qgemm.set_metadata(path, {f"{architecture}.{key}": value})
        qgemm.convert(path, tmp_path / "back", "f32", layout="huggingface")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The .gguf files of two classes."""
    path = tmp_path_factory.mktemp("files")
    names = "DeepseekV3ForCausalLM", "Exaone4ForCausalLM"
    for name in names:
        qgemm.convert(source_of(path / name, name), path / f"{name}.gguf", "f32")
    return {name: (path / f"{name}.gguf").read_bytes() for name in names}


def test_chat_template(tmp_path):
    qgemm.convert(folder(tmp_path / "m", "Qwen3ForCausalLM"), tmp_path / "m.gguf", "f16")
    qgemm.set_metadata(tmp_path / "m.gguf", {"tokenizer.chat_template": "{{ x }}", "tokenizer.ggml.eos_token_id": 7})
    qgemm.convert(tmp_path / "m.gguf", tmp_path / "back", "f16", layout="huggingface")
    assert (tmp_path / "back" / "chat_template.jinja").read_text() == "{{ x }}"
    assert json.loads((tmp_path / "back" / "config.json").read_text())["eos_token_id"] == 7


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"qwen3.key_of_2030": 1}, "key 'qwen3.key_of_2030': '1' cannot be expressed"),
        ({"qwen3.attention.value_length": 32}, "key 'qwen3.attention.value_length': '32' cannot be expressed"),
        ({"qwen3.attention.head_count_kv": [2, 1]}, "is no number, as the config needs"),
        ({"qwen3.feed_forward_length": 64}, "has shape"),
        (
            {"general.architecture": "qwen3next"},
            "general.architecture: 'qwen3next' does not become a folder, only llama",
        ),
    ],
)
def test_keys_that_a_config_cannot_express(values, rule, tmp_path):
    qgemm.convert(folder(tmp_path / "m", "Qwen3ForCausalLM"), tmp_path / "m.gguf", "f16")
    qgemm.set_metadata(tmp_path / "m.gguf", values)
    with pytest.raises(CheckpointError, match=re.escape(rule)):
        qgemm.convert(tmp_path / "m.gguf", tmp_path / "back", "f16", layout="huggingface")
    assert not (tmp_path / "back").exists()


def test_tensors_that_a_class_does_not_have(tmp_path):
    qgemm.convert(folder(tmp_path / "m", "LlamaForCausalLM"), tmp_path / "m.gguf", "f16")
    with qgemm.open(tmp_path / "m.gguf", copy=True) as file:
        tensors = {name: tensor.dequantize() for name, tensor in file.items()}
        metadata = dict(file.metadata)
    for name, rule in (("rope_freqs.weight", "no factors"), ("blk.0.attn_sinks.weight", "no place in a Llama")):
        model(tmp_path / "x.gguf", {**tensors, name: normal(D // 2)}, metadata)
        with pytest.raises(CheckpointError, match=rule):
            qgemm.convert(tmp_path / "x.gguf", tmp_path / "back", "f16", layout="huggingface")


def test_what_becomes_no_folder(refused, tmp_path):
    safetensors(tmp_path / "x.safetensors", {"w": normal(2, 32)})
    words = "convert", tmp_path / "x.safetensors", tmp_path / "back"
    assert "is no .gguf file" in refused(*words, "f16", "--layout", "huggingface")
    assert "has tensors of f32, f16, bf16, not of Q8_0" in refused(*words, "q8_0", "--layout", "huggingface", status=2)


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("embedding_length", np.uint64(2**40), "hidden_size"),
        ("embedding_length", np.float32("nan"), "hidden_size"),
        ("rope.freq_base", np.float32(-1), "rope_theta"),
    ],
)
def test_values_beyond_the_range_of_a_config(key, value, name, tmp_path):
    """They are refused before rotary factors are computed, for Llama 3.1's among others."""
    qgemm.convert(folder(tmp_path / "m", "LlamaForCausalLM"), tmp_path / "m.gguf", "f16")
    qgemm.set_metadata(tmp_path / "m.gguf", {f"llama.{key}": value})
    with pytest.raises(CheckpointError, match=rf"{name}: .* is no (count|number)"):
        qgemm.convert(tmp_path / "m.gguf", tmp_path / "x", "f16", layout="huggingface")

"""A Hugging Face folder becomes a .gguf model: names, shapes, keys of each architecture, the layout of its tensors."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from class_folders import CLASSES
from files import safetensors
from gguf.tensor_mapping import TensorNameMap
from hf_folders import ENDS, FOLDERS, LAYERS, D, E, F, G, H, M, V, X, folder, tensors_of
from numpy.testing import assert_array_equal

import qgemm
from qgemm.errors import CheckpointError

ATTENTION = {
    "attn_norm.weight": (E,), "attn_q.weight": (H * D, E), "attn_k.weight": (G * D, E), "attn_v.weight": (G * D, E),
    "attn_output.weight": (E, H * D), "ffn_norm.weight": (E,),
}  # fmt: skip
BIASES = {"attn_q.bias": (H * D,), "attn_k.bias": (G * D,), "attn_v.bias": (G * D,)}
HEAD_NORMS = {"attn_q_norm.weight": (D,), "attn_k_norm.weight": (D,)}
ROW_NORMS = {"attn_q_norm.weight": (H * D,), "attn_k_norm.weight": (G * D,)}
POST_NORMS = {"post_attention_norm.weight": (E,), "post_ffw_norm.weight": (E,)}
DENSE = {"ffn_gate.weight": (F, E), "ffn_up.weight": (F, E), "ffn_down.weight": (E, F)}


def experts(m: int) -> dict[str, tuple[int, ...]]:
    return {
        "ffn_gate_inp.weight": (X, E), "ffn_gate_exps.weight": (X, m, E), "ffn_up_exps.weight": (X, m, E),
        "ffn_down_exps.weight": (X, E, m),
    }  # fmt: skip


# What llama.cpp's loader asks for: the architecture's name, tensors of a layer, keys besides those of all.
WANTED = {
    "LlamaForCausalLM": ("llama", {**ATTENTION, **DENSE}, {"vocab_size": V, "rope.dimension_count": D}),
    "MistralForCausalLM": ("llama", {**ATTENTION, **DENSE}, {"attention.key_length": D, "rope.dimension_count": D}),
    "MixtralForCausalLM": ("llama", {**ATTENTION, **experts(F)}, {"expert_count": X, "expert_used_count": 2}),
    "Qwen2ForCausalLM": ("qwen2", {**ATTENTION, **BIASES, **DENSE}, {}),
    "Qwen3ForCausalLM": ("qwen3", {**ATTENTION, **HEAD_NORMS, **DENSE}, {"attention.key_length": D}),
    "Qwen3MoeForCausalLM": (
        "qwen3moe",
        {**ATTENTION, **HEAD_NORMS, **experts(M)},
        {"expert_count": X, "expert_used_count": 2, "expert_feed_forward_length": M, "attention.value_length": D},
    ),
    "Gemma3ForCausalLM": (
        "gemma3",
        {**ATTENTION, **HEAD_NORMS, **DENSE, "post_attention_norm.weight": (E,), "post_ffw_norm.weight": (E,)},
        {"attention.sliding_window": 64, "attention.key_length": D, "rope.freq_base_swa": 5000.0},
    ),
    "GemmaForCausalLM": ("gemma", {**ATTENTION, **DENSE}, {"attention.key_length": D}),
    "Gemma2ForCausalLM": (
        "gemma2",
        {**ATTENTION, **DENSE, **POST_NORMS},
        {"attention.sliding_window": 64, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 20.0},
    ),
    "GraniteForCausalLM": (
        "granite",
        {**ATTENTION, **DENSE},
        {"attention.scale": 0.125, "embedding_scale": 12.0, "residual_scale": 1.0, "logit_scale": 8.0},
    ),
    "Olmo2ForCausalLM": (
        "olmo2",
        {
            **{name: shape for name, shape in ATTENTION.items() if "norm" not in name}, **POST_NORMS, **DENSE,
            **ROW_NORMS,
        },
        {},
    ),
    "OlmoeForCausalLM": (
        "olmoe",
        {**ATTENTION, **ROW_NORMS, **experts(M)},
        {"expert_count": X, "expert_used_count": 2, "feed_forward_length": M},
    ),
    "SeedOssForCausalLM": (
        "seed_oss",
        {
            **{name: shape for name, shape in ATTENTION.items() if name != "ffn_norm.weight"}, **BIASES, **DENSE,
            "post_attention_norm.weight": (E,),
        },
        {"attention.key_length": D},
    ),
    "Phi3ForCausalLM": (
        "phi3",
        {
            "attn_norm.weight": (E,), "attn_qkv.weight": ((H + 2 * G) * D, E), "attn_output.weight": (E, H * D),
            "ffn_norm.weight": (E,), "ffn_up.weight": (2 * F, E), "ffn_down.weight": (E, F),
        },
        {
            "rope.dimension_count": D, "rope.scaling.original_context_length": 128, "attention.sliding_window": 64,
            "rope.scaling.attn_factor": np.float32(np.sqrt(1 + np.log(4) / np.log(128))),
        },
    ),
    "GptOssForCausalLM": (
        "gpt-oss",
        {
            **{name: shape for name, shape in ATTENTION.items() if name != "ffn_norm.weight"}, **BIASES, **experts(F),
            "attn_output.bias": (E,), "attn_sinks.weight": (H,), "post_attention_norm.weight": (E,),
            "ffn_gate_inp.bias": (X,), "ffn_gate_exps.bias": (X, F), "ffn_up_exps.bias": (X, F),
            "ffn_down_exps.bias": (X, E),
        },
        {
            "expert_count": X, "expert_used_count": 2, "expert_feed_forward_length": F, "attention.sliding_window": 128,
            "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 64,
            "rope.scaling.yarn_beta_fast": 24.0, "rope.scaling.yarn_beta_slow": 1.5,
            "rope.scaling.yarn_attn_factor": 0.75, "rope.scaling.yarn_ext_factor": 0.5,
        },
    ),
}  # fmt: skip
OF_ALL = {
    "context_length": 512, "embedding_length": E, "block_count": LAYERS, "feed_forward_length": F,
    "attention.head_count": H, "attention.head_count_kv": G, "attention.layer_norm_rms_epsilon": np.float32(1e-5),
    "rope.freq_base": 10000.0,
}  # fmt: skip
FACTORS = {"LlamaForCausalLM": ["rope_freqs"], "Phi3ForCausalLM": ["rope_factors_long", "rope_factors_short"]}
KEPT = r"norm|ffn_gate_inp|bias|sinks|rope_"


def converted(path, tmp_path, kind="f16", **options):
    """The tensors and keys of the file that a folder becomes."""
    done = qgemm.convert(path, tmp_path / "y.gguf", kind, force=True, **options)
    with qgemm.open(tmp_path / "y.gguf", copy=True) as file:
        tensors = {name: tensor.dequantize() for name, tensor in file.items()}
        types = {name: tensor.format.name for name, tensor in file.items()}
        return tensors, types, dict(file.metadata), done


SEEING = {"Gemma3ForConditionalGeneration", "Gemma3nForConditionalGeneration"}  # tested by their text parts


def test_every_architecture_is_tested():
    from qgemm.converter.architectures import ARCHITECTURES

    assert set(WANTED) == set(FOLDERS) == set(ARCHITECTURES) - set(CLASSES) - SEEING


@pytest.mark.parametrize("architecture", WANTED)
def test_names_shapes_and_keys(architecture, tmp_path):
    name, layer, keys = WANTED[architecture]
    tensors, types, metadata, _ = converted(folder(tmp_path / "m", architecture), tmp_path)
    want = {"token_embd.weight": (V, E), "output_norm.weight": (E,)}
    want |= {f"{factors}.weight": (D // 2,) for factors in FACTORS.get(architecture, [])}
    want |= {} if architecture.startswith("Gemma") else {"output.weight": (V, E)}
    want |= {f"blk.{i}.{part}": shape for i in range(LAYERS) for part, shape in layer.items()}
    assert {name: w.shape for name, w in tensors.items()} == want
    assert metadata["general.architecture"] == name
    assert (metadata["general.type"], metadata["general.name"], metadata["general.file_type"]) == ("model", "m", 1)
    model_keys = {key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")}
    assert {key: model_keys.get(key) for key in {**OF_ALL, **keys}} == {**OF_ALL, **keys}
    assert metadata["tokenizer.ggml.model"] == "none"
    for tensor, kind in types.items():  # weights of products, and tensors that llama.cpp reads as float32
        assert kind == ("f16" if tensor.endswith("weight") and not any(w in tensor for w in KEPT.split("|")) else "f32")


def halves_beside_each_other(w: np.ndarray, heads: int) -> np.ndarray:
    """Row i of the first and of the second half of each head, in turn."""
    reordered = np.empty_like(w)
    rows = len(w) // heads
    for head in range(heads):
        for i in range(rows // 2):
            reordered[head * rows + 2 * i] = w[head * rows + i]
            reordered[head * rows + 2 * i + 1] = w[head * rows + rows // 2 + i]
    return reordered


@pytest.mark.parametrize(("architecture", "moved"), [("LlamaForCausalLM", True), ("Qwen2ForCausalLM", False)])
def test_rotary_rows(architecture, moved, tmp_path):
    source = tensors_of(architecture)
    tensors, *_ = converted(folder(tmp_path / "m", architecture), tmp_path)
    for part, new, heads in (("q_proj", "attn_q", H), ("k_proj", "attn_k", G)):
        w = source[f"model.layers.1.self_attn.{part}.weight"].astype(np.float32)
        assert_array_equal(tensors[f"blk.1.{new}.weight"], halves_beside_each_other(w, heads) if moved else w)
    v = source["model.layers.1.self_attn.v_proj.weight"]
    assert_array_equal(tensors["blk.1.attn_v.weight"], v.astype(np.float32))


def test_norms_of_gemma_are_stored_as_one_less(tmp_path):
    source = tensors_of("Gemma3ForCausalLM")
    tensors, *_ = converted(folder(tmp_path / "m", "Gemma3ForCausalLM"), tmp_path)
    for old, new in (("model.norm", "output_norm"), ("model.layers.0.self_attn.k_norm", "blk.0.attn_k_norm"),
                     ("model.layers.1.post_feedforward_layernorm", "blk.1.post_ffw_norm")):  # fmt: skip
        assert_array_equal(tensors[f"{new}.weight"], source[f"{old}.weight"].astype(np.float32) + np.float32(1))


def test_a_text_model_among_others(tmp_path):
    """Names with a wrapper, hyperparameters in a section; what sees is left out."""
    import json

    source = {f"language_model.{name}": w for name, w in tensors_of("Gemma3ForCausalLM").items()}
    path = folder(tmp_path / "m", "Gemma3ForCausalLM", {**source, "vision_tower.x.weight": np.ones((2, 2), np.float16)})
    config_json = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps(
            {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config_json, "vision_config": {}}
        )
    )
    tensors, _, metadata, _ = converted(path, tmp_path)
    assert "blk.1.ffn_down.weight" in tensors
    assert metadata["gemma3.embedding_length"] == E


@pytest.mark.parametrize("kind", ["q8_0", "q4_k_m"])
def test_experts_are_stacked(kind, tmp_path):
    """Numbered matrices and joined ones give the blocks of the stacked matrix."""
    source = tensors_of("Qwen3MoeForCausalLM")
    path = folder(tmp_path / "m", "Qwen3MoeForCausalLM")
    tensors, types, *_ = converted(path, tmp_path, kind)
    stem = "model.layers.1.mlp.experts"
    w = np.stack([source[f"{stem}.{i}.up_proj.weight"] for i in range(X)]).astype(np.float32)
    fmt = types["blk.1.ffn_up_exps.weight"]
    assert_array_equal(tensors["blk.1.ffn_up_exps.weight"], qgemm.quantize(w, fmt).dequantize())
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: np.stack([source.pop(f"{stem}.{i}.{part}_proj.weight") for i in range(X)])
            for part in ("gate", "up", "down")
        }
        source[f"{stem}.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], 1)
        source[f"{stem}.down_proj"] = parts["down"]
    joined, *_ = converted(folder(tmp_path / "m", "Qwen3MoeForCausalLM", source), tmp_path, kind)
    assert joined.keys() == tensors.keys()
    for name, want in tensors.items():
        assert_array_equal(joined[name], want)


def test_gpt_oss_interleaves_gates_and_ups(tmp_path):
    source = tensors_of("GptOssForCausalLM")
    tensors, *_ = converted(folder(tmp_path / "m", "GptOssForCausalLM"), tmp_path)
    both = source["model.layers.0.mlp.experts.gate_up_proj"].astype(np.float32)
    assert_array_equal(tensors["blk.0.ffn_gate_exps.weight"], both[:, :, ::2].swapaxes(1, 2))
    assert_array_equal(tensors["blk.0.ffn_up_exps.weight"], both[:, :, 1::2].swapaxes(1, 2))
    down = source["model.layers.0.mlp.experts.down_proj"].astype(np.float32)
    assert_array_equal(tensors["blk.0.ffn_down_exps.weight"], down.swapaxes(1, 2))
    bias = source["model.layers.0.mlp.experts.gate_up_proj_bias"].astype(np.float32)
    assert_array_equal(tensors["blk.0.ffn_up_exps.bias"], bias[:, 1::2])


def test_gpt_oss_in_mxfp4_is_copied(tmp_path):
    """Codes and exponents stay, nibbles go to their places: no weight changes."""
    rng = np.random.default_rng(1)
    source, want = tensors_of("GptOssForCausalLM"), {}
    value = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    for layer in range(LAYERS):
        for name, rows, k in (("gate_up_proj", 2 * F, E), ("down_proj", E, F)):
            stem = f"model.layers.{layer}.mlp.experts.{name}"
            del source[stem]
            codes = rng.integers(0, 16, (X, rows, k // 32, 32), np.uint8)
            scales = rng.integers(120, 130, (X, rows, k // 32), np.uint8)
            source[f"{stem}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
            source[f"{stem}_scales"] = scales
            want[layer, name] = (value[codes] * np.exp2(scales.astype(np.float32) - 127)[..., None]).reshape(X, rows, k)
    path = folder(tmp_path / "m", "GptOssForCausalLM", source, quantization_config={"quant_method": "mxfp4"})
    tensors, types, _, done = converted(path, tmp_path, "mxfp4_moe")
    for layer in range(LAYERS):
        assert_array_equal(tensors[f"blk.{layer}.ffn_gate_exps.weight"], want[layer, "gate_up_proj"][:, ::2])
        assert_array_equal(tensors[f"blk.{layer}.ffn_up_exps.weight"], want[layer, "gate_up_proj"][:, 1::2])
        assert_array_equal(tensors[f"blk.{layer}.ffn_down_exps.weight"], want[layer, "down_proj"])
    assert types["blk.0.ffn_down_exps.weight"] == "mxfp4"
    assert {line.how for line in done.lines if "exps.weight" in line.name} == {"exact"}
    del source["model.layers.0.mlp.experts.down_proj_scales"]
    folder(tmp_path / "m", "GptOssForCausalLM", source, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(CheckpointError, match=r"experts\.down_proj': blocks U8 .* and no scales are no MXFP4"):
        converted(path, tmp_path)


def test_long_context_of_llama_3(tmp_path):
    """Short wavelengths stay, those beyond the first context are stretched by the factor, in between by less."""
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}  # fmt: skip
    path = folder(tmp_path / "m", "LlamaForCausalLM", rope_scaling=rope, rope_theta=500000.0)
    factors = converted(path, tmp_path)[0]["rope_freqs.weight"]
    assert factors.dtype == np.float32
    wavelengths = 2 * np.pi * 500000.0 ** (np.arange(D // 2) / (D // 2))
    assert_array_equal(factors[wavelengths < 2048], 1)
    assert_array_equal(factors[wavelengths > 8192], 8)
    between = (wavelengths > 2048) & (wavelengths < 8192)
    smooth = (8192 / wavelengths[between] - 1) / 3
    assert between.any()
    np.testing.assert_allclose(factors[between], 1 / ((1 - smooth) / 8 + smooth), rtol=1e-6)
    rope["high_freq_factor"] = 1.0
    path = folder(tmp_path / "m", "LlamaForCausalLM", rope_scaling=rope, rope_theta=500000.0)
    factors = converted(path, tmp_path)[0]["rope_freqs.weight"]  # without a range between, as in Llama 4
    assert_array_equal(factors, np.where(wavelengths > 8192, 8, 1))


def test_hyperparameters_as_transformers_5_writes_them(tmp_path):
    path = folder(tmp_path / "m", "Qwen2ForCausalLM", rope_theta=None,
                  rope_parameters={"rope_theta": 777.0, "rope_type": "linear", "factor": 4.0})  # fmt: skip
    metadata = converted(path, tmp_path)[2]
    assert (metadata["qwen2.rope.freq_base"], metadata["qwen2.rope.scaling.factor"]) == (777, 4)
    assert metadata["qwen2.rope.scaling.type"] == "linear"


def test_a_tied_output_is_left_out(tmp_path):
    assert "output.weight" in converted(folder(tmp_path / "m", "LlamaForCausalLM"), tmp_path)[0]
    path = folder(tmp_path / "m", "LlamaForCausalLM", tie_word_embeddings=True)
    assert "output.weight" not in converted(path, tmp_path)[0]


def test_mixtures_know_the_model(tmp_path):
    """A file type of llama-quantize chooses by the names and keys that the folder got."""
    _, types, metadata, _ = converted(folder(tmp_path / "m", "MixtralForCausalLM"), tmp_path, "q4_k_m")
    assert metadata["general.file_type"] == 15
    assert (types["output.weight"], types["blk.0.attn_q.weight"]) == ("q8_0", "q5_0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["OtherForCausalLM"]}, "'OtherForCausalLM' is not an architecture that becomes"),
        ({"num_hidden_layers": 3}, "'blk.2.attn_norm.weight': is missing"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers: '1099511627776' is no count"),
        ({"num_hidden_layers": 100}, "num_hidden_layers: '100' is more than the"),
        ({"hidden_size": 128}, r"'token_embd.weight': has shape \(40, 64\), \(40, 128\) by the config"),
        ({"num_key_value_heads": 4}, r"'blk.0.attn_k.weight': has shape"),
        ({"num_attention_heads": 6}, "rows, not 6 heads of pairs"),
        ({"rms_norm_eps": None}, "rms_norm_eps: 'None' is needed"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: 'nan' is no number"),
        ({"rope_scaling": {"rope_type": "ntk"}}, "rope_type: 'ntk' is a scaling of rotary embeddings that"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type: 'longrope' is not known of this architecture"),
        ({"rope_scaling": [1]}, "is no object"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor: 'None' is needed"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_by_name(change, message, tmp_path):
    path = folder(tmp_path / "m", "LlamaForCausalLM", **change)
    with pytest.raises(CheckpointError, match=message):
        converted(path, tmp_path)
    assert not (tmp_path / "y.gguf").exists()


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen3MoeForCausalLM"])
def test_a_name_of_all_layers_and_experts_is_looked_up_once(architecture, tmp_path, monkeypatch):
    """A refusal of a folder with many tensors must not cost a search of the package's map for each of them."""
    looked_up = []
    get_name = TensorNameMap.get_name

    def counted(self, key, *args, **kwargs):
        looked_up.append(key)
        return get_name(self, key, *args, **kwargs)

    monkeypatch.setattr(TensorNameMap, "get_name", counted)
    path = folder(tmp_path / "m", architecture)
    qgemm.convert(path, tmp_path / "y.gguf", "f16")
    assert max(Counter(looked_up).values()) == 1
    assert len(tensors_of(architecture)) > 2 * len(set(looked_up)) > 0


def test_a_tensor_without_a_name_is_refused(tmp_path):
    source = {**tensors_of("LlamaForCausalLM"), "model.layers.0.mlp.other.weight": np.ones((2, 32), np.float16)}
    path = folder(tmp_path / "m", "LlamaForCausalLM", source)
    with pytest.raises(
        CheckpointError, match=r"'model\.layers\.0\.mlp\.other\.weight': has no name in a \.gguf model of llama"
    ):
        converted(path, tmp_path)
    tensors, *_ = converted(folder(tmp_path / "m", "LlamaForCausalLM", source), tmp_path,
                            rename={r"^model\.layers\.0\.mlp\.other": "vision.other"})  # fmt: skip
    assert "blk.0.ffn_up.weight" in tensors
    del source["model.layers.0.mlp.other.weight"], source["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"'blk\.1\.ffn_up\.weight': is missing"):
        converted(folder(path, "LlamaForCausalLM", source), tmp_path)


def test_a_lone_file_keeps_its_names(tmp_path):
    """A source that is a file, or a target that holds only tensors, makes no model."""
    path = folder(tmp_path / "m", "LlamaForCausalLM")
    for src, dst in ((path / "model.safetensors", "y.gguf"), (path, "y.safetensors")):
        done = qgemm.convert(src, tmp_path / dst, "f16")
        assert {line.name for line in done.lines} == set(tensors_of("LlamaForCausalLM"))
    (path / "config.json").write_text("{}")
    done = qgemm.convert(path, tmp_path / "y.gguf", "f16", force=True)
    assert {line.name for line in done.lines} >= set(ENDS)


def test_shards_of_a_folder(tmp_path, run):
    """From the shell, of a folder in two files."""
    path = folder(tmp_path / "m", "LlamaForCausalLM")
    tensors = tensors_of("LlamaForCausalLM")
    (path / "model.safetensors").unlink()
    half = len(tensors) // 2
    for i, names in enumerate((list(tensors)[:half], list(tensors)[half:])):
        safetensors(path / f"model-0000{i + 1}-of-00002.safetensors", {name: tensors[name] for name in names})
    status, out, err = run("convert", path, tmp_path / "y.gguf", "q8_0")
    assert (status, err) == (0, "")
    assert "blk.1.attn_output.weight" in out

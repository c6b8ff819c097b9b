"""save_pretrained and from_pretrained of models of transformers with packed layers; half() and resizing of them."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
from torch_layers import assert_same, torch
from torch_models import INDEX, MIX, SIZES, VOCABULARY, random_model, transformers, write_gguf

import qgemm
import qgemm.torch.transformers as adapter
from qgemm.torch import QEmbedding, QExperts, QLinear, replace_linear
from qgemm.views import Reordered, Scaled

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
AUTO = transformers.AutoModelForCausalLM


def logits(model, index=INDEX):
    with torch.no_grad():
        return model(index).logits


@pytest.fixture(scope="module")
def model(request, tmp_path_factory):
    """A model from a .gguf file."""
    kind, tied = getattr(request, "param", ("llama", True))
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    write_gguf(path, random_model(kind, tied), **MIX)
    with adapter.patch():
        return AUTO.from_pretrained(path.parent, gguf_file=path.name)


each_model = pytest.mark.parametrize(
    "model", [("llama", True), ("llama", False), ("gemma3", True), ("qwen2", False)], ids=str, indirect=True
)


def saved(model, folder: Path, **options):
    """The model that is loaded from the folder of another one."""
    model.save_pretrained(folder, **options)
    loaded, info = AUTO.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    return loaded


# ---------------------------------------------------------------- saved and loaded


@each_model
def test_a_patched_model_is_loaded_as_it_was_saved(model, tmp_path):
    """In one file and in shards, with the packed bytes of the first model, twice in a row; tied weights stay one."""
    for number, options in enumerate(({}, {"max_shard_size": "100KB"})):
        folder = tmp_path / str(number)
        loaded = saved(saved(model, folder, **options), folder / "again")
        assert_same(logits(loaded), logits(model))
        assert len(list(folder.glob("*.safetensors"))) == 1 or options
        for ours, theirs in zip(loaded.modules(), model.modules(), strict=True):
            assert type(ours) is type(theirs)
            assert str(ours) == str(theirs)
        tied = loaded.lm_head.weight is loaded.get_input_embeddings().weight
        assert tied is model.config.tie_word_embeddings
    size = sum(path.stat().st_size for path in (tmp_path / "0").glob("*.safetensors"))
    assert size < 1.3 * sum(parameter.nbytes for parameter in model.parameters())


def test_the_folder_says_how_it_is_read(model, tmp_path):
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "qgemm", "activation": "a16"}
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QLinear)}
    with qgemm.load(tmp_path) as tensors:  # without torch; a tied head is there once
        for name in layers.keys() & {tensor.removesuffix(".weight") for tensor in tensors}:
            assert tensors[f"{name}.weight"].format == layers[name].format
            assert tensors[f"{name}.weight"].blocks.tobytes() == layers[name].packed.blocks.tobytes()
        assert not [name for name in tensors if "_extra_state" in name or tensors[name].format.name == "i16"]


@pytest.mark.parametrize("activation", ["a16", "a8"])
@pytest.mark.parametrize("embeddings", [False, True])
def test_replaced_layers_are_saved(activation, embeddings, tmp_path):
    """Beside dense layers; views of weights, with their order and factors, in 16 bits as well."""
    dense = random_model("qwen2")
    tensors = {}
    for name, parameter in dense.named_parameters():
        if parameter.dim() == 2 and "down" not in name and "lm_head" not in name:
            tensors[name] = qgemm.quantize(parameter.detach().numpy(), "q4_k" if "up" in name else "iq4_nl")
    q, k, o = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qko")
    tensors[q] = Scaled(tensors[q], np.linspace(0.5, 2, 256, dtype=np.float32), True)
    tensors[k] = Scaled(tensors[k], np.float32(1.1))
    tensors[o] = Reordered(tensors[o], np.random.default_rng(0).permutation(256))
    replace_linear(dense, tensors, embeddings=embeddings, activation=activation)
    for dtype in (torch.float32, torch.bfloat16):
        model = copy.deepcopy(dense).to(dtype)
        loaded = saved(model, tmp_path / str(dtype))
        loaded.model.rotary_emb = model.model.rotary_emb  # its frequencies, which no folder holds, were cast
        assert loaded.dtype is dtype
        assert type(loaded.get_input_embeddings()) is (QEmbedding if embeddings else torch.nn.Embedding)
        assert loaded.model.layers[0].self_attn.q_proj.divisor.dtype is torch.float32
        assert loaded.model.layers[1].mlp.gate_proj.activation == activation
        assert_same(logits(loaded), logits(model))


def test_experts_are_saved(tmp_path):
    sizes = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "head_dim": 64}
    torch.manual_seed(0)
    model = AUTO.from_config(transformers.Qwen3MoeConfig(**sizes)).eval()
    tensors = {}
    for number, layer in enumerate(model.model.layers):
        gate, up = layer.mlp.experts.gate_up_proj.detach().chunk(2, 1)
        for part, values in (("gate", gate), ("up", up), ("down", layer.mlp.experts.down_proj.detach())):
            tensors[f"blk.{number}.ffn_{part}_exps.weight"] = qgemm.quantize(values.contiguous().numpy(), "q4_k")
    qgemm.write(tmp_path / "experts.gguf", tensors)
    adapter.replace_experts(model, tmp_path / "experts.gguf")
    loaded = saved(model, tmp_path / "saved", max_shard_size="300KB")
    assert type(loaded.model.layers[1].mlp.experts) is QExperts
    assert_same(logits(loaded), logits(model))


def test_a_base_model_is_loaded_from_the_folder_of_a_head(model, tmp_path):
    """And the other way round: transformers adds and strips the prefix of names."""
    model.save_pretrained(tmp_path / "head")
    base = transformers.AutoModel.from_pretrained(tmp_path / "head")
    assert type(base.layers[0].mlp.up_proj) is QLinear
    with torch.no_grad():
        assert_same(base(INDEX)[0], model.model(INDEX)[0])
    base.save_pretrained(tmp_path / "base")
    assert_same(logits(AUTO.from_pretrained(tmp_path / "base")), logits(model))


@each_model
def test_too_little_memory(model, tmp_path):
    """device_map="auto" offloads to a disk what max_memory does not hold; the model is saved from there."""
    model.save_pretrained(tmp_path / "model")
    options = {"device_map": "auto", "max_memory": {"cpu": "100KB"}, "offload_folder": tmp_path / "offload"}
    loaded = AUTO.from_pretrained(tmp_path / "model", **options)
    assert "disk" in loaded.hf_device_map.values()
    for _ in range(2):
        assert_same(logits(loaded), logits(model))
    assert_same(logits(saved(loaded, tmp_path / "again")), logits(model))


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_needs_no_other_disk(tied, tmp_path):
    """Packed weights lie in the mapped file, where those that exceed the limit stay."""
    write_gguf(tmp_path / "model.gguf", random_model("llama", tied), **MIX)
    with adapter.patch():
        expected = logits(AUTO.from_pretrained(tmp_path, gguf_file="model.gguf"))
        for options in ({"device_map": "auto", "max_memory": {"cpu": "100KB"}}, {"device_map": {"": "disk"}}):
            loaded = AUTO.from_pretrained(tmp_path, gguf_file="model.gguf", **options)
            assert not any(parameter.is_meta for parameter in loaded.parameters())
            assert_same(logits(loaded), expected)


def test_dense_folders_are_not_packed_by_loading(tmp_path):
    random_model("llama").save_pretrained(tmp_path)
    with pytest.raises(qgemm.UnsupportedError, match=r"qgemm convert FOLDER MODEL\.gguf"):
        AUTO.from_pretrained(tmp_path, quantization_config=adapter.PackedConfig())


# ---------------------------------------------------------------- cast and resized


def test_half_casts_activations_biases_and_norms(model, tmp_path):
    for patched in (model, saved(model, tmp_path)):
        half, expected = copy.deepcopy(patched).half(), copy.deepcopy(patched).to(torch.float16)
        assert logits(half).dtype is torch.float16
        assert_same(logits(half), logits(expected))
        assert_same(logits(half.float().to(torch.float64)), logits(expected.to(torch.float64)))


def test_adapters_can_be_trained(model):
    """transformers' Trainer asks the quantizer."""
    assert model.hf_quantizer.is_trainable
    assert model.hf_quantizer.is_serializable()


@each_model
@pytest.mark.parametrize("mean", [False, True])
def test_resized_tables_keep_their_rows(model, mean, tmp_path):
    """More rows, then fewer; the model is saved with them. New rows are near the mean of the old ones, or random."""
    resized = copy.deepcopy(model)
    table = resized.resize_token_embeddings(100, mean_resizing=mean)
    assert table is resized.get_input_embeddings()
    assert (table.num_embeddings, resized.config.vocab_size, resized.lm_head.out_features) == (100, 100, 100)
    assert_same(logits(resized)[..., :VOCABULARY], logits(model))
    old, new = (layer.get_input_embeddings().dequantize() for layer in (model, resized))
    assert_same(new[:VOCABULARY], old)
    if mean:
        assert (new[VOCABULARY:] - old.mean(0)).abs().max() < 0.02 * old.abs().max()
    else:
        assert 0 < new[VOCABULARY:].std() < 2 * model.config.initializer_range
    index = torch.tensor([[99, 3, 97]])
    assert_same(logits(saved(resized, tmp_path), index), logits(resized, index))
    resized.resize_token_embeddings(pad_to_multiple_of=64)
    assert resized.lm_head.out_features == 128
    resized.resize_token_embeddings(VOCABULARY)
    assert_same(logits(resized), logits(model))
    assert resized.resize_token_embeddings() is resized.get_input_embeddings()
    tied = resized.lm_head.weight is resized.get_input_embeddings().weight
    assert tied is model.config.tie_word_embeddings


def test_a_dense_table_beside_a_packed_head():
    """As replace_linear leaves it by default."""
    model = random_model("llama")
    replace_linear(model, {"lm_head.weight": qgemm.quantize(model.lm_head.weight.detach().numpy(), "q8_0")})
    expected = logits(model)
    model.resize_token_embeddings(100)
    assert type(model.get_input_embeddings()) is torch.nn.Embedding
    assert_same(logits(model)[..., :VOCABULARY], expected)
    assert logits(model).shape[-1] == 100


def test_formats_that_need_importances_are_resized():
    """New rows are encoded with equal importances."""
    model, values = random_model("llama"), np.random.default_rng(0).standard_normal((VOCABULARY, 256), np.float32)
    table = qgemm.quantize(values, "iq2_xs", imatrix=np.ones(256))
    replace_linear(model, {"model.embed_tokens.weight": table}, embeddings=True)
    expected = logits(model)
    model.resize_token_embeddings(100)
    assert_same(logits(model)[..., :VOCABULARY], expected)


def test_views_are_not_resized():
    model = random_model("llama")
    head = Scaled(qgemm.quantize(model.lm_head.weight.detach().numpy(), "q8_0"), np.float32(2))
    replace_linear(model, {"lm_head.weight": head})
    with pytest.raises(qgemm.UnsupportedError, match=r"QLinear.*scaled or reordered weights"):
        model.resize_token_embeddings(100)

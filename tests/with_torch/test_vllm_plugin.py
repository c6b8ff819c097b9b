"""The plugin of vLLM over stand-ins: its registration, its choice of methods, its loader."""

from __future__ import annotations

import importlib
import json
import logging
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import vllm_like
from engine_layers import linear
from torch_layers import torch, weights
from vllm_like import CONFIG, RANKS

import qgemm
from qgemm.cli.weights import random_blocks
from qgemm.errors import QgemmError, UnsupportedError
from qgemm.files.gguf.writer import write
from qgemm.formats import GGML_TYPES


@pytest.fixture
def plugin(methods):
    module = importlib.import_module("qgemm.vllm.plugin")
    yield module
    module.patched.undo()


@pytest.mark.parametrize("order", ["qgemm first", "qgemm last"])
def test_the_order_of_plugins_does_not_matter(plugin, order):
    import qgemm.vllm

    calls = [qgemm.vllm.register, vllm_like.register]
    for register in calls if order == "qgemm first" else calls[::-1]:
        register()
    qgemm.vllm.register()
    assert vllm_like.REGISTERED["gguf"].__name__ == "PackedModelLoader"
    assert vllm_like.REGISTERED["config"].get_quant_method is plugin.quant_method


def test_files_of_types_that_the_package_gguf_lacks_are_read(plugin, tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "x.gguf"
    formats = {number: fmt for number, fmt in GGML_TYPES.items() if fmt.levels is not None}
    tensors = {
        fmt.name: qgemm.Tensor(fmt, (4, 256), random_blocks(fmt, 4, 256, rng)) for fmt in formats.values()
    }  # fmt: skip
    write(path, tensors, {"general.architecture": "llama"})
    with pytest.raises(ValueError, match="is not a valid GGMLQuantizationType"):
        gguf.GGUFReader(path)
    plugin.install()
    read = gguf.GGUFReader(path).tensors
    assert len(read) == len(formats)
    for tensor in read:
        fmt = formats[torch.tensor(tensor.tensor_type).item()]
        assert (fmt.name, fmt.name.upper()) == (tensor.name, tensor.tensor_type.name)
        assert tensor.data.tobytes() == tensors[fmt.name].blocks.tobytes()
    plugin.patched.undo()
    assert gguf.gguf_reader.GGMLQuantizationType is gguf.GGMLQuantizationType


def test_a_variable_turns_the_plugin_off(plugin, monkeypatch):
    import qgemm.vllm

    monkeypatch.setenv("QGEMM_VLLM", "off")
    with pytest.raises(ValueError, match="QGEMM_VLLM is 'off', and must be 0"):
        qgemm.vllm.register()
    monkeypatch.setenv("QGEMM_VLLM", "0")
    qgemm.vllm.register()
    assert not vllm_like.REGISTERED


def test_each_layer_gets_its_method(plugin, methods):
    config = vllm_like.GGUFConfig(["layers.0.mlp.gate", "layers.0.self_attn.v_proj", "layers.1.self_attn.q_proj"])
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    config.unquantized_modules += [f"layers.2.self_attn.{part}_proj" for part in "qkv"]

    def method(layer, prefix):
        return plugin.quant_method(config, layer, prefix)

    linear = vllm_like.LinearBase("qkv")
    assert type(method(linear, "layers.0.self_attn.qkv_proj")) is methods.PackedLinearMethod
    assert method(linear, "layers.0.self_attn.qkv_proj").floats
    assert not method(linear, "layers.3.self_attn.qkv_proj").floats
    assert type(method(linear, "layers.2.self_attn.qkv_proj")).__name__ == "U"
    assert type(method(linear, "layers.0.mlp.gate")).__name__ == "U"
    assert type(method(vllm_like.VocabParallelEmbedding(0, 1), "embed")) is methods.PackedEmbeddingMethod
    experts = vllm_like.RoutedExperts()
    experts.moe_config = None
    assert type(method(experts, "layers.0.mlp.experts")) is methods.PackedExpertsMethod
    assert method(torch.nn.Module(), "layers.0.attn") is None


def test_the_kind_of_activations_is_an_option_of_vllm(plugin):
    CONFIG.additional_config = {"qgemm": {"activation": "a8"}}
    method = plugin.quant_method(vllm_like.GGUFConfig(), vllm_like.LinearBase("row"), "a")
    assert method.activation == "a8"
    CONFIG.additional_config = {"qgemm": {"activation": "a9"}}
    with pytest.raises(QgemmError, match="'a9'"):
        plugin.quant_method(vllm_like.GGUFConfig(), vllm_like.LinearBase("row"), "a")


@pytest.mark.parametrize("options", ["a8", {"activations": "a8"}, {"activation": "a8", "kernel": "decode"}], ids=str)
def test_options_that_do_not_exist_are_refused(plugin, options):
    CONFIG.additional_config = {"qgemm": options}
    with pytest.raises(UnsupportedError, match=r'additional_config \{"qgemm": .*expected \{"activation": KIND\}'):
        plugin.activation_of(CONFIG)


def test_a_configuration_without_a_place_for_options_is_refused(plugin):
    """vLLM allows objects with a hash of their own, which would hide the formats of weights from its compile cache."""
    CONFIG.additional_config = SimpleNamespace(compute_hash=lambda: "0")
    with pytest.raises(UnsupportedError, match=r"additional_config: expected a dict, got namespace\("):
        plugin.activation_of(CONFIG)


def model_config(model_type="qwen3", weights=()):
    hf = SimpleNamespace(model_type=model_type, num_attention_heads=2, num_key_value_heads=1)
    return SimpleNamespace(hf_config=hf, weights=weights, dtype=torch.float16)


def vllm_config(model):
    return SimpleNamespace(
        model=model, additional_config={"qgemm": {"activation": "a8"}},
        scheduler_config=SimpleNamespace(max_num_batched_tokens=100),
    )  # fmt: skip


def test_kernels_are_prepared_for_every_number_of_tokens(plugin, methods, monkeypatch, caplog):
    loader = importlib.import_module("qgemm.vllm.loader")
    _, layer = linear(methods, "column", {None: weights("q4_0", 32)})
    calls = []
    monkeypatch.setattr(loader, "prepare", lambda *args, **options: calls.append((args, options)) or "3 kernels")
    config = vllm_config(torch.nn.ModuleList([layer]))
    with caplog.at_level(logging.INFO, "vllm.qgemm"):
        loader.PackedModelLoader().load_model(vllm_config=config, model_config=model_config())
    ((tensors,), options), = calls  # fmt: skip
    assert [str(w.format) for w in tensors] == ["Q4_0"]
    assert options["m"] == range(1, 101)  # batches mix prompts and single tokens
    assert (options["activation"], options["dtype"]) == ("a8", "float16")
    assert "(CPU, a8): 1 of Q4_0; 3 kernels" in caplog.text


def test_vllms_compile_cache_tells_formats_and_versions_apart(plugin, methods, monkeypatch):
    """Its key has the path of a file and additional_config, and it does not check the guards of a stored graph."""
    loader = importlib.import_module("qgemm.vllm.loader")
    monkeypatch.setattr(loader, "prepare", lambda *args, **options: "no kernels")

    def key(*names):
        layers = [linear(methods, "column", {None: weights(name, 32)})[1] for name in names]
        config = vllm_config(torch.nn.ModuleList(layers))
        loader.PackedModelLoader().load_model(vllm_config=config, model_config=model_config())
        assert loader.activation_of(config) == "a8"
        return json.dumps(config.additional_config, sort_keys=True)

    assert key("q4_0", "q8_0") == key("q4_0", "q8_0")
    assert len({key("q4_0", "q8_0"), key("q8_0", "q4_0"), key("q4_0"), key()}) == 4
    old = key("q4_0")
    monkeypatch.setattr(loader, "__version__", "0.0.1")
    assert key("q4_0") != old


def test_formats_are_known_before_the_model_is_created(plugin):
    loader = importlib.import_module("qgemm.vllm.loader")
    RANKS.size = 2
    loader.PackedModelLoader()._prepare_adapter(model_config())
    assert [fmt.name for fmt in loader.formats_of("model.layers.0.self_attn.q_proj")] == ["q4_k"]
    assert loader.formats_of("language_model.model.layers.0.self_attn.q_proj")
    assert not loader.formats_of("model.layers.0.self_attn.o_proj")


@pytest.mark.parametrize("kind", ["qweight", "weight", "bias"])
def test_rotary_rows_of_llama_are_put_into_vllms_order(plugin, kind):
    loader = importlib.import_module("qgemm.vllm.loader")
    rows = torch.arange(16)[:, None] if kind != "bias" else torch.arange(16)
    # As llama.cpp's converter permutes two heads of 8 rows: halves of a head interleave.
    stored = rows.reshape(2, 2, 4, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
    tensors = [(f"model.layers.0.self_attn.{part}_proj.{kind}", stored) for part in "qv"]
    for model_type, expected in (("llama", rows), ("qwen3", stored)):
        config = model_config(model_type, tensors)
        adapter = loader.PackedModelLoader()._prepare_adapter(config)
        (_, q), (_, v) = adapter.prepare_weights(config)
        assert q.equal(expected)
        assert v.equal(stored)


def test_merged_experts_of_transformers_have_a_name(plugin):
    importlib.import_module("qgemm.vllm.loader").PackedModelLoader()._prepare_adapter(model_config())
    (names,) = vllm_like.MAPS
    assert names.get_name("model.layers.0.mlp.experts.gate_up_proj") == "blk.0.ffn_gate_exps"
    assert names.get_name("model.layers.0.self_attn.q_proj") == "blk.0.attn_q"

"""qgemm.sglang over stand-ins of SGLang, whose signatures are those of the real one if it is installed."""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import sglang_like
from engine_layers import FACTORS, IDS, NUMBERS, E, F, K, assert_near, product, raw, routed
from gguf import gguf_reader
from sglang_like import HookRegistry
from stand_ins import check_signatures
from torch_layers import normal, torch, weights

import qgemm
import qgemm.sglang
from qgemm.errors import QgemmError
from qgemm.torch.serving import FILE_TYPES


@pytest.fixture
def hooks(monkeypatch):
    sglang_like.install(monkeypatch)
    module = importlib.import_module("qgemm.sglang.hooks")
    yield module
    module.patched.undo()


def linear(hooks, tensors, ranks=1):
    """A layer after loading."""
    first = next(iter(tensors.values()))
    numbers = {place: int(NUMBERS[w.format.name]) for place, w in tensors.items()}
    bytes_of = {place: raw(w) for place, w in tensors.items()}
    layer = sglang_like.linear(bytes_of, numbers, first.shape[1] * ranks, first.shape[1])
    hooks.process_linear(None, layer)
    return layer


@pytest.mark.filterwarnings("ignore")  # the packages import deprecated names
@pytest.mark.parametrize("name", [name for name, contents in sglang_like.MODULES.items() if contents])
def test_stand_ins_have_the_signatures_of_the_installed_package(name):
    check_signatures(name, sglang_like.MODULES)


def test_every_hook_names_something_of_sglang(hooks):
    for target in hooks.HOOKS:
        owner, name = target.rsplit(".", 1)
        module = owner if owner in sglang_like.MODULES else owner.rsplit(".", 1)[0]
        contents = sglang_like.MODULES[module]
        assert name in contents or hasattr(contents[owner.rsplit(".", 1)[1]], name)


def test_registering_twice_hooks_once_and_a_variable_turns_it_off(hooks, monkeypatch):
    monkeypatch.setenv("QGEMM_SGLANG", "off")
    with pytest.raises(ValueError, match="QGEMM_SGLANG is 'off', and must be 0"):
        qgemm.sglang.register()
    monkeypatch.setenv("QGEMM_SGLANG", "0")
    qgemm.sglang.register()
    assert not HookRegistry._hooks
    monkeypatch.delenv("QGEMM_SGLANG")
    qgemm.sglang.register()
    assert gguf_reader.GGMLQuantizationType is FILE_TYPES  # SGLang reads files of all types
    qgemm.sglang.register()
    assert {target: len(entries) for target, entries in HookRegistry._hooks.items()} == dict.fromkeys(hooks.HOOKS, 1)


@pytest.mark.parametrize("m", [1, 4])
def test_merged_layers_of_mixed_types_give_one_output(hooks, m):
    tensors = {"v": weights("q8_0", 32, seed=2), "q": weights("q4_0", 64), "k": weights("q4_0", 32, seed=1)}
    layer, x, bias = linear(hooks, tensors), normal(m, 128), normal(128, seed=3)
    assert [w.shape for w in layer.qgemm_weights] == [(96, 128), (32, 128)]
    y = hooks.apply_linear(None, layer, x, bias)
    assert_near(y, torch.cat([product(x, tensors[place]) for place in "qkv"], 1) + bias)


def test_the_functions_multiply_by_packed_weights_and_leave_bytes_to_sglang(hooks):
    w = weights("q5_1", 40)
    layer, x = linear(hooks, {None: w}), normal(3, w.shape[1])
    own = sglang_like.fused_mul_mat_gguf
    assert_near(hooks.mul_mat(own, x, layer.qweight, 7), product(x, w))
    assert hooks.mul_mat(own, x, raw(w), 7) == "SGLang's own"
    table, index = sglang_like.apply_gguf_embedding, torch.tensor([[1, 39]])
    rows = hooks.rows(table, index, layer.qweight, 7, w.shape[1], dtype=torch.float32)
    assert rows.equal(torch.from_numpy(w.dequantize()[[[1, 39]]]))
    assert hooks.rows(table, index, raw(w), 7, w.shape[1]) == "SGLang's own"
    arguments = index, raw(w), 7, w.shape[1], torch.float16
    assert hooks.rows(lambda *own: own, *arguments) == arguments
    assert layer.qweight.tensor_shape == (40, w.shape[1])  # read by SGLang's embedding


def test_layers_are_refused_by_name_before_bytes_are_loaded(hooks):
    """When all types are known; 4 ranks cannot share 768 columns of super-blocks."""
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(2, 2)})
    model["o_proj"] = sglang_like.linear({None: torch.empty(0)}, {None: 0}, 768, 192)

    def loaded(number):
        """The names that the model reads, as SGLang's loaders read them."""
        weights = [("o_proj.qweight_type", torch.tensor(number)), ("o_proj.qweight", torch.empty(0))]
        for name, tensor in hooks.checked(model, weights):
            if name.endswith("type"):
                model["o_proj"].qweight_type.weight_type = tensor.item()
            else:
                pytest.fail("bytes came")

    with pytest.raises(QgemmError, match=r"^o_proj: 768 columns of Q4_K are 3 blocks"):
        loaded(NUMBERS["q4_k"])
    with pytest.raises(QgemmError, match=r"^o_proj: type 24 of ggml is none that qgemm multiplies"):
        loaded(24)
    model["o_proj"].qweight_type.shard_weight_type = {"q": NUMBERS["q8_0"], "k": 9999}
    with pytest.raises(QgemmError, match=r"^o_proj: type 9999 of ggml"):
        loaded(NUMBERS["q8_0"])


def test_experts_of_several_types(hooks):
    shapes = {"w1": (F, K), "w3": (F, K), "w2": (K, F)}
    tensors = {
        part: qgemm.quantize(normal(E, *shape, seed=n).numpy() / 16, "q6_k" if part == "w2" else "q4_k")
        for n, (part, shape) in enumerate(shapes.items())
    }
    numbers = {part: int(NUMBERS[w.format.name]) for part, w in tensors.items()}
    layer = sglang_like.experts({part: raw(w) for part, w in tensors.items()}, numbers)
    hooks.process_experts(None, layer)
    method, x = SimpleNamespace(moe_runner_config=SimpleNamespace(activation="silu")), normal(3, K)
    ids = IDS.clone()
    ids[0, 0] = -1
    y = hooks.apply_experts(method, layer, sglang_like.dispatched(x, FACTORS, ids)).hidden_states
    assert_near(y, routed(x, tensors, IDS, FACTORS * (ids >= 0)))
    method.moe_runner_config.apply_router_weight_on_input = True
    of_one = sglang_like.dispatched(x, FACTORS[:, :1], IDS[:, :1])
    y = hooks.apply_experts(method, layer, of_one).hidden_states
    assert_near(y, routed(x * FACTORS[:, :1], tensors, IDS[:, :1], torch.ones(3, 1)))
    method.moe_runner_config.activation = "relu2"
    with pytest.raises(QgemmError, match="relu2"):
        hooks.apply_experts(method, layer, sglang_like.dispatched(x, FACTORS, ids))
    layer = sglang_like.experts({part: raw(w) for part, w in tensors.items()}, numbers, 2)
    with pytest.raises(QgemmError, match=r"^a\.experts: .* 2 ranks cannot share an expert; .*--ep-size"):
        hooks.check(layer, "a.experts")
    layer.moe_tp_size, layer.w2_qweight_type.weight_type = 1, 24
    with pytest.raises(QgemmError, match=r"^a\.experts: type 24 of ggml"):
        hooks.check(layer, "a.experts")


@pytest.mark.parametrize(("kind", "rows"), [("llama", [0, 2, 1, 3, 4, 6, 5, 7]), ("qwen3", range(8))])
def test_rows_of_q_and_k_are_in_the_order_of_sglang(hooks, monkeypatch, kind, rows):
    prepared = []
    monkeypatch.setattr(hooks, "prepare_model", prepared.append)
    loader, rows = sglang_like.GGUFModelLoader(), list(rows)
    q, up = "model.layers.1.self_attn.q_proj.qweight", "model.layers.1.mlp.up_proj.qweight"
    k, number = "model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.q_proj.qweight_type"
    tensor = torch.arange(16).reshape(8, 2)
    bias = "model.layers.1.self_attn.q_proj.bias"
    loader.tensors = [(q, tensor), (k, tensor[:4]), (up, tensor), (number, torch.tensor(2)), (bias, tensor[:, 0])]
    config = SimpleNamespace(hf_config=SimpleNamespace(model_type=kind, num_attention_heads=2, num_key_value_heads=1))
    load = sglang_like.GGUFModelLoader.load_model
    hooks.load_model(load, loader, model_config=config, device_config=None)
    model = hooks.load_model(load, loader, model_config=config, device_config=None)  # a loader may serve twice
    assert prepared[1:] == [model]
    assert model.loaded[q].equal(tensor[rows])
    assert model.loaded[k].equal(tensor[rows[:4]])
    assert model.loaded[up].equal(tensor)
    assert model.loaded[number] == 2
    assert model.loaded[bias].equal(tensor[rows, 0])


@pytest.mark.parametrize(("kind", "divided"), [("qwen3_moe", True), ("qwen3_moe", False), ("other", True)])
def test_factors_of_qwen3s_router_are_divided_by_their_sum(hooks, monkeypatch, kind, divided):
    """SGLang 0.5.23 leaves them for .gguf files."""
    monkeypatch.setattr(hooks, "prepare_model", lambda model: None)
    loader = sglang_like.GGUFModelLoader()
    loader.routers = [SimpleNamespace(renormalize=False) for _ in range(2)]
    config = SimpleNamespace(hf_config=SimpleNamespace(model_type=kind, norm_topk_prob=divided))
    hooks.load_model(sglang_like.GGUFModelLoader.load_model, loader, model_config=config, device_config=None)
    assert [router.renormalize for router in loader.routers] == [kind == "qwen3_moe" and divided] * 2


def test_adapters_beside_a_file_are_read_in_their_own_format(hooks):
    @dataclass(frozen=True)
    class LoadConfig:
        load_format: object
        path: str = "adapter"

    formats = sglang_like.LoadFormat
    shared = LoadConfig(formats.GGUF)
    adapter = SimpleNamespace(load_config=shared)
    hooks.adapter_files(adapter)
    assert adapter.load_config == LoadConfig(formats.AUTO)
    assert shared.load_format == formats.GGUF  # the model's
    adapter.load_config = untouched = LoadConfig("sharded")
    hooks.adapter_files(adapter)
    assert adapter.load_config is untouched


def test_lora_of_experts_and_tables_is_refused(hooks):
    own = sglang_like.get_lora_layer
    layer = linear(hooks, {None: weights("q4_0", 32)})
    assert hooks.lora_layer(own, layer, "backend", max_lora_rank=8) == "SGLang's own"
    assert hooks.lora_layer(own, torch.nn.Module(), "backend") == "SGLang's own"  # floats alone
    del layer.input_size  # a table has no input_size
    with pytest.raises(QgemmError, match=r"LoRA of Module over a \.gguf file.*--lora-target-modules"):
        hooks.lora_layer(own, layer, "backend")


def test_gate_and_up_of_two_types_are_refused_before_loading(hooks):
    def types(**numbers):
        for part, number in numbers.items():
            yield from (
                (f"model.layers.3.mlp.experts.{e}.{part}_proj.qweight_type", torch.tensor(number)) for e in (0, 1)
            )

    same = dict(types(gate=NUMBERS["q4_k"], up=NUMBERS["q4_k"], down=NUMBERS["q6_k"]))
    assert dict(hooks.checked(torch.nn.Module(), same.items())) == same
    # Rows of both types have as many bytes.
    with pytest.raises(QgemmError, match=r"layers\.3\.mlp\.experts: gate and up are of Q4_K and Q4_0"):
        list(hooks.checked(torch.nn.Module(), types(gate=NUMBERS["q4_k"], up=NUMBERS["q4_0"])))


def test_kernels_are_prepared_after_loading(hooks, monkeypatch, caplog):
    calls = []
    monkeypatch.setattr(hooks, "prepare", lambda *args, **options: calls.append((args, options)) or "2 kernels")
    model = torch.nn.ModuleList([linear(hooks, {None: weights("q4_0", 32)}), torch.nn.LayerNorm(4).half()])
    with caplog.at_level(logging.INFO, "qgemm.sglang.hooks"):
        assert hooks.prepare_model(model) is None
        hooks.prepare_model(torch.nn.Linear(1, 1))
    ((_, options),) = calls
    assert options["dtype"] == "float16"
    assert {1, 8, 24, 256, 4096} <= set(options["m"])
    assert "1 of Q4_0; 2 kernels" in caplog.text

"""qgemm.torch.fuse: layers with one input share calls, and models compute the same as without."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import at_once
from torch_layers import assert_same, torch

import qgemm
import qgemm.torch.peft
from qgemm.torch import QLinear, fuse, fusion, ops, replace_linear, siblings, unfuse

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # raised by transformers

INDEX = torch.randint(256, (1, 5), generator=torch.Generator().manual_seed(0))
CONFIGS = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "gemma": transformers.GemmaConfig,
    "gemma2": transformers.Gemma2Config,
    "gemma3": transformers.Gemma3TextConfig,
    "granite": transformers.GraniteConfig,
    "olmo2": transformers.Olmo2Config,
    "cohere": transformers.CohereConfig,
    "glm": transformers.GlmConfig,
    "phi3": transformers.Phi3Config,
    "gpt_oss": transformers.GptOssConfig,
}
JOINED = {"glm", "phi3"}  # gate and up are one matrix; so are Q, K and V of phi3
EXPERTS = {"qwen3_moe", "gpt_oss"}  # their experts stay dense here
SIZES = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MORE = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
each_kind = pytest.mark.parametrize("kind", CONFIGS)


def packed_model(kind: str, fused: bool = True, **options):
    """A model with packed layers, V in another format than Q and K."""
    torch.manual_seed(0)
    config = CONFIGS[kind](**SIZES, **MORE.get(kind, {}))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    weights = {
        name: qgemm.quantize(p.detach(), "q8_0" if "v_proj" in name else "q4_0")
        for name, p in model.named_parameters()
        if p.dim() == 2 and p.shape[1] % 32 == 0
    }
    replace_linear(model, weights, fuse=fused, **options)
    return model


def logits(model, index=INDEX):
    with torch.no_grad():
        return model(index).logits


@pytest.fixture
def gated_on_cpu(monkeypatch):
    """Gated blocks are one call on the CPU, too."""
    monkeypatch.setattr(fusion, "GATED_ON", ("cpu", "cuda"))


# ---------------------------------------------------------------- models


@each_kind
def test_fused_models_compute_the_same_bits_by_fewer_calls(kind, calls):
    plain, model = packed_model(kind, fused=False), packed_model(kind)
    expected = logits(plain)
    apart = calls.total()
    calls.clear()
    assert_same(logits(model), expected)
    attention = 1 if kind == "phi3" else 3
    mlps = 0 if kind in JOINED else {"qwen3_moe": 1, "gpt_oss": 0}.get(kind, 2)
    assert apart - calls.total() == 2 * (attention - 1) + mlps
    assert calls["matmul_many"] == 2 * (attention == 3) + mlps
    calls.clear()
    logits(model, INDEX[:, :1])
    assert apart - calls.total() == 2 * (attention - 1) + mlps


@each_kind
def test_gated_blocks_are_one_call(kind, calls, gated_on_cpu):
    """To within the roundings of a float32 more or less."""
    expected = logits(packed_model(kind, fused=False))
    calls.clear()
    y = logits(packed_model(kind))
    assert calls["gated"] == (0 if kind in JOINED | {"gpt_oss"} else 1 if kind == "qwen3_moe" else 2)
    assert (y - expected).abs().max() <= 2**-18 * expected.abs().max()


def test_a_decode_step_is_four_calls_a_layer(calls, gated_on_cpu):
    """Q, K and V; o; gate and up; down."""
    model = packed_model("llama")
    calls.clear()
    logits(model, INDEX[:, :1])
    assert calls == {"matmul_many": 2, "gated": 2, "matmul": 2 + 2 + 1}


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen2"])
def test_models_are_compiled_without_a_break(kind, gated_on_cpu):
    torch._dynamo.reset()
    model, graphs = packed_model(kind), []

    def backend(graph, inputs):
        graphs.append(Counter(str(node.target).rpartition(".")[0] for node in graph.graph.nodes))
        return graph

    compiled, expected = torch.compile(model, backend=backend, fullgraph=True), logits(model)
    with torch.no_grad():
        for _ in range(2):
            assert_same(compiled(INDEX, use_cache=False).logits, expected)
    (ops,) = graphs
    assert (ops["qgemm.linear_many"], ops["qgemm.gated"]) == (2, 2)


@pytest.mark.parametrize("mode", ["no_grad", "inference"])
def test_names_copies_and_undo(mode, calls):
    plain, model = packed_model("llama", fused=False), packed_model("llama")
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    plain.load_state_dict(model.state_dict())
    with torch.inference_mode() if mode == "inference" else torch.no_grad():
        expected = model(INDEX).logits
        calls.clear()
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
            assert_same(other(INDEX).logits, expected)
            assert calls["matmul_many"] == 4
            calls.clear()
        copied = copy.deepcopy(model)
        unfuse(copied)
        unfuse(copied)
        assert_same(copied(INDEX).logits, expected)
        assert calls["matmul_many"] == 0
        assert_same(model(INDEX).logits, expected)
        assert calls["matmul_many"] == 4
        assert str(fuse(copied)) == "10 layers share 4 calls; gated blocks of one call: 2"
        assert str(fuse(copied)) == "0 layers share 0 calls; gated blocks of one call: 0"


def test_each_layer_may_be_called_alone():
    """In any order and with the same x; other weights, biases and values of x count at once."""
    plain, model = (packed_model("qwen2", fused=fused) for fused in (False, True))
    names, x = ("k_proj", "q_proj", "q_proj", "v_proj", "k_proj"), torch.randn(2, 128)
    expected_layers, layers = (m.model.layers[0].self_attn for m in (plain, model))

    def check(name, grad=False):
        with torch.set_grad_enabled(grad):
            y, expected = getattr(layers, name)(x), getattr(expected_layers, name)(x)
        assert_same(y, expected)
        assert y.requires_grad is expected.requires_grad

    for name in names:
        check(name)
    for attention in (expected_layers, layers):
        attention.v_proj.bias.data.fill_(3)
    check("q_proj")
    check("v_proj")
    x.mul_(2)
    check("v_proj")
    check("k_proj")
    for attention in (expected_layers, layers):
        attention.k_proj.load_state_dict(model.model.layers[1].self_attn.k_proj.state_dict())
    check("q_proj")
    check("k_proj")
    check("q_proj")
    for attention in (expected_layers, layers):
        attention.v_proj.bias.requires_grad_()
    check("v_proj", grad=True)


def test_gradients_and_lora():
    """Gradients are those of layers one by one; LoRA beside a layer adds to the shared product."""
    plain, model = (packed_model("llama", fused=fused) for fused in (False, True))
    for m in (plain, model):
        torch.manual_seed(1)
        for name in ("q_proj", "v_proj"):
            m.model.layers[1].self_attn.get_submodule(name).add_lora(
                torch.randn(2, 128), torch.randn(128 if name == "q_proj" else 64, 2)
            )
        m.model.layers[0].mlp.up_proj.add_lora(torch.randn(2, 128), torch.randn(256, 2))
    assert_same(logits(model), logits(plain))
    for m in (plain, model):
        m(INDEX, labels=INDEX).loss.backward()
    for (name, p), (_, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert (p.grad is None) is (q.grad is None), name
        if p.grad is not None:
            assert_same(p.grad, q.grad)


def test_peft(calls, gated_on_cpu):
    """Adapters beside fused layers: base layers share calls, a gated block with adapters does not become one."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    models = []
    for fused in (False, True):
        with qgemm.torch.peft.patch():
            torch.manual_seed(2)
            models.append(peft.get_peft_model(packed_model("llama", fused=fused), config).eval())
    plain, model = models
    expected = logits(plain)
    calls.clear()
    assert_same(logits(model), expected)
    assert (calls["matmul_many"], calls["gated"]) == (4, 0)
    model(INDEX, labels=INDEX).loss.backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_hooks_see_every_layer(gated_on_cpu, calls):
    model, seen = packed_model("llama"), []
    for name, layer in model.named_modules():
        if isinstance(layer, QLinear) or "act_fn" in name:
            layer.register_forward_hook(lambda layer, inputs, y, name=name: seen.append((name, inputs[0], y)))
    logits(model)
    assert len(seen) == 2 * 8 + 1
    assert calls["gated"] == 0
    for name, x, y in tuple(seen):  # the calls below are seen as well
        layer = model.get_submodule(name)
        expected = ops.product(x, layer.packed, layer.bias, "a16") if isinstance(layer, QLinear) else layer(x)
        assert_same(y, expected)


def test_layers_whose_weights_may_move_are_called_alone(calls):
    """A hook before a forward may bring the weight, as a forward of the instance does; accelerate says if it does."""
    model, x = packed_model("llama"), torch.randn(2, 128)
    attention = model.model.layers[0].self_attn
    handle = attention.k_proj.register_forward_pre_hook(lambda layer, inputs: None)
    attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)
    assert calls == {"matmul_many": 1, "matmul": 1}
    handle.remove()
    calls.clear()
    attention.k_proj.forward = attention.k_proj.forward
    attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)
    assert calls == {"matmul_many": 1, "matmul": 1}
    calls.clear()
    attention.k_proj._hf_hook = SimpleNamespace(offload=False)
    attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)
    assert calls == {"matmul_many": 1}


def test_threads_share_a_model(calls):
    model = packed_model("llama")
    indices = [torch.randint(256, (1, 5), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    expected, ys = [logits(model, index) for index in indices], {}
    calls.clear()

    def run(number):
        ys[number] = [logits(model, indices[number]) for _ in range(4)]

    at_once(run, range(4))
    for number, want in enumerate(expected):
        for y in ys[number]:
            assert_same(y, want)
    assert calls["matmul_many"] == 4 * 4 * 4


def test_autocast():
    plain, model = (packed_model("llama", fused=fused) for fused in (False, True))
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(logits(model), logits(plain))


# ---------------------------------------------------------------- groups


class Attention(torch.nn.Module):
    """Layers with the same input, where nothing but the source says which."""

    def __init__(self):
        super().__init__()
        for seed, name in enumerate(("first", "second", "third", "last")):
            w = np.random.default_rng(seed).standard_normal((64, 64), np.float32)
            self.add_module(name, QLinear.from_tensor(qgemm.quantize(w, "q4_0")))

    def forward(self, x, context=None):
        if context is None:
            context = x
        first, second, third = self.first(x), self.second(context), self.third(context)
        x = first * second + third
        return self.last(x)


def test_layers_are_grouped_by_the_source_of_their_module(calls):
    model, x = Attention(), torch.randn(3, 64)
    expected = model(x)
    assert fuse(model).groups == (("first", "second", "third"),)
    calls.clear()
    assert_same(model(x), expected)
    assert calls == {"matmul_many": 1, "matmul": 1}


CHANGES = {
    "activation": lambda layer: [setattr(other, "activation", "a8") for other in layer.siblings.layers],
    "bias": lambda layer: setattr(layer, "bias", torch.nn.Parameter(torch.ones(64))),
    "bytes": lambda layer: layer.weight.zero_(),
    "forward": lambda layer: setattr(layer, "forward", layer.forward),
    "hook": lambda layer: layer.register_forward_pre_hook(lambda layer, args: (2 * args[0],)),
    "weight": lambda layer: setattr(layer, "weight", torch.nn.Parameter(layer.weight.flip(0), requires_grad=False)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_round_like_the_one_before_asks_no_layer_again(change, calls, monkeypatch):
    """After a change of a layer, products are still those of layers alone."""
    rng, plain = np.random.default_rng(0), torch.nn.ModuleList()
    for _ in range(3):
        plain.append(QLinear.from_tensor(qgemm.quantize(rng.standard_normal((64, 64), np.float32), "q4_0")))
    layers = copy.deepcopy(plain)
    siblings.Siblings(list(layers))

    def compare():
        x = torch.randn(2, 64)
        assert_same(torch.stack([layer(x) for layer in layers]), torch.stack([layer(x) for layer in plain]))

    with torch.no_grad():
        compare()
        with monkeypatch.context() as patches:
            patches.setattr(siblings, "can_join", lambda *_: pytest.fail("a layer is asked again"))
            compare()
        assert calls["matmul_many"] == 2
        if change == "activation":
            for layer in plain:
                layer.activation = "a8"
        else:
            CHANGES[change](plain[1])
        CHANGES[change](layers[1])
        compare()
        compare()


def test_layers_with_other_inputs_leave_the_group(calls):
    """Cross attention: after two rounds in which a layer did not have the x of the others."""
    model, x, context = Attention(), torch.randn(3, 64), torch.randn(2, 1, 64)
    expected = model(x, context)
    fuse(model)
    for _ in range(3):
        assert_same(model(x, context), expected)
    calls.clear()
    assert_same(model(x, context), expected)
    assert calls == {"matmul_many": 1, "matmul": 2}
    assert set(model.first.siblings.groups) == {(0,), (1, 2)}


def test_groups_hold_one_k_activation_and_device(calls):
    model = torch.nn.Module()
    rng = np.random.default_rng(0)
    for name, k, activation in (("a", 64, "a16"), ("b", 64, "a8"), ("c", 32, "a16"), ("d", 64, "a16")):
        w = qgemm.quantize(rng.standard_normal((32, k), np.float32), "q4_0")
        model.add_module(name, QLinear.from_tensor(w, activation=activation))

    class Model(type(model)):
        def forward(self, x):
            return self.a(x), self.b(x), self.d(x), self.c(x)

    model.__class__ = Model
    assert fuse(model).groups == (("a", "d"),)
    model.d.to("meta")
    x = torch.randn(2, 64)
    calls.clear()
    model.a(x)
    assert calls == {"matmul": 1}


def test_blocks_of_unlike_layers_are_left_alone():
    """Gate and up of other activations, shapes or one object, and functions that qgemm has no gate for."""
    changes = {
        "": lambda block: None,
        "activation": lambda block: setattr(block.gate_proj, "activation", "a8"),
        "shape": lambda block: setattr(block, "up_proj", block.down_proj),
        "the same layer": lambda block: setattr(block, "up_proj", block.gate_proj),
        "a function": lambda block: setattr(block, "act_fn", torch.nn.Tanh()),
    }
    for name, change in changes.items():
        block = packed_model("llama", fused=False).model.layers[0].mlp
        change(block)
        assert bool(fuse(block).gated) == (name == ""), name

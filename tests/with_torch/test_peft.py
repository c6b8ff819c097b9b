"""peft's LoRA beside packed layers, against the same adapters beside dense layers of the decoded weights."""

from __future__ import annotations

import copy

import pytest
from torch_layers import assert_same, normal, torch, weights
from torch_models import transformers

import qgemm
from qgemm.torch import QEmbedding, QLinear, replace_linear

peft = pytest.importorskip("peft", reason="peft is not installed (extra peft)")
from qgemm.torch.peft import AdaptedEmbedding, AdaptedLinear, patch  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # by transformers
IDS = torch.arange(24).reshape(2, 12) % 31
FORMATS = {"up": "q4_k", "down": "q6_k", "embed": "q8_0"}  # by a part of a layer's name; others q4_0


@pytest.fixture(autouse=True)
def patched():
    with patch() as patched:
        yield patched


@pytest.fixture(scope="module")
def models():
    """A tiny Llama with packed weights, and one with the same weights decoded."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=32, max_position_embeddings=16, eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    dense = transformers.AutoModelForCausalLM.from_config(config)
    packed = copy.deepcopy(dense)
    tensors = {}
    for name, parameter in dense.named_parameters():
        if parameter.dim() == 2:
            fmt = next((fmt for part, fmt in FORMATS.items() if part in name), "q4_0")
            tensors[name] = qgemm.quantize(parameter.detach().numpy(), fmt)
            parameter.data = torch.from_numpy(tensors[name].dequantize())
    replace_linear(packed, tensors, embeddings=True)
    return packed, dense


def small_model():
    """A table, two packed layers and a dense one."""
    up = QLinear.from_tensor(weights(n=64), torch.nn.Parameter(normal(64), requires_grad=False))
    down = QLinear.from_tensor(weights(n=96, blocks=1))
    layers = {"table": QEmbedding.from_tensor(weights(n=32)), "up": up, "down": down, "head": torch.nn.Linear(96, 8)}
    return Chain(layers)


class Chain(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x):
        for layer in self.children():
            x = torch.tanh(layer(x))
        return x


def config(target="all-linear", **options):
    return peft.LoraConfig(target_modules=target, **{"r": 4, **options})


def perturbed(model):
    """All matrices of adapters moved, so that none of them is zero."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in sorted(model.named_parameters()):
        if "lora_" in name and "magnitude" not in name:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def losses(base, options, steps=3):
    torch.manual_seed(0)
    model = perturbed(peft.get_peft_model(copy.deepcopy(base), config(**options))).train()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
    values = []
    for step in range(steps):
        torch.manual_seed(step)  # for dropout
        loss = model(input_ids=IDS, labels=IDS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True, "lora_dropout": 0.2},
        {"use_dora": True},
        {"use_dora": True, "lora_dropout": 0.2},
        {"target": ["embed_tokens", "v_proj", "lm_head"], "init_lora_weights": "gaussian"},
        {"target": ["embed_tokens"], "use_dora": True},
    ],
    ids=str,
)
def test_the_loss_is_that_of_the_decoded_model(models, options):
    """And it falls."""
    packed, dense = (losses(model, options) for model in models)
    assert packed == pytest.approx(dense, rel=1e-4)
    assert packed[0] > packed[1] > packed[2]


def test_all_linear_layers_but_the_head(models):
    model = peft.get_peft_model(copy.deepcopy(models[0]), config())
    layers = {name.split(".")[-1] for name, module in model.named_modules() if type(module) is AdaptedLinear}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert type(model.get_output_embeddings()) is QLinear
    model.add_adapter("second", config())
    assert model.peft_config["second"].target_modules == model.peft_config["default"].target_modules


def test_several_adapters_are_saved_and_loaded(tmp_path):
    base = small_model()
    plain = base(IDS)
    model = peft.get_peft_model(copy.deepcopy(base), config(["table", "up", "head"], use_rslora=True))
    assert_same(model(IDS), plain)
    model.add_adapter("second", config(use_dora=True))
    perturbed(model).eval()
    y = {}
    for name in ("default", "second"):
        model.set_adapter(name)
        y[name] = model(IDS)
        assert not torch.allclose(y[name], plain)
    with model.disable_adapter():
        assert_same(model(IDS), plain)
    model.save_pretrained(tmp_path)
    for memory in ({}, {"low_cpu_mem_usage": True}):
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path, **memory).eval()
        loaded.load_adapter(tmp_path / "second", "second")
        for name in y:
            loaded.set_adapter(name)
            assert_same(loaded(IDS), y[name])
    model.set_adapter("default")
    model.delete_adapter("second")
    assert_same(model(IDS), y["default"])
    unloaded = model.unload()
    assert type(unloaded.up) is QLinear
    assert_same(unloaded(IDS), plain)


def test_a_batch_of_several_adapters():
    model = peft.get_peft_model(small_model(), config(["table", "up", "down"]))
    model.add_adapter("second", config(["table", "up", "down"]))
    perturbed(model).eval()
    y = []
    for name in ("default", "second"):
        model.set_adapter(name)
        y.append(model(IDS))
    names = ["second", "default"]
    with model.base_model._enable_peft_forward_hooks(adapter_names=names):
        mixed = model.base_model.model(IDS)
    torch.testing.assert_close(mixed, torch.stack([y[1][0], y[0][1]]))


def test_a_merge_is_refused_and_changes_nothing():
    """In a model with dense layers too, of which none is merged before."""
    base = small_model()
    base = Chain({"first": torch.nn.Linear(12, 12), **dict(base.named_children())})
    base.first.register_forward_pre_hook(lambda layer, inputs: (inputs[0].float(),))
    base.first.register_forward_hook(lambda layer, inputs, y: torch.atanh(y.clamp(-0.9, 0.9)).long().abs())
    model = perturbed(peft.get_peft_model(base, config(["first", "up"])))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for merge in (model.merge_and_unload, model.merge_adapter, model.base_model.model.up.merge):
        with pytest.raises(
            qgemm.UnsupportedError, match=r"QLinear\(.*cannot merge an adapter: the packed weight would"
        ):
            merge()
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    model.base_model.model.up.merge(adapter_names=[])


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "orthogonal", "mica", "lora_ga"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_initial_values_that_need_a_dense_weight(init):
    model = small_model()
    with pytest.raises(qgemm.UnsupportedError, match=f"init_lora_weights='{init}'.*packed: use one of True, False"):
        peft.get_peft_model(model, config(["up"], init_lora_weights=init))
    assert type(model.up) is QLinear


def test_kinds_of_lora_that_need_a_dense_weight():
    with pytest.raises(ValueError, match="unsupported variant"):
        peft.get_peft_model(small_model(), config(["up"], use_bdlora=peft.tuners.lora.config.BdLoraConfig()))


def test_dora_sees_the_weight_of_a_layer_with_a_hook():
    """Files whose columns have another order than the model's: a hook permutes x."""
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    layer = QLinear.from_tensor(weights(n=64), torch.nn.Parameter(normal(64), requires_grad=False))
    dense = torch.nn.Linear(128, 64)
    dense.weight.data[:, order], dense.bias.data = layer.dequantize(), layer.bias.data
    layer.register_forward_pre_hook(lambda layer, inputs: (inputs[0][..., order],))
    x = normal(3, 128)
    y = []
    for base in (layer, dense):
        torch.manual_seed(0)
        y.append(perturbed(peft.get_peft_model(Chain({"up": base}), config(["up"], use_dora=True)))(x))
    torch.testing.assert_close(*y)


def test_rows_of_an_adapter_are_scaled_as_those_of_the_table():
    """Gemma's tables are scaled by a hook after them."""
    table = QEmbedding.from_tensor(weights(n=32))
    table.embed_scale = 11.5
    model = peft.get_peft_model(Chain({"table": table}), config(["table"]))
    assert type(model.base_model.model.table) is AdaptedEmbedding
    adapter = perturbed(model).base_model.model.table
    delta = adapter.get_delta_weight("default")[IDS]
    torch.testing.assert_close(adapter(IDS), table(IDS) + 11.5 * delta)


def test_undone_peft_knows_no_packed_layer(patched):
    patched.undo()
    with pytest.raises(ValueError, match=r"Target module QLinear.* is not supported"):
        peft.get_peft_model(small_model(), config(["up"]))

"""QExperts, and models of transformers whose experts stay packed."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from experts import known_layer
from helpers import ROUNDING
from measured_errors import check_rms
from torch_layers import assert_same, torch

import qgemm
from qgemm.routing import GATE_OF
from qgemm.torch import QExperts

E, F, K = 5, 96, 64
FORMATS = ("q4_0", "mxfp4", "q5_1")


def stack(name, n, k, seed):
    return qgemm.quantize(np.random.default_rng(seed).standard_normal((E, n, k), dtype=np.float32) / 8, name)


def layer(bias=True, activation="swiglu"):
    torch.manual_seed(0)
    biases = [torch.randn(E, n) / 4 if bias else None for n in (F, F, K)]
    tensors = (
        stack(name, *shape, i) for i, (name, shape) in enumerate(zip(FORMATS, ((F, K), (F, K), (K, F)), strict=True))
    )
    return QExperts.from_tensors(*tensors, biases, activation)


def inputs(t=7, top_k=3, dtype=torch.float32):
    torch.manual_seed(1)
    ids = torch.stack([torch.randperm(E)[:top_k] for _ in range(t)])
    return torch.randn(t, K).to(dtype), ids, torch.rand(t, top_k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", GATE_OF)
def test_a_layer_is_that_of_its_decoded_weights(activation, bias, dtype):
    """Within the bound of products in float32, and of rounding y."""
    module, (x, ids, weights) = layer(bias, activation), inputs(dtype=dtype)
    y = module(x, ids, weights)
    assert (y.shape, y.dtype) == (x.shape, dtype)
    parts = module.gate, module.up, module.down
    biases = [None if part.bias is None else part.bias.numpy() for part in parts]
    reference = known_layer(
        x.float().numpy(), *(part.packed for part in parts), ids.numpy(), weights.numpy(), GATE_OF[activation], biases,
        in_float=True,
    )  # fmt: skip
    name = str(dtype).removeprefix("torch.")
    off = np.abs(y.double().numpy() - reference.y)
    assert (off <= reference.bound + ROUNDING[name] * (np.abs(reference.y) + reference.bound) + 2.0**-24).all()
    check_rms(y.double().numpy(), reference.y, name, 1)


def test_a_state_dict_brings_its_formats_and_layers_are_copied():
    module, arguments = layer(), inputs()
    y = module(*arguments)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_same(other(*arguments), y)
    empty = QExperts(E, K, F, ["q8_0"] * 3, bias=True)
    empty.load_state_dict(module.state_dict())
    assert_same(empty(*arguments), y)
    assert [part.format.name for part in (empty.gate, empty.up, empty.down)] == list(FORMATS)
    meta = QExperts(E, K, F, FORMATS, bias=True, device="meta")
    meta.load_state_dict(module.state_dict(), assign=True)
    assert_same(meta(*arguments), y)
    assert module.state_dict()["gate.weight"].shape == (E, F, K // 32 * 18)
    with pytest.raises(RuntimeError, match="5 96 64"):
        QExperts(E, K, F + 32, FORMATS, bias=True).load_state_dict(module.state_dict())


def test_dtypes_touch_the_biases_alone():
    module, arguments = layer(), inputs()
    before = [part.weight.clone() for part in (module.gate, module.up, module.down)]
    module.half()
    assert module.gate.bias.dtype is torch.float16
    for part, bytes_ in zip((module.gate, module.up, module.down), before, strict=True):
        assert_same(part.weight, bytes_)
    assert not any(part.weight.requires_grad for part in (module.gate, module.up, module.down))
    with torch.autocast("cpu", torch.bfloat16):
        assert module(*arguments).dtype is torch.bfloat16


def test_compiled_whole():
    torch._dynamo.reset()  # its limit counts the graphs of all tests of this process
    module, arguments = layer(), inputs()
    with torch.no_grad():
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        assert_same(compiled(*arguments), module(*arguments))


def test_what_is_refused():
    module, (x, ids, weights) = layer(), inputs()
    with pytest.raises(qgemm.UnsupportedError, match="no gradient flows through QExperts"):
        module(x.requires_grad_(), ids, weights)
    with torch.no_grad():
        assert not module(x, ids, weights).requires_grad
    with pytest.raises(qgemm.UnsupportedError, match="activation is"):
        QExperts(E, K, F, FORMATS, "relu")
    tensors = module.gate.packed, module.up.packed, module.down.packed
    with pytest.raises(qgemm.ShapeError, match="bias has shape"):
        QExperts.from_tensors(*tensors, [torch.zeros(E, 3), None, None])
    with pytest.raises(qgemm.ShapeError, match="are no layer"):
        QExperts.from_tensors(module.gate.packed, module.up.packed, module.gate.packed)
    with pytest.raises(IndexError, match="there are experts 0 to 4"):
        module(x.detach(), ids + 3, weights)


# ---------------------------------------------------------------- models of transformers

MODELS = ("qwen3moe", "gpt-oss", "mixtral")


@pytest.fixture(params=MODELS)
def saved(request, tmp_path):
    """A model with random experts and its .gguf file of q8_0."""
    from torch_models import SIZES, transformers

    sizes = {**SIZES, "intermediate_size": 128, "head_dim": 64}
    config = {
        "qwen3moe": lambda: transformers.Qwen3MoeConfig(
            **sizes, moe_intermediate_size=768, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True
        ),
        "gpt-oss": lambda: transformers.GptOssConfig(
            **sizes, num_local_experts=8, num_experts_per_tok=2, sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
        ),
        "mixtral": lambda: transformers.MixtralConfig(**sizes, num_local_experts=8, num_experts_per_tok=2),
    }[request.param]()  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape)) if parameter.dim() == 1 else parameter.mul_(3)
    model.save_pretrained(tmp_path / "folder")
    qgemm.convert(tmp_path / "folder", tmp_path / "model.gguf", "q8_0", pure=True)
    return request.param, model, tmp_path / "model.gguf"


INDEX = torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(0))


def logits(model):
    """Experts that are dense are multiplied one by one, which works in float64 as well."""
    model.set_experts_implementation("eager")
    with torch.no_grad():
        return model(INDEX).logits.double()


def dense_experts(model, path):
    """The model with the experts of a file decoded in the place of its own."""
    with qgemm.open(path) as file:
        for name, module in model.named_modules():
            if not name.endswith(".experts"):
                continue
            gate, up, down = (
                torch.from_numpy(file[f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight"].dequantize())
                for part in ("gate", "up", "down")
            )
            if type(module).__name__ == "GptOssExperts":
                both = torch.stack([gate, up], dim=2).flatten(1, 2).transpose(1, 2)
                down = down.transpose(1, 2)
            else:
                both = torch.cat([gate, up], dim=1)
            with torch.no_grad():
                module.gate_up_proj.copy_(both)
                module.down_proj.copy_(down)
    return model


def test_experts_of_a_model_are_replaced_by_those_of_a_file(saved):
    """Every family; logits no further from those of the decoded experts than sums in another order are."""
    import qgemm.torch.transformers as adapter

    _, model, path = saved
    expected = logits(dense_experts(copy.deepcopy(model), path))
    exact = logits(dense_experts(copy.deepcopy(model), path).double())
    assert adapter.replace_experts(model, path) == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    assert sum(isinstance(module, QExperts) for module in model.modules()) == 2
    distance = (expected - exact).abs().max()
    assert (logits(model) - exact).abs().max() <= 8 * distance
    other, dense = path.parent / "other.gguf", dense_like(saved)
    qgemm.write(other, {"x": qgemm.quantize(np.zeros((1, 32), np.float32), "q8_0")})
    with pytest.raises(qgemm.UnsupportedError, match=r"no packed experts that fit model.layers.0"):
        adapter.replace_experts(dense, other)


def dense_like(saved):
    from torch_models import transformers

    return transformers.AutoModelForCausalLM.from_config(saved[1].config)


@pytest.mark.parametrize("saved", ["qwen3moe"], indirect=True)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_model_that_transformers_loads_keeps_packed_experts(saved):
    """Logits equal those of transformers, which decodes the experts; no dense experts are beside them."""
    from torch_models import transformers

    import qgemm.torch.transformers as adapter

    _, _, path = saved
    options = {"gguf_file": path.name}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path.parent, **options)
    exact = transformers.AutoModelForCausalLM.from_pretrained(path.parent, **options, dtype=torch.float64)
    with adapter.patch():
        ours = transformers.AutoModelForCausalLM.from_pretrained(path.parent, **options)
    assert sum(isinstance(module, QExperts) for module in ours.modules()) == 2
    names = {name for name, _ in ours.named_parameters()}
    assert "model.layers.0.mlp.experts.down.weight" in names
    assert not any("gate_up_proj" in name for name in names)
    distance = (logits(theirs) - logits(exact)).abs().max()
    assert (logits(ours) - logits(exact)).abs().max() <= 4 * distance


@pytest.mark.parametrize(("gate_up", "down"), [("q4_0", "q8_0"), ("q4_k", "q6_k")])
def test_blocks_of_transformers_are_multiplied_where_they_are(gate_up, down):
    """GgufExperts, the layer of transformers that holds blocks, on a CPU, where it has no kernel of its own."""
    transformers = pytest.importorskip("qgemm.torch.transformers")
    utils, silu = transformers.gguf_utils, torch.nn.functional.silu
    k, f = 256, 256
    module = utils.GgufExperts(E, k, f, qgemm.FORMATS[gate_up].ggml_type, qgemm.FORMATS[down].ggml_type, silu)
    weights = [stack(gate_up, 2 * f, k, 0), stack(down, k, f, 1)]
    for parameter, w in zip((module.gate_up_proj, module.down_proj), weights, strict=True):
        parameter.data = torch.from_numpy(w.blocks.view(np.uint8).reshape(parameter.shape))
    places = [parameter.data_ptr() for parameter in module.parameters()]
    torch.manual_seed(1)
    ids, factors = torch.stack([torch.randperm(E)[:3] for _ in range(7)]), torch.rand(7, 3)
    x = torch.randn(7, k)
    with transformers.patch():
        y = module(x, ids, factors)
    gate, up = (
        qgemm.Tensor(weights[0].format, (E, f, k), weights[0].blocks[:, part]) for part in (slice(f), slice(f, None))
    )
    reference = known_layer(
        x.numpy(), gate, up, weights[1], ids.numpy(), factors.numpy(), "silu", [None] * 3, in_float=True
    )
    assert (
        np.abs(y.double().numpy() - reference.y) <= reference.bound + 2.0**-23 * np.abs(reference.y) + 2.0**-24
    ).all()
    check_rms(y.double().numpy(), reference.y, "float32")
    assert places == [parameter.data_ptr() for parameter in module.parameters()]
    with pytest.raises(qgemm.UnsupportedError, match="no format is ggml's type 9999"):
        transformers.mul_mat_id(module.down_proj, x, ids, 9999, k)

"""qgemm.torch.diffusers: models that diffusers loads from a .gguf file, beside its own road."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
from torch_layers import assert_product, assert_same, torch, weights

import qgemm
from qgemm.cuda.layout import tile as tiles

os.environ["HF_HUB_OFFLINE"] = "1"  # a test asks no server
diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed (extra diffusers)")
pytest.importorskip("accelerate", reason="accelerate is not installed, without which diffusers loads no .gguf file")
from diffusers.loaders.lora_pipeline import FluxLoraLoaderMixin  # noqa: E402
from diffusers.quantizers.gguf.utils import GGUFLinear, dequantize_gguf_tensor  # noqa: E402

import qgemm.torch.diffusers as adapter  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # raised by diffusers
FLUX = {
    "patch_size": 1, "in_channels": 64, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 64,
    "num_attention_heads": 4, "joint_attention_dim": 256, "pooled_projection_dim": 256, "axes_dims_rope": (16, 24, 24),
}  # fmt: skip


def formats(name: str) -> str:
    """Several formats, and numbers of 16 bits, in one file."""
    return "bf16" if "proj_out" in name else "q6_k" if "norm" in name else "q4_k" if "attn" in name else "q5_0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Flux of two blocks as model.gguf, its config, and the same with decoded weights."""
    path = tmp_path_factory.mktemp("flux")
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(**FLUX)
    model.save_config(path)
    tensors = {}
    for name, value in model.state_dict().items():
        packs = value.dim() == 2 and value.shape[1] % 256 == 0
        tensors[name] = qgemm.quantize(value.numpy(), formats(name)) if packs else value.numpy()
    qgemm.write(path / "model.gguf", tensors)
    return path


def load(folder, patched=True, dtype=torch.float32):
    """The model, by the adapter or by diffusers alone."""
    config = diffusers.GGUFQuantizationConfig(compute_dtype=dtype)
    with adapter.patch() if patched else nullcontext():
        model = diffusers.FluxTransformer2DModel.from_single_file(
            str(folder / "model.gguf"), config=str(folder), quantization_config=config, torch_dtype=dtype
        )
    return model.eval()


def decoded(folder, dtype):
    """The model with decoded weights."""
    model = diffusers.FluxTransformer2DModel(**FLUX)
    with qgemm.open(folder / "model.gguf") as file:
        model.load_state_dict({name: torch.from_numpy(tensor.dequantize()) for name, tensor in file.items()})
    return model.to(dtype).eval()


def output(model, dtype=torch.float32):
    dice = torch.Generator().manual_seed(0)
    shapes = {"hidden_states": (1, 16, 64), "encoder_hidden_states": (1, 8, 256), "pooled_projections": (1, 256)}
    with torch.no_grad():
        return model(
            **{name: torch.randn(shape, generator=dice).to(dtype) for name, shape in shapes.items()},
            timestep=torch.tensor([1.0], dtype=dtype), img_ids=torch.zeros(16, 3), txt_ids=torch.zeros(8, 3),
        ).sample.double()  # fmt: skip


def kinds(model):
    return {type(layer) for layer in model.modules()} & {GGUFLinear, adapter.PackedLinear}


def test_a_model_is_that_of_the_decoded_weights(folder):
    """No further from that in float64 than four times what float32's own is: sums in another order."""
    model, exact = load(folder), output(decoded(folder, torch.float64), torch.float64)
    assert kinds(model) == {adapter.PackedLinear}
    distance = (output(decoded(folder, torch.float32)) - exact).abs().max()
    assert (output(model) - exact).abs().max() <= 4 * distance


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_product_is_within_its_bound(folder, dtype):
    """And every weight is that of diffusers, which decodes in float16: d * s * q - m, with a rounding for each sign, of
    numbers up to twice the largest weight."""
    kind, seen = getattr(torch, dtype), []
    model, theirs = load(folder, dtype=kind), dict(load(folder, False, dtype=kind).named_modules())

    def check(layer, inputs, y):
        assert y.dtype is kind
        assert_product(y, inputs[0], layer.packed, layer.bias)
        seen.append(layer)

    for name, layer in model.named_modules():
        if isinstance(layer, adapter.PackedLinear):
            want = dequantize_gguf_tensor(theirs[name].weight).float()
            assert (layer.dequantize() - want).abs().max() <= 6 * 2.0**-11 * want.abs().max() + 2.0**-20
            assert (layer.compute_dtype, layer.bias.dtype) == (kind, kind)
            layer.register_forward_hook(check)
    output(model, kind)
    assert len(seen) == sum(isinstance(layer, GGUFLinear) for layer in theirs.values())


def test_undo(folder):
    model, patched = load(folder), adapter.patch()
    assert kinds(load(folder, False)) == kinds(model) == {adapter.PackedLinear}
    patched.undo()
    assert kinds(load(folder, False)) == {GGUFLinear}
    assert kinds(model) == {adapter.PackedLinear}


def test_what_asks_for_layers_of_diffusers_finds_them(folder):
    """Its model.dequantize(), and shapes that LoRA is fitted to."""
    model, theirs = load(folder), load(folder, False)
    for name, layer in theirs.named_modules():
        if isinstance(layer, GGUFLinear):
            ours = model.get_submodule(name)
            assert isinstance(ours, GGUFLinear)
            shape = FluxLoraLoaderMixin._calculate_module_shape(model, base_module=ours)
            assert tuple(shape) == tuple(layer.weight.quant_shape) == (ours.out_features, ours.in_features)
            assert ours.weight.to("meta").quant_shape == layer.weight.quant_shape
    model.dequantize()
    theirs.dequantize()
    assert kinds(model) == set()
    for parameter, other in zip(model.parameters(), theirs.parameters(), strict=True):
        assert_same(parameter, other)


def test_lora_of_peft(folder):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = load(folder)
    layer, x = model.transformer_blocks[0].attn.to_q, torch.randn(3, 256)
    without = layer(x)
    model.add_adapter(peft.LoraConfig(r=4, lora_alpha=8, target_modules=["to_q"], init_lora_weights=False))
    added = model.transformer_blocks[0].attn.to_q
    A, B = added.lora_A["default"].weight, added.lora_B["default"].weight
    torch.testing.assert_close(added(x), without + 2 * x @ A.T @ B.T)
    model.disable_adapters()
    assert_same(added(x), without)


def test_a_model_compiles_whole(folder):
    torch._dynamo.reset()
    model = load(folder)
    torch.testing.assert_close(output(torch.compile(model, backend="eager", fullgraph=True)), output(model))


def test_tiles_of_a_gpu_are_decoded_as_bytes_of_the_file():
    """What diffusers decodes is [N, bytes of a row], whatever the layout in which the bytes lie."""
    w = weights("q4_k", n=70, blocks=1)
    size = tiles.tiles_shape(w.format, *w.shape)
    raw = tiles.pack(w.format, w.blocks).tobytes() + bytes(4 * size[0] * tiles.ROWS)
    weight = adapter.GGUFParameter(torch.frombuffer(bytearray(raw), dtype=torch.uint8), quant_type=w.format.ggml_type)
    weight.quant_shape = w.shape
    assert weight.to("meta").quant_shape == w.shape
    assert weight.as_tensor().numpy().tobytes() == w.blocks.tobytes()
    assert weight.packed().shape == w.shape


def test_a_type_that_is_not_decoded_is_named():
    layer = GGUFLinear(256, 8)
    kind = next(kind for kind, fmt in qgemm.formats.GGML_TYPES.items() if fmt.levels is None and fmt.weights == 256)
    size = qgemm.formats.GGML_TYPES[kind].block_bytes
    layer.weight = diffusers.quantizers.gguf.utils.GGUFParameter(
        torch.zeros(8, size, dtype=torch.uint8), quant_type=kind
    )
    with pytest.raises(qgemm.UnsupportedError, match="is packed as Q8_K, which has no decoder"):
        adapter._replace(torch.nn.Sequential(layer))

"""qgemm.torch.diffusers: models that diffusers loads from a .gguf file, beside its own road."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
from diffusion_models import FLUX, adapter, diffusers, load, output, write_flux
from torch_layers import assert_product, assert_same, torch, weights

import qgemm
from qgemm.cuda.layout import tile as tiles

from diffusers.loaders.lora_pipeline import FluxLoraLoaderMixin  # isort: skip  # diffusion_models skips without diffusers
from diffusers.quantizers.gguf.utils import GGUFLinear, dequantize_gguf_tensor  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # raised by diffusers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Flux of two blocks as model.gguf, and its config."""
    path = tmp_path_factory.mktemp("flux")
    write_flux(path)
    return path


def decoded(folder, dtype):
    """The model with decoded weights."""
    model = diffusers.FluxTransformer2DModel(**FLUX)
    with qgemm.open(folder / "model.gguf") as file:
        model.load_state_dict({name: torch.from_numpy(tensor.dequantize()) for name, tensor in file.items()})
    return model.to(dtype).eval()


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
    weight = adapter._parameter(torch.frombuffer(bytearray(raw), dtype=torch.uint8), w.format.name, w.shape)
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


# ---------------------------------------------------------------- copied, fused, cast


def test_copies(folder):
    """With their own weights of diffusers' class, used before or not."""
    model = load(folder)
    expected = output(model)
    for source in (model, load(folder)):
        for copied in (copy.deepcopy(source), pickle.loads(pickle.dumps(source))):
            assert_same(output(copied), expected)
            layer, original = copied.proj_out, source.proj_out
            assert type(layer.weight) is type(original.weight)
            assert layer.weight.quant_type == original.weight.quant_type
            assert layer.weight.data_ptr() != original.weight.data_ptr()
            copied.dequantize()
            assert kinds(copied) == set()


@pytest.mark.parametrize("assign", [False, True])
def test_a_loaded_weight_is_of_diffusers_class(folder, assign):
    model, other = load(folder), load(folder)
    state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    model.to_empty(device="cpu").load_state_dict(state, assign=assign)
    assert_same(output(model), output(other))
    assert isinstance(model.proj_out.weight, adapter.GGUFParameter)
    model.dequantize()


def test_fused_projections(folder):
    """diffusers joins those of q, k and v: outputs stay, no weight is copied, and they can be separated again."""
    model = load(folder)
    expected, parameters = output(model), sum(p.nbytes for p in model.parameters())
    model.fuse_qkv_projections()
    attention = model.transformer_blocks[0].attn
    assert isinstance(attention.to_qkv, adapter.JoinedLinear)
    assert isinstance(attention.to_added_qkv, adapter.JoinedLinear)
    assert sum(p.nbytes for p in model.parameters()) == parameters
    called = []
    attention.to_qkv.register_forward_hook(lambda *_: called.append(True))
    assert_same(output(model), expected)
    assert called
    assert_same(output(copy.deepcopy(model)), expected)
    attention.unfuse_projections()
    assert not hasattr(attention, "to_qkv")
    model.unfuse_qkv_projections()
    assert_same(output(model), expected)


def test_fused_projections_of_dense_layers_are_those_of_diffusers(folder):
    model = load(folder)
    model.dequantize()
    for block in model.transformer_blocks:
        block.attn.fuse_projections()
        assert type(block.attn.to_qkv) is torch.nn.Linear


def adapted(folder, **options):
    """A model with an adapter that changes its output."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = load(folder)
    targets = ["to_q", "to_out.0", "proj_mlp", "x_embedder"]  # the last one is dense
    torch.manual_seed(0)
    model.add_adapter(peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, **options))
    return model


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_fused_lora(folder, scale):
    """Packed weights stay; the adapter is added beside them, survives its peft layers, and can be taken out."""
    without, model = output(load(folder)), adapted(folder)
    if scale == 1.0:
        expected = output(model)
        assert (expected - without).abs().max() > 1e-3
    model.fuse_lora(lora_scale=scale)
    if scale == 1.0:
        torch.testing.assert_close(output(model), expected, rtol=1e-4, atol=1e-4)
    fused = output(model)
    assert_same(output(copy.deepcopy(model)), fused)
    model.unfuse_lora()
    model.disable_adapters()
    torch.testing.assert_close(output(model), without, rtol=1e-4, atol=1e-4)
    model.enable_adapters()
    model.fuse_lora()
    model.unload_lora()
    assert_same(output(model), fused)


def test_adapters_that_change_the_weight_are_not_fused(folder):
    model = adapted(folder, lora_bias=True)
    with pytest.raises(qgemm.UnsupportedError, match="adapter 'default' changes the weight or the bias"):
        model.fuse_lora()


def test_half(folder):
    model = load(folder).half()
    assert output(model, torch.float16).isfinite().all()
    assert model.proj_out.bias.dtype is torch.float16
    assert output(model.float()).isfinite().all()


@pytest.mark.parametrize("size", ["10GB", "100KB"])
def test_a_saved_model_is_loaded(folder, size, tmp_path):
    """In one file and in shards, twice in a row, with the packed bytes."""
    model = load(folder)
    expected, names = output(model), list(model.state_dict())
    for number in "ab":
        model.save_pretrained(tmp_path / number, max_shard_size=size)
        model, info = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path / number, output_loading_info=True)
        assert not any(info.values())
        assert kinds(model) == {adapter.PackedLinear}
        assert_same(output(model), expected)
        assert list(model.state_dict()) == names
    config = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "qgemm"
    assert config["formats"]["proj_out"] == "bf16"
    assert output(model.half(), torch.float16).isfinite().all()
    model.float().fuse_qkv_projections()
    assert isinstance(model.transformer_blocks[0].attn.to_qkv, adapter.JoinedLinear)


def test_a_dequantized_model_is_saved_dense(folder, tmp_path):
    model = load(folder)
    model.dequantize()
    model.save_pretrained(tmp_path)
    loaded = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path)
    assert kinds(loaded) == set()
    assert_same(output(loaded), output(model))


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("kind", ["leaf_level", "block_level"])
def test_offload_of_groups(kind, on_disk, folder, tmp_path):
    """From the CPU to itself; with a stream it needs a GPU, where it assigns to `weight.data` (test_offload.py)."""
    model, cpu = load(folder), torch.device("cpu")
    expected = output(model)
    blocks = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    model.enable_group_offload(cpu, cpu, kind, **blocks, **({"offload_to_disk_path": str(tmp_path)} if on_disk else {}))
    for _ in range(2):
        assert_same(output(model), expected)

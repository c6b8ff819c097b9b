"""qgemm.torch.comfyui with a stand-in of ComfyUI-GGUF; where QGEMM_COMFYUI_GGUF names a checkout, the real one too."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import comfy_like
import gguf
import numpy as np
import pytest
from comfy_like import LoRAAdapter, tensor
from torch_layers import assert_product, assert_same, normal, torch, weights

import qgemm.torch.comfyui as adapter
from qgemm.cuda.layout import tile as tiles

CHECKOUT = os.environ.get("QGEMM_COMFYUI_GGUF", "")
FORMATS = "q4_0", "q8_0", "q4_k", "q6_k", "iq4_nl"
BIAS = normal(40, seed=1).numpy()


@pytest.fixture(params=["stand-in", "checkout"])
def ops(request, monkeypatch):
    if request.param == "stand-in":
        return comfy_like.stand_in()
    if not CHECKOUT:
        pytest.skip("QGEMM_COMFYUI_GGUF names no checkout of ComfyUI-GGUF")
    return comfy_like.checkout(Path(CHECKOUT), monkeypatch)


def linear(ops, w, bias=BIAS, patches=()):
    """A layer of ComfyUI-GGUF over a Tensor."""
    layer = ops.GGMLOps.Linear(w.shape[1], w.shape[0])
    layer.load(tensor(ops, w), None if bias is None else tensor(ops, bias))
    if patches:
        layer.weight.patches = [(list(patches), "a.weight")]
    return layer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_multiplies_by_its_blocks(ops, name, dtype):
    """Within the bound of a product, with and without a bias; no weight is decoded, and there is none besides."""
    w, decoded = weights(name), []
    x = normal(2, 3, w.shape[1], dtype=dtype)
    for bias in (None, BIAS):
        layer = linear(ops, w, bias)
        decode = layer.get_weight
        layer.get_weight = lambda tensor, *args, decode=decode: decoded.append(tensor.dim()) or decode(tensor, *args)
        with adapter.patch(ops):
            for _ in range(2):
                assert_product(layer(x), x, w, None if bias is None else torch.from_numpy(bias))
        assert layer.weight._qgemm.layer.weight.data_ptr() == layer.weight.data_ptr()
    assert set(decoded) == {1}  # the bias


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_those_of_comfyui_gguf(ops, name):
    """Which decodes in float16: d * s * q - m, with a rounding for each sign, of numbers up to twice the largest."""
    w = weights(name)
    layer, want = linear(ops, w), torch.from_numpy(w.dequantize())
    got = layer.get_weight(layer.weight, torch.float32)
    assert (got - want).abs().max() <= 6 * 2.0**-11 * want.abs().max() + 2.0**-20


def test_undo(ops):
    w = weights()
    layer, before = linear(ops, w), ops.GGMLOps.Linear.forward_ggml_cast_weights
    with adapter.patch(ops):
        assert ops.GGMLOps.Linear.forward_ggml_cast_weights is not before
        layer(normal(2, 128))
    assert ops.GGMLOps.Linear.forward_ggml_cast_weights is before
    fresh = linear(ops, w)
    assert_same(layer(normal(2, 128)), fresh(normal(2, 128)))
    assert not hasattr(fresh.weight, "_qgemm")


@pytest.mark.parametrize("spelled", ["class", "tuple"])
@pytest.mark.parametrize("alpha", [None, 8.0])
def test_lora_is_multiplied_beside_the_weight(ops, spelled, alpha):
    """Not added to it; several, with their strengths; taken away again."""
    w, x = weights("q8_0"), normal(3, 128)
    pairs = [(normal(40, 4, seed=s), normal(4, 128, seed=s + 1)) for s in (1, 3)]
    loras = [LoRAAdapter(*p, alpha) if spelled == "class" else ("lora", (*p, alpha, None)) for p in pairs]
    strengths = 0.5, -0.25
    layer = linear(ops, w, patches=[(k, lora, 1.0, None, None) for k, lora in zip(strengths, loras, strict=True)])
    weight = torch.from_numpy(w.dequantize()).double()
    magnitude = weight.abs()
    for k, (B, A) in zip(strengths, pairs, strict=True):
        scale = k * (1 if alpha is None else alpha / 4)
        weight = weight + scale * B.double() @ A.double()
        magnitude = magnitude + abs(scale) * B.double().abs() @ A.double().abs()
    bias = torch.from_numpy(BIAS).double()
    want, size = x.double() @ weight.T + bias, x.double().abs() @ magnitude.T + bias.abs()
    with adapter.patch(ops):
        # Sums in float32 of 128 products, of 4, and of four parts; a scale.
        assert ((layer(x) - want).abs() <= 2.0**-24 * (128 + 4 + 4 + 1) * size).all()
        assert len(layer.weight._qgemm.layer.lora) == 2
        layer.weight.patches = []
        assert_product(layer(x), x, w, torch.from_numpy(BIAS))
    assert ((layer(x) - want).abs() > 0.01).any()


def test_what_is_no_lora_takes_the_old_road(ops):
    """Differences, other kinds of LoRA, a weight that is scaled: the same numbers as before."""
    w, x = weights("q8_0"), normal(3, 128)
    A, B = normal(4, 128, seed=1), normal(40, 4, seed=2)
    for entry in (
        (0.5, ("diff", (normal(40, 128, seed=3),)), 1.0, None, None),
        (0.5, LoRAAdapter(B, A, None), 0.5, None, None),
        (0.5, LoRAAdapter(B, A, None, None, normal(40), None), 1.0, None, None),
    ):
        layer = linear(ops, w, patches=[entry])
        want = layer(x)
        with adapter.patch(ops):
            assert_same(layer(x), want)
        assert not hasattr(layer.weight, "_qgemm")


def test_what_is_no_matrix_of_whole_blocks_takes_the_old_road(ops):
    """As tensors that were reshaped for their type; and a type without a decoder here."""
    w = weights("q8_0", n=64)
    layer = linear(ops, w)
    assert adapter._multiplies(w.format, (64, 128), layer.weight)
    assert not adapter._multiplies(w.format, (128, 64), layer.weight)
    assert not adapter._multiplies(w.format, (64, 100), layer.weight)
    assert not adapter._multiplies(w.format, (2, 32, 128), layer.weight)
    assert not adapter._multiplies(adapter.GGML_TYPES[gguf.GGMLQuantizationType.Q8_K], (64, 128), layer.weight)


def test_a_new_weight_is_seen(ops):
    first, second, x = weights(), weights(seed=5), normal(2, 128)
    with adapter.patch(ops):
        layer = linear(ops, first)
        assert_product(layer(x), x, first, torch.from_numpy(BIAS))
        layer.load(tensor(ops, second), tensor(ops, np.zeros(40, np.float32)))
        assert_product(layer(x), x, second)
        with torch.inference_mode():
            layer = linear(ops, first)
            assert_product(layer(x), x, first, torch.from_numpy(BIAS))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # raised by torch
def test_a_model_compiles_in_parts(ops):
    torch._dynamo.reset()
    w, x = weights("q8_0"), normal(3, 128)
    model = torch.nn.Sequential(linear(ops, w), torch.nn.ReLU())
    with adapter.patch(ops), torch.no_grad():
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            assert_same(compiled(x), model(x))


def test_tiles_of_a_gpu_are_read_wherever_they_are(ops):
    """A weight whose bytes became tiles, and which ComfyUI brought back to the host."""
    w, x = weights("q4_k", n=70, blocks=1), normal(2, 256)
    raw = tiles.pack(w.format, w.blocks).tobytes()
    raw += bytes(4 * tiles.tiles_shape(w.format, *w.shape)[0] * tiles.ROWS)

    def tiled():
        layer = linear(ops, w, None)
        layer.weight.data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        assert layer.weight.dim() == adapter.TILES_NDIM
        return layer

    with adapter.patch(ops):
        layer = tiled()
        assert_product(layer(x), x, w)
        assert_product(layer(x), x, w)
        assert layer.weight.dim() == 2  # the file's layout, on the host
        dense = tiled()
    want = linear(ops, w, None).get_weight(tensor(ops, w), torch.float32)
    torch.testing.assert_close(dense.get_weight(dense.weight, torch.float32), want, rtol=2.0**-9, atol=2.0**-9)


def test_without_comfyui_gguf(monkeypatch):
    for modules in ((), (ModuleType("other"),)):
        with pytest.raises(
            ImportError, match=r"qgemm.torch.comfyui needs ComfyUI-GGUF's module ops \(GGMLOps, .*import"
        ):
            adapter.patch(*modules)
    ops = comfy_like.stand_in()
    monkeypatch.setitem(sys.modules, "custom_nodes.ComfyUI-GGUF.ops", ops)
    before = ops.GGMLOps.Linear.forward_ggml_cast_weights
    with adapter.patch():
        assert ops.GGMLOps.Linear.forward_ggml_cast_weights is not before

"""Packed weights on their way to a GPU: transformers' loaders move parameters that become tiles there, one by one.

There is no GPU: a parameter that is moved becomes tiles on the host, as it would on one.
"""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from torch_layers import assert_same, normal, tiled, torch, weights
from torch_models import MIX, VOCABULARY, random_model, transformers, write_gguf
from transformers import modeling_utils

import qgemm
import qgemm.torch.transformers as adapter
from qgemm.torch import QLinear, module, storage
from qgemm.torch.module import PackedModule

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
AUTO = transformers.AutoModelForCausalLM
INDEX = torch.arange(24).reshape(2, 12) % VOCABULARY


def logits(model):
    with torch.no_grad():
        return model(INDEX).logits


@pytest.fixture
def moved(monkeypatch) -> list[str]:
    """The formats of parameters that were moved: each became tiles, and no bytes reached a GPU in another way."""
    formats = []

    def to(self, *args, **kwargs):
        if self.dim() == 1:
            return self
        formats.append(self.spelling)
        packed = storage.host_tensor(self, self.spelling, self.packed_shape)
        return type(self)(tiled(packed))

    monkeypatch.setattr(storage.PackedParameter, "to", to)
    return formats


@pytest.fixture
def allocated(monkeypatch) -> list[int]:
    """Bytes that transformers would allocate on a GPU before it loads a model."""
    sizes = []

    def warmup(model, device_map, quantizer):
        sizes.append(round(sum(modeling_utils.get_total_byte_count(model, device_map, quantizer).values())))

    monkeypatch.setattr(modeling_utils, "caching_allocator_warmup", warmup)
    return sizes


def packed_sizes(model) -> int:
    """Bytes of a model's parameters as a GPU allocates them."""
    unit = storage.ALLOCATION_UNIT
    sizes = {id(p): -(-p.nbytes // unit) * unit if p.dtype == torch.uint8 else p.nbytes for p in model.parameters()}
    return sum(sizes.values())


@pytest.mark.parametrize("tied", [False, True])
def test_models_of_a_file_and_of_a_folder(tmp_path, moved, allocated, tied):
    """The first is read by the adapter, and the second by transformers from safetensors."""
    model = random_model("llama", tied)
    write_gguf(tmp_path / "model.gguf", model, **MIX)
    with adapter.patch():
        loaded = AUTO.from_pretrained(tmp_path, gguf_file="model.gguf", device_map="cpu")
    layers = [layer for layer in loaded.modules() if isinstance(layer, PackedModule)]
    assert len(moved) == len(layers) - tied
    assert all(layer.weight.dim() == 1 for layer in layers)
    assert sum(allocated) == pytest.approx(packed_sizes(loaded), rel=1e-3)
    expected = logits(loaded)
    moved.clear(), allocated.clear()
    loaded.save_pretrained(tmp_path / "saved")
    reloaded = AUTO.from_pretrained(tmp_path / "saved", device_map="cpu")
    assert len(moved) == len(layers) - tied
    assert sum(allocated) == pytest.approx(packed_sizes(reloaded), rel=1e-3)
    assert_same(logits(reloaded), expected)
    reloaded.save_pretrained(tmp_path / "twice")
    assert_same(logits(AUTO.from_pretrained(tmp_path / "twice")), expected)


def test_a_file_has_one_name_map(tmp_path, monkeypatch):
    """Where transformers alone makes one for each module of the model."""
    calls, original = [], gguf.get_tensor_name_map
    write_gguf(tmp_path / "model.gguf", random_model("llama"), **MIX)
    monkeypatch.setattr(gguf, "get_tensor_name_map", lambda *args: calls.append(args) or original(*args))
    with adapter.patch():
        AUTO.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert len(calls) == 1


def test_a_parameter_becomes_tiles_on_its_way_to_a_gpu(monkeypatch):
    """By one transfer of the host's bytes; numbers of experts are as many bytes there as in the file."""
    targets = []
    monkeypatch.setattr(storage, "to_device", lambda tensor, device: targets.append(device) or tiled(tensor))
    w = weights("q4_k", 70, 1)
    data = storage.file_bytes(w)
    parameter = storage.parameter_class(storage.PackedParameter, "q4_k", w.shape)(data)
    for arguments in (("cuda",), (torch.device("cuda", 1),), ("cuda", torch.uint8)):
        on_gpu = parameter.to(*arguments)
        assert type(on_gpu) is type(parameter)
        assert_same(on_gpu.data, tiled(w))
    assert targets == [torch.device("cuda"), torch.device("cuda", 1), torch.device("cuda")]
    assert parameter.to("cpu") is parameter
    plain = torch.zeros(2, 3, 128, dtype=torch.uint8)
    experts = storage.parameter_class(storage.PackedParameter, "f32", (2, 3, 32))(plain)
    assert experts.to("meta").shape == (2, 3, 128)
    assert storage.device_size(qgemm.FORMATS["f32"], (2, 3, 32)) == plain.numel()


def test_layers_become_tiles_in_their_own_parameter(monkeypatch):
    """`.to` of a layer replaces the parameter's bytes by those of one transfer, and lets the old ones go."""
    monkeypatch.setattr(module, "to_device", lambda tensor, device: tiled(tensor))
    w = weights("q4_k", 70, 1)
    layer = QLinear.from_tensor(w)
    x = normal(3, w.shape[1])
    expected, parameter, derived = layer(x), layer.weight, weakref.ref(layer.packed)
    moved = layer._moved(parameter, lambda tensor: SimpleNamespace(device=torch.device("cuda")))
    assert moved is parameter
    assert_same(layer(x), expected)  # the tiles are on the host, where a product makes them rows reloaded
    gc.collect()
    assert derived() is None


def test_sizes_that_a_gpu_allocates():
    """Tiles and bounds in units of the allocator, by the byte of the file; a byte or more for formats without tiles."""
    fmt = qgemm.FORMATS["q4_k"]
    shape = (4096, 4096)
    nbytes = int(np.prod(storage.file_shape(fmt, shape)))
    assert storage.element_size(fmt, shape) * nbytes == storage.device_size(fmt, shape)
    assert storage.element_size(fmt, shape) < 1.002
    assert storage.element_size(qgemm.FORMATS["q8_1"], (1, 32)) >= 1

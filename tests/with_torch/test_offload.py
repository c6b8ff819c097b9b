"""Offload by accelerate and diffusers, copies and state dicts in random order: a model's output never changes."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch_layers import assert_same, normal, tiled, torch, weights

import qgemm
from qgemm.torch import QEmbedding, QLinear, storage

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed (extra transformers)")
from accelerate.hooks import remove_hook_from_module  # noqa: E402

from qgemm.torch import accelerate as adapter  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
STEPS, WALKS = 10, range(3)
INDEX = torch.arange(24).reshape(2, 12) % 40


class Tied(torch.nn.Module):
    """A table, layers of several formats, one of them a view, and a head that shares the table's weight."""

    def __init__(self) -> None:
        super().__init__()
        table, order = weights("q4_0"), np.random.default_rng(0).permutation(128)
        self.table = QEmbedding.from_tensor(table)
        self.up = QLinear.from_tensor(qgemm.views.Reordered(weights("q8_0", 128), order), normal(128))
        self.norm = torch.nn.LayerNorm(128)
        self.down = QLinear.from_tensor(weights("iq4_nl", 128), normal(128))
        self.head = QLinear.from_tensor(table)
        self.head.weight = self.table.weight

    def forward(self, index):
        return self.head(self.down(self.norm(self.up(self.table(index)))))


class Walk:
    """A model, its output at the start, and operations that keep it; `hooked` while hooks of accelerate are on it."""

    def __init__(self, model: Any, output: Callable[[Any], Any], dice: random.Random, folder: Any) -> None:
        self.model, self.output, self.dice, self.folder = model, output, dice, folder
        self.expected, self.hooked = output(model), False

    def step(self) -> str:
        """Do one operation, and check the output."""
        operations = [self.deepcopy, self.unhook if self.hooked else self.offload]
        if not self.hooked:
            operations += [self.pickle, self.move, self.load, self.load_empty, self.layers_moved]
        operation = self.dice.choice(operations)
        operation()
        assert_same(self.output(self.model), self.expected)
        return operation.__name__

    def deepcopy(self) -> None:
        self.model = copy.deepcopy(self.model)

    def pickle(self) -> None:
        self.model = pickle.loads(pickle.dumps(self.model))

    def move(self) -> None:
        self.model.to("cpu").requires_grad_(False)

    def layers_moved(self) -> None:
        """Every layer by its own, as offload of groups does."""
        for module in self.model.modules():
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.clone()

    def state(self) -> dict[str, Any]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def load(self) -> None:
        self.model.load_state_dict(self.state(), assign=self.dice.random() < 0.5)

    def load_empty(self) -> None:
        """Through the device meta, or memory without values; buffers that no state dict has are copied."""
        state, buffers = self.state(), dict(copy.deepcopy(self.model).named_buffers())
        if self.dice.random() < 0.5:
            self.model.to("meta")
        self.model.to_empty(device="cpu")
        self.model.load_state_dict(state)
        for name, buffer in self.model.named_buffers():
            buffer.copy_(buffers[name])
        if hasattr(self.model, "tie_weights"):
            self.model.tie_weights()

    def offload(self) -> None:
        kind = self.dice.choice(("cpu", "disk", "hook", "map"))
        name = str(self.folder / str(self.dice.random()))
        if kind == "cpu":
            accelerate.cpu_offload(self.model, "cpu", offload_buffers=self.dice.random() < 0.5)
        elif kind == "disk":
            accelerate.disk_offload(self.model, name, "cpu")
        elif kind == "hook":
            accelerate.cpu_offload_with_hook(self.model, "cpu")[1].offload()
        else:
            places = {child: self.dice.choice(("cpu", "disk")) for child, _ in self.model.named_children()}
            accelerate.dispatch_model(self.model, {**places, next(iter(places)): "disk"}, offload_dir=name)
        self.hooked = True
        assert_same(self.output(self.model), self.expected)

    def unhook(self) -> None:
        remove_hook_from_module(self.model, recurse=True)
        vars(self.model).pop("hf_device_map", None)
        self.hooked = False


def walk(model: Any, output: Callable[[Any], Any], seed: int, folder: Any) -> None:
    walker, names = Walk(model, output, random.Random(seed), folder), []
    for _ in range(STEPS):
        try:
            names.append(walker.step())
        except Exception as error:
            error.add_note(f"after {', '.join(names) or 'nothing'}")
            raise


@pytest.mark.parametrize("seed", WALKS)
def test_layers_in_any_order(seed, tmp_path):
    with torch.no_grad():
        walk(Tied(), lambda model: model(INDEX), seed, tmp_path)


@pytest.fixture(scope="module")
def model(request, tmp_path_factory):
    """A model that transformers or diffusers loaded from a .gguf file, and its output, as functions."""
    kind, folder = request.param, tmp_path_factory.mktemp("model")
    if kind == "flux":
        models = pytest.importorskip("diffusion_models")
        models.write_flux(folder)
        return models.load(folder), models.output
    models = pytest.importorskip("torch_models")
    adapter = pytest.importorskip("qgemm.torch.transformers")
    models.write_gguf(folder / "model.gguf", models.random_model("llama", kind == "tied llama"), **models.MIX)
    with adapter.patch():
        loaded = models.transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf")
    return loaded, lambda model: model(INDEX).logits


@pytest.mark.parametrize("model", ["llama", "tied llama", "flux"], indirect=True)
@pytest.mark.parametrize("seed", WALKS)
def test_models_in_any_order(model, seed, tmp_path):
    with torch.no_grad():
        walk(copy.deepcopy(model[0]), model[1], seed, tmp_path)


# ---------------------------------------------------------------- tiles, as they lie on a GPU


def as_on_a_gpu(monkeypatch) -> None:
    """After each forward a weight is tiles, as on a GPU, where the first product makes them in the same parameter."""
    forward = QLinear.forward

    def tiling_forward(self, x):
        y, w = forward(self, x), self.packed
        if self.weight.dim() == 2:
            self.weight.data = tiled(w)
            storage.keep(self.weight, w, self._format)
        return y

    monkeypatch.setattr(QLinear, "forward", tiling_forward)


@pytest.mark.parametrize("offload", [accelerate.cpu_offload, accelerate.disk_offload])
def test_tiles_have_the_shape_of_the_file_while_they_are_offloaded(offload, monkeypatch, tmp_path):
    as_on_a_gpu(monkeypatch)
    model = torch.nn.Sequential(QLinear.from_tensor(weights()), QLinear.from_tensor(weights("q4_k", 70, 1)))
    model[0] = QLinear.from_tensor(weights("q8_0", 256), normal(256))
    x = normal(3, 128)
    expected = model(x)
    assert [layer.weight.dim() for layer in model] == [1, 1]
    model = copy.deepcopy(model)
    folder = [tmp_path / "offload"] if offload is accelerate.disk_offload else []
    offload(model, *folder, "cpu")
    for _ in range(3):
        assert_same(model(x), expected)
        assert [tuple(layer.weight.shape) for layer in model] == [(256, 136), (70, 144)]
    remove_hook_from_module(model, recurse=True)
    assert_same(model(x), expected)


def test_a_parameter_of_tiles_keeps_its_format():
    """In copies, in other parameters made from it, and when it is pickled."""
    w = weights("q4_k", 70, 1)
    p = storage.parameter_class(storage.PackedParameter, "q4_k", w.shape)(tiled(w))
    for other in (p, copy.deepcopy(p), pickle.loads(pickle.dumps(p)), type(p)(p.data, requires_grad=True)):
        assert (other.spelling, other.packed_shape, other.requires_grad) == ("q4_k", (70, 256), False)
        assert type(other) is type(p)
        assert tuple(other.to("meta").shape) == (70, 144)
    assert p.to("cpu") is p
    assert type(p)(p.to("meta")).to("meta").shape == (70, 144)


def test_memory_of_moved_weights_is_freed():
    """The Tensor of the old bytes, which a cache holds, keeps none of them once torch has moved the weight."""
    layer = QLinear.from_tensor(weights())
    layer(normal(3, 128))
    packed = weakref.ref(layer.packed)
    assert packed() is not None
    layer._apply(lambda tensor: tensor.clone())
    gc.collect()
    assert packed() is None


def test_tiles_that_are_exchanged_for_other_bytes_are_freed(monkeypatch):
    """diffusers' offload of groups with a stream assigns the bytes of the host to `weight.data`, and moves nothing."""
    as_on_a_gpu(monkeypatch)
    layer, x = QLinear.from_tensor(weights()), normal(3, 128)
    host = layer.weight.data
    expected = layer(x)
    tiles = weakref.ref(layer.packed)
    assert layer.weight.dim() == 1
    assert tiles() is not None
    layer.weight.data = host
    gc.collect()
    assert tiles() is None
    assert_same(layer(x), expected)


def empty_model(**formats: str) -> Tied:
    """The layers of Tied on the device meta, before a checkpoint is loaded."""
    with torch.device("meta"):
        model = Tied.__new__(Tied)
        torch.nn.Module.__init__(model)
        shapes = {"up": (128, 128, "q8_0"), "down": (128, 128, "iq4_nl"), "head": (128, 40, "q4_0")}
        model.table, model.norm = QEmbedding(40, 128, "q4_0"), torch.nn.LayerNorm(128)
        for name, (k, n, fmt) in shapes.items():
            setattr(model, name, QLinear(k, n, formats.get(name, fmt), name != "head"))
        model.up.register_buffer("column_order", torch.empty(128, dtype=torch.int32))
    model.head.weight = model.table.weight
    return model


@pytest.fixture
def checkpoint(tmp_path):
    """A model, and the path of its checkpoint by torch or safetensors."""
    model = Tied()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save(state, tmp_path / "model.bin")
    pytest.importorskip("safetensors.torch").save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    return model, tmp_path


MAPS = {
    "one device": {"": "cpu"},
    "some on the disk": {"table": "cpu", "up": "disk", "norm": "cpu", "down": "disk", "head": "cpu"},
}


@pytest.mark.parametrize("file", ["model.bin", "model.safetensors"])
@pytest.mark.parametrize("places", MAPS)
def test_a_checkpoint_is_loaded_and_dispatched(places, file, checkpoint):
    model, folder = checkpoint
    with torch.no_grad(), adapter.patch():
        loaded = accelerate.load_checkpoint_and_dispatch(
            empty_model(), str(folder / file), MAPS[places], offload_folder=str(folder / "disk"), offload_buffers=True
        )
        assert_same(loaded(INDEX), model(INDEX))


@pytest.mark.parametrize("places", MAPS)
def test_a_checkpoint_of_another_format_is_refused(places, checkpoint):
    """Both formats have as many bytes, so the layer would multiply by other weights."""
    model, folder = checkpoint
    other = empty_model(down="q4_0")
    assert other.down.weight.shape == model.down.weight.shape
    refusal = pytest.raises(qgemm.UnsupportedError, match="down: the checkpoint has the packed weight 'iq4_nl 128 128'")
    with adapter.patch(), refusal:
        accelerate.load_checkpoint_and_dispatch(
            other, str(folder / "model.bin"), MAPS[places], offload_folder=str(folder / "disk")
        )


@pytest.mark.parametrize("state", ["iq4_nl 128 128", "q4_0 64 256"])
@pytest.mark.parametrize("disk_first", [False, True])
def test_a_description_is_compared_in_either_order(disk_first, state, tmp_path):
    """Some releases of accelerate write it to the disk before they look for its layer."""
    model, name = empty_model(down="q4_0"), "down._extra_state"
    tensor = torch.tensor(list(state.encode()), dtype=torch.uint8)

    def steps():
        if disk_first:
            adapter.modeling.offload_weight(tensor, name, str(tmp_path), index={})
        adapter.modeling.set_module_tensor_to_device(model, name, "meta")
        if not disk_first:
            adapter.modeling.offload_weight(tensor, name, str(tmp_path), index={})

    with adapter.patch(), pytest.raises(qgemm.UnsupportedError, match=f"down: .* packed weight '{state}'"):
        steps()

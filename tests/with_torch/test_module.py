"""What torch does with any layer: moved, copied, pickled, saved, loaded, built empty; and both layouts of the bytes."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys

import numpy as np
import pytest
from strategies import TILED, over_formats
from torch_layers import MATRICES, assert_same, normal, tiled, torch, weights

import qgemm
from qgemm.torch import QEmbedding, QLinear, storage

each_format = pytest.mark.parametrize("name", [fmt.name for fmt in MATRICES])
X = normal(3, 128)


def kbit_of_its_own() -> qgemm.Tensor:
    """A Tensor [40, 128] with a codebook that is not the format's own."""
    levels = np.array([-1, -0.5, -0.2, -0.1, 0.1, 0.3, 0.6, 1], np.float32)
    return qgemm.quantize(normal(40, 128).numpy(), "kbit3_f16", codebook=levels)


def both(w: qgemm.Tensor) -> torch.nn.Module:
    """A head and the table that it shares its weight with."""
    table, head = QEmbedding.from_tensor(w), QLinear.from_tensor(w, normal(w.shape[0]))
    head.weight = table.weight
    return torch.nn.ModuleDict({"table": table, "head": head})


def saved(state) -> object:
    """Through torch.save and torch.load, which takes nothing but tensors and plain values."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer)), copy.copy])
def test_copies(copied):
    """Used before or not; tied layers stay tied, and derived tensors are not copied."""
    for used in (False, True):
        model = both(kbit_of_its_own())
        want = model["head"](X)
        if not used:
            model = both(kbit_of_its_own())
        duplicate = copied(model)
        assert_same(duplicate["head"](X), want)
        assert duplicate["head"].weight is duplicate["table"].weight
        assert duplicate["head"].packed is duplicate["table"].packed
        assert duplicate["head"].format == kbit_of_its_own().format
        if copied is not copy.copy:
            assert duplicate["head"].packed is not model["head"].packed
            assert duplicate["head"].weight.data_ptr() != model["head"].weight.data_ptr()


def test_a_whole_model_through_torch_save():
    model, buffer = both(weights()), io.BytesIO()
    want = model["head"](X)
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert_same(loaded["head"](X), want)
    assert loaded["head"].weight is loaded["table"].weight


# ---------------------------------------------------------------- state dicts


@each_format
def test_a_state_dict_is_the_bytes_of_the_file(name):
    w = weights(name)
    layer = QLinear.from_tensor(w, normal(40))
    state = layer.state_dict()
    assert state["weight"].shape == (40, w.nbytes // 40)
    assert state["weight"].numpy().tobytes() == w.blocks.tobytes()
    assert bytes(state["_extra_state"].tolist()).decode() == f"{name} 40 {w.shape[1]}"
    loaded = QLinear(w.shape[1], 40, name)
    assert loaded.load_state_dict(saved(state)) == ([], [])
    assert_same(loaded(normal(3, w.shape[1])), layer(normal(3, w.shape[1])))
    assert_same(saved(layer.state_dict(keep_vars=True))["weight"], layer.weight)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_state_dict_brings_its_format(device, assign):
    """Codebook included; into a layer that was built empty for another, without memory on the device meta."""
    layer = QLinear.from_tensor(kbit_of_its_own(), normal(40))
    empty = QLinear(128, 40, "q8_0", device=device)
    assert empty.weight.device.type == device
    if device == "meta" and not assign:
        with pytest.warns(UserWarning, match="is a no-op"):
            empty.load_state_dict(layer.state_dict())
        assert empty.weight.is_meta
        return
    empty.load_state_dict(saved(layer.state_dict()), assign=assign)
    assert empty.format == layer.format
    assert_same(empty(X), layer(X))


def test_what_is_tied_stays_tied_when_it_is_loaded():
    model, other = both(weights()), both(weights(seed=1))
    want = other["head"](X)
    assert not torch.equal(model["head"](X), want)
    model.load_state_dict(saved(other.state_dict()))
    assert_same(model["head"](X), want)
    assert model["head"].weight is model["table"].weight


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("owned", [False, True])
def test_a_tied_weight_that_the_state_dict_lacks(owned, empty):
    """accelerate and torch.distributed.checkpoint put the model's own parameter in its place."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    model, other = both(weights()), both(weights(seed=1))
    model = copy.deepcopy(model) if owned else model
    if empty:
        model.to_empty(device="cpu")
    state = saved(other.state_dict())
    del state["head.weight"]
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, strict=False))
    assert_same(model["head"](X), other["head"](X))
    assert model["head"].weight is model["table"].weight


def test_memory_of_torch_is_written_in_place():
    """As load_state_dict of any layer does: other tensors over the same memory see the loaded bytes."""
    layer = copy.deepcopy(QLinear.from_tensor(weights()))
    view, other = layer.weight.detach(), QLinear.from_tensor(weights(seed=1))
    layer.load_state_dict(other.state_dict())
    assert_same(view, other.weight)
    assert_same(layer(X), other(X))


def test_loading_never_writes_into_the_file(tmp_path):
    """Bytes that lie in a mapping, which is read-only, are left there."""
    path = tmp_path / "model.gguf"
    qgemm.write(path, {"w": weights()})
    with qgemm.open(path) as file:
        layer = QLinear.from_tensor(file["w"])
        layer.load_state_dict(QLinear.from_tensor(weights(seed=1)).state_dict())
        assert_same(layer(X), QLinear.from_tensor(weights(seed=1))(X))
        assert file["w"].blocks.tobytes() == weights().blocks.tobytes()


def test_state_dicts_that_do_not_fit():
    layer = QLinear.from_tensor(weights())
    dense, packed = torch.nn.Linear(128, 40, bias=False).state_dict(), layer.state_dict()
    before = layer(X)
    for state, message in (
        (dense, r"torch.float32 \[40, 128\], this layer's is packed, uint8 \[40, 72\] for Q4_0"),
        ({**packed, "weight": packed["weight"][:-1]}, r"torch.uint8 \[39, 72\]"),
        (QLinear(64, 40, "q4_0", bias=False).state_dict(), r"packed weight 'q4_0 40 64', this is QLinear\("),
        ({**packed, "_extra_state": torch.zeros(3, dtype=torch.uint8)}, "the state dict has the packed weight"),
        ({**packed, "_extra_state": torch.tensor(list(b"q4_9 40 128"), dtype=torch.uint8)}, "no format 'q4_9'"),
        ({**packed, "other": packed["weight"]}, 'Unexpected key.*"other"'),
        ({"_extra_state": packed["_extra_state"]}, 'Missing key.*"weight"'),
        ({"weight": packed["weight"]}, 'Missing key.*"_extra_state"'),
    ):
        with pytest.raises(RuntimeError, match=message):
            layer.load_state_dict(state)
        assert_same(layer(X), before)
    assert layer.load_state_dict({"weight": packed["weight"]}, strict=False).missing_keys == ["_extra_state"]


# ---------------------------------------------------------------- moved


def test_a_dtype_touches_the_bias_alone():
    w = weights()
    for change in ("half", "bfloat16", "double", "float"):
        layer = getattr(QLinear.from_tensor(w, normal(40)), change)()
        assert layer.weight.numpy().tobytes() == w.blocks.tobytes()
        assert layer.bias.dtype is normal(1).__getattribute__(change)().dtype
    layer = QLinear.from_tensor(w, normal(40)).to(torch.float16).type(torch.float64).to("cpu", torch.bfloat16)
    assert (layer.weight.dtype, layer.bias.dtype) == (torch.uint8, torch.bfloat16)
    assert layer(X).dtype is torch.float32


@pytest.mark.parametrize("kind", [QLinear, QEmbedding])
def test_the_weight_cannot_be_taken_away(kind):
    layer = kind.from_tensor(weights())
    for take in (lambda: delattr(layer, "weight"), lambda: setattr(layer, "weight", None)):
        with pytest.raises(qgemm.UnsupportedError, match="a packed layer needs its weight; replace the layer instead"):
            take()
    assert_same(layer.dequantize(), torch.from_numpy(weights().dequantize()))


def test_a_deleted_bias_is_none():
    layer = QLinear.from_tensor(weights(), torch.ones(weights().shape[0]))
    layer.note = "of the user"
    del layer.bias, layer.note
    assert layer.bias is None
    assert "bias=False" in repr(layer)
    assert not hasattr(layer, "note")
    assert_same(layer(X), QLinear.from_tensor(weights())(X))


def test_to_the_device_meta_and_back():
    layer = QLinear.from_tensor(weights(), normal(40)).to("meta")
    assert (layer.weight.device.type, layer.bias.device.type) == ("meta", "meta")
    assert layer.weight.shape == (40, 72)
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        layer.to("cpu")
    layer.to_empty(device="cpu").load_state_dict(QLinear.from_tensor(weights(), normal(40)).state_dict())
    assert_same(layer(X), QLinear.from_tensor(weights(), normal(40))(X))
    with torch.device("meta"):
        big = QLinear(1 << 20, 1 << 20, "q4_0", bias=False)
    assert big.weight.is_meta
    assert big.weight.numel() == 18 << 35


def test_shared_memory():
    layer = QLinear.from_tensor(weights(), normal(40))
    want = layer(X)
    layer.share_memory()
    assert layer.weight.is_shared()
    assert_same(layer(X), want)
    assert layer.packed.blocks.ctypes.data == layer.weight.data_ptr()


def test_bytes_that_were_changed_are_seen():
    """Another parameter, other data of it, or bytes that were written in place: no product is that of the old ones."""
    w, other = weights(), weights(seed=1)
    want = QLinear.from_tensor(other)(X)
    raw = torch.from_numpy(other.blocks.copy().view(np.uint8).reshape(40, -1))
    layer = QLinear.from_tensor(w)
    layer(X)
    layer.weight = torch.nn.Parameter(raw, requires_grad=False)
    assert_same(layer(X), want)
    layer = copy.deepcopy(QLinear.from_tensor(w))
    layer(X)
    layer.weight.copy_(raw)
    assert_same(layer(X), want)
    layer = QLinear.from_tensor(w)
    layer(X)
    layer.weight.data = raw
    assert_same(layer(X), want)
    layer.weight = torch.nn.Parameter(raw.T.contiguous().T, requires_grad=False)
    assert_same(layer(X), want)


def test_classes_of_parameters_are_found_by_their_names_in_another_process():
    """torch and vLLM store the classes of a compiled graph's inputs, without the inputs, the latter by dill."""
    custom = kbit_of_its_own().format
    classes = [
        storage.PackedParameter,
        storage.parameter_class(storage.PackedParameter, "q4_0", (64, 256)),
        storage.parameter_class(storage.PackedParameter, storage.spelled(custom), (2, 64, 256)),
    ]
    for cls in classes:
        assert getattr(storage, cls.__qualname__) is cls
    assert pickle.loads(pickle.dumps(classes)) == classes
    script = "import pickle, sys; print(*(c.__qualname__ for c in pickle.loads(sys.stdin.buffer.read())), sep='\\n')"
    names = subprocess.run([sys.executable, "-c", script], input=pickle.dumps(classes), capture_output=True, check=True)
    assert names.stdout.decode().split() == [cls.__qualname__ for cls in classes]


@pytest.mark.parametrize(
    "name", ["PackedParameters", "PackedParameter[q4_0]", "PackedParameter[q4_0,64,256", "Other[q4_0,1,2]"]
)
def test_other_names_are_no_classes(name):
    with pytest.raises(AttributeError, match="has no attribute"):
        getattr(storage, name)


def test_layers_of_inference_mode():
    with torch.inference_mode():
        layer = QLinear.from_tensor(weights())
        want = layer(X)
        copied = copy.deepcopy(layer)
        moved = copy.deepcopy(layer).half().to("cpu")
    assert_same(layer(X), want)
    assert_same(moved(X), want)
    assert_same(copied(X), want)
    layer(X.clone().requires_grad_()).sum().backward()


# ---------------------------------------------------------------- tiles, as they lie on a GPU


@over_formats(TILED)
def test_tiles_that_others_brought_to_the_host(fmt):
    """As accelerate and torch.load(map_location="cpu") do: they become rows again, in their own parameter."""
    w = weights(fmt.name, n=70, blocks=3)
    raw = tiled(w)
    assert storage.device_size(fmt, w.shape) == raw.numel()
    table, head = QEmbedding.from_tensor(w), QLinear.from_tensor(w)
    x = normal(3, w.shape[1])
    want = head(x)
    head.weight = table.weight = parameter = torch.nn.Parameter(raw, requires_grad=False)
    assert_same(head(x), want)
    assert head.weight is parameter
    assert table.weight.shape == (70, w.nbytes // 70)
    assert_same(table(torch.tensor([69])), torch.from_numpy(w.dequantize()[69:]))
    head.weight = torch.nn.Parameter(raw, requires_grad=False)
    assert head.state_dict()["weight"].numpy().tobytes() == w.blocks.tobytes()


def test_formats_as_text():
    for fmt in (*qgemm.FORMATS.values(), kbit_of_its_own().format):
        assert storage.format_of(storage.spelled(fmt)) == fmt
    with pytest.raises(qgemm.UnsupportedError, match="Q4_0 has no codebook to replace, got 'q4_0:00'"):
        storage.format_of("q4_0:00")

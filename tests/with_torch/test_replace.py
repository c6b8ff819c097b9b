"""replace_linear: layers of a model become those of a file; tied, shared, named and kept layers; refusals."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from torch_layers import assert_same, normal, torch

import qgemm
from qgemm.torch import QEmbedding, QLinear, replace_linear

nn = torch.nn


class Model(nn.Module):
    """A table that is the head as well, a layer of two names, layers with a bias and without."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 64, padding_idx=2)
        self.up = nn.Linear(64, 128)
        self.block = nn.Sequential(nn.Linear(128, 64, bias=False), nn.ReLU())
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.table.weight
        self.again = self.up

    def forward(self, index):
        return self.head(self.block(self.again(self.table(index))))


INDEX = torch.tensor([[1, 2, 49]])
FORMATS = {"table.weight": "q8_0", "up.weight": "q4_0", "block.0.weight": "f16"}


def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


def packed(layers: nn.Module = None, formats: dict[str, str] = FORMATS) -> dict[str, qgemm.Tensor]:
    parameters = dict((layers or model()).named_parameters())
    return {name: qgemm.quantize(parameters[name], fmt) for name, fmt in formats.items()}


def dense(layers: nn.Module, tensors: dict[str, qgemm.Tensor]) -> nn.Module:
    """The model with the decoded weights of the tensors."""
    state = {name: torch.from_numpy(tensor.dequantize()) for name, tensor in tensors.items()}
    copy_of_layers = copy.deepcopy(layers)
    copy_of_layers.load_state_dict(state, strict=False)
    return copy_of_layers


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.gguf"
    qgemm.write(path, packed())
    return path


@pytest.mark.parametrize("embeddings", [False, True])
def test_a_model_from_a_file(file, embeddings):
    """Its output is that of the decoded weights; shared layers stay shared, and tied ones have one weight."""
    replaced = model()
    done = replace_linear(replaced, file, embeddings=embeddings)
    want = dense(model(), packed())(INDEX) if embeddings else None
    names = ["up", "block.0", "head"]
    assert [layer.name for layer in done.layers] == ["table", *names] if embeddings else names
    assert done.kept == ()
    assert replaced.again is replaced.up
    assert all(type(layer) is QLinear for layer in (replaced.up, replaced.block[0], replaced.head))
    assert replaced.up.format == qgemm.FORMATS["q4_0"]
    assert not replaced.up.training
    if embeddings:
        assert type(replaced.table) is QEmbedding
        assert replaced.table.padding_idx == 2
        assert replaced.head.weight is replaced.table.weight
        torch.testing.assert_close(replaced(INDEX), want, rtol=1e-4, atol=1e-4)
        assert sum(p.numel() for p in replaced.parameters()) == sum(t.nbytes for t in packed().values()) + 128
    else:
        assert type(replaced.table) is nn.Embedding
        torch.testing.assert_close(replaced.head(normal(1, 64)), dense(model(), packed()).head(normal(1, 64)))


def test_what_was_tied_may_come_of_two_tensors():
    """A head of its own in the file, where the model ties it to the table."""
    tensors = {**packed(), "output.weight": qgemm.quantize(normal(50, 64), "q4_0")}
    replaced, names = model(), {"table": "table.weight", "head": "output.weight"}
    replace_linear(replaced, tensors, names, embeddings=True)
    assert_same(replaced.head.dequantize(), torch.from_numpy(tensors["output.weight"].dequantize()))
    assert_same(replaced.table.dequantize(), torch.from_numpy(tensors["table.weight"].dequantize()))


def test_the_report(file):
    with qgemm.open(file) as opened:
        done = replace_linear(model(), opened, {"up": "up.weight"})
    assert done.layers == (("up", "up.weight", "Q4_0", (128, 64), 128 * 36),)
    assert done.kept == ("block.0", "head")
    assert str(done) == "1 layers replaced (1 Q4_0; 0.0 MiB); kept as they are: block.0, head"


def test_names(file):
    """A function, a mapping, a Tensor whose rows the caller put in another order, None."""
    rows = np.arange(128)[::-1].copy()
    with qgemm.open(file) as opened:
        other = opened["up.weight"][rows]
        for names in (
            {"up": other, "block.0": None},
            lambda name: {"up": other, "block.0": None}.get(name),
        ):
            replaced = model()
            assert replace_linear(replaced, opened, names).kept == ("block.0", "head")
            assert_same(replaced.up.dequantize(), torch.from_numpy(opened["up.weight"].dequantize()[rows]))
    replaced = model()
    replace_linear(replaced, packed(), activation="a8")
    assert (replaced.up.activation, replaced.block[0].activation) == ("a8", "a16")  # f16 has no integer codes
    with pytest.raises(qgemm.UnsupportedError, match="activation is 'a16', 'a8', 'a8_g256' or 'e4m3_g256', got 'a4'"):
        replace_linear(model(), packed(), activation="a4")


def test_biases():
    """The file's, in the layer's type, else the layer's own parameter."""
    own = model().half()
    bias = own.up.bias
    replace_linear(own, packed())
    assert own.up.bias is bias
    other = model().half()
    replace_linear(other, {**packed(), "up.bias": qgemm.quantize(normal(128), "f32")})
    assert_same(other.up.bias, normal(128).half())
    assert other.up.bias.requires_grad


def test_a_model_that_was_built_empty(file):
    with torch.device("meta"):
        empty = Model()
    with pytest.raises(qgemm.UnsupportedError, match="the layer's bias is on the device meta, and the file has none"):
        replace_linear(empty, file, embeddings=True)
    tensors = {**packed(), "up.bias": qgemm.quantize(model().up.bias, "f32")}
    replace_linear(empty, tensors, embeddings=True)
    want = model()
    replace_linear(want, tensors, embeddings=True)
    assert_same(empty.eval()(INDEX), want(INDEX))


def test_torch_does_not_take_its_fused_transformer():
    """Its kernel would ask for dense weights; out_proj of attention stays, for the same reason."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    tensors = packed(layer, {"linear1.weight": "q8_0", "linear2.weight": "q8_0"})
    want = dense(layer, tensors)
    whole = nn.TransformerEncoder(layer, 2)
    names = {f"layers.{i}.{name}": tensors[f"{name}.weight"] for i in (0, 1) for name in ("linear1", "linear2")}
    assert len(replace_linear(whole, tensors, names).layers) == 4
    replace_linear(layer, tensors)
    x = normal(2, 5, 64)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), want(x), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(whole(x), want(want(x)), rtol=1e-3, atol=1e-3)


def test_hooks_go_on():
    layers, seen = model(), []
    layers.up.register_forward_pre_hook(lambda module, args, kwargs: seen.append(type(module)), with_kwargs=True)
    layers.up.register_forward_hook(lambda module, args, y: seen.append(y.shape))
    layers.up.register_full_backward_hook(lambda module, grad_input, grad_output: seen.append("backward"))
    replace_linear(layers, packed())
    layers(INDEX).sum().backward()
    assert seen == [QLinear, (1, 3, 128), "backward"]


class Special(nn.Linear):
    """A Linear of a class of its own."""


def test_what_does_not_fit_is_named_before_anything_changes():
    tensors = packed()
    limited = model()
    limited.table.max_norm = 1.0
    special = model()
    special.up = Special(64, 128)
    wrong_bias = {**tensors, "up.bias": qgemm.quantize(normal(64), "f32")}
    more_bias = {**tensors, "block.0.bias": qgemm.quantize(normal(64), "f32")}
    for layers, file, names, error, message in (
        (
            model(),
            tensors,
            {"down": "up.weight"},
            qgemm.UnsupportedError,
            "no layer 'down'; it has layers like 'table'",
        ),
        (model(), tensors, {"up": "block.0.weight"}, qgemm.ShapeError, r"'up' \(\(128, 64\)\).*another shape"),
        (model(), tensors, {"block": "up.weight"}, qgemm.UnsupportedError, "'block' is of class Sequential"),
        (model(), tensors, {"table": "table.weight"}, None, ""),
        (special, tensors, {"up": "up.weight"}, qgemm.UnsupportedError, "'up' is of class Special, not torch"),
        (limited, tensors, None, qgemm.UnsupportedError, "a table with max_norm is changed when it is read"),
        (model(), wrong_bias, None, qgemm.ShapeError, r"its bias is .*, the layer's has shape \(128,\)"),
        (model(), more_bias, None, qgemm.UnsupportedError, "the file has .*, the layer takes no bias"),
        (model(), {}, None, qgemm.UnsupportedError, "no layer was replaced: there are tensors like none, the model"),
        (torch.nn.SiLU(), tensors, None, qgemm.UnsupportedError, r"the model has no torch\.nn\.Linear$"),
        (model(), tensors, lambda name: f"{name}.w", KeyError, "table.w"),
    ):
        if error is None:
            replace_linear(layers, file, names, embeddings=True)
            continue
        before = repr(layers)
        with pytest.raises(error, match=message):
            replace_linear(layers, file, names, embeddings=True)
        assert repr(layers) == before
    with pytest.raises(qgemm.UnsupportedError, match=r"'table' is of class Embedding.*give embeddings=True"):
        replace_linear(model(), tensors, {"table": "table.weight"})
    with pytest.raises(qgemm.UnsupportedError, match=r"is a layer itself.*QLinear\.from_tensor"):
        replace_linear(nn.Linear(64, 128), {"weight": tensors["up.weight"]})


def test_a_name_that_the_file_lacks(file):
    with pytest.raises(qgemm.NameNotFoundError, match=r"model\.gguf: there is no tensor 'up\.weigth'"):
        replace_linear(model(), file, {"up": "up.weigth"})
    with pytest.raises(qgemm.GGUFNotFoundError):
        replace_linear(model(), file.with_name("other.gguf"))

"""Layers under torch.compile, torch.export and fake tensors: registered ops, no graph break, the same numbers."""

from __future__ import annotations

import copy
import shutil

import pytest
from torch_layers import DTYPES, assert_same, normal, torch, weights

import qgemm
from qgemm.torch import QEmbedding, QLinear, storage

pytestmark = pytest.mark.filterwarnings(  # torch's own
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:At pre-dispatch tracing:UserWarning"
)
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.compiles])]
each_backend = pytest.mark.parametrize("backend", BACKENDS)


class Model(torch.nn.Module):
    """A table, layers with and without bias and LoRA, and a head that is the table."""

    def __init__(self):
        super().__init__()
        table = weights("q8_0", n=40)
        self.table = QEmbedding.from_tensor(table, padding_idx=0)
        self.up = QLinear.from_tensor(weights("q4_0", n=256), normal(256))
        self.down = QLinear.from_tensor(weights("q4_k", n=128, blocks=1), activation="a8")
        self.down.add_lora(normal(2, 256), normal(128, 2), 0.01)
        self.head = QLinear.from_tensor(table)
        self.head.weight = self.table.weight

    def forward(self, index):
        x = self.table(index)
        x = x + self.down(torch.relu(self.up(x)))
        return self.head(torch.nn.functional.layer_norm(x, (128,)))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@each_backend
def test_a_model_compiles_whole(backend):
    """fullgraph: no break; also of a copy, for other shapes, and after a new weight came."""
    model = Model().eval()
    index = torch.randint(40, (2, 5), generator=torch.Generator().manual_seed(0))
    for candidate in (model, copy.deepcopy(model)):
        compiled = torch.compile(candidate, backend=backend, fullgraph=True)
        with torch.no_grad():
            for indices in (index, index[:1], index[:, :3]):
                torch.testing.assert_close(compiled(indices), candidate(indices), rtol=1e-4, atol=1e-3)
            candidate.up.load_state_dict(QLinear.from_tensor(weights("q4_0", n=256, seed=5), normal(256)).state_dict())
            torch.testing.assert_close(compiled(index), candidate(index), rtol=1e-4, atol=1e-3)


@each_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_compiles_to_the_same_bits(backend, dtype):
    layer = QLinear.from_tensor(weights(), normal(40, dtype=dtype))
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    x = normal(2, 3, 128, dtype=dtype)
    with torch.no_grad():
        for view in (x, x.transpose(0, 1), x[:0], x[0, 0]):
            assert_same(compiled(view), layer(view))
    with torch.inference_mode():
        assert_same(compiled(x), layer(x))


@each_backend
def test_gradients_and_autocast(backend):
    layer = QLinear.from_tensor(weights("q8_0"), torch.nn.Parameter(normal(40)))
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    gradients = []
    for function in (layer, compiled):
        x = normal(3, 128).requires_grad_()
        layer.bias.grad = None
        function(x).pow(2).sum().backward()
        gradients.append((x.grad, layer.bias.grad))
    for eager, other in zip(*gradients, strict=True):
        torch.testing.assert_close(other, eager)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        y = compiled(normal(3, 128))
        assert y.dtype is torch.bfloat16
        assert_same(y, layer(normal(3, 128)))


@each_backend
@pytest.mark.parametrize("requires_grad", [False, True])
def test_compiled_calls_derive_a_weight_once(backend, requires_grad, monkeypatch):
    """An op finds what multiplies by the bytes of a layer, call after call."""
    derived, derive = [], storage._host_tensor
    monkeypatch.setattr(storage, "_host_tensor", lambda *args: derived.append(args) or derive(*args))
    compiled = torch.compile(QLinear.from_tensor(weights(), normal(40)), backend=backend, fullgraph=True)
    x = normal(2, 128).requires_grad_(requires_grad)
    for _ in range(3):
        y = compiled(x)
        if requires_grad:
            y.sum().backward()
    assert len(derived) == 1


def test_the_ops_are_what_torch_asks_of_ops():
    """Schemas, fake tensors, gradients and dynamic shapes, by torch's own checks."""
    layer = QLinear.from_tensor(weights("q8_0"), torch.nn.Parameter(normal(40)))
    table = QEmbedding.from_tensor(weights("q8_0"))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    x = normal(3, 128).requires_grad_()
    for op, args in (
        (torch.ops.qgemm.linear, (x, layer.weight, layer.bias, "q8_0", 40, 128, "a16", False)),
        (
            torch.ops.qgemm.linear,
            (x.detach().half().requires_grad_(), layer.weight, None, "q8_0", 40, 128, "a16", True),
        ),
        (torch.ops.qgemm.linear, (x, layer.weight, None, "q8_0", 40, 128, "a8", False)),
        (torch.ops.qgemm.linear_backward, (normal(3, 40), layer.weight, "q8_0", 40, 128)),
        (torch.ops.qgemm.embedding, (torch.tensor([[1, 2]]), table.weight, "q8_0", 40, 128, torch.float16)),
    ):
        torch.library.opcheck(op, args, test_utils=checks)


@pytest.mark.parametrize("strict", [False, True])
def test_export_and_back(tmp_path, strict):
    """An exported program holds the bytes with format and shape: it runs wherever it is loaded."""
    model, index = Model().eval(), torch.tensor([[1, 2, 3]])
    program = torch.export.export(model, (index,), strict=strict)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    with torch.no_grad():
        assert_same(loaded(index), model(index))
    assert "qgemm.linear" in str(program.graph)


def test_fake_and_meta_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    layer, table = QLinear(128, 40, "q4_0", device="meta"), QEmbedding(40, 128, "q4_0", device="meta")
    assert layer(torch.empty(2, 3, 128, device="meta")).shape == (2, 3, 40)
    assert table(torch.empty(2, 3, device="meta", dtype=torch.int64)).shape == (2, 3, 128)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(normal(2, 128))
        y = QLinear.from_tensor(weights())(x)
    assert (type(y).__name__, y.shape) == ("FakeTensor", (2, 40))
    with pytest.raises(qgemm.ShapeError, match="x has rows of 64"):
        QLinear.from_tensor(weights())(normal(2, 64))

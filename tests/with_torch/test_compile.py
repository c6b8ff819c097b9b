"""Layers under torch.compile, torch.export and fake tensors: registered ops, no graph break, the same numbers."""

from __future__ import annotations

import copy
import shutil

import pytest
from measured_errors import check_rms
from torch_layers import DTYPES, assert_same, normal, torch, weights

import qgemm
from qgemm.torch import QEmbedding, QExperts, QLinear, storage

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


# ---------------------------------------------------------------- graphs


OPS = torch.ops.qgemm
PLAIN_OPS = ("linear_forward", "linear_backward", "embedding", "moe")  # those that run in compiled code


def qgemm_ops(graphs):
    """The ops of this package in graphs, in order."""
    targets = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    return [target.split(".")[1] for target in targets if target.startswith("qgemm.")]


def compiled_ops(module, x):
    """The ops in the graph of torch.compile, and in the graphs that tracing through autograd makes of it."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    captured, traced = [], []

    def compiler(graph, inputs):
        traced.append(graph)
        return make_boxed_func(graph)

    def backend(graph, inputs):
        captured.append(graph)
        return aot_autograd(fw_compiler=compiler, bw_compiler=compiler)(graph, inputs)

    y = torch.compile(module, backend=backend, fullgraph=True)(x)
    if y.requires_grad:
        y.sum().backward()
    return qgemm_ops(captured), qgemm_ops(traced)


def trained(layer):
    """The layer with LoRA, both matrices trainable."""
    layer.add_lora(normal(2, layer.in_features), normal(layer.out_features, 2), 0.1)
    return layer


@pytest.mark.parametrize("op", PLAIN_OPS)
def test_ops_of_compiled_code_have_no_kernel_of_autograd(op):
    """Such a kernel is Python's, and is called even where no gradient is needed."""
    name = f"qgemm::{op}"
    kernels = ("Autograd", "AutogradCPU", "AutogradCUDA", "CompositeImplicitAutograd")
    assert [key for key in kernels if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)] == []
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")


def test_a_graph_without_gradients_has_ops_without_autograd():
    frozen, biased = QLinear.from_tensor(weights()), QLinear.from_tensor(weights(), torch.nn.Parameter(normal(40)))
    forward = (["linear_forward"],) * 2
    assert compiled_ops(frozen, normal(2, 128)) == forward
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for layer in (frozen, biased, trained(QLinear.from_tensor(weights()))):
                torch._dynamo.reset()
                assert compiled_ops(layer, normal(2, 128)) == forward
    torch._dynamo.reset()
    with torch.no_grad():
        model_ops = ["embedding", "linear_forward", "linear_forward", "linear_forward"]
        assert compiled_ops(Model(), torch.tensor([[1, 2]])) == (model_ops, model_ops)


def test_a_graph_with_experts():
    """One op; a gradient, which experts have not, is refused as in eager code, and never lost in silence."""
    experts, ids, routed = QExperts(2, 64, 64, ("q4_0",) * 3), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    with torch.no_grad():
        assert compiled_ops(lambda x: experts(x, ids, routed), normal(3, 64)) == (["moe"], ["moe"])
    compiled = torch.compile(experts, backend="aot_eager")
    with pytest.raises(qgemm.UnsupportedError, match="no gradient flows through QExperts"):
        compiled(normal(3, 64).requires_grad_(), ids, routed)
    x = normal(3, 64).requires_grad_()
    assert "qgemm.moe" in str(torch.export.export(experts, (x, ids, routed)).graph)


def test_a_graph_with_gradients_has_ops_without_autograd_below_it():
    """torch.compile differentiates qgemm::linear once, while it traces; compiled code calls its parts."""
    layer, x = QLinear.from_tensor(weights()), normal(2, 128)
    assert compiled_ops(layer, x.requires_grad_()) == (["linear"], ["linear_forward", "linear_backward"])
    torch._dynamo.reset()
    biased = QLinear.from_tensor(weights(), torch.nn.Parameter(normal(40)))
    assert compiled_ops(biased, x.detach()) == (["linear"], ["linear_forward"])
    torch._dynamo.reset()
    two = torch.nn.Sequential(trained(QLinear.from_tensor(weights(n=128))), QLinear.from_tensor(weights()))
    expected = ["linear_forward", "linear"], ["linear_forward", "linear_forward", "linear_backward"]
    assert compiled_ops(two, x.detach()) == expected


def test_one_compiled_layer_follows_what_needs_a_gradient():
    layer = QLinear.from_tensor(weights("q8_0"), normal(40))
    compiled, x = torch.compile(layer, backend="aot_eager", fullgraph=True), normal(2, 128)
    for trainable in (False, True, False):
        layer.bias.requires_grad_(trainable)
        assert compiled(x).requires_grad == trainable
        assert compiled(x.clone().requires_grad_()).requires_grad
        with torch.no_grad():
            assert not compiled(x.clone().requires_grad_()).requires_grad


# ---------------------------------------------------------------- shapes, modes, training


@each_backend
def test_dynamic_shapes(backend):
    """One graph for any number of rows, besides those of 0 and 1 row, which torch may specialize."""
    from torch._dynamo.testing import CompileCounterWithBackend

    layer, counter = QLinear.from_tensor(weights(), normal(40)), CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for m in (5, 2, 33, 0, 1, 7, 64):
            assert_same(compiled(normal(m, 128)), layer(normal(m, 128)))
        for shape in ((2, 3, 128), (4, 1, 128), (1, 5, 128)):
            assert_same(compiled(normal(*shape)), layer(normal(*shape)))
    assert counter.frame_count <= 6


@pytest.mark.parametrize("dynamic", [False, True])
@needs_compiler
@pytest.mark.compiles
def test_reduce_overhead(dynamic):
    """CUDA graphs where there is a GPU (tests/gpu/test_torch_linear.py), the code of the default mode elsewhere."""
    model = Model().eval()
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        for m in (3, 1, 3, 4):
            index = torch.arange(m)[None]
            torch.testing.assert_close(compiled(index), model(index), rtol=1e-4, atol=1e-3)


def test_no_graph_break():
    explained = torch._dynamo.explain(Model().eval())(torch.tensor([[1, 2]]))
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)


@each_backend
@pytest.mark.parametrize("checkpointed", [False, True])
def test_training_of_lora(backend, checkpointed):
    """Gradients of compiled blocks, with activations kept or computed again, are those of eager ones."""
    from torch.utils.checkpoint import checkpoint

    def block(x):
        return down(torch.relu(up(x)))

    def step(x):
        y = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
        return y.pow(2).sum()

    up, down = (
        trained(QLinear.from_tensor(weights("q8_0", n=64))),
        trained(QLinear.from_tensor(weights("q8_0", blocks=1))),
    )
    parameters = [*up.lora.parameters(), *down.lora.parameters()]
    gradients = []
    for function in (step, torch.compile(step, backend=backend, fullgraph=True)):
        x = normal(3, 128).requires_grad_()
        gradients.append(torch.autograd.grad(function(x), [x, *parameters]))
    for eager, other in zip(*gradients, strict=True):
        check_rms(other.numpy(), eager.numpy(), "float32")


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
        (torch.ops.qgemm.linear_forward, (normal(3, 128), layer.weight, layer.bias.detach(), "q8_0 40 128 a8")),
        (torch.ops.qgemm.linear_forward, (normal(3, 128).half(), layer.weight, None, "q8_0 40 128 a16 wide")),
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


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_layer_has_gradients(strict):
    """x may need a gradient where the program is loaded, as with an eager layer."""
    layer, x = QLinear.from_tensor(weights("q8_0"), normal(40)), normal(3, 128)
    loaded = torch.export.export(layer, (x,), strict=strict).module()
    gradients = []
    for function in (layer, loaded):
        leaf = x.clone().requires_grad_()
        gradients.append(torch.autograd.grad(function(leaf).pow(2).sum(), leaf)[0])
    assert_same(*gradients)


def test_derivatives_of_the_op():
    """A graph that runs uncompiled differentiates it as often as an eager layer."""
    layer, x = QLinear.from_tensor(weights("q8_0", n=8, blocks=1)), normal(2, 64).requires_grad_()
    functions = layer, lambda x: OPS.linear(x, layer.weight, None, "q8_0", 8, 64, "a16", False)
    results = []
    for function in functions:
        first = torch.autograd.grad(function(x).pow(3).sum(), x, create_graph=True)[0]
        results.append((first, torch.autograd.grad(first.pow(2).sum(), x)[0]))
    for eager, other in zip(*results, strict=True):
        assert_same(other, eager)


@pytest.mark.filterwarnings("ignore:.*batching rule:UserWarning")
def test_transforms_of_torch_func_under_compile():
    """A batch axis works; a derivative, for which torch has no rule there, is an error, never a zero."""
    layer, x = QLinear.from_tensor(weights("q8_0")), normal(3, 128)
    vmapped = torch.compile(lambda x: torch.vmap(lambda row: layer(row))(x), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(vmapped(x), layer(x), rtol=1e-4, atol=1e-4)
    tangent = torch.compile(lambda x: torch.func.jvp(layer, (x,), (x,))[1], backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="custom_function_call"):
        tangent(x)


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

"""Layers of PyTorch on the GPU: products, one copy of each weight, moves, gradients, rows, streams, graphs, compile."""

from __future__ import annotations

import copy
import io
import sys

import numpy as np
import pytest
from helpers import at_once, cupy, random_tensor
from measured_errors import check_rms
from strategies import TILED
from torch_layers import DTYPES, assert_gpu_product, assert_product, on_host, torch

import qgemm
from qgemm.torch import QEmbedding, QLinear, ops

if not torch.cuda.is_available():
    pytest.skip("torch finds no GPU", allow_module_level=True)

# Every format by float16, and every type by one: kernels of the others are compiled and tested elsewhere.
PAIRS = [(fmt, "float16") for fmt in TILED] + [(qgemm.FORMATS["q4_0"], dtype) for dtype in DTYPES[1:]]
each_pair = pytest.mark.parametrize(("fmt", "dtype"), PAIRS, ids=[f"{fmt.name}-{dtype}" for fmt, dtype in PAIRS])


def weights(name: str = "q4_0", n: int = 200, k: int = 512) -> qgemm.Tensor:
    return random_tensor(qgemm.FORMATS[name], n, k, np.random.default_rng(0))


def normal(*shape, dtype="float32", seed=0):
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float16)
    return torch.from_numpy(values).cuda().to(getattr(torch, dtype))


@each_pair
def test_products_and_one_copy_of_the_weight(fmt, dtype):
    """The layer is moved, copied and saved, or its bytes were copied to the GPU by other code."""
    w = weights(fmt.name)
    layer = QLinear.from_tensor(w, normal(200, dtype=dtype).cpu())
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    assert layer.to("cuda") is layer
    assert (layer.weight.device.type, layer.weight.dim(), layer.bias.device.type) == ("cuda", 1, "cuda")
    assert layer.packed.pointer == layer.weight.data_ptr()
    for m in (1, 70):
        x = normal(m, 512, dtype=dtype)
        y = layer(x)
        assert y.dtype is x.dtype
        assert_gpu_product(y, x, w, layer.bias)
    copied = copy.deepcopy(layer)
    assert copied.weight.data_ptr() != layer.weight.data_ptr()
    foreign = QLinear.from_tensor(w, layer.bias)
    foreign.weight = torch.nn.Parameter(state["weight"].cuda(), requires_grad=False)
    loaded = QLinear(512, 200, "q8_0", device="cuda", dtype=x.dtype)
    loaded.load_state_dict(state)
    for other in (copied, foreign, loaded):
        assert torch.equal(other(x), y)
        assert other.weight.dim() == 1
        assert other.packed.pointer == other.weight.data_ptr()
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor.cpu(), state[name])
    assert layer.cpu().weight.numpy().tobytes() == w.blocks.tobytes()


def test_memory_is_that_of_the_tiles():
    """Nothing of the file's layout stays on the GPU, and nothing at all of a layer that is gone."""

    def used() -> int:
        torch.cuda.synchronize()
        pool = cupy().get_default_memory_pool().used_bytes() if sys.modules.get("cupy") else 0
        return torch.cuda.memory_allocated() + pool

    w, x = weights(n=4096, k=4096), normal(1, 4096)
    QLinear.from_tensor(w).cuda()(x)
    before = used()
    layer = QLinear.from_tensor(w).cuda()
    layer(x)
    assert w.nbytes <= used() - before <= 1.05 * w.nbytes
    del layer
    assert used() <= before


def test_a_whole_model_saved_on_the_gpu_is_loaded_on_the_host():
    layer, buffer = QLinear.from_tensor(weights()).cuda(), io.BytesIO()
    x = normal(2, 512)
    want = layer(x)
    torch.save(layer, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False, map_location="cpu")
    assert_gpu_product(want, x, weights())
    assert_product(loaded(x.cpu()), x.cpu(), weights())
    assert loaded.weight.numpy().tobytes() == weights().blocks.tobytes()


@pytest.mark.parametrize("name", ["q4_0", "q6_k", "kbit4", "f16"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("panel", [64 * 512, 1 << 20], ids=["panels", "at_once"])
def test_gradients(name, dtype, panel, monkeypatch):
    """Gradients are computed at once or panel by panel, for a number of rows that no row block divides."""
    monkeypatch.setitem(ops.PANEL_WEIGHTS, "cuda", panel)
    w = weights(name)
    layer = QLinear.from_tensor(w, torch.nn.Parameter(normal(200, dtype=dtype))).cuda()
    x, gradient = normal(3, 512, dtype=dtype).requires_grad_(), normal(3, 200, dtype=dtype, seed=1)
    layer(x).backward(gradient)
    dense = torch.from_numpy(w.dequantize(np.float64)).cuda()
    loss = 4 * {"float32": 2.0**-10, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]  # torch may multiply in TF32
    want = gradient.double() @ dense
    assert ((x.grad.double() - want).abs() <= loss * (gradient.double().abs() @ dense.abs())).all()
    check_rms(on_host(x.grad), on_host(want), "bfloat16" if dtype == "bfloat16" else "float16")
    torch.testing.assert_close(layer.bias.grad.double(), gradient.double().sum(0), rtol=loss, atol=loss)
    assert torch.equal(layer.dequantize(), dense.float())


@each_pair
def test_rows_of_a_table_that_is_the_head_as_well(fmt, dtype):
    w, kind = weights(fmt.name), getattr(torch, dtype)
    table, head = QEmbedding.from_tensor(w, dtype=kind), QLinear.from_tensor(w)
    head.weight = table.weight
    model = torch.nn.ModuleDict({"table": table, "head": head}).cuda()
    assert model["head"].weight is model["table"].weight
    dense = torch.from_numpy(w.dequantize()).to(kind).cuda()
    for index in (torch.tensor([199]), torch.randint(200, (5, 30)), torch.zeros(2, 0, dtype=torch.int64)):
        assert torch.equal(model["table"](index.cuda()), dense[index.cuda()])
        assert torch.equal(model["table"](index.cuda().int()), dense[index.cuda()])
    assert_gpu_product(model["head"](normal(3, 512, dtype=dtype)), normal(3, 512, dtype=dtype), w)


@pytest.mark.parametrize("name", ["f16", "bf16", "f32"])
def test_rows_of_plain_tables(name):
    w = weights(name)
    table = QEmbedding.from_tensor(w).cuda()
    index = torch.randint(200, (7,)).cuda()
    assert torch.equal(table(index), torch.from_numpy(w.dequantize()).cuda()[index])


def test_streams_and_graphs_of_torch():
    """Work is on torch's current stream, and a graph that captured it follows its inputs."""
    table = QEmbedding.from_tensor(weights("q8_0", n=512)).cuda()
    up = QLinear.from_tensor(weights("q4_0", n=512), normal(512)).cuda()
    head = QLinear.from_tensor(weights("q6_k", n=512)).cuda()

    def model(index):
        return head(torch.relu(up(table(index))))

    with torch.no_grad():
        index, other = torch.arange(4).cuda(), torch.arange(100, 104).cuda()
        wants = [model(index).clone(), model(other).clone()]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            copy = torch.zeros_like(index)
            torch.cuda._sleep(20_000_000)  # what follows must wait for the copy on the same stream
            copy.copy_(other)
            y = model(copy)
        stream.synchronize()
        assert torch.equal(y, wants[1])
        static, graph = index.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            for _ in range(3):
                model(static)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            y = model(static)
        for ids, want in ((index, wants[0]), (other, wants[1])):
            static.copy_(ids)
            graph.replay()
            assert torch.equal(y, want)


def test_threads_with_streams_of_their_own():
    layer = QLinear.from_tensor(weights("q5_0", n=512), normal(512)).cuda()
    xs = [normal(m, 512, dtype="float16", seed=m) for m in (1, 4, 40, 200)]
    with torch.no_grad():
        wants, wrong = [layer(x) for x in xs], []
    torch.cuda.synchronize()

    def work(x, want):
        stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(50):
                y = layer(x)
                stream.synchronize()
                if not torch.equal(y, want):
                    wrong.append(len(x))

    at_once(work, xs, wants)
    assert wrong == []


@pytest.mark.parametrize("options", [{"backend": "aot_eager"}, {}, {"mode": "reduce-overhead"}], ids=str)
@pytest.mark.filterwarnings("ignore")
def test_compiled_whole(options):
    """Inductor's own CUDA graphs as well; the second and third call of a graph replay it."""
    table = QEmbedding.from_tensor(weights("q8_0", n=512), dtype=torch.float16)
    up, head = (
        QLinear.from_tensor(weights("q4_0", n=512), normal(512).cpu().half()),
        QLinear.from_tensor(weights("q6_k")),
    )
    model = torch.nn.Sequential(table, up, torch.nn.ReLU(), head).cuda()
    compiled = torch.compile(model, fullgraph=True, **options)
    with torch.no_grad():
        for seed in range(4):
            index = torch.randint(512, (2, 3), generator=torch.Generator().manual_seed(seed)).cuda()
            y, want = compiled(index).clone(), model(index)
            torch.testing.assert_close(y, want, rtol=2e-2, atol=2e-1)
            check_rms(y.cpu().numpy(), want.cpu().numpy(), "float16", 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.filterwarnings("ignore")
def test_compiled_for_any_number_of_rows(dtype):
    """Without a gradient and with one; every layer multiplies by the same tiles."""
    layer = QLinear.from_tensor(weights()).cuda()
    torch._dynamo.reset()  # all layers share the code of QLinear.forward, whose recompiles torch limits
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for m in (1, 3, 0, 40, 1):
        x = normal(m, 512, dtype=dtype)
        with torch.no_grad():
            assert torch.equal(compiled(x), layer(x))
        gradients = []
        for function in (layer, compiled):
            leaf = x.clone().requires_grad_()
            gradients.append(torch.autograd.grad(function(leaf).sum(), leaf)[0])
        torch.testing.assert_close(*gradients, rtol=2e-2, atol=2e-1)
        check_rms(*(gradient.double().cpu().numpy() for gradient in gradients), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_multiplies_by_transposed_weights(dtype):
    w = weights().to_device()
    for m in (1, 1, 40):
        x = normal(m, 512, dtype=dtype)
        assert torch.equal(x @ w.T, qgemm.matmul(x, w))


def test_autocast():
    layer, x = QLinear.from_tensor(weights()).cuda(), normal(3, 512)
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype is torch.bfloat16
    assert torch.equal(y, layer(x.bfloat16()))


def test_what_lies_elsewhere_is_named():
    layer = QLinear.from_tensor(weights())
    with pytest.raises(qgemm.UnsupportedError, match="x is on a CUDA device, w on the host"):
        layer(normal(1, 512))
    with pytest.raises(qgemm.UnsupportedError, match="w is on a CUDA device"):
        layer.cuda()(normal(1, 512).cpu())

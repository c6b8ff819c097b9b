"""How a product is called on the GPU: short second calls, graphs, streams, torch, views, guards, errors."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from helpers import assert_same_bits, at_once, check_product, cupy, poisoned, random_tensor
from strategies import each_product

import qgemm


@each_product
@pytest.mark.parametrize("m", [1, 8, 16, 64])
def test_same_input_same_bits(fmt, m, activation):
    rng = np.random.default_rng(3)
    w = random_tensor(fmt, 320, 512, rng).to_device()
    x = cupy().asarray(rng.standard_normal((m, 512)).astype(np.float16))
    assert_same_bits(qgemm.matmul(x, w, activation), lambda: qgemm.matmul(x, w, activation))


def test_leading_shapes_strides_and_empty():
    cp, rng = cupy(), np.random.default_rng(5)
    w = qgemm.quantize(rng.standard_normal((96, 64)).astype(np.float32), "q8_0")
    on_device = w.to_device()
    x = cp.asarray(rng.standard_normal((3, 4, 128)).astype(np.float32))[:, ::2, ::2]
    check_product(qgemm.matmul(x, on_device).get(), x.get(), w)
    assert qgemm.matmul(x[0, 0], on_device).shape == (96,)
    assert qgemm.matmul(x[:0], on_device).shape == (0, 2, 96)
    strided = cp.full((3, 2, 192), np.nan, np.float16)
    qgemm.matmul(x, on_device, out=strided[..., ::2])
    check_product(strided[..., ::2].get(), x.get(), w)
    assert cp.isnan(strided[..., 1::2]).all()
    empty = qgemm.Tensor("q8_0", (5, 0), np.empty((5, 0), qgemm.FORMATS["q8_0"].dtype)).to_device()
    assert (qgemm.matmul(cp.ones((2, 0), np.float32), empty) == 0).all()


@pytest.mark.parametrize("activation", ["a16", "a8"])
def test_second_call_takes_the_fast_path(activation):
    """A second call of the same shapes: same bits, into any other arrays; views and overlaps take the slow path."""
    cp, rng = cupy(), np.random.default_rng(21)
    w = qgemm.quantize(rng.standard_normal((96, 96)).astype(np.float32), "q4_0").to_device()
    for m in (1, 5):
        for _ in range(3):
            x = cp.asarray(rng.standard_normal((m, 96)).astype(np.float16))
            want = qgemm.matmul(x, w, activation, dtype="float16")
            y = poisoned((m, 96), np.float16)
            qgemm.matmul(x, w, activation, out=y)
            assert (y == want).all()
            buffer = cp.zeros(m * 96 + 1, np.float16)
            shifted = buffer[1:].reshape(m, 96)
            shifted[...] = x
            assert (qgemm.matmul(shifted, w, activation, out=y) == want).all()
            assert (qgemm.matmul(shifted, w, activation, out=shifted) == want).all()


@pytest.mark.parametrize("activation", ["a16", "a8"])
@pytest.mark.parametrize("m", [1, 16])
def test_a_product_can_be_captured_in_a_graph(activation, m):
    cp, rng = cupy(), np.random.default_rng(22)
    w = qgemm.quantize(rng.standard_normal((320, 256)).astype(np.float32), "q4_1").to_device()
    x, y = cp.zeros((m, 256), np.float16), cp.empty((m, 320), np.float32)
    qgemm.matmul(x, w, activation, out=y)
    with cp.cuda.Stream(non_blocking=True) as stream:
        qgemm.matmul(x, w, activation, out=y)  # compiles, and takes its workspace
        stream.begin_capture()
        qgemm.matmul(x, w, activation, out=y)
        graph = stream.end_capture()
        for _ in range(3):
            x[...] = cp.asarray(rng.standard_normal((m, 256)).astype(np.float16))
            y.fill(np.nan)
            graph.launch(stream)
            assert (y == qgemm.matmul(x, w, activation)).all()


@each_product
def test_guard_regions(fmt, activation):
    """Memory around y is not written, and NaN in the memory around x reaches no output."""
    cp, rng = cupy(), np.random.default_rng(9)
    n, k = 70, 3 * fmt.weights
    w = random_tensor(fmt, n, k, rng).to_device()
    for m in (1, 2, 5, 8, 16, 20, 70, 300):
        x = cp.full((m + 2, k), np.nan, np.float16)
        x[1:-1] = cp.asarray(rng.standard_normal((m, k)))
        before = x.copy()
        guarded = cp.full((m + 2, n), 7.0, np.float32)
        qgemm.matmul(x[1:-1], w, activation, out=guarded[1:-1])
        assert (guarded[0] == 7).all()
        assert (guarded[-1] == 7).all()
        assert (guarded[1:-1] != 7).all()
        assert cp.isfinite(guarded).all()
        assert (x.view(np.uint16) == before.view(np.uint16)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_torch_in_torch_out(dtype):
    """Zero-copy in and out through DLPack, on torch's current stream."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from torch_layers import assert_gpu_product

    rng = np.random.default_rng(11)
    w = qgemm.quantize(rng.standard_normal((256, 128)).astype(np.float32), "q4_0")
    on_device = w.to_device()
    for m in (1, 33):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x = torch.randn(m, 128, device="cuda").to(getattr(torch, dtype))
            torch.cuda._sleep(20_000_000)  # what follows must wait for x * 2 on the same stream
            x *= 2
            y = qgemm.matmul(x, on_device, dtype=dtype)
            out = torch.full((m, 256), float("nan"), device="cuda", dtype=torch.float32)
            assert qgemm.matmul(x, on_device, out=out) is out
        stream.synchronize()
        assert isinstance(y, torch.Tensor)
        assert y.dtype == x.dtype
        for got in (y, out):
            assert_gpu_product(got, x, w)


@pytest.mark.parametrize("activation", ["a16", "a8"])
@pytest.mark.parametrize(
    ("n", "counts"),
    [(512, (1, 4, 8, 40)), (512, (17, 64, 200, 600)), (8192, (113, 128, 160, 256))],
    ids=["few", "many", "CTAs that wait for each other"],
)
def test_threads_and_streams(activation, n, counts):
    cp, rng = cupy(), np.random.default_rng(13)
    w = qgemm.quantize(rng.standard_normal((n, 256)).astype(np.float32), "q5_0").to_device()
    xs = [cp.asarray(rng.standard_normal((m, 256)).astype(np.float16)) for m in counts]
    wants = [qgemm.matmul(x, w, activation).get() for x in xs]
    failures: list[str] = []

    def work(x, want):
        with cp.cuda.Stream(non_blocking=True) as stream:
            for _ in range(50):
                y = qgemm.matmul(x, w, activation)
                stream.synchronize()
                if not (y.get() == want).all():
                    failures.append(f"M = {len(x)}")

    cp.cuda.Device().synchronize()
    at_once(work, xs, wants)
    assert not failures


def test_errors_name_what_came_and_what_fits():
    cp = cupy()
    w = qgemm.quantize(np.ones((32, 64), np.float32), "q4_0")
    on_device = w.to_device()
    with pytest.raises(qgemm.UnsupportedError, match="to_device"):
        qgemm.matmul(cp.ones((1, 64), np.float32), w)
    with pytest.raises(qgemm.UnsupportedError, match="upload x first"):
        qgemm.matmul(np.ones((1, 64), np.float32), on_device)
    with pytest.raises(qgemm.ShapeError, match="K = 64"):
        qgemm.matmul(cp.ones((1, 32), np.float32), on_device)
    with pytest.raises(TypeError, match="int32"):
        qgemm.matmul(cp.ones((1, 64), np.int32), on_device)
    with pytest.raises(qgemm.ShapeError, match="out has shape"):
        qgemm.matmul(cp.ones((1, 64), np.float32), on_device, out=cp.empty((2, 32), np.float32))
    with pytest.raises(qgemm.UnsupportedError, match="no kernel for F16 a8"):
        qgemm.matmul(
            cp.ones((1, 64), np.float32), qgemm.quantize(np.ones((32, 64), np.float32), "f16").to_device(), "a8"
        )


def test_x_at_w_transposed():
    """The operator of every library, and what to write where its operand is not transposed."""
    cp, x = cupy(), np.random.default_rng(3).standard_normal((3, 64)).astype(np.float16)
    w = qgemm.quantize(np.random.default_rng(4).standard_normal((32, 64)).astype(np.float32), "q4_0").to_device()
    want = qgemm.matmul(cp.asarray(x), w)
    assert (cp.asarray(x) @ w.T == want).all()
    with pytest.raises(TypeError, match=r"write x @ tensor\.T"):
        cp.asarray(x) @ w
    torch = pytest.importorskip("torch", reason="torch is not installed")
    parameter = torch.nn.Parameter(torch.from_numpy(x).cuda())
    y = parameter @ w.T
    assert type(y) is torch.Tensor
    assert (y.cpu().numpy() == want.get()).all()
    with pytest.raises(TypeError, match=r"write x @ tensor\.T"):
        parameter @ w
    bias = torch.nn.Parameter(torch.ones(32, device="cuda"))
    np.testing.assert_array_equal(qgemm.matmul(parameter, w, bias=bias).cpu(), (want + np.float32(1)).get())
    with pytest.raises(qgemm.UnsupportedError, match="out requires grad"):
        qgemm.matmul(parameter, w, out=torch.empty(3, 32, device="cuda").requires_grad_())


def test_outs_that_overlap_are_refused():
    """Also where a call of the same shapes was made before; columns of one array do not overlap."""
    cp, w = cupy(), qgemm.quantize(np.ones((64, 64), np.float32), "q4_0").to_device()
    x, buffer = cp.ones((3, 64), np.float16), cp.zeros((6, 64), np.float16)
    for outs in ([buffer[:3], buffer[3:]], [buffer[:3], buffer[3:]]):
        qgemm.matmul_many(x, [w, w], outs=outs)
    for outs in ([buffer[:3], buffer[2:5]], [buffer[:3], buffer[:3]]):
        with pytest.raises(qgemm.UnsupportedError, match=r"outs\[0\] and outs\[1\] share memory"):
            qgemm.matmul_many(x, [w, w], outs=outs)
    fused = cp.zeros((3, 128), np.float16)
    qgemm.matmul_many(x, [w, w], outs=[fused[:, :64], fused[:, 64:]])
    assert (fused == buffer[:1, :1]).all()
    repeated = cp.lib.stride_tricks.as_strided(cp.zeros(64, np.float16), (3, 64), (0, 2))
    with pytest.raises(qgemm.UnsupportedError, match="out has elements that share memory"):
        qgemm.matmul(x, w, out=repeated)
    with pytest.raises(qgemm.UnsupportedError, match="bias is on the host"):
        qgemm.matmul(x, w, bias=np.ones(64, np.float32))


@pytest.mark.parametrize("activation", ["a16", "a8"])
@pytest.mark.parametrize("m", [1, 16, 300])
def test_torch_captures_products(activation, m):
    """On a stream of torch's own where nothing was warmed, into new tensors and given ones, with an epilogue."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    rng = np.random.default_rng(31)
    w = qgemm.quantize(rng.standard_normal((320, 256)).astype(np.float32), "q4_1").to_device()
    x, bias = torch.zeros(m, 256, device="cuda").half(), torch.randn(320, device="cuda")
    out = torch.empty(m, 320, device="cuda")
    qgemm.matmul(x, w, activation)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = qgemm.matmul(x, w, activation, bias=bias, dtype="bfloat16")
        qgemm.matmul(x, w, activation, out=out)
        many = qgemm.matmul_many(x, [w, w], activation, dtype="float16")
    for _ in range(3):
        x.normal_()
        for output in (y, out, *many):
            output.fill_(float("nan"))
        graph.replay()
        want = qgemm.matmul(x, w, activation)
        assert torch.equal(out, want)
        assert all(torch.equal(half, want.half()) for half in many)
        assert torch.equal(y, qgemm.matmul(x, w, activation, bias=bias).bfloat16())


def test_a_call_touches_its_own_stream_alone():
    """Products on a stream of torch end, by the slow and the fast path, while the default stream is still at work."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from torch_layers import assert_gpu_product

    rng = np.random.default_rng(32)
    w = qgemm.quantize(rng.standard_normal((256, 128)).astype(np.float32), "q4_0")
    on_device, stream = w.to_device(), torch.cuda.Stream()
    x = torch.randn(3, 128, device="cuda").half()
    qgemm.matmul(x, on_device, "a8")
    qgemm.matmul(x, on_device, "a16")  # both compiled
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    at_work = torch.cuda.Event()
    at_work.record()
    with torch.cuda.stream(stream):
        ys = [qgemm.matmul(x, on_device, activation) for activation in ("a16", "a8") for _ in range(3)]
    stream.synchronize()
    assert not at_work.query()
    for y, activation in zip(ys, ["a16"] * 3 + ["a8"] * 3, strict=True):
        assert_gpu_product(y, x, w, activation=activation)


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_calls_leave_nothing_behind(library):
    """10,000 calls of every kind leak neither memory of the GPU nor objects of Python."""
    cp = cupy()
    if library == "torch":
        torch = pytest.importorskip("torch", reason="torch is not installed")
        array, used = lambda x: torch.from_numpy(x).cuda(), torch.cuda.memory_allocated
    else:
        array, used = cp.asarray, cp.get_default_memory_pool().used_bytes
    rng = np.random.default_rng(33)
    w = qgemm.quantize(rng.standard_normal((64, 64)).astype(np.float32), "q4_0").to_device()
    x, bias = array(rng.standard_normal((20, 64)).astype(np.float16)), array(np.ones(64, np.float32))
    out = array(np.empty((20, 64), np.float32))

    def calls() -> None:
        for activation in ("a16", "a8"):
            qgemm.matmul(x, w, activation)
            qgemm.matmul(x, w, activation, bias=bias, out=out)
            qgemm.matmul(x[:1], w, activation, residual=out[:1], out=out[:1])
            qgemm.matmul_many(x[:3], [w, w], activation)
        qgemm.matmul(qgemm.quantize_activations(x), w)

    def state() -> tuple[int, int, int]:
        gc.collect()
        return used(), len(gc.get_objects()), len(w.plans)

    for _ in range(20):
        calls()
    before = state()
    for _ in range(1200):
        calls()
    after = state()
    assert (after[0], after[2]) == (before[0], before[2])
    assert abs(after[1] - before[1]) < 100


def test_threads_that_share_a_stream():
    """Every product quantizes its x into its stream's workspace, and none reads the x of another stream."""
    cp, rng = cupy(), np.random.default_rng(34)
    w = qgemm.quantize(rng.standard_normal((512, 256)).astype(np.float32), "q4_0").to_device()
    xs = [cp.asarray(rng.standard_normal((5, 256)).astype(np.float16)) for _ in range(4)]
    wants = [qgemm.matmul(x, w, "a8").get() for x in xs]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(300):
            if not (qgemm.matmul(xs[index], w, "a8").get() == wants[index]).all():
                wrong.append(index)

    at_once(work, range(4))
    assert not wrong

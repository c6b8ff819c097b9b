"""Products of a mixture of experts in float64, with bounds of the error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gates import function, gated_bound, gated_noise, gated_up
from helpers import ROUNDING, exact, level_loss, product_bound, random_tensor
from measured_errors import Expected, noise_of, weight_loss

import qgemm
from qgemm.codec.error_bound import magnitudes
from qgemm.codec.format import float_dtype

FLOAT32 = 2.0**-23


def random_experts(fmt, e, n, k, rng):
    """Random weights [E, N, K'], with scales such that products by them stay in the range of float16."""
    w = random_tensor(fmt, e * n, k, rng)
    return qgemm.Tensor(fmt, (e, n, w.shape[1]), w.blocks.reshape(e, n, -1))


def golden_experts(fmt, e, n):
    """Experts [E, n, 512] of the bytes that ggml's C wrote for a type, and the values that it reads from them."""
    with np.load(Path(__file__).parent / "data" / "ggml_blocks.npz") as golden:
        rows, values = golden[f"{fmt.name}/blocks"], golden[f"{fmt.name}/values"]
    order = np.arange(e * n) * 7 % len(rows)  # experts begin at other rows
    blocks = np.ascontiguousarray(rows[order]).view(fmt.dtype).reshape(e, n, -1)
    return qgemm.Tensor(fmt, (e, n, values.shape[1]), blocks), values[order].reshape(e, n, -1).astype(np.float64)


def product(x, w, bias=None, dtype="float32", rounded="float32"):
    """x [M, K] @ w [N, K].T + bias by sums in float32, of x of a type; rounded: the type of weights."""
    x, bias = x.astype(np.float64), np.zeros(w.shape[0]) if bias is None else bias.astype(np.float64)
    bound = product_bound(x, w, float_dtype(rounded)) + level_loss(x, w, dtype)
    loss = weight_loss(w.format, w.blocks, dtype if rounded == "float32" else rounded, rounded == "float32")
    return Expected(exact(x, w), bound, noise_of(x, magnitudes(w.format, w.blocks), loss)).plus(bias)


def known_matmul(x, w, ids, bias=None, dtype="float32", rounded="float32"):
    """y [T, top_k, N] of x [T, K] or [T, top_k, K]."""
    arrays = [np.zeros((*ids.shape, w.shape[1])) for _ in Expected._fields]
    rows = np.broadcast_to(x if x.ndim == 3 else x[:, None], (*ids.shape, x.shape[-1]))
    for expert in np.unique(ids):
        places = ids == expert
        result = product(rows[places], w[expert], None if bias is None else bias[expert], dtype, rounded)
        for array, part in zip(arrays, result, strict=True):
            array[places] = part
    return Expected(*arrays)


def known_layer(
    x, gate, up, down, ids, weights, name, biases=(None, None, None), between="float32", in_float=False,
    rounded="float32",
):  # fmt: skip
    """y [T, K] of x [T, K] by pairs of weights.

    between: the type of the activations between the products. The router's weights multiply these activations, unless
    `in_float` is set.
    """
    t, top_k = ids.shape
    y, bound, square = (np.zeros((t, down.shape[1])) for _ in Expected._fields)
    for expert in np.unique(ids):
        token, j = np.nonzero(ids == expert)
        factor = weights[token, j].astype(np.float64)[:, None]
        bias = [None if array is None else array[expert] for array in biases]
        g, u = (product(x[token], w[expert], b, between, rounded) for w, b in zip((gate, up), bias[:2], strict=True))
        middle = function(name, g.y) * gated_up(name, u.y)
        off = gated_bound(name, g.y, u.y, g.bound, u.bound, between) + ROUNDING[between] * np.abs(middle)
        # float16 holds the activation times the factor, which may be subnormal
        off += 2.0**-24 / (np.abs(factor) + 1e-9) * (between == "float16" and not in_float)
        d = product(middle, down[expert], bias[2], between, rounded)
        noise = gated_noise(name, g, u, between) + 2.0**-26 / (np.abs(factor) + 1e-9) * (between == "float16")
        dense = np.abs(down[expert].dequantize(np.float64)).T
        sums = np.abs(factor * d.y) + np.abs(factor) * (np.abs(middle) @ dense)
        np.add.at(y, token, factor * d.y)
        np.add.at(bound, token, np.abs(factor) * (1.01 * d.bound + off @ dense) + (top_k + 2) * FLOAT32 * sums)
        np.add.at(square, token, factor**2 * (d.rounded(between).noise ** 2 + noise**2 @ dense**2))
    return Expected(y, bound, np.sqrt(square))


def assert_within(y, expected, dtype="float32", more=0.0, tiny=2.0**-24):
    """y, which may lie on the GPU, is as expected once it is rounded to dtype.

    more: the error of a gate's exponential, relative to y. tiny: what subnormal halves lose.
    """
    y, size = y if isinstance(y, np.ndarray) and not hasattr(y, "get") else y.get(), np.abs(expected.y)
    expected = expected.rounded(dtype)
    bound = expected.bound + (more + FLOAT32) * size + tiny
    Expected(expected.y, bound, np.hypot(expected.noise, more * size) + tiny).check(y)


def routed(rng, t, top_k, e, skewed=False):
    """ids [T, top_k], those of a token different where there are enough experts, and weights that sum to 1."""
    ids = np.stack([rng.choice(e, top_k, replace=top_k > e) for _ in range(t)]) if t else np.zeros((0, top_k))
    if skewed:
        ids[:, 0] = 0
    weights = rng.random((t, top_k)).astype(np.float32) + np.float32(0.05)
    return ids.astype(np.int32), weights / weights.sum(1, keepdims=True)


def assert_a_graph_follows_ids(t, more=0.0, **of_layer):
    """A graph of torch with a layer of t tokens multiplies by the experts that ids name when it is replayed; a call
    outside of it, by then a graph of its own where it has several launches, gives the same bits.

    more: the error of a gate's exponential, relative to y. of_layer: arguments of known_layer.
    """
    torch = pytest.importorskip("torch", reason="torch is not installed")
    rng, fmt = np.random.default_rng(2), qgemm.FORMATS["q4_0"]
    weights = [random_experts(fmt, 8, *shape, rng) for shape in ((256, 128), (256, 128), (128, 256))]
    gate, up, down = (w.to_device() for w in weights)
    x = torch.from_numpy((rng.standard_normal((t, 128)) / 64).astype(np.float16)).cuda()
    ids = torch.zeros((t, 2), dtype=torch.int64, device="cuda")
    factors = torch.full((t, 2), 0.5, device="cuda")
    y = torch.empty((t, 128), device="cuda")
    stream = torch.cuda.Stream()

    def call():
        qgemm.moe(x, (gate, up), down, ids, factors, out=y)

    with torch.cuda.stream(stream):
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(3):  # launches are bound to their addresses while the stream is captured
                call()
    for seed in range(4):
        chosen, new = routed(np.random.default_rng(seed), t, 2, 8, skewed=seed == 3)
        ids.copy_(torch.from_numpy(chosen))
        factors.copy_(torch.from_numpy(new))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        wide = x.cpu().numpy().astype(np.float32)
        expected = known_layer(wide, *weights, chosen, new, "silu", between="float16", **of_layer)
        assert_within(y.cpu().numpy(), expected, more=more)
        replayed = y.clone()
        y.fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize()
        assert torch.equal(y, replayed)

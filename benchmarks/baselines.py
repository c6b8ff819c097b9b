"""Baselines of GPU products, as loops on the same stream: dense float16 products, and reading the packed bytes."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from qgemm.cli.timing import Call, Cublas, Loop, capture, compare, rotation

READ = r"""
extern "C" __global__ void stream_read(const uint4* p, long long n, unsigned* sink) {
    const long long stride = (long long)gridDim.x * blockDim.x;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned sum = 0;
    for (; i + 3 * stride < n; i += 4 * stride) {
        const uint4 a = __ldcs(p + i), b = __ldcs(p + i + stride);
        const uint4 c = __ldcs(p + i + 2 * stride), d = __ldcs(p + i + 3 * stride);
        sum ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    for (; i < n; i += stride) {
        const uint4 a = __ldcs(p + i);
        sum ^= a.x ^ a.y ^ a.z ^ a.w;
    }
    if (sum == 0x12345678) *sink = sum;  // keeps the loads
}
"""
THREADS = 256
CTAS_PER_SM = (2, 4, 8, 16)  # the fastest of these counts is used


def dense(stream: Any, cublas: Cublas, x: Any, weights: Sequence[Any], y: Any) -> tuple[str, Loop]:
    """The fastest installed dense product and its name: cuBLAS itself, or torch, which may pick a faster algorithm."""
    turns = rotation(weights, weights[0].nbytes, 2 * y.size * x.shape[1])
    calls: list[Call] = [lambda w=w: cublas(x, w, y) for w in turns]  # type: ignore[misc]
    loops = {"cublasGemmEx": capture(stream, calls)}
    if find_spec("torch"):
        loops["torch"] = _torch(stream, x, turns, y)
    medians = compare(stream, list(loops.values()))
    return min(zip(medians, loops.items(), strict=True))[1]


def _torch(stream: Any, x: Any, turns: Sequence[Any], y: Any) -> Loop:
    """torch.mm of the same arrays in turn, captured by torch, replayed on the same stream."""
    torch: Any = import_module("torch")
    torch_stream = torch.cuda.ExternalStream(stream.ptr)
    x, y = torch.from_dlpack(x), torch.from_dlpack(y)
    transposed = [torch.from_dlpack(w).T for w in turns]
    with torch.cuda.stream(torch_stream):
        torch.mm(x, transposed[0], out=y)
        torch_stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch_stream):
            for w in transposed:
                torch.mm(x, w, out=y)

    def replay() -> None:
        with torch.cuda.stream(torch_stream):
            graph.replay()

    return Loop(len(transposed), replay, (x, transposed, y))


def fp8(stream: Any, x: Any, weights: Sequence[Any]) -> Loop | None:
    """torch's product of e4m3 with a scale for each row of x and W, converted beforehand; None if there is none."""
    if not find_spec("torch"):
        return None
    torch: Any = import_module("torch")
    torch_stream = torch.cuda.ExternalStream(stream.ptr)

    def scaled(rows: Any) -> tuple[Any, Any]:
        values = torch.from_dlpack(rows)
        scale = values.abs().amax(1, keepdim=True).float() / torch.finfo(torch.float8_e4m3fn).max
        return (values / scale.to(values.dtype)).to(torch.float8_e4m3fn), scale

    with torch.cuda.stream(torch_stream):
        left, pairs = scaled(x), [scaled(w) for w in weights]
        turns = rotation(pairs, weights[0].nbytes / 2, 2 * len(x) * weights[0].size)

        def multiply(w: Any, scale: Any) -> Any:
            return torch._scaled_mm(
                left[0], w.T, scale_a=left[1], scale_b=scale.T, out_dtype=torch.bfloat16, use_fast_accum=True
            )

        try:
            multiply(*turns[0])
            torch_stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch_stream):
                for pair in turns:
                    multiply(*pair)
        except RuntimeError:  # no kernel for this GPU
            return None

    def replay() -> None:
        with torch.cuda.stream(torch_stream):
            graph.replay()

    return Loop(len(turns), replay, (left, pairs))


def read(stream: Any, buffers: Sequence[Any]) -> Loop:
    """Reading all bytes of the buffers in turn, 16 at a time and bypassing the caches, with the best of a few grids."""
    import cupy

    kernel = cupy.RawKernel(READ, "stream_read")
    sink = cupy.zeros(1, cupy.uint32)
    sms = cupy.cuda.Device().attributes["MultiProcessorCount"]

    def loop(grid: int) -> Loop:
        calls: list[Call] = [
            lambda b=b: kernel((grid,), (THREADS,), (b, np.int64(b.nbytes // 16), sink))  # type: ignore[misc]
            for b in rotation(buffers, buffers[0].nbytes)
        ]
        return capture(stream, calls)

    loops = [loop(sms * ctas) for ctas in CTAS_PER_SM]
    medians = compare(stream, loops, repeats=3)
    return loops[medians.index(min(medians))]

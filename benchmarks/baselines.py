"""Baselines of GPU products, as loops on the same stream: dense float16 products, and reading the packed bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from qgemm.cli.timing import Call, Cublas, Loop, capture, compare, rotation
from qgemm.cuda.devices import Function
from qgemm.cuda.driver.launch import Launch
from qgemm.cuda.jit.nvrtc import arch_of, compile_cubin

READERS = Path(__file__).with_name("read.cu")
BULK = 4 * 8192  # bytes of shared memory of a CTA of read_bulk: 4 stages
SINCE_BULK = 90  # the first compute capability with cp.async.bulk


class Reader(NamedTuple):
    """A kernel of read.cu, threads and shared bytes of a CTA, and the numbers of CTAs of an SM to try."""

    name: str
    threads: int
    shared: int
    ctas: tuple[int, ...]
    least: int = 0  # compute capability


# The fastest of all with any of these grids is the floor of a size.
CANDIDATES = (
    Reader("read_strided", 256, 0, (2, 4, 8, 16)),
    Reader("read_shares", 512, 0, (1, 2, 4)),
    Reader("read_bulk", 32, BULK, (1, 2, 4, 6), SINCE_BULK),
)


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
    """Reading all bytes of the buffers in turn, bypassing the caches, by the fastest reader and grid."""
    loops = list(readers(stream, buffers).values())
    medians = compare(stream, loops, repeats=3)
    return loops[medians.index(min(medians))]


def readers(stream: Any, buffers: Sequence[Any], overlapped: bool = False) -> dict[tuple[str, int], Loop]:
    """The loops of every reader, by its name and the number of CTAs of an SM.

    overlapped: whether a launch starts while the one before it reads, which hides all ramps between them; launches of
    products hide the first stages of their pipelines.
    """
    import cupy

    device = cupy.cuda.Device()
    sm, sms = int(device.compute_capability), device.attributes["MultiProcessorCount"]
    cubin = compile_cubin(READERS.read_text(), arch_of(divmod(sm, 10))).cubin
    sink, turns = cupy.zeros(1, cupy.uint32), rotation(buffers, buffers[0].nbytes)

    def loop(reader: Reader, ctas: int) -> Loop:
        pointers = (ctypes.c_void_p * 2)()
        size = ctypes.sizeof(ctypes.c_void_p)
        memory, result = (ctypes.c_void_p.from_buffer(pointers, offset) for offset in (0, size))
        arguments = memory, result, ctypes.c_int64(buffers[0].nbytes // 16)
        function, grid = Function(cubin, reader.name, device.id), sms * ctas
        launch = Launch(function, grid, reader.threads, reader.shared, arguments, pointers, 2, programmatic=overlapped)
        calls: list[Call] = [lambda b=b: launch(stream.ptr, b.data.ptr, sink.data.ptr) for b in turns]  # type: ignore[misc]
        return capture(stream, calls)._replace(keep=(turns, sink, launch))

    fitting = [reader for reader in CANDIDATES if sm >= reader.least]
    return {(reader.name, ctas): loop(reader, ctas) for reader in fitting for ctas in reader.ctas}

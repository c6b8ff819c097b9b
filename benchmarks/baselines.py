"""Baselines of GPU products, as loops on the same stream: dense float16 products, and reading the packed bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

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


def dense(stream: Any, cublas: Cublas, x: Any, weights: Sequence[Any], y: Any) -> dict[str, Loop]:
    """Loops of the installed dense products of x's type: cuBLAS itself, and torch, which may pick a faster algorithm.

    weights: copies of W as 16-bit integers that hold the bits of its numbers.
    """
    turns = rotation(weights, weights[0].nbytes, 2 * y.size * x.shape[1])
    calls: list[Call] = [lambda w=w: cublas(x, w, y) for w in turns]  # type: ignore[misc]
    loops = {"cublasGemmEx": capture(stream, calls)}
    if find_spec("torch"):
        with suppress(RuntimeError):  # no memory, or no kernel for this GPU
            loops["torch"] = _torch(stream, x, turns, y)
    return loops


def as_torch(array: Any, dtype: str) -> Any:
    """The memory of a CuPy array of 16-bit numbers as a torch tensor: DLPack of CuPy knows no bfloat16."""
    torch: Any = import_module("torch")
    return torch.from_dlpack(array.view(np.int16)).view(getattr(torch, dtype))


def _torch(stream: Any, x: Any, turns: Sequence[Any], y: Any) -> Loop:
    """torch.mm of the same arrays in turn, captured by torch, replayed on the same stream."""
    torch: Any = import_module("torch")
    torch_stream, dtype = torch.cuda.ExternalStream(stream.ptr), x.dtype.name
    x, y = as_torch(x, dtype), as_torch(y, dtype)
    transposed = [as_torch(w, dtype).T for w in turns]
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
    """torch's product of e4m3 with a scale for each row of x and W, converted beforehand; None if there is none.

    weights: as those of `dense`.
    """
    if not find_spec("torch"):
        return None
    torch: Any = import_module("torch")
    torch_stream = torch.cuda.ExternalStream(stream.ptr)

    def scaled(rows: Any) -> tuple[Any, Any]:
        values = as_torch(rows, x.dtype.name)
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
    """Reading all bytes of the buffers in turn, bypassing the caches, by the fastest reader and grid.

    The readers are compared by loops that read each buffer once, to which the start of a graph adds the same time.
    """
    short = readers(stream, buffers, turns=buffers)
    medians = compare(stream, list(short.values()), rest=0)
    best = min(zip(medians, short, strict=True))[1]
    return readers(stream, buffers, only=best)[best]


def readers(
    stream: Any,
    buffers: Sequence[Any],
    overlapped: bool = False,
    turns: Sequence[Any] = (),
    only: tuple[str, int] | None = None,
) -> dict[tuple[str, int], Loop]:
    """The loops of every reader, by its name and the number of CTAs of an SM.

    overlapped: whether a launch starts while the one before it reads, which hides all ramps between them; launches of
    products hide the first stages of their pipelines. turns: the buffers in the order of the calls, without it a
    rotation. only: the one reader that is wanted.
    """
    import cupy

    device = cupy.cuda.Device()
    sm, sms = int(device.compute_capability), device.attributes["MultiProcessorCount"]
    cubin = _cubin(arch_of(divmod(sm, 10)))
    sink, turns = cupy.zeros(1, cupy.uint32), turns or rotation(buffers, buffers[0].nbytes)

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
    pairs = [(reader, ctas) for reader in fitting for ctas in reader.ctas]
    return {(reader.name, ctas): loop(reader, ctas) for reader, ctas in pairs if only in (None, (reader.name, ctas))}


@cache
def _cubin(arch: str) -> bytes:
    return compile_cubin(READERS.read_text(), arch).cubin

"""Ranges of a tensor encoded on a GPU: the same blocks as on the CPU, with the error that they make.

A range goes up from pinned memory, through the kernel and down into pinned memory on a stream of its own, so that while
one is encoded, others are copied, read and written.
"""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.backend import backends, module
from qgemm.codec.format import Format
from qgemm.codec.packing import Floats
from qgemm.errors import UnsupportedError
from qgemm.files.imatrix import Importance

from .encode import Encoder, Piece, Unfit
from .rules import Step
from .searching import range_of

STREAMS = 4  # ranges on their way at a time, each with a thread: 16 threads hinder each other (11 for 17 GB/s)
RANGE = 1 << 22  # weights of one, half as many: 17 for 28 GB/s; with all copies of them 180 MiB for float32
KINDS = {"f32": "float", "f16": "half", "bf16": "bf16"}  # formats whose numbers go up as they are: the kernels' names


class Device:
    """The current CUDA device, as which any number of threads may encode.

    UnsupportedError, with the reason, if there is none that can be used.
    """

    def __init__(self) -> None:
        cuda = backends()["cuda"]
        if not cuda.available:
            raise UnsupportedError(f"there is no GPU to encode on: {cuda.detail}")
        import cupy

        self._device = cupy.cuda.Device()
        self._streams: SimpleQueue[Any] = SimpleQueue()
        for _ in range(STREAMS):
            self._streams.put(cupy.cuda.Stream(non_blocking=True))

    @staticmethod
    def serves(step: Step, encoder: Encoder) -> bool:
        """Whether weights are encoded at all, by a kernel that there is, and not by a search, which the CPU does.

        What ggml encodes by an importance matrix in another way than by that search has kernels too.
        """
        fmt, kernels = step.format, module("cuda").encode
        if encoder.search:
            return encoder.importance is not None and kernels.takes_weighted(fmt)
        kernel = (fmt.bit_planes and fmt.stored_in_parts) or kernels.takes(fmt)
        return kernel and not (step.copied or step.by_codes or fmt.plain)

    def piece(self, step: Step, start: int, stop: int, importance: Importance | None = None) -> Piece:
        """As `encode.piece` does on the CPU: one range; Unfit if it cannot be held. importance: the encoder's."""
        stream = self._streams.get()
        try:
            with self._device, stream:
                of = None if importance is None else range_of(step.weight, importance, start, stop)
                return _piece(step, start, stop, stream, of)
        finally:
            self._streams.put(stream)


def _piece(step: Step, start: int, stop: int, stream: Any, importance: Floats | None) -> Piece:
    import cupy

    encode, fmt, (numbers, kind) = module("cuda").encode, step.format, _numbers(step, start, stop)
    count = len(numbers) // fmt.weights
    up = _pinned(numbers.nbytes)
    up[:] = numbers.view(np.uint8)
    values = cupy.empty(numbers.shape, numbers.dtype)
    values.data.copy_from_host_async(up.ctypes.data, up.nbytes, stream)
    of = None if importance is None else cupy.asarray(importance)
    blocks, found = _to_codebook(values, kind, fmt) if fmt.bit_planes else encode.encode(values, kind, fmt, of)
    made, sums = _pinned(blocks.nbytes), _pinned(found.nbytes)
    blocks.get(out=made, blocking=False)
    found.get(out=sums, blocking=False)
    stream.synchronize()
    of_ctas = sums.view(encode.ENCODE_STATS)
    if of_ctas["refused"].min() < count:
        raise Unfit(step)
    own = made[: count * fmt.block_bytes].view(fmt.dtype)
    return Piece(own, float(of_ctas["error"].sum()), float(of_ctas["power"].sum()))


def _numbers(step: Step, start: int, stop: int) -> tuple[NDArray[Any], str]:
    """Weights [stop - start] as the source has them, if kernels read such, else as float32; and the kernels' name."""
    weight = step.weight
    if weight.tensor is not None and (kind := KINDS.get(weight.tensor.format.name)):
        return np.ascontiguousarray(weight.tensor.read(start, stop)), kind
    assert weight.values is not None, "the plan refuses what has no decoder"
    return weight.values(start, stop), "float"


def _to_codebook(values: Any, kind: str, fmt: Format) -> tuple[Any, Any]:
    """As `encode.encode`, for kbit formats, whose kernel makes planes and measures nothing."""
    import cupy

    planes = module("cuda").planes
    if kind == "bf16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    count = values.size // fmt.weights
    absmax = cupy.empty(count, fmt.dtype["absmax"])
    codes = cupy.empty((count, *fmt.dtype["planes"].shape), np.uint32)
    refused = cupy.full(1, count, np.uint64)
    planes.launch_quantize(fmt, values, absmax, codes, refused)
    made = planes.Planes(fmt, values.shape, absmax, codes)
    sums = [cupy.square(x, dtype=np.float64).sum() for x in (made.dequantize() - values, values)]
    return made.blocks(), cupy.concatenate([*(x.reshape(1).view(np.uint8) for x in sums), refused.view(np.uint8)])


def _pinned(size: int) -> NDArray[np.uint8]:
    """Memory on the host that the GPU copies to and from; CuPy keeps it for the next range."""
    import cupy

    return np.frombuffer(cupy.cuda.alloc_pinned_memory(size), np.uint8, size)

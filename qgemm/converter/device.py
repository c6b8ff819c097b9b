"""Encode ranges of a tensor on a GPU: the same blocks as on the CPU, and their error.

Each range has a stream of its own: it is uploaded from pinned memory, encoded, and downloaded into pinned memory, so
that encoding, copies, reads and writes of different ranges overlap.
"""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.backend import backends
from qgemm.codec.format import Format
from qgemm.codec.packing import Floats
from qgemm.cuda import encode as kernels
from qgemm.cuda import planes
from qgemm.cuda.driver.device import reason_without_cupy
from qgemm.cuda.kernels.transforms import ENCODE_STATS
from qgemm.errors import UnsupportedError
from qgemm.files.imatrix import Importance

from .range_encoding import EncodedRange, Encoder, UnencodableRange
from .rules import Step
from .scale_search import importance_of_range

STREAMS = 4  # ranges in flight, each with a thread: 16 threads contend (11 GB/s instead of 17)
RANGE = 1 << 22  # weights per range, 180 MiB with all copies in float32; half of it: 17 GB/s instead of 28
KINDS = {"f32": "float", "f16": "half", "bf16": "bf16"}  # format uploaded unchanged -> the kernels' name of its type


class Device:
    """The current CUDA device, on which any number of threads may encode.

    UnsupportedError gives the reason if no device is usable.
    """

    streams, range = STREAMS, RANGE

    def __init__(self) -> None:
        cuda = backends()["cuda"]
        if reason := reason_without_cupy(cuda, "converting"):
            raise UnsupportedError(f"there is no GPU to encode on: {reason}")
        import cupy

        self._device = cupy.cuda.Device()
        self._streams: SimpleQueue[Any] = SimpleQueue()
        for _ in range(STREAMS):
            self._streams.put(cupy.cuda.Stream(non_blocking=True))

    @staticmethod
    def supports(step: Step, encoder: Encoder) -> bool:
        """Whether a kernel encodes the weights of this step.

        No kernel is needed where blocks or codes are copied. Searches run on the CPU, but the formats that ggml encodes
        by an importance matrix with its own method have kernels.
        """
        fmt = step.format
        if encoder.search:
            return encoder.importance is not None and kernels.takes_weighted(fmt)
        kernel = (fmt.tile.bit_planes and fmt.stored_in_parts) or kernels.takes(fmt)
        return kernel and not (step.copied or step.by_codes or fmt.plain)

    def encode_range(self, step: Step, start: int, stop: int, importance: Importance | None = None) -> EncodedRange:
        """Encode one range, as `range_encoding.encode_range` does; UnencodableRange if the format cannot hold it."""
        stream = self._streams.get()
        try:
            with self._device, stream:
                range_importance = (
                    None if importance is None else importance_of_range(step.weight, importance, start, stop)
                )
                return _encode_range(step, start, stop, stream, range_importance)
        finally:
            self._streams.put(stream)


def _encode_range(step: Step, start: int, stop: int, stream: Any, importance: Floats | None) -> EncodedRange:
    import cupy

    fmt, (numbers, kind) = step.format, _numbers(step, start, stop)
    count = len(numbers) // fmt.weights
    staged = _pinned(numbers.nbytes)
    staged[:] = numbers.view(np.uint8)
    values = cupy.empty(numbers.shape, numbers.dtype)
    values.data.copy_from_host_async(staged.ctypes.data, staged.nbytes, stream)
    weights = None if importance is None else cupy.asarray(importance)
    blocks, sums = (
        _to_codebook(values, kind, fmt) if fmt.tile.bit_planes else kernels.encode(values, kind, fmt, weights)
    )
    host_blocks, host_sums = _pinned(blocks.nbytes), _pinned(sums.nbytes)
    blocks.get(out=host_blocks, blocking=False)
    sums.get(out=host_sums, blocking=False)
    stream.synchronize()
    cta_sums: NDArray[Any] = host_sums.view(ENCODE_STATS)
    if cta_sums["refused"].min() < count:
        raise UnencodableRange(step)
    encoded = host_blocks[: count * fmt.block_bytes].view(fmt.dtype)
    return EncodedRange(encoded, float(cta_sums["error"].sum()), float(cta_sums["power"].sum()))


def _numbers(step: Step, start: int, stop: int) -> tuple[NDArray[Any], str]:
    """Weights [stop - start] in the source's type if kernels read it, else as float32; and the kernels' name of it."""
    weight = step.weight
    if weight.tensor is not None and (kind := KINDS.get(weight.tensor.format.name)):
        return np.ascontiguousarray(weight.tensor.read(start, stop)), kind
    assert weight.values is not None, "the plan refuses types without a decoder"
    return weight.values(start, stop), "float"


def _to_codebook(values: Any, kind: str, fmt: Format) -> tuple[Any, Any]:
    """Like `kernels.encode`, for kbit formats, whose kernel writes bit planes and does not measure the error."""
    import cupy

    if kind == "bf16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    count = values.size // fmt.weights
    absmax = cupy.empty(count, fmt.dtype["absmax"])
    codes = cupy.empty((count, *fmt.dtype["planes"].shape), np.uint32)
    refused = cupy.full(1, count, np.uint64)
    planes.launch_quantize(fmt, values, absmax, codes, refused)
    encoded = planes.Planes(fmt, values.shape, absmax, codes)
    sums = [cupy.square(x, dtype=np.float64).sum() for x in (encoded.dequantize() - values, values)]
    return encoded.blocks(), cupy.concatenate([*(x.reshape(1).view(np.uint8) for x in sums), refused.view(np.uint8)])


def _pinned(size: int) -> NDArray[np.uint8]:
    """Pinned host memory; CuPy pools it for the next range."""
    import cupy

    return np.frombuffer(cupy.cuda.alloc_pinned_memory(size), np.uint8, size)

"""The CUDA backend: arrays of CuPy, torch or DLPack, on the caller's stream; kernels compiled by NVRTC.

Importing it needs no GPU, no CuPy and no torch: one of the two is imported when a device is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from numpy.typing import ArrayLike, NDArray

from qgemm.arguments import Activation, Array, Weights
from qgemm.arrays import like
from qgemm.backend import PRODUCTS, Status, Tuned
from qgemm.codec.float_types import DType
from qgemm.codec.format import Blocks, Format, float_name
from qgemm.errors import ShapeError
from qgemm.tensor import Tensor

from . import encode, planes, prepare, tuner, tuning
from .activations import DeviceActivations, quantized
from .call import experts, replay
from .driver.device import require, status
from .kernels.add_epilogue import gate_launch
from .kernels.needed import ROWS
from .libraries import current_device, default_library, on_device_of
from .planes import Planes as Planes
from .tensor import DeviceExperts as DeviceExperts
from .tensor import DeviceTensor as DeviceTensor
from .tensor import check_tiled, packed_there


class CudaBackend:
    """`qgemm.backend.Backend` on NVIDIA GPUs."""

    product = staticmethod(replay.product)
    products = staticmethod(replay.products)
    moe_matmul = staticmethod(experts.matmul)
    moe = staticmethod(experts.feed_forward)

    def quantize_activations(self, x: Array, activation: Activation) -> DeviceActivations:
        """x [..., K] as blocks of codes on its device."""
        require("an array on a CUDA device")
        return quantized(x, activation)

    def quantize(self, x: Array, fmt: Format, importance: ArrayLike | None = None) -> DeviceTensor | Planes:
        """Values on a device -> a DeviceTensor of a matrix or, of kbit formats, Planes of any shape."""
        require("an array on a CUDA device")
        return planes.quantize(x, fmt) if fmt.tile.bit_planes else encode.quantize(x, fmt, importance)

    def dequantize(self, w: DeviceTensor, dtype: DType) -> Any:
        """The weights as an array [N, K] of the library of their tiles."""
        return w.dequantize(dtype)

    def rows(self, w: DeviceTensor, index: NDArray[Any], dtype: DType) -> Any:
        """Rows of a matrix, by an index on its device, as an array of the index's library."""
        return w.rows(index, float_name(dtype))

    def array(self, values: NDArray[Any]) -> Any:
        """Values of the host as an array on the current device."""
        library = default_library()
        device = current_device(library)
        with library.on_device(device):
            return library.uploaded(values, device)

    def gated(self, function: str, gate: Any, up: Any) -> Any:
        """y = function(gate) * up of two products, float32 arrays of one library and shape."""
        with on_device_of(gate) as (values, library, device):
            y, up = library.empty(tuple(values.shape), "float32", device), library.wrap(up)
            if count := prod(values.shape):
                launch = gate_launch(device, function, "float32", count)
                launch(library.stream(device), library.pointer(up), library.pointer(y), 0, library.pointer(values))
        return like(gate, y)

    def preparation(
        self, tensors: Sequence[Any], rows: Sequence[int] | None, activations: Sequence[str], dtypes: Sequence[str]
    ) -> list[Callable[[], bool]]:
        """Kernels for the current device, compiled and loaded there."""
        require("preparing kernels")
        return prepare.tasks(tensors, ROWS if rows is None else rows, activations, dtypes)

    def from_bytes(self, rows: Array, fmt: Format, shape: tuple[int, ...], name: str) -> DeviceTensor | DeviceExperts:
        """Bytes in the layout of a file on a device -> weights there, in memory of the library of the bytes."""
        self.check_upload(fmt, shape, f"tensor {name}" if name else f"bytes of {fmt} {shape}")
        return packed_there(rows, fmt, shape, name)

    def tune(
        self, tensors: Sequence[Any], rows: Sequence[int] | None, activations: Sequence[str], dtypes: Sequence[str],
        seconds: float, progress: bool | None,
    ) -> Tuned:  # fmt: skip
        """Configs of the current device's products, timed there."""
        require("tuning")
        return tuning.tune(tensors, tuner.ROWS if rows is None else rows, activations, dtypes, seconds, progress)

    def check_upload(self, fmt: Format, shape: tuple[int, ...], who: str) -> None:
        """UnsupportedError without a GPU or for a format that no kernel reads, ShapeError for other shapes."""
        check_tiled(fmt, who)
        if len(shape) not in (2, 3):
            fitting = "only a matrix (N, K), or experts (E, N, K), goes to a device"
            raise ShapeError(f"{fitting}, got {who}; index its leading axes")
        require("to_device()")

    def upload(self, tensor: Weights, blocks: Blocks) -> DeviceTensor | DeviceExperts:
        """Blocks of the host -> tiles on the current device; of experts if there are three axes."""
        assert isinstance(tensor, Tensor), "other weights are on a device already"
        packed: type[DeviceTensor] | type[DeviceExperts] = DeviceExperts if len(tensor.shape) == 3 else DeviceTensor
        return packed.pack(tensor, blocks)

    def status(self) -> Status:
        """The GPU, driver, CuPy and NVRTC of this machine, or the one that is missing."""
        return status()


BACKEND = CudaBackend()
PRODUCTS[DeviceTensor] = PRODUCTS[DeviceExperts] = BACKEND

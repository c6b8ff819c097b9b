"""The CUDA backend: CuPy arrays, or others through DLPack, on the caller's stream; kernels compiled by NVRTC.

Importing it needs no GPU and no CuPy, which is imported when a device is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import DTypeLike

from qgemm.arguments import Activation
from qgemm.backend import Status
from qgemm.codec.format import Blocks, Format
from qgemm.errors import UnsupportedError
from qgemm.tensor import Tensor

from . import encode, experts, plan_cache, planes, prepare
from .activations import DeviceActivations, quantized
from .driver.device import require, status
from .experts import DeviceExperts
from .kernels.needed import ROWS
from .tensor import DeviceTensor, check_tiled


class CudaBackend:
    """`qgemm.backend.Backend` on NVIDIA GPUs."""

    def moe_matmul(
        self, x: Any, w: Any, ids: Any, activation: str, bias: Any, out: Any, dtype: DTypeLike | None
    ) -> Any:
        """y [T, top_k, N], in `out` or as a new array of x's library."""
        if activation != "a16":
            raise UnsupportedError("products by experts on a GPU are of activations as they are ('a16')")
        return experts.matmul(x, w, ids, bias, out, dtype)

    def moe(
        self, x: Any, gate_up: Any, down: Any, ids: Any, weights: Any, activation: str, biases: Sequence[Any] | None,
        out: Any, dtype: DTypeLike | None,
    ) -> Any:  # fmt: skip
        """y [T, K], in `out` or as a new array of x's library; a call like an earlier one by its launches."""
        return experts.feed_forward(x, gate_up, down, ids, weights, activation, biases, out, dtype)

    def quantize_activations(self, x: Any, activation: Activation) -> DeviceActivations:
        """x [..., K] as blocks of codes on its device."""
        require("an array on a CUDA device")
        return quantized(x, activation)

    def quantize(self, x: Any, fmt: Format, importance: Any = None) -> DeviceTensor | planes.Planes:
        """Values on a device -> a DeviceTensor of a matrix or, of kbit formats, Planes of any shape."""
        require("an array on a CUDA device")
        return planes.quantize(x, fmt) if fmt.tile.bit_planes else encode.quantize(x, fmt, importance)

    def preparation(
        self, tensors: Sequence[Any], rows: Sequence[int] | None, activations: Sequence[str], dtypes: Sequence[str]
    ) -> list[Callable[[], bool]]:
        """Kernels for the current device, compiled and loaded there."""
        require("preparing kernels")
        return prepare.tasks(tensors, ROWS if rows is None else rows, activations, dtypes)

    def check_upload(self, fmt: Format, shape: tuple[int, ...], who: str) -> None:
        """UnsupportedError without a GPU, for a format that no kernel reads, for what is no matrix or experts."""
        check_tiled(fmt, who)
        if len(shape) not in (2, 3):
            what = "only a matrix (N, K), or experts (E, N, K), goes to a device"
            raise UnsupportedError(f"{what}, got {who}; index its leading axes")
        if len(shape) == 3 and fmt.plain:
            raise UnsupportedError(f"{who}: no GPU kernel multiplies by experts of plain numbers; quantize them")
        require("to_device()")

    def upload(self, tensor: Tensor, blocks: Blocks) -> DeviceTensor | DeviceExperts:
        """Blocks of the host -> tiles on the current device; of experts if there are three axes."""
        packed: type[DeviceTensor] | type[DeviceExperts] = DeviceExperts if len(tensor.shape) == 3 else DeviceTensor
        return packed.pack(tensor, blocks)

    def status(self) -> Status:
        """What GPU, driver, CuPy and NVRTC are there, or what is missing."""
        return status()


BACKEND = CudaBackend()
DeviceTensor.product = DeviceExperts.product = plan_cache.product
DeviceTensor.products = DeviceExperts.products = staticmethod(plan_cache.products)

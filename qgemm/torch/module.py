"""PackedModule: a layer with one packed weight, which torch moves, copies, saves and loads like any other.

A state dict holds the weight as bytes in the file's layout [N, bytes per row] on the host, whatever the device, and
format and shape as text in its extra state, which is a tensor of bytes, so that safetensors can hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, ClassVar

import torch

from qgemm.codec.format import Format
from qgemm.errors import QgemmError, UnsupportedError
from qgemm.packed import Packed
from qgemm.tensor import Tensor

from .ops import dense
from .parameter import NO_GRADIENT, TRAINED, PackedWeight
from .storage import (
    file_bytes,
    file_shape,
    format_of,
    host_tensor,
    packed_of,
    release_moved,
    spelled,
    to_device,
    weight_of,
)

STATE = "._extra_state"  # the end of the name of a layer's description in a state dict


class PackedModule(torch.nn.Module):
    """Base of the layers: `weight`, a parameter of bytes that takes no gradient, and its format and shape.

    format: of the packed weight [N, K]. tensor_name: name of its source tensor, for messages.
    """

    rows: ClassVar[str]  # the layer's names of N and K
    columns: ClassVar[str]
    axes: ClassVar[int] = 2  # 2: weight [N, K]; 3: experts [E, N, K]

    def __init__(self, shape: tuple[int, ...], format: Format | str, device: torch.device | str | None = None) -> None:
        """Weights of zero bytes, for a state dict; on the device "meta" they take no memory."""
        super().__init__()
        fmt = format_of(format) if isinstance(format, str) else format
        self._describe(fmt, shape)
        data = torch.zeros(file_shape(fmt, shape), dtype=torch.uint8, device=device)
        self.weight = torch.nn.Parameter(data, requires_grad=False)
        self.tensor_name = ""

    def _describe(self, fmt: Format, shape: tuple[int, ...]) -> None:
        setattr(self, self.rows, shape[-2])
        setattr(self, self.columns, shape[-1])
        self._shape, self._format = shape, spelled(fmt)
        if fmt.levels is None:
            raise UnsupportedError(f"{fmt} has no decoder, so a layer cannot multiply by it")

    def _take(self, packed: Packed, weight: torch.nn.Parameter | None = None) -> None:
        """Hold the weights of a Tensor or DeviceTensor; weight: a parameter that already has their bytes."""
        packed = packed.in_device_form() if isinstance(packed, Tensor) else packed
        self.weight = weight_of(packed, self.axes) if weight is None else weight
        self._describe(packed.format, packed.shape)
        self.tensor_name = packed.name

    @property
    def format(self) -> Format:
        """The format of the packed weight."""
        return format_of(self._format)

    @property
    def packed(self) -> Any:
        """The qgemm.Tensor (on the CPU) or DeviceTensor (on a GPU) over the memory of `weight`."""
        return packed_of(self._parameters["weight"], self._format, self._shape, self.tensor_name)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weights as a new tensor [N, K] on their device: exact in float32, otherwise rounded once from it."""
        n, k = self._shape
        return dense(self.weight, self._format, (n, k), dtype)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Register a parameter; that of the weight gets the class PackedWeight, whoever assigned it.

        UnsupportedError for a weight of None.
        """
        if name == "weight" and param is None:
            raise UnsupportedError(f"{self!r}: a packed layer needs its weight; replace the layer instead")
        if name == "weight" and type(param) is torch.nn.Parameter:
            param.__class__ = PackedWeight
        super().register_parameter(name, param)

    def __delattr__(self, name: str) -> None:
        """Assign None to a parameter that is deleted, since forward reads it: UnsupportedError for the weight."""
        if name in self._parameters:
            self.register_parameter(name, None)
        else:
            super().__delattr__(name)

    def requires_grad_(self, requires_grad: bool = True) -> PackedModule:
        """Raise UnsupportedError for a gradient of the packed weight, which takes none."""
        if requires_grad:
            raise UnsupportedError(f"{self!r}: {NO_GRADIENT}; {TRAINED}")
        return super().requires_grad_(False)  # type: ignore[no-any-return]

    # ---------------------------------------------------------------- moved

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PackedModule:
        """Apply `.to`, `.cuda`, `.half` and similar calls: the bytes move to the device, and ignore dtypes."""
        weight = self._parameters["weight"]
        with torch.inference_mode(False), torch.no_grad():
            moved = self._moved(weight, fn)
        self._parameters["weight"] = None
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters["weight"] = moved
        return self

    def _moved(self, weight: torch.nn.Parameter, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.nn.Parameter:
        """A parameter once for the layers that share it, with its bytes on the device to which `fn` moves tensors."""
        device = fn(weight.new_empty(0)).device
        if "meta" in (device.type, weight.device.type):
            empty = torch.empty(file_shape(self.format, self._shape), dtype=torch.uint8, device="meta")
            return weight if device == weight.device else type(weight)(fn(empty), requires_grad=False)
        if device.type == "cuda" != weight.device.type:
            weight.data = to_device(host_tensor(weight, self._format, self._shape, self.tensor_name), device)
            packed_of(weight, self._format, self._shape, self.tensor_name)  # the class that knows the format
        elif weight.dim() == 1 and device.type != "cuda":
            data = file_bytes(host_tensor(weight, self._format, self._shape, self.tensor_name))
            weight.data = data.to(device)
        else:
            data = fn(weight.data)
            weight.data = data if data.dtype == torch.uint8 else weight.data.to(device)
        release_moved(weight, self._format)
        return weight

    # ---------------------------------------------------------------- saved and loaded

    def get_extra_state(self) -> torch.Tensor:
        """Format and shape as text, e.g. "q4_0 4096 14336", in a tensor of its bytes."""
        text = " ".join(map(str, (self._format, *self._shape)))
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Adopt the format of a state dict; UnsupportedError if the shape differs."""
        spelling, shape = description(state)
        if shape != self._shape:
            text = " ".join(map(str, (spelling, *shape)))
            raise UnsupportedError(f"the state dict has the packed weight {text!r}, this is {self!r}")
        if spelling != self._format:
            fmt = format_of(spelling)
            empty = torch.empty(file_shape(fmt, self._shape), dtype=torch.uint8, device=self.weight.device)
            self._describe(fmt, self._shape)
            self.weight = torch.nn.Parameter(empty, requires_grad=False)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            destination[prefix + "weight"] = torch.Tensor.detach(self.weight)  # no class that a reader must know
        if self.weight.dim() == 1 and not self._is_elsewhere(self.weight):
            destination[prefix + "weight"] = file_bytes(
                host_tensor(self.weight, self._format, self._shape, self.tensor_name)
            )

    def _is_elsewhere(self, weight: torch.Tensor) -> bool:
        """Whether a parameter is a placeholder without bytes, as DeepSpeed's ZeRO-3 has, whose ranks keep parts."""
        return not weight.numel() and prod(self._shape) > 0

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Load bytes, into new memory unless torch allocated the old one: it may be a mapped file, or tiles.

        Some loaders complete a state dict by the model's own parameters, which then hold what tied layers loaded.
        """
        loaded, extra = state_dict.get(prefix + "weight"), state_dict.get(prefix + "_extra_state")
        device = self.weight.device
        try:
            if extra is not None:
                self.set_extra_state(extra)
            if isinstance(loaded, torch.Tensor):
                self._check_loaded(loaded, prefix)
        except QgemmError as error:
            error_msgs.append(f"{prefix}weight: {error}")
            return
        if isinstance(loaded, torch.Tensor) and loaded is not self.weight and not self._holds(loaded):
            self.weight.data = torch.empty_like(loaded, device="cpu", memory_format=torch.contiguous_format)
            release_moved(self.weight, self._format)  # the old tiles go before there are new ones
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if device.type == "cuda" and not local_metadata.get("assign_to_params_buffers", False):
            self._parameters["weight"] = self._moved(self.weight, lambda tensor: tensor.to(device))

    def _holds(self, loaded: torch.Tensor) -> bool:
        """Whether bytes can be written into the weight's memory: torch's own on the host, and nothing on "meta"."""
        weight = self.weight
        if weight.device.type != "cpu":
            return bool(weight.is_meta)
        return weight.shape == loaded.shape and bool(weight.untyped_storage().resizable())

    def _check_loaded(self, loaded: torch.Tensor, prefix: str) -> None:
        expected = file_shape(self.format, self._shape)
        if self._is_elsewhere(loaded) and self._is_elsewhere(self.weight):
            return
        if loaded.dtype != torch.uint8 or tuple(loaded.shape) != expected:
            packed = f"this layer's is packed, uint8 {list(expected)} for {self.format}"
            raise UnsupportedError(f"the state dict has {loaded.dtype} {list(loaded.shape)}, {packed}")


def description(state: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """Format and shape of a packed weight from its extra state; an empty shape if that is no description."""
    spelling, *sizes = bytes(state.tolist()).decode(errors="replace").split() or [""]
    return spelling, tuple(int(size) for size in sizes if size.isdecimal())

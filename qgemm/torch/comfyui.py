"""ComfyUI-GGUF: its linear layers multiply by the packed weights that they hold.

    import qgemm.torch.comfyui

    qgemm.torch.comfyui.patch()  # e.g. as the last line of ComfyUI-GGUF/__init__.py

ComfyUI-GGUF (github.com/city96/ComfyUI-GGUF) decodes a whole weight at every call, and adds LoRA to it. `patch` gives
the forward of its Linear a QLinear, which is kept beside the weight's tensor; LoRA is multiplied beside it. What else
changes a weight (DoRA, differences, parts of it), and weights that are on another device than x, take the old road.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from qgemm.codec.format import Format
from qgemm.formats import GGML_TYPES

from .linear import QLinear
from .ops import dense
from .patching import Patched
from .storage import device_size, file_shape, packed_of

NAMES = {"GGMLOps", "GGMLTensor", "dequantize_tensor"}  # that its module `ops` has
TILES = 1  # axes of the bytes of a weight that are tiles of a GPU


def patch(ops: Any = None) -> Patched:
    """From now on layers of ComfyUI-GGUF multiply by packed weights, on the CPU and on a GPU.

    ops: its module `ops`; by default that of every copy that is imported, ImportError if there is none. What it gives
    can `undo()` that, and is a context manager that does so.
    """
    loaded = list(sys.modules.values()) if ops is None else [ops]
    found: list[Any] = [module for module in loaded if getattr(module, "__dict__", {}).keys() >= NAMES]
    if not found:
        how = "import it before, or give its module: patch(ops)"
        raise ImportError(f"qgemm.torch.comfyui needs ComfyUI-GGUF's module ops ({', '.join(sorted(NAMES))}); {how}")
    patched = Patched()
    for module in found:
        linear = module.GGMLOps.Linear
        patched.replace(linear, "forward_ggml_cast_weights", _forward(linear.forward_ggml_cast_weights))
        if not hasattr(module.dequantize_tensor, "reads_tiles"):  # stays: there may be tiles after `undo`
            module.dequantize_tensor = _decoder(module.dequantize_tensor)
    return patched


def _forward(theirs: Any) -> Any:
    def forward_ggml_cast_weights(self: Any, input: Any) -> Any:
        layer = _layer(self, input)
        if layer is None:
            return theirs(self, input)
        y = layer(input)
        if layer.weight.data_ptr() != self.weight.data_ptr():  # by tiles
            self.weight.data = layer.weight.data
        return y

    return torch.compiler.disable(forward_ggml_cast_weights)  # which cannot trace the class of their tensors


def _decoder(theirs: Any) -> Any:
    def dequantize_tensor(tensor: Any, dtype: Any = None, dequant_dtype: Any = None) -> Any:
        shape = getattr(tensor, "tensor_shape", None)
        if shape is None or tensor.dim() != TILES or len(shape) != 2:
            return theirs(tensor, dtype, dequant_dtype)
        return dense(_plain(tensor), GGML_TYPES[tensor.tensor_type].name, tuple(shape), dtype or torch.float32)

    dequantize_tensor.reads_tiles = True  # type: ignore[attr-defined]
    return dequantize_tensor


# ---------------------------------------------------------------- a weight's layer


class Held(NamedTuple):
    """The layer over a weight's bytes, and what it was made of besides."""

    layer: QLinear
    bias: Any
    patches: list[Any]

    def made_of(self, weight: Any, bias: Any, patches: list[Any]) -> bool:
        """Whether it is still what these give."""
        same = self.bias is bias and self.layer.weight.data_ptr() == weight.data_ptr()
        return same and list(map(id, self.patches)) == list(map(id, patches))


def _layer(module: Any, x: Any) -> QLinear | None:
    """The QLinear of a module, which is kept with its weight while that and what is beside it stay; None if there is
    none for this x."""
    weight, bias = module.weight, module.bias
    shape = tuple(getattr(weight, "tensor_shape", ()))
    fmt = GGML_TYPES.get(getattr(weight, "tensor_type", -1))
    if fmt is None or weight.device != x.device or not _multiplies(fmt, shape, weight):
        return None
    patches = _entries(weight) + _entries(bias)
    held: Held | None = getattr(weight, "_qgemm", None)
    if held is not None and held.made_of(weight, bias, patches):
        return held.layer
    loras = _loras(_entries(weight), shape, x)
    if loras is None:
        return None
    parameter = torch.nn.Parameter(_plain(weight), requires_grad=False)
    added = None if bias is None else _plain(module.get_weight(bias.to(x.device), torch.float32))
    layer = QLinear._sharing(packed_of(parameter, fmt.name, shape), parameter, added, "a16")
    for number, (A, B, scale) in enumerate(loras):
        layer.add_lora(A, B, scale, str(number)).requires_grad_(False)
    weight._qgemm = Held(layer, bias, patches)
    return layer


def _multiplies(fmt: Format, shape: tuple[int, ...], weight: Any) -> bool:
    """Whether these are the blocks of a matrix, rows of whole blocks, in a format that its device multiplies by."""
    if len(shape) != 2 or fmt.levels is None or shape[1] % fmt.weights:
        return False
    if weight.device.type == "cuda" and device_size(fmt, shape) < 0:
        return False
    size = (device_size(fmt, shape),) if weight.dim() == TILES else file_shape(fmt, shape)
    return weight.device.type in ("cpu", "cuda") and tuple(weight.size()) == size


def _plain(tensor: Any) -> Any:
    """A tensor without the class that ComfyUI-GGUF gives it, over the same memory."""
    return tensor.as_subclass(torch.Tensor)


def _entries(tensor: Any) -> list[Any]:
    """What ComfyUI adds to a tensor when it is used: (strength, what, strength of the model, part, function)."""
    return [entry for entries, _ in getattr(tensor, "patches", ()) for entry in entries]


def _loras(entries: Iterable[Any], shape: tuple[int, ...], x: Any) -> list[tuple[Any, Any, float]] | None:
    """A, B and the scale of each LoRA, in the dtype of x; None if there is something else."""
    found = []
    for strength, what, *others in entries:
        named = what if isinstance(what, tuple) else (getattr(what, "name", ""), getattr(what, "weights", ()))
        if named[0] != "lora" or [other for other in others if other is not None] not in ([], [1.0]):
            return None
        B, A, alpha, *rest = named[1]
        if any(each is not None for each in rest):
            return None
        A, B = (matrix.flatten(1).to(x.device, x.dtype) for matrix in (A, B))
        if (B.shape[0], A.shape[1]) != shape:
            return None
        found.append((A, B, float(strength) * (1.0 if alpha is None else float(alpha) / A.shape[0])))
    return found

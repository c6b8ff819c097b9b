"""ComfyUI-GGUF: its linear layers multiply by the packed weights that they hold.

    import qgemm.torch.comfyui

    qgemm.torch.comfyui.patch()  # e.g. as the last line of ComfyUI-GGUF/__init__.py

ComfyUI-GGUF (github.com/city96/ComfyUI-GGUF) decodes a whole weight at every call, and adds LoRA to it. `patch` makes
its Linear call a QLinear, which is cached with the weight's tensor; LoRA is multiplied beside it. Other changes of a
weight (DoRA, differences, parts of it), and weights on another device than x, are left to ComfyUI-GGUF.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NamedTuple

import torch

from qgemm.codec.format import Format
from qgemm.formats import GGML_TYPES

from .linear import QLinear
from .ops import dense
from .patching import Patched
from .storage import device_size, file_shape, packed_of

NAMES = {"GGMLOps", "GGMLTensor", "dequantize_tensor"}  # names in its module `ops`
TILES_NDIM = 1  # axes of a weight's bytes if they are GPU tiles


def patch(ops: ModuleType | None = None) -> Patched:
    """Make layers of ComfyUI-GGUF multiply by packed weights, on the CPU and on a GPU.

    ops: its module `ops`; by default that of every imported copy, ImportError if there is none. The result has
    `undo()`, and is a context manager that calls it.
    """
    loaded = list(sys.modules.values()) if ops is None else [ops]
    modules: list[Any] = [module for module in loaded if getattr(module, "__dict__", {}).keys() >= NAMES]
    if not modules:
        hint = "import it before, or give its module: patch(ops)"
        raise ImportError(f"qgemm.torch.comfyui needs ComfyUI-GGUF's module ops ({', '.join(sorted(NAMES))}); {hint}")
    patched = Patched()
    for module in modules:
        linear = module.GGMLOps.Linear
        patched.replace(linear, "forward_ggml_cast_weights", _forward(linear.forward_ggml_cast_weights))
        if not hasattr(module.dequantize_tensor, "reads_tiles"):  # not undone: weights may still be tiles after `undo`
            module.dequantize_tensor = _decoder(module.dequantize_tensor)
    return patched


def _forward(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def forward_ggml_cast_weights(self: Any, input: torch.Tensor) -> torch.Tensor:
        layer = _layer(self, input)
        if layer is None:
            return original(self, input)
        y = layer(input)
        if layer.weight.data_ptr() != self.weight.data_ptr():  # the layer replaced the bytes by tiles
            self.weight.data = layer.weight.data
        return y

    # The compiler cannot trace the tensor class of ComfyUI-GGUF.
    return torch.compiler.disable(forward_ggml_cast_weights)  # type: ignore[no-any-return]


def _decoder(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def dequantize_tensor(
        tensor: torch.Tensor, dtype: torch.dtype | None = None, dequant_dtype: torch.dtype | str | None = None
    ) -> torch.Tensor:
        shape = getattr(tensor, "tensor_shape", None)
        if shape is None or tensor.dim() != TILES_NDIM or len(shape) != 2:
            return original(tensor, dtype, dequant_dtype)
        return dense(_plain(tensor), GGML_TYPES[tensor.tensor_type].name, tuple(shape), dtype or torch.float32)

    dequantize_tensor.reads_tiles = True  # type: ignore[attr-defined]
    return dequantize_tensor


# ---------------------------------------------------------------- a weight's layer


class CachedLayer(NamedTuple):
    """The layer over a weight's bytes, and the bias and patches that it includes."""

    layer: QLinear
    bias: Any
    patches: list[Any]

    def is_current(self, weight: torch.Tensor, bias: torch.Tensor | None, patches: list[Any]) -> bool:
        """Whether the layer still corresponds to this weight, bias and patches."""
        same = self.bias is bias and self.layer.weight.data_ptr() == weight.data_ptr()
        return same and list(map(id, self.patches)) == list(map(id, patches))


def _layer(module: torch.nn.Module, x: torch.Tensor) -> QLinear | None:
    """The QLinear of a module; None if it has none for this x.

    It is cached with the module's weight until weight, bias or patches change.
    """
    weight, bias = module.weight, module.bias
    shape = tuple(getattr(weight, "tensor_shape", ()))
    fmt = GGML_TYPES.get(getattr(weight, "tensor_type", -1))
    if fmt is None or weight.device != x.device or not _multiplies(fmt, shape, weight):
        return None
    patches = _entries(weight) + _entries(bias)
    cached: CachedLayer | None = getattr(weight, "_qgemm", None)
    if cached is not None and cached.is_current(weight, bias, patches):
        return cached.layer
    loras = _loras(_entries(weight), shape, x)
    if loras is None:
        return None
    parameter = torch.nn.Parameter(_plain(weight), requires_grad=False)
    added = None if bias is None else _plain(module.get_weight(bias.to(x.device), torch.float32))
    layer = QLinear._sharing(packed_of(parameter, fmt.name, shape), parameter, added, "a16")
    for number, (A, B, scale) in enumerate(loras):
        layer.add_lora(A, B, scale, str(number)).requires_grad_(False)
    weight._qgemm = CachedLayer(layer, bias, patches)
    return layer


def _multiplies(fmt: Format, shape: tuple[int, ...], weight: torch.Tensor) -> bool:
    """Whether the bytes are a matrix, with rows of whole blocks, in a format with products on its device."""
    if len(shape) != 2 or fmt.levels is None or shape[1] % fmt.weights:
        return False
    if weight.device.type == "cuda" and device_size(fmt, shape) < 0:
        return False
    size = (device_size(fmt, shape),) if weight.dim() == TILES_NDIM else file_shape(fmt, shape)
    return weight.device.type in ("cpu", "cuda") and tuple(weight.size()) == size


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as a plain torch.Tensor over the same memory, without ComfyUI-GGUF's class."""
    return tensor.as_subclass(torch.Tensor)


def _entries(tensor: torch.Tensor | None) -> list[Any]:
    """ComfyUI's patches of a tensor: (strength, contents, strength of the model, part, function)."""
    return [entry for entries, _ in getattr(tensor, "patches", ()) for entry in entries]


def _loras(entries: Iterable[Any], shape: tuple[int, ...], x: torch.Tensor) -> list[tuple[Any, Any, float]] | None:
    """A, B and the scale of each LoRA, in the dtype of x; None if there are other patches."""
    loras = []
    for strength, contents, *others in entries:
        named = contents
        if not isinstance(contents, tuple):
            named = getattr(contents, "name", ""), getattr(contents, "weights", ())
        if named[0] != "lora" or [other for other in others if other is not None] not in ([], [1.0]):
            return None
        B, A, alpha, *rest = named[1]
        if any(matrix is not None for matrix in rest):
            return None
        A, B = (matrix.flatten(1).to(x.device, x.dtype) for matrix in (A, B))
        if (B.shape[0], A.shape[1]) != shape:
            return None
        loras.append((A, B, float(strength) * (1.0 if alpha is None else float(alpha) / A.shape[0])))
    return loras

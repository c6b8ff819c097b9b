"""diffusers: models loaded from a .gguf file multiply by its packed weights.

    import qgemm.torch.diffusers

    qgemm.torch.diffusers.patch()
    config = GGUFQuantizationConfig(compute_dtype=torch.bfloat16)
    model = FluxTransformer2DModel.from_single_file("model.gguf", quantization_config=config)

diffusers keeps the blocks of a file in its GGUFLinear, and decodes a whole weight at every call. `patch` replaces each
by a QLinear once a model is loaded. The replacement still is a GGUFLinear with a GGUFParameter, for code that checks
these classes: LoRA through peft, which adds its product to that of the layer; `model.dequantize()`.
"""

from __future__ import annotations

from typing import Any

import torch

from qgemm.errors import UnsupportedError
from qgemm.formats import GGML_TYPES

from .linear import QLinear
from .patching import Patched, needs
from .storage import file_bytes, host_tensor, packed_of

try:
    from diffusers.quantizers.gguf import utils
    from diffusers.quantizers.gguf.gguf_quantizer import GGUFQuantizer
except ImportError as error:
    raise needs("qgemm.torch.diffusers", "diffusers", "0.38", error) from error


def patch() -> Patched:
    """Make models that diffusers loads from a .gguf file multiply by packed weights, on the CPU and on a GPU.

    The result has `undo()`, and is a context manager that calls it; loaded models keep their layers.
    """
    original = GGUFQuantizer._process_model_after_weight_loading

    def loaded(self: Any, model: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        model = original(self, model, **kwargs)
        _replace(model)
        return model

    patched = Patched()
    patched.replace(GGUFQuantizer, "_process_model_after_weight_loading", loaded)
    return patched


def _replace(model: torch.nn.Module) -> None:
    """Replace each GGUFLinear of a model; UnsupportedError for a type without a decoder."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is utils.GGUFLinear and isinstance(child.weight, utils.GGUFParameter):
                setattr(parent, name, PackedLinear.from_gguf_linear(child))


class PackedLinear(QLinear, utils.GGUFLinear):
    """A QLinear that passes as a GGUFLinear."""

    compute_dtype: Any
    source_cls: Any

    @classmethod
    def from_gguf_linear(cls, layer: utils.GGUFLinear) -> PackedLinear:
        """The same layer over the same memory."""
        fmt = GGML_TYPES[layer.weight.quant_type]
        if fmt.levels is None:
            raise UnsupportedError(f"{layer!r} is packed as {fmt}, which has no decoder")
        weight = GGUFParameter(layer.weight.as_tensor(), quant_type=layer.weight.quant_type)
        new = cls._sharing(weight.packed(), weight, layer.bias, "a16")
        new.compute_dtype, new.source_cls = layer.compute_dtype, layer.source_cls
        return new.train(layer.training)  # type: ignore[no-any-return]


class GGUFParameter(utils.GGUFParameter):
    """Bytes of a weight, as in the file or as GPU tiles, in diffusers' class.

    Operations of torch return plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    def packed(self) -> Any:
        """The Tensor or DeviceTensor over them."""
        return packed_of(self, GGML_TYPES[self.quant_type].name, self.quant_shape)

    def as_tensor(self) -> torch.Tensor:
        """The bytes in the file's layout [N, bytes per row], a plain tensor on their device, for diffusers' decoder."""
        if self.dim() == 2:
            return super().as_tensor()
        return file_bytes(host_tensor(self, GGML_TYPES[self.quant_type].name, self.quant_shape)).to(self.device)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """A copy on another device, with the same type and shape."""
        moved = super().to(*args, **kwargs)
        if moved is not self:
            moved = type(self)(moved, quant_type=self.quant_type)
            moved.quant_shape = self.quant_shape
        return moved

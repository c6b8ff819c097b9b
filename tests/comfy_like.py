"""ComfyUI-GGUF as qgemm.torch.comfyui meets it: a stand-in of its module `ops`, or a checkout of the real one.

The stand-in has the names that the adapter uses: a tensor that knows its type and shape, a Linear that decodes it and
adds patches, and the decoder. The real one is read from the folder QGEMM_COMFYUI_GGUF, with the few parts of ComfyUI
(the package comfy) that its module `ops` needs.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gguf
import numpy as np
from torch_layers import torch

PLAIN = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16


class LoRAAdapter:
    """ComfyUI's class of LoRA: B, A, alpha, and the fields of other kinds (mid, DoRA's scale, shape)."""

    name = "lora"

    def __init__(self, B: Any, A: Any, alpha: float | None, *more: Any):
        self.weights = (B, A, alpha, *(more or (None, None, None)))


def calculate_weight(patches: list[Any], weight: Any, key: str) -> Any:
    """A dense weight with patches: LoRA, and differences as ("diff", (tensor,))."""
    for strength, contents, strength_of_model, offset, function in patches:
        assert (offset, function) == (None, None)
        weight = weight * strength_of_model
        if isinstance(contents, tuple) and contents[0] == "diff":
            weight = weight + strength * contents[1][0].to(weight.dtype)
            continue
        B, A, alpha, *_ = contents[1] if isinstance(contents, tuple) else contents.weights
        scale = strength * (1.0 if alpha is None else alpha / A.shape[0])
        weight = weight + (scale * (B.float() @ A.float())).to(weight.dtype)
    return weight


def stand_in() -> Any:
    """The module."""
    ops = ModuleType("ops_of_a_stand_in")

    class GGMLTensor(torch.Tensor):
        @staticmethod
        def __new__(cls, data, tensor_type, tensor_shape, patches=()):
            return data.as_subclass(cls)

        def __init__(self, data, tensor_type, tensor_shape, patches=()):
            self.tensor_type, self.tensor_shape, self.patches = tensor_type, tensor_shape, list(patches)

        def to(self, *args, **kwargs):
            moved = super().to(*args, **kwargs)
            moved.tensor_type, moved.tensor_shape, moved.patches = (
                self.tensor_type,
                self.tensor_shape,
                list(self.patches),
            )
            return moved

        def detach(self):
            return self

        @property
        def shape(self):
            return getattr(self, "tensor_shape", self.size())

    def dequantize_tensor(tensor, dtype=None, dequant_dtype=None):
        if tensor.tensor_type in PLAIN:
            return tensor.as_subclass(torch.Tensor).to(dtype)
        raw = tensor.as_subclass(torch.Tensor).cpu().numpy()
        return torch.from_numpy(gguf.quants.dequantize(raw, tensor.tensor_type)).to(dtype).reshape(tensor.shape)

    class Linear(torch.nn.Module):
        def __init__(self, in_features, out_features):
            super().__init__()
            self.in_features, self.out_features, self.weight, self.bias = in_features, out_features, None, None

        def get_weight(self, tensor, dtype):
            weight = ops.dequantize_tensor(tensor, dtype)
            for entries, key in getattr(tensor, "patches", []):
                weight = calculate_weight(entries, weight, key)
            return weight

        def forward_ggml_cast_weights(self, input):
            bias = None if self.bias is None else self.get_weight(self.bias, input.dtype)
            return torch.nn.functional.linear(input, self.get_weight(self.weight, input.dtype), bias)

        def forward(self, input):
            return self.forward_ggml_cast_weights(input)

        def load(self, weight, bias):
            self.weight = torch.nn.Parameter(weight, requires_grad=False)
            self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)

    ops.GGMLTensor, ops.dequantize_tensor, ops.GGMLOps = GGMLTensor, dequantize_tensor, type("GGMLOps", (), {})
    ops.GGMLOps.Linear = Linear
    return ops


# ---------------------------------------------------------------- the real one


class CastLinear(torch.nn.Linear):
    """ComfyUI's Linear, whose forward asks a method for the product."""

    def forward(self, *args, **kwargs):
        return self.forward_comfy_cast_weights(*args, **kwargs)

    def load(self, weight, bias):
        state = {"weight": weight} | ({} if bias is None else {"bias": bias})
        self.load_state_dict(state, strict=False)


def checkout(folder: Path, monkeypatch: Any) -> Any:
    """The module `ops` of a checkout of ComfyUI-GGUF."""
    kinds = {
        name: type(name, (CastLinear if name == "Linear" else getattr(torch.nn, name),), {})
        for name in ("Linear", "Conv2d", "Embedding", "LayerNorm", "GroupNorm")
    }
    cast = SimpleNamespace(
        manual_cast=type("manual_cast", (), kinds),
        cast_to=lambda tensor, dtype, device, **_: tensor.to(device=device, dtype=dtype),
    )
    parts = {
        "ops": cast,
        "lora": SimpleNamespace(calculate_weight=calculate_weight),
        "model_management": SimpleNamespace(device_supports_non_blocking=lambda device: False),
    }
    comfy, package = ModuleType("comfy"), ModuleType("comfyui_gguf")
    package.__path__ = [str(folder)]
    for name, module in {"comfy": comfy, "comfyui_gguf": package}.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name, part in parts.items():
        setattr(comfy, name, part)
        monkeypatch.setitem(sys.modules, f"comfy.{name}", part)
    spec = importlib.util.spec_from_file_location("comfyui_gguf.ops", folder / "ops.py")
    ops = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "comfyui_gguf.ops", ops)
    spec.loader.exec_module(ops)
    return ops


def tensor(ops: Any, w: Any) -> Any:
    """A qgemm.Tensor, or an array of float32, as ComfyUI-GGUF holds it."""
    if isinstance(w, np.ndarray):
        kind = gguf.GGMLQuantizationType.F32
        return ops.GGMLTensor(torch.from_numpy(w), tensor_type=kind, tensor_shape=torch.Size(w.shape), patches=[])
    raw = torch.from_numpy(np.array(w.blocks).view(np.uint8).reshape(len(w), -1))
    kind = gguf.GGMLQuantizationType(w.format.ggml_type)
    return ops.GGMLTensor(raw, tensor_type=kind, tensor_shape=torch.Size(w.shape), patches=[])

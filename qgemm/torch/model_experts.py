"""Expert layers of transformers models: replaced by QExperts over the tensors of a .gguf file.

The layers are recognized by their class: those of Qwen2-MoE, Qwen3-MoE and Mixtral (SwiGLU), and of gpt-oss.
`mul_mat_id` serves layers that hold ggml's blocks themselves, such as transformers' GgufExperts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from qgemm.cuda.upload import tiles_nbytes
from qgemm.errors import UnsupportedError
from qgemm.experts import moe_matmul
from qgemm.files.gguf.reader import open
from qgemm.formats import GGML_TYPES
from qgemm.gating import LIMIT, SLOPE
from qgemm.tensor import Tensor

from .experts import QExperts
from .hosts import adopt
from .storage import packed_of, spelled

PARTS = ("gate", "up", "down")
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
SILU = ("SiLUActivation", "SiLU")


class ExpertTensors(NamedTuple):
    """The tensors of one layer in a file: packed gate, up and down, their biases or None, and the activation."""

    weights: tuple[Tensor, Tensor, Tensor]
    biases: tuple[Tensor | None, ...]
    activation: str

    def empty(self, dtype: torch.dtype) -> QExperts:
        """An empty layer for these tensors, on the device meta."""
        gate, _, _ = self.weights
        e, f, k = gate.shape
        formats = [tensor.format for tensor in self.weights]
        return QExperts(e, k, f, formats, self.activation, self.biases[0] is not None, "meta", dtype)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def mul_mat_id(
    blocks: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, ggml_type: int, out_features: int
) -> torch.Tensor:
    """y [T, top_k, N], y[t, j] = x[t] @ w[ids[t, j]].T in x's dtype, by experts w [E, N, K] in the blocks of a file.

    blocks: uint8 [E, N, bytes per row of K], of this ggml type; the CPU reads them in place, a GPU converts them to
    tiles at the first product, in the same tensor. x [T, K]; ids [T, top_k], int32 or int64; out_features: N. The
    arguments are those of the function of this name in transformers.integrations.gguf. UnsupportedError for shapes that
    do not fit.
    """
    if ggml_type not in GGML_TYPES:
        raise UnsupportedError(f"no format is ggml's type {ggml_type}")
    fmt, k = GGML_TYPES[ggml_type], x.shape[-1]
    experts = blocks.shape[0] if blocks.dim() > 1 else blocks.numel() // tiles_nbytes(fmt, out_features, k)
    w = packed_of(blocks, spelled(fmt), (experts, out_features, k))
    return moe_matmul(x.detach(), w, ids, dtype=x.dtype)


def replace_experts(model: torch.nn.Module, path: str | os.PathLike[str]) -> list[str]:
    """Replace a model's expert layers by QExperts with the packed weights of a .gguf file -> their names.

    For models that were built from another source than the file, whose tensors have ggml's names. Biases come from the
    file, in the dtype of the model's own. UnsupportedError if a layer's tensors are missing in the file or do not fit.
    """
    file = open(path)
    plans = dict(plan_experts(model, file))
    missing = [name for name, module in model.named_modules() if experts_activation(module) and name not in plans]
    if missing:
        raise UnsupportedError(f"{os.fspath(path)}: no packed experts that fit {', '.join(missing)}")
    for name, tensors in plans.items():
        parameter = next(model.get_submodule(name).parameters())
        dtype, device = parameter.dtype, parameter.device
        biases = [
            None if bias is None else torch.from_numpy(bias.dequantize()).to(dtype) for bias in tensors.biases
        ]  # fmt: skip
        layer = QExperts.from_tensors(*tensors.weights, biases, tensors.activation)
        model.set_submodule(name, layer if device.type in ("cpu", "meta") else layer.to(device))
    adopt(model)
    return list(plans)


def plan_experts(model: torch.nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, ExpertTensors]]:
    """The model's expert layers, by name, whose weights a file has as blocks."""
    for name, module in model.named_modules():
        layer, activation = LAYER.search(name), experts_activation(module)
        if layer is None or not activation:
            continue
        weights = [tensors.get(tensor_name(layer[1], part, "weight")) for part in PARTS]
        if not _fit(weights, module):
            continue
        biases = tuple(tensors.get(tensor_name(layer[1], part, "bias")) for part in PARTS)
        yield name, ExpertTensors(tuple(weights), biases, activation)  # type: ignore[arg-type]


def tensor_name(layer: str, part: str, kind: str) -> str:
    """ggml's name of a tensor of experts."""
    return f"blk.{layer}.ffn_{part}_exps.{kind}"


def experts_activation(module: torch.nn.Module) -> str:
    """The activation of an expert layer; "" for any other module, and for experts with another activation."""
    kind = type(module).__name__
    if kind in ("Qwen2MoeExperts", "Qwen3MoeExperts", "MixtralExperts"):
        return "swiglu" if type(module.act_fn).__name__ in SILU else ""
    if kind == "GptOssExperts":
        return "swiglu_oai" if (module.alpha, module.limit) == (SLOPE, LIMIT) else ""
    return ""


def _fit(weights: list[Tensor | None], module: torch.nn.Module) -> bool:
    """Whether weights are blocks of the model's sizes, which files of ggml store as [E, N, K]."""
    if any(w is None or w.ndim != 3 or w.format.plain or w.format.levels is None for w in weights):
        return False
    gate, up, down = (w.shape for w in weights if w is not None)
    e, f, k = gate
    sizes = sorted(module.gate_up_proj.shape) == sorted((e, 2 * f, k))
    return sizes and up == gate and down == (e, k, f) and e == module.num_experts

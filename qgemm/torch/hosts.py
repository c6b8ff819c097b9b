"""Packed layers in a model of transformers: its config names them, and its tables and heads can be resized.

transformers is not imported: a model is recognized by its config.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from qgemm.errors import UnsupportedError
from qgemm.ops import quantize
from qgemm.tensor import Tensor

from .embedding import QEmbedding
from .linear import QLinear
from .ops import dense
from .storage import host_tensor, weight_of

METHOD = "qgemm"  # the name of the method in config.json, under quantization_config


def adopt(model: torch.nn.Module, activation: str = "a16") -> None:
    """Prepare models of transformers, `model` or modules in it, for saving and resizing their packed layers.

    `save_pretrained` writes bytes of packed weights, and the config says how to read them
    (qgemm/torch/pretrained.py). A model that another quantizer loaded keeps its config.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "get_text_config") and getattr(module, "hf_quantizer", None) is None:
            config.quantization_config = {"quant_method": METHOD, "activation": activation}
            allow_resizing(module)


def allow_resizing(model: Any) -> None:
    """Let a model's `resize_token_embeddings` resize packed tables and heads."""
    if hasattr(model, "resize_token_embeddings"):
        model.resize_token_embeddings = partial(resize_token_embeddings, model)


def resize_token_embeddings(
    model: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
) -> torch.nn.Module:
    """The method of this name of transformers' models: packed rows are cut off, or new ones quantized and appended.

    New rows are the mean of the old ones, or random as the config says if not `mean_resizing`.
    """
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if new_num_tokens is None and pad_to_multiple_of is None:
        return table
    n = len(table.weight) if new_num_tokens is None else new_num_tokens
    n = n if pad_to_multiple_of is None else -(-n // pad_to_multiple_of) * pad_to_multiple_of
    std = None if mean_resizing else model.config.get_text_config().initializer_range
    tied = head is not None and head.weight is table.weight
    if isinstance(table, QEmbedding):
        _resize(table, n, std)
        table.padding_idx = None if table.padding_idx is not None and table.padding_idx >= n else table.padding_idx
    else:
        model.set_input_embeddings(model._get_resized_embeddings(table, n, mean_resizing=mean_resizing))
    if isinstance(head, QLinear):
        _resize(head, n, std, table.weight if tied else None)
    elif head is not None:
        model.set_output_embeddings(model._get_resized_lm_head(head, n, mean_resizing=mean_resizing))
    model.config.get_text_config().vocab_size = model.vocab_size = n
    model.tie_weights()
    return model.get_input_embeddings()


def _resize(layer: QEmbedding | QLinear, n: int, std: float | None, shared: torch.nn.Parameter | None = None) -> None:
    """Give a layer n rows, in place. std: of new rows, None for the mean of the old ones; shared: a resized weight."""
    (rows, k), device = layer._shape, layer.weight.device
    if isinstance(layer, QLinear) and layer.viewed:
        raise UnsupportedError(f"{layer!r} has scaled or reordered weights, which are not resized; dequantize() them")
    if shared is None:
        tensor = host_tensor(layer.weight, layer._format, layer._shape, layer.tensor_name)
        blocks = tensor.blocks[:n]
        if n > rows:
            mean = dense(layer.weight, layer._format, (rows, k), torch.float32).mean(0).expand(n - rows, k)
            added = mean if std is None else torch.randn(n - rows, k) * std
            importance = np.ones(k, np.float32) if tensor.format.encoding.needs_importance else None
            added_rows = quantize(added.cpu().numpy(), tensor.format, imatrix=importance)
            blocks = np.concatenate([blocks, added_rows.blocks])
        shared = weight_of(Tensor(tensor.format, (n, k), blocks, tensor.name))
        shared.data = shared.data.to(device)
    layer.weight = shared
    layer._describe(layer.format, (n, k))
    bias = layer._parameters.get("bias")
    if bias is not None:
        new = bias.new_zeros(n)
        new[: min(n, rows)] = bias.detach()[:n]
        layer.bias = torch.nn.Parameter(new, requires_grad=bias.requires_grad)

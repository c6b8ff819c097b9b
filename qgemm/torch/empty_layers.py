"""Empty packed layers on the device "meta", which replace those of a model that transformers is about to load."""

from __future__ import annotations

import torch

from qgemm.arguments import check_activation
from qgemm.codec.format import Format

from .embedding import QEmbedding
from .linear import QLinear


def empty_layer(old: torch.nn.Module, fmt: Format, dtype: torch.dtype, activation: str = "a16") -> QLinear | QEmbedding:
    """The empty layer that replaces a Linear or a table; activation: of formats with integer codes."""
    n, k = old.weight.shape
    if not is_table(old):
        activation = check_activation(activation) if fmt.integer else "a16"
        return QLinear(k, n, fmt, old.bias is not None, activation, "meta", dtype)
    new = QEmbedding(n, k, fmt, old.padding_idx, "meta", dtype)
    scale = row_scale(old)
    if scale is not None:
        new.register_forward_hook(Scaled(scale))
        new.embed_scale = scale  # for qgemm.torch.peft: rows of an adapter are scaled as well
    return new


def is_replaceable(module: torch.nn.Module | None) -> bool:
    """Whether a packed layer can replace a module: a Linear or table of torch's own, or gemma's scaled table."""
    return type(module) is torch.nn.Linear or is_table(module)


def is_table(module: torch.nn.Module | None) -> bool:
    """Whether a module is torch's embedding table, or gemma's."""
    return type(module) is torch.nn.Embedding or row_scale(module) is not None


def row_scale(module: torch.nn.Module | None) -> float | None:
    """The factor of a row in gemma's embedding tables; None for any other layer."""
    named = type(module).__name__.endswith("TextScaledWordEmbedding")
    return getattr(module, "scalar_embed_scale", None) if named else None


class Scaled:
    """A hook of a table's forward that multiplies rows by a number in their dtype."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, layer: torch.nn.Module, inputs: tuple[object, ...], rows: torch.Tensor) -> torch.Tensor:
        """The scaled rows."""
        return rows * torch.tensor(self.scale, dtype=rows.dtype, device=rows.device)

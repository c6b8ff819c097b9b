"""QEmbedding: torch.nn.Embedding whose table stays packed; only the rows of an index are decoded."""

from __future__ import annotations

from collections.abc import Callable

import torch

from qgemm.codec.format import Format
from qgemm.errors import UnsupportedError
from qgemm.packed import Packed

from .module import PackedModule
from .ops import check_tensor, traced, traced_embedding
from .rows import selected


def _cast_by_fsdp(table: QEmbedding) -> torch.dtype:
    """The type of a table's rows under fully_shard: its policy casts float parameters and never the bytes of a table.

    torch tells no module its policy; it is that of the group of parameters with the table's weight.
    """
    from torch.distributed._composable_state import _module_state_mapping as states

    for state in [reference() for reference in states.values()]:
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in filter(None, groups):
            for info in (parameter._module_info for parameter in group.fsdp_params):
                if any(module is table for module in (info.module, *info.shared_modules)):
                    return group.mp_policy.param_dtype or table.dtype
    return table.dtype


class QEmbedding(PackedModule):
    """Rows of a packed table [num_embeddings, embedding_dim] by their index, decoded into `dtype`.

    The index is int32 or int64 of any shape, on the layer's device. The table takes no gradient. padding_idx names the
    padding row, which the forward decodes like any other, as torch.nn.Embedding does. A layer may share its `weight`
    with a QLinear, as in models whose head is their table. Under fully_shard (FSDP) with mixed precision rows have the
    policy's param_dtype, as those of torch.nn.Embedding, whose parameter FSDP casts.
    """

    rows, columns = "num_embeddings", "embedding_dim"
    num_embeddings: int
    embedding_dim: int
    max_norm, norm_type, scale_grad_by_freq, sparse = None, 2.0, False, False  # those of torch.nn.Embedding, fixed

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        format: Format | str,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """A table of zeros, for a state dict, which also sets the format. dtype: of the output, torch's default."""
        super().__init__((num_embeddings, embedding_dim), format, device)
        self._complete(padding_idx, dtype)

    def _complete(self, padding_idx: int | None, dtype: torch.dtype | None) -> None:
        n = self.num_embeddings
        if padding_idx is not None and not -n <= padding_idx < n:
            raise UnsupportedError(f"padding_idx is {padding_idx}, the table has rows 0 to {n - 1}")
        self.padding_idx = padding_idx + n if padding_idx is not None and padding_idx < 0 else padding_idx
        self.dtype = torch.get_default_dtype() if dtype is None else dtype

    @classmethod
    def from_tensor(
        cls, tensor: Packed, padding_idx: int | None = None, dtype: torch.dtype | None = None
    ) -> QEmbedding:
        """A table over the memory of a qgemm.Tensor [rows, K], which may be in a mapped file, or of a DeviceTensor."""
        return cls._sharing(tensor, None, padding_idx, dtype)

    @classmethod
    def _sharing(
        cls, tensor: Packed, weight: torch.nn.Parameter | None, padding_idx: int | None, dtype: torch.dtype | None
    ) -> QEmbedding:
        """`from_tensor`, with an existing parameter that holds the tensor's bytes, or None."""
        layer = cls.__new__(cls)
        torch.nn.Module.__init__(layer)
        layer._take(tensor, weight)
        layer._complete(padding_idx, dtype)
        return layer

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        """index [...] -> rows [..., embedding_dim]."""
        check_tensor(index, self)
        if index.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"an index is int32 or int64, got {index.dtype}")
        dtype = self.dtype if "_is_fsdp_managed_module" not in vars(self) else _cast_by_fsdp(self)
        if traced(index):
            n, k = self.num_embeddings, self.embedding_dim
            return traced_embedding(index, self.weight, self._format, n, k, dtype)
        return selected(self.packed, self._parameters["weight"], index, dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QEmbedding:
        """Convert like torch; `.half()` and similar calls change the output's dtype."""
        super()._apply(fn, recurse)
        dtype = fn(torch.empty(0, dtype=self.dtype, device=self.weight.device)).dtype
        self.dtype = dtype if dtype.is_floating_point else self.dtype
        return self

    def extra_repr(self) -> str:
        """For repr."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, format={self.format}, dtype={self.dtype}"

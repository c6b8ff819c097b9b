"""ViewedModule: a layer whose packed weight may be seen through a view of qgemm, Reordered or Scaled.

    Reordered   buffer column_order [K] int32       y = x[..., column_order] @ weight.T + bias
    Scaled      buffer factor, or divisor, float32  y = (x @ weight.T) * factor + bias, rounded to x's dtype once

Buffers are where the weight is, in every state dict, and shared by nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from qgemm.errors import UnsupportedError
from qgemm.packed import Packed
from qgemm.views import Reordered, Scaled, View

from .module import PackedModule
from .storage import host_tensor

BUFFERS = {"column_order": torch.int32, "factor": torch.float32, "divisor": torch.float32}


class ViewedModule(PackedModule):
    """Base of QLinear: a packed weight [N, K] and, where it is a view's, what the view adds to it."""

    def _take(self, packed: Packed, weight: Any = None) -> None:
        """Hold the weights of a Tensor, a DeviceTensor or a view of either."""
        super()._take(packed.tensor if isinstance(packed, View) else packed, weight)
        if isinstance(packed, Reordered):
            self._see("column_order", packed.columns)
        elif isinstance(packed, Scaled):
            self._see("divisor" if packed.divides else "factor", packed.factor)

    def _see(self, name: str, values: Any) -> None:
        """Copy what a view adds into a buffer beside the weight."""
        values = values if hasattr(values, "__cuda_array_interface__") else np.array(values)
        self.register_buffer(name, torch.as_tensor(values).to(BUFFERS[name], copy=True))

    @property
    def viewed(self) -> bool:
        """Whether the weight is seen otherwise than it is packed."""
        return any(self._buffers.get(name) is not None for name in BUFFERS)

    def gathered(self, x: Any) -> Any:
        """x [..., K] with its columns in the order of the packed weight; as it is if it has no K columns."""
        columns = self._buffers.get("column_order")
        return x if columns is None or x.shape[-1:] != columns.shape else x.index_select(-1, columns)

    def scaled(self, y: Any) -> Any:
        """y [..., N] float32 times the factor of a Scaled weight."""
        factor, divisor = self._buffers.get("factor"), self._buffers.get("divisor")
        return y * factor if factor is not None else y if divisor is None else y / divisor

    @property
    def wide(self) -> bool:
        """Whether products are handed over in float32, since a factor follows."""
        return self._buffers.get("factor") is not None or self._buffers.get("divisor") is not None

    def dequantize(self, dtype: Any = torch.float32) -> Any:
        """The weights as a new tensor [N, K] on their device: exact in float32, otherwise rounded once from it.

        Those with a factor are decoded on the host.
        """
        if self.wide:
            stored = host_tensor(self.weight, self._format, self._shape, self.tensor_name)
            name = "divisor" if self._buffers.get("factor") is None else "factor"
            factor = self._buffers[name].detach().cpu().numpy()
            values = torch.from_numpy(Scaled(stored, factor, name == "divisor").dequantize())
            return values.to(self.weight.device, dtype)
        w, columns = super().dequantize(dtype), self._buffers.get("column_order")
        return w if columns is None else torch.empty_like(w).index_copy_(1, columns.long(), w)

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> PackedModule:
        """Buffers go to the weight's device; no dtype touches them, as it touches no packed weight."""
        kept = {name: self._buffers[name] for name in BUFFERS if self._buffers.get(name) is not None}
        super()._apply(fn, recurse)
        for name, values in kept.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype != values.dtype:
                self._buffers[name] = values.to(moved.device)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        """A layer without a view takes that of the state dict."""
        for name, dtype in BUFFERS.items():
            given = state_dict.get(prefix + name)
            if given is None or self._buffers.get(name) is not None:
                continue
            fits = ((self._shape[1],),) if name == "column_order" else ((), (self._shape[0],), (1,))
            if given.dtype != dtype or tuple(given.shape) not in fits:
                others[-1].append(f"{prefix}{name}: {given.dtype} {list(given.shape)} does not fit {self!r}")
                return
            self.register_buffer(name, torch.empty_like(given, device=self.weight.device))
        super()._load_from_state_dict(state_dict, prefix, *others)


def check_unviewed(layer: Any, who: str) -> None:
    """UnsupportedError for a layer that is not cut over ranks, since its weight is a view's."""
    if layer.viewed:
        raise UnsupportedError(f"{who} has a weight of which columns are reordered or scaled, which is not cut")

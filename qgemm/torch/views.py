"""ViewedModule: a layer whose packed weight may be a view of qgemm, Reordered or Scaled.

    Reordered   buffer column_order [K] int32       y = x[..., column_order] @ weight.T + bias
    Scaled      buffer factor, or divisor, float32  y = (x @ weight.T) * factor + bias, rounded to x's dtype once

Buffers are on the weight's device and in every state dict; layers do not share them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    """Base of QLinear: a packed weight [N, K] and, if it is a view, buffers for its order or factor."""

    def _take(self, packed: Packed, weight: torch.nn.Parameter | None = None) -> None:
        """Hold the weights of a Tensor, a DeviceTensor or a view of either."""
        super()._take(packed.tensor if isinstance(packed, View) else packed, weight)
        if isinstance(packed, Reordered):
            self._add_buffer("column_order", packed.columns)
        elif isinstance(packed, Scaled):
            self._add_buffer("divisor" if packed.divides else "factor", packed.factor)

    def _add_buffer(self, name: str, values: Any) -> None:
        """Copy a view's order or factor into a buffer."""
        values = values if hasattr(values, "__cuda_array_interface__") else np.array(values)
        self.register_buffer(name, torch.as_tensor(values).to(BUFFERS[name], copy=True))

    @property
    def viewed(self) -> bool:
        """Whether the weight is a view."""
        return any(self._buffers.get(name) is not None for name in BUFFERS)

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] with its columns in the order of the packed weight; unchanged if it has no K columns."""
        columns = self._buffers.get("column_order")
        return x if columns is None or x.shape[-1:] != columns.shape else x.index_select(-1, columns)

    def scaled(self, y: torch.Tensor) -> torch.Tensor:
        """y [..., N] float32 with the factor or divisor of a Scaled weight applied."""
        factor, divisor = self._buffers.get("factor"), self._buffers.get("divisor")
        return y * factor if factor is not None else y if divisor is None else y / divisor

    @property
    def wide(self) -> bool:
        """Whether products are computed in float32, because a factor or divisor follows."""
        return self._buffers.get("factor") is not None or self._buffers.get("divisor") is not None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weights as a new tensor [N, K] on their device: exact in float32, otherwise rounded once from it.

        Weights with a factor are decoded on the host.
        """
        if self.wide:
            stored = host_tensor(self.weight, self._format, self._shape, self.tensor_name)
            name = "divisor" if self._buffers.get("factor") is None else "factor"
            factor = self._buffers[name].detach().cpu().numpy()
            values = torch.from_numpy(Scaled(stored, factor, name == "divisor").dequantize())
            return values.to(self.weight.device, dtype)
        w, columns = super().dequantize(dtype), self._buffers.get("column_order")
        return w if columns is None else torch.empty_like(w).index_copy_(1, columns.long(), w)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PackedModule:
        """Buffers move to the weight's device; like packed weights they ignore dtypes."""
        buffers = {name: self._buffers[name] for name in BUFFERS if self._buffers.get(name) is not None}
        super()._apply(fn, recurse)
        for name, values in buffers.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype != values.dtype:
                self._buffers[name] = values.to(moved.device)
        return self

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *others: Any) -> None:
        """Load a state dict; a layer without a view adopts that of the state dict."""
        for name, dtype in BUFFERS.items():
            loaded = state_dict.get(prefix + name)
            if loaded is None or self._buffers.get(name) is not None:
                continue
            fits = ((self._shape[1],),) if name == "column_order" else ((), (self._shape[0],), (1,))
            if loaded.dtype != dtype or tuple(loaded.shape) not in fits:
                others[-1].append(f"{prefix}{name}: {loaded.dtype} {list(loaded.shape)} does not fit {self!r}")
                return
            self.register_buffer(name, torch.empty_like(loaded, device=self.weight.device))
        super()._load_from_state_dict(state_dict, prefix, *others)


def check_unviewed(layer: ViewedModule, label: str) -> None:
    """UnsupportedError for a layer whose weight is a view, which cannot be cut over ranks."""
    if layer.viewed:
        raise UnsupportedError(f"{label} has a weight of which columns are reordered or scaled, which is not cut")

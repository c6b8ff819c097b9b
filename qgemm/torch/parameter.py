"""PackedWeight: bytes as a parameter that other code moves, copies, broadcasts and averages like any other."""

from __future__ import annotations

from typing import Any

import torch

from qgemm.errors import UnsupportedError

NO_GRADIENT = "the packed weight takes no gradient"
TRAINED = "train its bias (.bias.requires_grad_()), dense layers, or matrices beside it (.add_lora, peft)"


class PackedWeight(torch.nn.Parameter):
    """A parameter of bytes, without a gradient.

    Floats that are copied into it are rounded to the nearest byte, where torch would cut them off: the averages of
    models (torch.optim.swa_utils) are computed in floats, and one of equal bytes must be those bytes.
    """

    def requires_grad_(self, requires_grad: bool = True) -> PackedWeight:
        """Raise UnsupportedError for a gradient."""
        if requires_grad:
            raise UnsupportedError(f"{NO_GRADIENT}; {TRAINED}")
        return super().requires_grad_(False)  # type: ignore[no-any-return]

    def detach(self) -> Any:
        """A parameter over this memory, into which floats are copied in the same way."""
        return super().detach().as_subclass(PackedWeight)

    def copy_(self, src: torch.Tensor, non_blocking: bool = False) -> Any:
        """Copy bytes, or floats rounded to bytes."""
        return super().copy_(src.round() if src.is_floating_point() else src, non_blocking)

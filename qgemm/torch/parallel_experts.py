"""ParallelExperts: QExperts whose experts are distributed over the ranks of torch.distributed; one sum over the ranks.

Every rank processes all tokens. A token's experts on other ranks contribute nothing: they get weight 0 and are replaced
by the first expert, so that no further bytes are read. A rank computes all top_k products: memory is divided, and the
bytes read for few tokens, but not the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qgemm.errors import ShapeError, UnsupportedError
from qgemm.packed import Packed
from qgemm.tensor import Tensor

from .experts import QExperts
from .group import Group, Ranks
from .ops import traced


class ParallelExperts(QExperts):
    """y [T, K] of all experts of a layer, on every rank; made by `from_tensors`, which every rank calls.

    group: the ranks. part: this rank's experts. The ids of a call are those of the whole layer. Each rank's part of the
    sum is rounded to x's dtype, and the sum again.
    """

    group: Group
    part: slice
    total: int

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UnsupportedError("ParallelExperts.from_tensors cuts a layer from tensors; there is no empty one")

    @classmethod
    def from_tensors(
        cls, gate: Packed, up: Packed, down: Packed, biases: Sequence[Any] = (None, None, None),
        activation: str = "swiglu", *, group: Group | Ranks | None = None,
    ) -> ParallelExperts:  # fmt: skip
        """This rank's experts of Tensors [E, F, K], [E, F, K], [E, K, F]: views of a mapped file.

        biases: of the whole layer, tensors [E, N] or None. group: as in `ColumnParallelLinear.from_tensor`. An error on
        one rank is raised on all; ShapeError if there are fewer experts than ranks.
        """
        group = Group.wrap(group)
        with group.together() as facts:
            facts.append(f"{(gate, up, down)}, {activation}")
            return cls._cut((gate, up, down), biases, activation, group)

    @classmethod
    def _cut(
        cls, tensors: Sequence[Packed], biases: Sequence[Any], activation: str, group: Group
    ) -> ParallelExperts:  # fmt: skip
        """This rank's experts of gate, up and down, without communication."""
        shards, total = list[Packed](), tensors[0].shape[0]
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or tensor.ndim != 3:
                raise UnsupportedError(f"experts are cut on the host, as Tensors (E, N, K); got {tensor!r}")
            if tensor.shape[0] != total:
                raise ShapeError(f"gate has {total} experts, got {tensor!r}")
            shards.append(tensor.shard(group.rank, group.world, 0))
            part = tensor.shares(group.world, 0)[group.rank]
        gate, up, down = shards
        own_biases = [None if bias is None else bias.detach()[part].clone() for bias in biases]
        layer = super().from_tensors(gate, up, down, own_biases, activation)
        assert isinstance(layer, cls)
        layer.group, layer.part, layer.total = group, part, total
        return layer

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """x [T, K], ids [T, top_k] of all experts, the router's weights [T, top_k] -> y [T, K]."""
        graph, ids = traced(hidden_states), top_k_index
        if not graph and not ids.is_cuda and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.total:
            raise IndexError(f"ids are {int(ids.min())} to {int(ids.max())}, there are experts 0 to {self.total - 1}")
        local = (ids >= self.part.start) & (ids < self.part.stop)
        y = super().forward(
            hidden_states, torch.where(local, ids - self.part.start, 0), torch.where(local, top_k_weights, 0)
        )
        return self.group.traced_sum(y) if graph else self.group.sum(y)

    def extra_repr(self) -> str:
        """For repr."""
        cut = f"experts {self.part.start} to {self.part.stop} of {self.total}"
        return f"{super().extra_repr()}, {self.group!r}: {cut}"

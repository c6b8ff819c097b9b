"""ColumnParallelLinear, RowParallelLinear: QLinear whose weight is cut over the ranks of torch.distributed.

    column parallel   y [..., N / world] = x @ W[part].T + bias[part]      no sum; y may be joined to [..., N]
    row parallel      y [..., N] = sum over ranks of x[part] @ W[:, part].T, + bias    x [..., K / world]

A column parallel layer followed by a row parallel one is a block of a transformer with a single sum.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import torch

from qgemm.errors import ShapeError, UnsupportedError
from qgemm.packed import Packed
from qgemm.tensor import Tensor

from .gradients import Product, differentiated, graph_linear
from .group import Group, Joined, Part, Ranks, Shared, Summed
from .linear import QLinear
from .ops import product, traced


class ParallelLinear(QLinear):
    """Base of the two: a QLinear over this rank's share.

    group: the ranks. parts: the features of each rank along the cut axis.
    """

    axis: ClassVar[int]
    features: ClassVar[str]
    group: Group
    parts: list[slice]
    whole: bool

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UnsupportedError(f"{type(self).__name__}.from_tensor cuts a layer from a tensor; there is no empty one")

    @classmethod
    def from_tensor(
        cls,
        tensor: Packed,
        bias: torch.Tensor | None = None,
        activation: str = "a16",
        *,
        group: Group | Ranks | None = None,
        multiple: int | None = None,
        whole: bool = False,
    ) -> Any:
        """This rank's share of a qgemm.Tensor [N, K] and bias [N]; every rank of the group calls it.

        group: a process group, a device mesh of one axis, or None for all ranks. multiple: the smallest unit of a cut,
        see `Tensor.shares`. whole: x and y are those of QLinear on every rank: y is joined, or x cut here. An error on
        one rank is raised on all, as RankError with its message.
        """
        group = Group.wrap(group)
        with group.together() as facts:
            facts.append(f"{tensor!r}, multiple {multiple}, whole {whole}")
            return cls._cut(tensor, bias, activation, group, multiple, whole)

    @classmethod
    def _cut(
        cls, tensor: Packed, bias: torch.Tensor | None, activation: str, group: Group, multiple: int | None, whole: bool
    ) -> Any:
        """The layer of this rank, without communication."""
        if not isinstance(tensor, Tensor) or tensor.ndim != 2:
            raise UnsupportedError(
                f"weights are cut on the host, before they go to a GPU: a Tensor (N, K); got {tensor!r}"
            )
        parts = tensor.shares(group.world, cls.axis, multiple)
        shard = tensor.shard(group.rank, group.world, cls.axis, multiple)
        return cls.of_shard(shard, parts, cls._bias(bias, tensor, parts[group.rank]), activation, group, whole)

    @classmethod
    def of_shard(
        cls,
        shard: Packed,
        parts: list[slice],
        bias: torch.Tensor | None,
        activation: str,
        group: Group,
        whole: bool = False,
    ) -> Any:
        """A layer over a share that this rank already has, on either device; the others hold the rest of `parts`."""
        layer = cls._sharing(shard, None, bias, activation)
        layer.group, layer.parts, layer.whole = group, parts, whole
        return layer

    @classmethod
    def _bias(cls, bias: torch.Tensor | None, tensor: Tensor, part: slice) -> torch.Tensor | None:
        """This rank's part of the whole layer's bias."""
        if bias is not None and tuple(bias.shape) != tensor.shape[:1]:
            raise ShapeError(f"bias has shape {list(bias.shape)}, {tensor!r} needs [{tensor.shape[0]}]")
        return bias

    @property
    def widths(self) -> list[int]:
        """The number of features of each rank along the cut axis."""
        return [part.stop - part.start for part in self.parts]

    def add_lora(self, A: torch.Tensor, B: torch.Tensor, scale: float = 1.0, name: str = "default") -> NoReturn:
        """Raise UnsupportedError: low-rank matrices would have to be cut too."""
        raise UnsupportedError(f"{self!r}: LoRA beside a layer that is cut over ranks is not supported")

    def extra_repr(self) -> str:
        """For repr."""
        part = self.parts[self.group.rank]
        cut = f"{self.features} {part.start} to {part.stop} of {self.parts[-1].stop}"
        return f"{super().extra_repr()}, {self.group!r}: {cut}"


class ColumnParallelLinear(ParallelLinear):
    """A share of a layer's outputs: y [..., N_rank] = x [..., K] @ W[part].T + bias[part].

    Made by `from_tensor`; whole: y [..., N], joined from all ranks.
    """

    axis, features = 0, "outputs"

    @classmethod
    def _bias(cls, bias: torch.Tensor | None, tensor: Tensor, part: slice) -> torch.Tensor | None:
        bias = super()._bias(bias, tensor, part)
        if bias is None:
            return None
        return torch.nn.Parameter(bias.detach()[part].clone(), requires_grad=bias.requires_grad)

    def _linear(self, x: torch.Tensor) -> torch.Tensor:
        if traced(x):
            y = super()._linear(x)
            return self.group.traced_joined(y, self.widths) if self.whole else y
        if differentiated(x, self._parameters["bias"]):
            y = super()._linear(Shared.apply(x, self.group))
            return Joined.apply(y, self.group, self.widths) if self.whole else y
        y = super()._linear(x)
        return self.group.joined(y, self.widths) if self.whole else y


class RowParallelLinear(ParallelLinear):
    """A share of a layer's inputs: y [..., N] = the sum over ranks of x [..., K_rank] @ W[:, part].T, plus bias once.

    Made by `from_tensor`; whole: x [..., K], whose part each rank selects. Parts of the sum are rounded to x's dtype,
    the sum again, and y once more where there is a bias. All ranks get the same bits.
    """

    axis, features = 1, "inputs"

    def _linear(self, x: torch.Tensor) -> torch.Tensor:
        bias, widths = self._parameters["bias"], self.widths
        if x.dim() == 0 or x.shape[-1] != (sum(widths) if self.whole else self.in_features):
            raise ShapeError(f"x has shape {list(x.shape)}, {self!r}")
        if traced(x):
            x = x[..., self.parts[self.group.rank]] if self.whole else x
            n, k = self.out_features, self.in_features
            y = graph_linear(x, self.weight, None, self._format, n, k, self.activation, False)
            y = self.group.traced_sum(y)
        elif differentiated(x, bias):
            x = Part.apply(x, self.group, widths) if self.whole else x
            y = Product.apply(x, self.weight, None, self._format, *self._shape, self.activation, False)
            y = Summed.apply(y, self.group)
        else:
            x = x[..., self.parts[self.group.rank]] if self.whole else x
            y = self.group.sum(product(x, self.packed, None, self.activation))
            return y if bias is None else y.add_(bias)
        return y if bias is None else (y + bias).to(y.dtype)

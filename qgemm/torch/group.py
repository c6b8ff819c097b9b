"""Group: the ranks of torch.distributed over which weights are cut, and the collectives of the layers.

All ranks call the same collectives in the same order. Actions that may fail on a single rank, such as reading a file,
run inside `Group.together`, at whose end every rank learns of the others' errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn, TypeAlias
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as traceable

from qgemm.errors import RankError, UnsupportedError

Ranks: TypeAlias = "dist.ProcessGroup | dist.device_mesh.DeviceMesh"  # a string: torch may be built without distributed


class Group:
    """A process group, a device mesh of one axis, or all ranks (None).

    timeout: of collectives; a rank that waits longer for another fails. Default: the group's own.
    """

    def __init__(self, group: Any = None, timeout: timedelta | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise UnsupportedError(
                "there is no process group: call torch.distributed.init_process_group() first, under torchrun"
            )
        if hasattr(group, "get_group"):  # a DeviceMesh
            if group.ndim != 1:
                raise UnsupportedError(f"weights are cut along one axis of a mesh, got {group}; give mesh['tp']")
            group = group.get_group()
        if group is None:
            group = dist.group.WORLD
        elif not isinstance(group, dist.ProcessGroup):
            raise UnsupportedError(f"this rank is in no group: got {group!r}")
        if timeout is not None:
            ranks = dist.get_process_group_ranks(group)
            group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
        # Weak: a group that is alive when the interpreter exits, after destroy_process_group, crashes the process.
        self._process_group = ref(group)
        self.rank: int = dist.get_rank(group)
        self.world: int = dist.get_world_size(group)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """torch's process group; UnsupportedError after it was destroyed."""
        group = self._process_group()
        if group is None:
            raise UnsupportedError(f"{self!r}: the process group is gone, destroy_process_group() was called")
        return group

    @classmethod
    def wrap(cls, group: Group | Ranks | None, timeout: timedelta | None = None) -> Group:
        """The Group itself, or one over torch's group."""
        return group if isinstance(group, Group) else cls(group, timeout)

    @contextmanager
    def together(self) -> Iterator[list[str]]:
        """A block without collectives that every rank runs: it succeeds on all, or raises on all.

        The failing rank raises its own error, the others a RankError with its message. Text appended to the list must
        be the same on all ranks, else RankError reports the difference.
        """
        facts: list[str] = []
        error = None
        try:
            yield facts
        except Exception as caught:
            error = caught
        reports: list[Any] = [None] * self.world
        report = None if error is None else f"{type(error).__name__}: {error}"
        dist.all_gather_object(reports, (report, facts), group=self.process_group)
        if error is not None:
            raise error
        for rank, (text, _) in enumerate(reports):
            if text is not None:
                raise RankError(f"rank {rank} of {self.world} failed with {text}")
        for rank, (_, rank_facts) in enumerate(reports):
            if rank_facts != reports[0][1]:
                first, other = next((a, b) for a, b in _pairs(reports[0][1], rank_facts) if a != b)
                raise RankError(f"ranks must do the same: rank 0 has {first}, rank {rank} has {other}")

    # ---------------------------------------------------------------- collectives of tensors

    def sum(self, y: torch.Tensor) -> torch.Tensor:
        """The sum of y over the ranks, in place; y is contiguous. All ranks get the same bits."""
        dist.all_reduce(y, group=self.process_group)
        return y

    def joined(self, y: torch.Tensor, widths: list[int]) -> torch.Tensor:
        """y [..., widths[rank]] of all ranks concatenated, [..., sum(widths)], as a new tensor."""
        padded = y.new_zeros((*y.shape[:-1], max(widths)))
        padded[..., : y.shape[-1]] = y
        parts = [torch.empty_like(padded) for _ in widths]
        dist.all_gather(parts, padded, group=self.process_group)
        return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], -1)

    def traced_sum(self, y: torch.Tensor) -> torch.Tensor:
        """`sum` in a traced graph, as a new tensor."""
        return traceable.wait_tensor(traceable.all_reduce(y, "sum", self.process_group))

    def traced_joined(self, y: torch.Tensor, widths: list[int]) -> torch.Tensor:
        """`joined` in a traced graph."""
        padded = torch.nn.functional.pad(y, (0, max(widths) - y.shape[-1])).unsqueeze(0).contiguous()
        parts = traceable.wait_tensor(traceable.all_gather_tensor(padded, 0, self.process_group))
        return torch.cat([parts[rank, ..., :width] for rank, width in enumerate(widths)], -1)

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError("a layer of a group cannot be pickled; save its state_dict, which is that of its share")

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.world}"


def _pairs(first: list[str], other: list[str]) -> Iterator[tuple[str, str]]:
    for index in range(max(len(first), len(other))):
        yield tuple(facts[index] if index < len(facts) else "nothing" for facts in (first, other))  # type: ignore[misc]


# ---------------------------------------------------------------- with gradients


class Summed(torch.autograd.Function):
    """The sum of one part per rank, on all ranks; its gradient is that of each part."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, y: torch.Tensor, group: Group) -> torch.Tensor:
        return group.sum(y.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[Any, None]:
        return grad, None


class Shared(torch.autograd.Function):
    """x, which all ranks have, as input of layers that each compute a share; its gradients are summed."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[Any, None]:
        return ctx.group.sum(grad.clone(memory_format=torch.contiguous_format)), None


class Joined(torch.autograd.Function):
    """`Group.joined`; each rank takes its part of the gradient, which all ranks have."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, y: torch.Tensor, group: Group, widths: list[int]
    ) -> torch.Tensor:
        ctx.rank, ctx.widths = group.rank, widths
        return group.joined(y, widths)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[Any, None, None]:
        return grad.split(ctx.widths, -1)[ctx.rank], None, None


class Part(torch.autograd.Function):
    """A rank's part of the columns of x, which all ranks have; gradients are joined."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, group: Group, widths: list[int]
    ) -> torch.Tensor:
        ctx.group, ctx.widths = group, widths
        return x.split(widths, -1)[group.rank].clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[Any, None, None]:
        return ctx.group.joined(grad, ctx.widths), None, None

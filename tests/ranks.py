"""Processes that are the ranks of a group, over gloo or NCCL, each of which runs one function of a test."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

PRELOADED = [
    "qgemm.torch.transformers",
    "qgemm.torch",
    "pytest",
    "hypothesis",
]  # once, by the process that forks the ranks
TIMEOUT = 120.0  # seconds, of a collective and of all ranks


def run(world: int, function: Callable[..., Any], *args: Any, backend: str = "gloo") -> list[Any]:
    """Run function(rank, *args) on `world` ranks -> their results, in order.

    AssertionError with the traceback of the first rank that raised. Results must be plain objects, not tensors.
    """
    outcomes = outcomes_of(world, function, *args, backend=backend)
    failed = next((text for text, _ in outcomes if text), None)
    assert failed is None, failed
    return [value for _, value in outcomes]


def outcomes_of(world: int, function: Callable[..., Any], *args: Any, backend: str = "gloo") -> list[tuple[str, Any]]:
    """The traceback, or "", and the result of each rank; "gone" for one that ended without either."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED if backend == "gloo" else PRELOADED[1:])
    with tempfile.TemporaryDirectory() as folder:
        ends = [context.Pipe(duplex=False) for _ in range(world)]
        processes = [
            context.Process(
                target=_rank,
                args=(rank, world, backend, str(Path(folder, "store")), ends[rank][1], function, args),
                daemon=True,
            )
            for rank in range(world)
        ]
        for process, (_, theirs) in zip(processes, ends, strict=True):
            process.start()
            theirs.close()
        outcomes: dict[int, tuple[str, Any]] = {}
        end = time.monotonic() + TIMEOUT
        while len(outcomes) < world and time.monotonic() < end:
            waiting = {ours: rank for rank, (ours, _) in enumerate(ends) if rank not in outcomes}
            for ours in wait(list(waiting), timeout=end - time.monotonic()):
                try:
                    outcomes[waiting[ours]] = ours.recv()
                except EOFError:
                    outcomes[waiting[ours]] = "gone", None
        for process in processes:
            if len(outcomes) < world:
                process.kill()
            process.join(10)
    return [outcomes.get(rank, (f"rank {rank} did not end within {TIMEOUT} s", None)) for rank in range(world)]


def _rank(
    rank: int, world: int, backend: str, store: str, sender: Any, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    else:
        os.environ["QGEMM_CPU"] = "numpy"
        torch.set_num_threads(1)
    try:
        dist.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT)
        )
        outcome = "", function(rank, *args)
        dist.destroy_process_group()
    except BaseException:
        outcome = traceback.format_exc(), None
    sender.send(outcome)

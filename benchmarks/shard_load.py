"""Loading a .gguf file onto the GPUs: whole by one rank, and sharded over all ranks."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from qgemm.cli.weights import random_blocks
from qgemm.codec.format import Blocks
from qgemm.errors import UnsupportedError
from qgemm.files.gguf.reader import open
from qgemm.files.gguf.writer import write
from qgemm.formats import FORMATS
from qgemm.tensor import Tensor
from qgemm.torch.group import Group

from .results import Row

FORMAT = "q4_0"
HIDDEN, KEYS, INNER = 8192, 1024, 28672  # Llama-70B
OUTPUTS, INPUTS = 0, 1  # the axis of [N, K] that is sharded
LAYER = (
    (HIDDEN, HIDDEN, OUTPUTS), (KEYS, HIDDEN, OUTPUTS), (KEYS, HIDDEN, OUTPUTS), (HIDDEN, HIDDEN, INPUTS),
    (INNER, HIDDEN, OUTPUTS), (INNER, HIDDEN, OUTPUTS), (HIDDEN, INNER, INPUTS),
)  # fmt: skip
DRAWN = 256  # random rows of each matrix, which repeats them
BYTES = 10e9
REPEATS = 3
FOLDERS = "/dev/shm", tempfile.gettempdir()  # the first with enough space


def rows(group: Group, nbytes: float = BYTES) -> Iterator[Row]:
    """us from a path to packed weights on the GPUs: the median of REPEATS, with the file in the host's page cache."""
    name: list[Any] = [None]
    with group.together():
        if group.rank == 0:
            name = [str(_file(nbytes))]
    dist.broadcast_object_list(name, src=0)
    path = Path(name[0])
    try:
        whole, sharded = [], []
        for _ in range(REPEATS):
            whole.append(_seconds(group, path, group.rank == 0, 1))
            sharded.append(_seconds(group, path, True, group.world))
        single, us = (1e6 * sorted(seconds)[REPEATS // 2] for seconds in (whole, sharded))
        size = path.stat().st_size
        title = f"loading {size / 1e9:.1f} GB, layers of a Llama-70B"
        yield {"what": title, "format": FORMAT, "one_us": round(single), "us": round(us), "bytes": size}
    finally:
        dist.barrier()
        if group.rank == 0:
            shutil.rmtree(path.parent)


def _file(nbytes: float) -> Path:
    """Write a file of about `nbytes` of layers of a Llama-70B, whose rows repeat -> its path."""
    folder = next((f for f in FOLDERS if os.path.isdir(f) and shutil.disk_usage(f).free > 1.2 * nbytes), None)
    if folder is None:
        raise UnsupportedError(f"there is no space for {nbytes / 1e9:.0f} GB in any of {', '.join(FOLDERS)}")
    fmt, drawn = FORMATS[FORMAT], dict[tuple[int, int], Blocks]()
    for n, k, _ in LAYER:
        drawn[n, k] = np.resize(random_blocks(fmt, DRAWN, k, np.random.default_rng(k)), (n, fmt.blocks_in(k)))
    layers = max(1, round(nbytes / sum(drawn[n, k].nbytes for n, k, _ in LAYER)))
    tensors = {
        f"blk.{layer}.{i}.weight": Tensor(fmt, (n, k), drawn[n, k])
        for layer in range(layers)
        for i, (n, k, _) in enumerate(LAYER)
    }
    path = Path(tempfile.mkdtemp(dir=folder)) / "model.gguf"
    write(path, tensors, {})
    return path


def _seconds(group: Group, path: Path, busy: bool, world: int) -> float:
    """Seconds from the common start until the last rank has its share on its GPU."""
    import cupy

    dist.barrier()
    cupy.cuda.Device().synchronize()
    start = time.perf_counter()
    loaded = []
    if busy:
        with open(path) as file:
            for i, tensor in enumerate(file.values()):
                loaded.append(tensor.shard(group.rank % world, world, LAYER[i % len(LAYER)][2]).to_device())
    cupy.cuda.Device().synchronize()
    dist.barrier()
    cupy.cuda.Device().synchronize()
    seconds = time.perf_counter() - start
    del loaded
    cupy.get_default_memory_pool().free_all_blocks()
    return seconds

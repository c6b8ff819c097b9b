"""Loading a .gguf file onto the GPUs: whole by one rank, and cut over all of them."""

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
HIDDEN, KEYS, INNER = 8192, 1024, 28672  # of a Llama-70B
OUTPUTS, INPUTS = 0, 1  # the axis of [N, K] that is cut
LAYER = (
    (HIDDEN, HIDDEN, OUTPUTS), (KEYS, HIDDEN, OUTPUTS), (KEYS, HIDDEN, OUTPUTS), (HIDDEN, HIDDEN, INPUTS),
    (INNER, HIDDEN, OUTPUTS), (INNER, HIDDEN, OUTPUTS), (HIDDEN, INNER, INPUTS),
)  # fmt: skip
DRAWN = 256  # rows of each matrix that are drawn, and repeated
BYTES = 10e9
REPEATS = 3
FOLDERS = "/dev/shm", tempfile.gettempdir()  # the first with room


def rows(group: Group, nbytes: float = BYTES) -> Iterator[Row]:
    """us from a path to packed weights on the GPUs: the median of some times, the file in the host's cache."""
    name: list[Any] = [None]
    with group.together():
        if group.rank == 0:
            name = [str(_file(nbytes))]
    dist.broadcast_object_list(name, src=0)
    path = Path(name[0])
    try:
        alone, cut = [], []
        for _ in range(REPEATS):
            alone.append(_seconds(group, path, group.rank == 0, 1))
            cut.append(_seconds(group, path, True, group.world))
        single, us = (1e6 * sorted(taken)[REPEATS // 2] for taken in (alone, cut))
        size = path.stat().st_size
        what = f"loading {size / 1e9:.1f} GB, layers of a Llama-70B"
        yield {"what": what, "format": FORMAT, "one_us": round(single), "us": round(us), "bytes": size}
    finally:
        dist.barrier()
        if group.rank == 0:
            shutil.rmtree(path.parent)


def _file(nbytes: float) -> Path:
    """A file of so many layers of a Llama-70B, whose rows repeat."""
    folder = next((f for f in FOLDERS if os.path.isdir(f) and shutil.disk_usage(f).free > 1.2 * nbytes), None)
    if folder is None:
        raise UnsupportedError(f"there is no room for {nbytes / 1e9:.0f} GB in any of {', '.join(FOLDERS)}")
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
    """From the start on all ranks to when the last has its share on its GPU."""
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

"""Open sources: .gguf files, safetensors, NumPy's .npy and .npz, and checkpoints quantized by AWQ, GPTQ or as kbit."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from qgemm.errors import QgemmError
from qgemm.files.gguf.reader import open as open_gguf
from qgemm.files.npy import open_npy
from qgemm.files.npz import open_npz
from qgemm.files.paths import PathLike, path_string, shown_path

from . import array_weights
from .checkpoints import files as checkpoint
from .checkpoints.configs import refuse_packed
from .consistency import consistent
from .tensor_names import restore_shapes
from .weight import Source, weight_from_tensor


@consistent
def open_source(path: PathLike, kind: str = "", part: bool = False) -> Source:
    """Open a source by the suffix of its name, or as a file of suffix `kind`; a folder by the files in it.

    A shard opens all shards of its model; part: that shard alone.
    """
    name = path_string(path)
    if os.path.isdir(name):
        name = checkpoint.inside(name)
    for suffix, reader in SOURCES.items():
        if (kind or name).endswith(suffix):
            return PARTS[suffix](name) if part and suffix in PARTS else reader(name)
    raise QgemmError(f"{shown_path(name)}: must be a folder, or its name end in {', '.join(SOURCES)}")


def gguf(path: str, part: bool = False) -> Source:
    """A .gguf file, or a split model by its first shard, or (part) a single shard."""
    file = open_gguf(path, part=part)
    with ExitStack() as undo:
        undo.callback(file.close)
        metadata = file.metadata
        numbers = {shard: number for number, shard in enumerate(file.paths)}
        stored = {
            name: replace(weight_from_tensor(tensor), shard=numbers[file.place(name)[0]])
            for name, tensor in file.items()
        }
        weights = restore_shapes(path, metadata, stored)
        return Source(path, weights, metadata, undo.pop_all().close, is_gguf=True, files=file.paths)


def npy(path: str) -> Source:
    """The array of a .npy file."""
    with ExitStack() as undo:
        weights = {name: array_weights.weight_from_npy(array) for name, array in open_npy(path, undo).items()}
        return Source(path, weights, {}, undo.pop_all().close, files=[path])


def npz(path: str) -> Source:
    """The arrays of a .npz file by name."""
    with ExitStack() as undo:
        weights = {name: array_weights.weight_from_npy(array) for name, array in open_npz(path, undo).items()}
        refuse_packed(shown_path(path), weights)
        return Source(path, weights, {}, undo.pop_all().close, files=[path])


SOURCES: dict[str, Callable[[str], Source]] = {
    ".gguf": gguf,
    ".safetensors": checkpoint.safetensors,
    checkpoint.INDEX: checkpoint.index,
    ".npy": npy,
    ".npz": npz,
}
PARTS: dict[str, Callable[[str], Source]] = {  # opens one shard alone, of the kinds that can be split
    ".gguf": partial(gguf, part=True),
    ".safetensors": partial(checkpoint.safetensors, part=True),
}

"""What is read: .gguf files, safetensors, NumPy's .npy and .npz, and checkpoints quantized by AWQ, GPTQ or as kbit."""

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
from .tensor_names import original_shapes
from .weight import Source, of_tensor


def open_source(path: PathLike, kind: str = "", part: bool = False) -> Source:
    """Open what is at a path by the end of its name, or as if that were `kind`; a folder by what is in it.

    A shard brings the others with it; part: it alone.
    """
    name = path_string(path)
    if os.path.isdir(name):
        name = checkpoint.inside(name)
    for suffix, opened in SOURCES.items():
        if (kind or name).endswith(suffix):
            return PARTS[suffix](name) if part and suffix in PARTS else opened(name)
    raise QgemmError(f"{shown_path(name)}: must be a folder, or its name end in {', '.join(SOURCES)}")


def gguf(path: str, part: bool = False) -> Source:
    """A .gguf file, or the first shard of a split model, or (part) any shard alone."""
    file = open_gguf(path, part=part)
    with ExitStack() as undo:
        undo.callback(file.close)
        metadata = file.metadata
        shard = {each: number for number, each in enumerate(file.paths)}
        found = {name: replace(of_tensor(tensor), shard=shard[file.place(name)[0]]) for name, tensor in file.items()}
        weights = original_shapes(path, metadata, found)
        return Source(path, weights, metadata, undo.pop_all().close, is_gguf=True, files=file.paths)


def npy(path: str) -> Source:
    """One array."""
    with ExitStack() as undo:
        weights = {name: array_weights.of_npy(array) for name, array in open_npy(path, undo).items()}
        return Source(path, weights, {}, undo.pop_all().close, files=[path])


def npz(path: str) -> Source:
    """Arrays by name."""
    with ExitStack() as undo:
        weights = {name: array_weights.of_npy(array) for name, array in open_npz(path, undo).items()}
        refuse_packed(shown_path(path), weights)
        return Source(path, weights, {}, undo.pop_all().close, files=[path])


SOURCES: dict[str, Callable[[str], Source]] = {
    ".gguf": gguf,
    ".safetensors": checkpoint.safetensors,
    checkpoint.INDEX: checkpoint.index,
    ".npy": npy,
    ".npz": npz,
}
PARTS: dict[str, Callable[[str], Source]] = {  # of those, what can be split: one shard
    ".gguf": partial(gguf, part=True),
    ".safetensors": partial(checkpoint.safetensors, part=True),
}

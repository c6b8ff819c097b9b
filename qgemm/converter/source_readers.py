"""Open sources: .gguf files, safetensors, files of NumPy and PyTorch, and checkpoints of any quantization method."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from qgemm.errors import CheckpointError, QgemmError
from qgemm.files.gguf.layout import MAGIC as GGUF_MAGIC
from qgemm.files.gguf.reader import open as open_gguf
from qgemm.files.kinds import hint as kind_hint
from qgemm.files.npy import open_npy
from qgemm.files.npz import open_npz
from qgemm.files.paths import PathLike, RegularFile, path_string, shown_path
from qgemm.files.shards import piece_hint

from . import array_weights
from .checkpoints import files as checkpoint
from .checkpoints.configs import refuse_packed
from .consistency import consistent
from .tensor_names import restore_shapes
from .weight import Source, weight_from_tensor


@consistent
def open_source(path: PathLike, part: bool = False, copy: bool = False) -> Source:
    """Open a source by its first bytes and the suffix of its name; a folder by the files in it.

    A shard opens all shards of its model; part: that shard alone. copy: read a .gguf file instead of mapping it.
    """
    name = path_string(path)
    if os.path.isdir(name):
        name = checkpoint.inside(name)
    kind = source_kind(name)
    if not kind:
        rule = f"is no file of weights by its first bytes, and its name does not end in {', '.join(SOURCES)}"
        raise QgemmError(f"{shown_path(name)}: {rule}{kind_hint(_first_bytes(name))}{piece_hint(name)}")
    try:
        return SOURCES[kind](name, part, copy)
    except CheckpointError as error:
        if hint := piece_hint(name):
            raise CheckpointError(f"{error}{hint}") from error
        raise


def source_kind(path: str) -> str:
    """The key of SOURCES for a file, "" if neither its first bytes nor its name tells; a .gguf file may have any name.

    QgemmError if a file whose name does not tell cannot be read.
    """
    named = next((suffix for suffix in SOURCES if path.lower().endswith(suffix)), "")
    try:
        start = _first_bytes(path)
    except QgemmError:
        if not named:
            raise
        return named
    if start.startswith(GGUF_MAGIC):
        return ".gguf"
    return named or next((suffix for suffix, pattern in STARTS.items() if pattern.match(start)), "")


def _first_bytes(path: str) -> bytes:
    file = RegularFile(path, CheckpointError)
    try:
        return file.read(0, min(START_BYTES, file.size)).tobytes()
    finally:
        file.close()


def gguf(path: str, part: bool, copy: bool) -> Source:
    """A .gguf file, or a split model by its first shard, or (part) a single shard."""
    file = open_gguf(path, part=part, copy=copy)
    with ExitStack() as undo:
        undo.callback(file.close)
        metadata = file.metadata
        numbers = {shard: number for number, shard in enumerate(file.paths)}
        stored = {
            name: replace(weight_from_tensor(tensor), shard=numbers[file.place(name)[0]])
            for name, tensor in file.items()
        }
        weights = restore_shapes(path, metadata, stored)
        return Source(
            path, weights, metadata, undo.pop_all().close, is_gguf=True, files=file.paths, shards=file.shard_count
        )


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


START_BYTES = 512
STARTS = {  # suffix -> pattern of the first bytes
    ".safetensors": re.compile(rb".{4}\0{4}\{", re.DOTALL),  # the size of a header of JSON
    ".npy": re.compile(rb"\x93NUMPY"),
    ".npz": re.compile(rb"PK\x03\x04.{26}[^\0]{1,400}\.npy", re.DOTALL),  # an archive whose first member is an array
    checkpoint.TORCH: re.compile(rb"PK\x03\x04.{26}[^\0]{1,400}/data\.pkl", re.DOTALL),
}
SOURCES: dict[str, Callable[[str, bool, bool], Source]] = {  # suffix -> (path, part, copy) -> the source
    ".gguf": gguf,
    ".safetensors": lambda path, part, copy: checkpoint.safetensors(path, part),
    checkpoint.INDEX: lambda path, part, copy: checkpoint.index(path),
    ".npy": lambda path, part, copy: npy(path),
    ".npz": lambda path, part, copy: npz(path),
    checkpoint.TORCH: lambda path, part, copy: checkpoint.torch_archive(path),
}

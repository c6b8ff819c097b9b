"""What is read: .gguf files, safetensors, NumPy's .npy and .npz, and checkpoints quantized by AWQ, GPTQ or as kbit."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from qgemm.errors import CheckpointError, GGUFError, QgemmError
from qgemm.files.gguf.parts import SUFFIXES, Joiner
from qgemm.files.gguf.reader import open as open_gguf
from qgemm.files.npy import open_npy, open_npz
from qgemm.files.paths import PathLike, path_string, shown, shown_path
from qgemm.files.safetensors import SafetensorsFile, shards

from . import arrays
from .packed import PARTS, matrices, method_of
from .weight import SAFETENSORS, Source, Weight, of_tensor

INDEX = ".safetensors.index.json"


def open_source(path: PathLike, kind: str = "") -> Source:
    """Open what is at a path by the end of its name, or as if that were `kind`; a folder by what is in it."""
    name = path_string(path)
    if os.path.isdir(name):
        name = _checkpoint(name)
    for suffix, opened in SOURCES.items():
        if (kind or name).endswith(suffix):
            return opened(name)
    raise QgemmError(f"{shown_path(name)}: must be a folder, or its name end in {', '.join(SOURCES)}")


def gguf(path: str) -> Source:
    """A .gguf file, or the first shard of a split model."""
    file = open_gguf(path)
    return Source(
        path, {name: of_tensor(tensor) for name, tensor in file.items()}, file.metadata, file.close, is_gguf=True
    )


def npy(path: str) -> Source:
    """One array."""
    with ExitStack() as undo:
        weights = {name: arrays.of_npy(array) for name, array in open_npy(path, undo).items()}
        return Source(path, weights, {}, undo.pop_all().close)


def npz(path: str) -> Source:
    """Arrays by name."""
    with ExitStack() as undo:
        weights = {name: arrays.of_npy(array) for name, array in open_npz(path, undo).items()}
        return Source(path, weights, {}, undo.pop_all().close)


def safetensors(path: str) -> Source:
    """One file."""
    return _safetensors(path, [path], None)


def index(path: str) -> Source:
    """A sharded checkpoint, by its index."""
    placed = shards(path)
    return _safetensors(path, list(dict.fromkeys(placed.values())), placed)


def _checkpoint(folder: str) -> str:
    """The index or the one file of safetensors in a folder."""
    for pattern in (f"*{INDEX}", "*.safetensors"):
        found = glob.glob(os.path.join(glob.escape(folder), pattern))
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(shown(os.path.basename(each)) for each in sorted(found))
            raise CheckpointError(f"{shown_path(folder)}: holds {names}: name the one that is meant")
    raise CheckpointError(f"{shown_path(folder)}: holds no .safetensors file")


def _safetensors(path: str, paths: list[str], placed: Mapping[str, str] | None) -> Source:
    with ExitStack() as undo:
        files: dict[str, SafetensorsFile] = {}  # by tensor
        metadata: dict[str, str] = {}
        weights: dict[str, Weight] = {}
        for each in paths:
            file = SafetensorsFile(each)
            undo.callback(file.close)
            metadata.update(file.metadata)
            for name, weight in arrays.of_safetensors(file).items():
                if placed is not None and placed.get(name) != each:
                    there = shown_path(placed.get(name, "no file"))
                    raise CheckpointError(f"{shown_path(each)}: tensor {shown(name)}: the index has it in {there}")
                files[name], weights[name] = file, weight
        for name in placed or ():
            if name not in files:
                raise CheckpointError(
                    f"{shown_path(path)}: tensor {shown(name)}: is not in the file that the index says"
                )
        weights = _joined(path, _unpacked(path, weights, files))
        keys = {f"{SAFETENSORS}{key}": value for key, value in metadata.items() if key.isascii() and "\0" not in key}
        return Source(path, weights, keys, undo.pop_all().close)


def _unpacked(path: str, weights: dict[str, Weight], files: Mapping[str, SafetensorsFile]) -> dict[str, Weight]:
    """The tensors with each matrix of AWQ or GPTQ in place of its parts."""
    if not any(name.endswith(f".{PARTS[0]}") for name in weights):
        return weights
    matrix = dict(matrices(files, method_of(os.path.dirname(path))))
    prefixes = {name.rpartition(".")[0] for name in matrix}
    found: dict[str, Weight] = {}
    for name, weight in weights.items():
        prefix, _, part = name.rpartition(".")
        if name in matrix:
            weight = matrix[name]
            if weight.name in weights:
                raise CheckpointError(
                    f"{shown_path(path)}: tensor {shown(weight.name)}: is there twice, once quantized"
                )
        elif part in PARTS and prefix in prefixes:
            continue
        found[weight.name] = weight
    return found


def _joined(path: str, weights: dict[str, Weight]) -> dict[str, Weight]:
    """The tensors with each kbit tensor in place of its parts (gguf_parts.py)."""
    if not any(name.endswith(SUFFIXES) for name in weights):
        return weights
    stored = {name: weight.tensor for name, weight in weights.items() if weight.tensor is not None}

    def refusal(name: str, rule: str) -> GGUFError:
        return GGUFError(f"{shown_path(path)}: tensor {shown(name)}: {rule}")

    joined = Joiner().joined(stored, refusal)
    kept = {name: weight for name, weight in weights.items() if not name.endswith(SUFFIXES)}
    return {**kept, **{name: of_tensor(tensor) for name, tensor in joined.items() if name not in kept}}


SOURCES: dict[str, Callable[[str], Source]] = {
    ".gguf": gguf,
    ".safetensors": safetensors,
    INDEX: index,
    ".npy": npy,
    ".npz": npz,
}

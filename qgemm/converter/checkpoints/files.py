"""Checkpoints in safetensors, one file or sharded: plain tensors, and the matrices of every method that is read."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from qgemm.errors import CheckpointError, GGUFError, GGUFNotFoundError
from qgemm.files.documents import shards
from qgemm.files.gguf.parts import SUFFIXES, Joiner
from qgemm.files.paths import shown, shown_path
from qgemm.files.safetensors import SafetensorsFile
from qgemm.files.shards import shard_name

from ..array_weights import Stored, weight_from_stored
from ..weight import SAFETENSORS, Source, Weight, weight_from_tensor
from . import awq_gptq, bnb, compressed, fp4, fp8, hqq, mxfp4
from .configs import CONFIGS, method_of, refuse_packed
from .methods import BitsAndBytes, Compressed, EightBits, FourBits, Hqq, Method, Nvfp4, Said

SUFFIX = ".safetensors"
QWEIGHT = f".{awq_gptq.PARTS[0]}"
INDEX = f"{SUFFIX}.index.json"
Matrices = tuple[dict[str, Weight], set[str]]  # by the name of their first part, and the names of all parts
READERS: dict[type, Callable[[str, Mapping[str, Stored], Any], Matrices]] = {
    Method: awq_gptq.matrices,
    Compressed: compressed.matrices,
    Hqq: hqq.matrices,
    BitsAndBytes: bnb.matrices,
    FourBits: mxfp4.matrices,
    Nvfp4: fp4.modelopt,
}
BESIDE = "*config.json", "tokenizer*", f"*{INDEX}"  # what else belongs to a checkpoint in its folder


def safetensors(path: str, part: bool = False) -> Source:
    """One file, or all shards given the first, or (part) any shard alone."""
    name = None if part else shard_name(path, SUFFIX)
    if name is None or name.shards == 1:
        return _opened(path, [path], None)
    if name.number > 1:
        first = shown_path(name.path(1))
        raise CheckpointError(f"{shown_path(path)}: is shard {name.number} of {name.shards}: open the first, {first}")
    try:
        paths = name.paths()
    except GGUFNotFoundError as error:
        rest = f"{shown_path(path)} is one of {name.shards} shards, which `qgemm convert --part` reads alone"
        raise GGUFNotFoundError(f"{error}; {rest}") from error
    whole = name.stem + INDEX
    placed = shards(whole) if os.path.exists(whole) else None
    return _opened(path, paths, placed)


def index(path: str) -> Source:
    """A sharded checkpoint, by its index."""
    placed = shards(path)
    return _opened(path, list(dict.fromkeys(placed.values())), placed)


def inside(folder: str) -> str:
    """The index, the one file or the first of the shards of safetensors in a folder; of several what is called model,
    as transformers does.
    """
    for pattern in (f"*{INDEX}", f"*{SUFFIX}"):
        found = glob.glob(os.path.join(glob.escape(folder), pattern))
        if len(found) > 1:
            shard_names = {each: shard_name(each, SUFFIX) for each in found}
            found = [each for each, name in shard_names.items() if name is None or name.number == 1] or found
            found = [each for each in found if os.path.basename(each) == f"model{pattern[1:]}"] or found
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(shown(os.path.basename(each)) for each in sorted(found))
            raise CheckpointError(f"{shown_path(folder)}: holds {names}: name the one that is meant")
    raise CheckpointError(f"{shown_path(folder)}: holds no .safetensors file")


def _opened(path: str, paths: list[str], placed: Mapping[str, str] | None) -> Source:
    """The checkpoint in some files; placed: the path of each tensor's, by an index."""
    with ExitStack() as undo:
        stored: dict[str, Stored] = {}
        metadata: dict[str, str] = {}
        for each in paths:
            file = SafetensorsFile(each)
            undo.callback(file.close)
            metadata.update(file.metadata)
            for name, entry in file.tensors.items():
                if placed is not None and placed.get(name) != each:
                    there = shown_path(placed.get(name, "no file"))
                    raise CheckpointError(f"{shown_path(each)}: tensor {shown(name)}: the index has it in {there}")
                if name in stored:
                    there = shown_path(stored[name].file.path)
                    raise CheckpointError(f"{shown_path(each)}: tensor {shown(name)}: is also in {there}")
                stored[name] = Stored(file, entry)
        for name in placed or ():
            if name not in stored:
                raise CheckpointError(
                    f"{shown_path(path)}: tensor {shown(name)}: is not in the file that the index says"
                )
        weights = _joined(path, _decoded(path, stored, method_of(os.path.dirname(path))))
        keys = {f"{SAFETENSORS}{key}": value for key, value in metadata.items() if key.isascii() and "\0" not in key}
        return Source(path, weights, keys, undo.pop_all().close, files=[path, *paths, *_beside(path)])


def _beside(path: str) -> list[str]:
    """The configs, indexes and tokenizers in the folder of a checkpoint."""
    folder = glob.escape(os.path.dirname(path))
    return [each for pattern in BESIDE for each in glob.glob(os.path.join(folder, pattern))]


def _decoded(path: str, stored: Mapping[str, Stored], method: Said | None) -> dict[str, Weight]:
    """The tensors, with each packed matrix in place of its parts."""
    read = READERS.get(type(method))
    matrices, parts = ({}, set()) if read is None else read(path, stored, method)
    eight_bits = method if isinstance(method, EightBits) else None
    for name, (_, entry) in stored.items():
        if name in parts or name in matrices:
            continue
        if name.endswith(QWEIGHT):
            said = "the config says otherwise" if method else f"none of {', '.join(CONFIGS)} says how"
            raise CheckpointError(f"{shown_path(path)}: tensor {shown(name)}: is packed by AWQ or GPTQ, but {said}")
        if name in fp8.MARKERS and not entry.nbytes:
            parts.add(name)
        elif entry.type in fp8.NUMBERS:
            matrices[name] = fp8.matrix(name, stored, eight_bits)
            parts |= fp8.parts(name, stored)
    refuse_packed(shown_path(path), stored.keys() - parts - matrices.keys())
    found: dict[str, Weight] = {}
    for name, each in stored.items():
        if name in matrices:
            weight = matrices[name]
        elif name in parts:
            continue
        else:
            weight = weight_from_stored(name, each)
        if weight.name in found or (weight.name != name and weight.name in stored):
            raise CheckpointError(f"{shown_path(path)}: tensor {shown(weight.name)}: is there twice, once quantized")
        found[weight.name] = weight
    return found


def _joined(path: str, weights: dict[str, Weight]) -> dict[str, Weight]:
    """The tensors with each kbit tensor in place of its parts (gguf_parts.py)."""
    if not any(name.endswith(SUFFIXES) for name in weights):
        return weights
    stored = {name: weight.tensor for name, weight in weights.items() if weight.tensor is not None}

    def refusal(name: str, rule: str) -> GGUFError:
        return GGUFError(f"{shown_path(path)}: tensor {shown(name)}: {rule}")

    for name, weight in weights.items():
        if name.endswith(SUFFIXES) and weight.tensor is None:
            raise refusal(name, f"is {weight.type}, as no part of a kbit tensor is")
    joined = Joiner().joined(stored, refusal)
    kept = {name: weight for name, weight in weights.items() if not name.endswith(SUFFIXES)}
    return {**kept, **{name: weight_from_tensor(tensor) for name, tensor in joined.items() if name not in kept}}

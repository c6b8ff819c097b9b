"""Checkpoints in safetensors, in one file or shards: plain tensors, and the matrices of every supported method."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from qgemm.errors import CheckpointError, GGUFError, GGUFNotFoundError
from qgemm.files.documents import shards
from qgemm.files.gguf.parts import SUFFIXES, Joiner
from qgemm.files.paths import shown, shown_path, system_errors
from qgemm.files.safetensors import SafetensorsFile
from qgemm.files.shards import shard_name
from qgemm.files.torch_archive import TorchFile

from ..array_weights import Stored, weight_from_array, weight_from_stored
from ..weight import SAFETENSORS, Source, Weight, weight_from_tensor
from . import awq_gptq, bnb, compressed, fp4, fp8, hqq, mxfp4, packed_layers
from .configs import CONFIGS, folder_settings, refuse_packed
from .methods import BitsAndBytes, Compressed, EightBits, FourBits, Hqq, Method, Nvfp4, Settings
from .torch_files import stored_tensors

SUFFIX, GGUF, TORCH = ".safetensors", ".gguf", ".pt"
QWEIGHT = f".{awq_gptq.PARTS[0]}"
INDEX = f"{SUFFIX}.index.json"
Matrices = tuple[dict[str, Weight], set[str]]  # matrices by the name of their first part; the names of all parts
READERS: dict[type, Callable[[str, Mapping[str, Stored], Any], Matrices]] = {
    Method: awq_gptq.matrices,
    Compressed: compressed.matrices,
    Hqq: hqq.matrices,
    BitsAndBytes: bnb.matrices,
    FourBits: mxfp4.matrices,
    Nvfp4: fp4.modelopt,
}
BESIDE = "*config.json", "tokenizer*", f"*{INDEX}"  # other files of a checkpoint in its folder


def safetensors(path: str, part: bool = False) -> Source:
    """One file, or all shards of a model by the first, or (part) a single shard."""
    name = shard_name(path, SUFFIX)
    if part or name is None or name.shards == 1:
        return replace(_open_files(path, [path], None), shards=1 if name is None else name.shards)
    if name.number > 1:
        first = shown_path(name.path(1))
        raise CheckpointError(f"{shown_path(path)}: is shard {name.number} of {name.shards}: open the first, {first}")
    try:
        paths = name.paths()
    except GGUFNotFoundError as error:
        rest = f"{shown_path(path)} is one of {name.shards} shards, which `qgemm convert --part` reads alone"
        raise GGUFNotFoundError(f"{error}; {rest}") from error
    index_path = name.stem + INDEX
    file_of = shards(index_path) if os.path.lexists(index_path) else None
    return _open_files(path, paths, file_of)


def index(path: str) -> Source:
    """A sharded checkpoint, by its index."""
    file_of = shards(path)
    return _open_files(path, list(dict.fromkeys(file_of.values())), file_of)


def inside(folder: str) -> str:
    """The path of the index, the file or the first shard of safetensors in a folder, else of its .gguf or .pt file.

    Among several it is the one called model, as in transformers.
    """
    with system_errors(folder, "read"):
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    for suffix in (INDEX, SUFFIX, GGUF, TORCH):
        paths = [os.path.join(folder, name) for name in names if name.lower().endswith(suffix)]
        if len(paths) > 1:
            shard_names = {path: shard_name(path, suffix) for path in paths}
            paths = [path for path, name in shard_names.items() if name is None or name.number == 1] or paths
            paths = [path for path in paths if os.path.basename(path) == f"model{suffix}"] or paths
        if len(paths) == 1:
            return paths[0]
        if paths:
            choices = ", ".join(shown(os.path.basename(path)) for path in paths)
            raise CheckpointError(f"{shown_path(folder)}: holds {choices}: name the one that is meant")
    raise CheckpointError(f"{shown_path(folder)}: holds no .safetensors file")


def _open_files(path: str, paths: list[str], file_of: Mapping[str, str] | None) -> Source:
    """The checkpoint in these files; file_of: tensor name -> path of its file, from an index."""
    with ExitStack() as undo:
        stored: dict[str, Stored] = {}
        metadata: dict[str, str] = {}
        for shard in paths:
            file = SafetensorsFile(shard)
            undo.callback(file.close)
            metadata.update(file.metadata)
            for name, entry in file.tensors.items():
                if file_of is not None and file_of.get(name) != shard:
                    other = shown_path(file_of.get(name, "no file"))
                    raise CheckpointError(f"{shown_path(shard)}: tensor {shown(name)}: the index has it in {other}")
                if name in stored:
                    other = shown_path(stored[name].file.path)
                    raise CheckpointError(f"{shown_path(shard)}: tensor {shown(name)}: is also in {other}")
                stored[name] = Stored(file, entry)
        for name in file_of or ():
            if name not in stored:
                raise CheckpointError(
                    f"{shown_path(path)}: tensor {shown(name)}: is not in the file that the index says"
                )
        weights = _join(path, _decode(path, stored, folder_settings(os.path.dirname(path))))
        keys = {f"{SAFETENSORS}{key}": value for key, value in metadata.items() if key.isascii() and "\0" not in key}
        return Source(path, weights, keys, undo.pop_all().close, files=[path, *paths, *_beside(path)])


def torch_archive(path: str) -> Source:
    """A state dict or HQQ's qmodel.pt in PyTorch's own form; HQQ's library needs no section of a config."""
    with ExitStack() as undo:
        file = TorchFile(path)
        undo.callback(file.close)
        stored = stored_tensors(file)
        own = Hqq() if any(name.endswith(hqq.PART) for name in stored) else None
        weights = _decode(path, stored, folder_settings(os.path.dirname(path)) or own)
        return Source(path, weights, {}, undo.pop_all().close, files=[path, *_beside(path)])


def _beside(path: str) -> list[str]:
    """The configs, indexes and tokenizers in the folder of a checkpoint."""
    folder = glob.escape(os.path.dirname(path))
    return [file for pattern in BESIDE for file in glob.glob(os.path.join(folder, pattern))]


def _decode(path: str, stored: Mapping[str, Stored], method: Settings | None) -> dict[str, Weight]:
    """The tensors, with each packed matrix in place of its parts."""
    read = READERS.get(type(method))
    matrices, parts = packed_layers.matrices(path, stored) if read is None else read(path, stored, method)
    eight_bits = method if isinstance(method, EightBits) else None
    for name, (_, entry) in stored.items():
        if name in parts or name in matrices:
            continue
        if name.endswith(QWEIGHT):
            rule = "the config says otherwise" if method else f"none of {', '.join(CONFIGS)} says how"
            raise CheckpointError(f"{shown_path(path)}: tensor {shown(name)}: is packed by AWQ or GPTQ, but {rule}")
        if name in fp8.MARKERS and not entry.nbytes:
            parts.add(name)
        elif entry.type in fp8.NUMBERS:
            matrices[name] = fp8.matrix(name, stored, eight_bits)
            parts |= fp8.parts(name, stored)
    refuse_packed(shown_path(path), stored.keys() - parts - matrices.keys())
    weights: dict[str, Weight] = {}
    for name, tensor in stored.items():
        if name in matrices:
            weight = matrices[name]
        elif name in parts:
            continue
        elif tensor.entry.type == fp8.EXPONENTS[0]:  # powers of two that scale no tensor of this file
            weight = weight_from_array(name, "F32", tensor.entry.shape, partial(fp8.powers, name, tensor))
        else:
            weight = weight_from_stored(name, tensor)
        if weight.name in weights or (weight.name != name and weight.name in stored):
            raise CheckpointError(f"{shown_path(path)}: tensor {shown(weight.name)}: is there twice, once quantized")
        weights[weight.name] = weight
    return weights


def _join(path: str, weights: dict[str, Weight]) -> dict[str, Weight]:
    """The tensors, with each kbit tensor in place of its parts (files/gguf/parts.py)."""
    if not any(name.endswith(SUFFIXES) for name in weights):
        return weights
    stored = {name: weight.tensor for name, weight in weights.items() if weight.tensor is not None}

    def refusal(name: str, rule: str) -> GGUFError:
        return GGUFError(f"{shown_path(path)}: tensor {shown(name)}: {rule}")

    for name, weight in weights.items():
        if name.endswith(SUFFIXES) and weight.tensor is None:
            raise refusal(name, f"is {weight.type}, as no part of a kbit tensor is")
    joined = Joiner().joined(stored, refusal)
    whole = {name: weight for name, weight in weights.items() if not name.endswith(SUFFIXES)}
    return {**whole, **{name: weight_from_tensor(tensor) for name, tensor in joined.items() if name not in whole}}

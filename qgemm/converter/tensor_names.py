"""Tensors by name: dropping, renaming, and the shapes of five dimensions as ComfyUI stores them.

comfy.gguf.orig_shape.NAME   array of INT32   the shape of tensor NAME outside the file, slowest axis first
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.errors import GGUFError, QgemmError
from qgemm.files.gguf.layout import MAX_NAME_BYTES
from qgemm.files.paths import shown, shown_path
from qgemm.text import names_in_short

from .weight import Source, Weight

ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
Rename = tuple[re.Pattern[str], str]


def parse_rename(text: str) -> Rename:
    """Parse REGEX=NEW; NEW may refer to groups of REGEX: \\1, \\g<name>."""
    pattern, equals, new = text.rpartition("=")
    if not equals:
        raise QgemmError(f"{text!r} is not REGEX=NEW")
    try:
        return re.compile(pattern), new
    except re.error as error:
        raise QgemmError(f"{pattern!r} is not a regular expression: {error}") from None


def apply_drops(source: Source, patterns: Sequence[re.Pattern[str]]) -> Source:
    """Leave out every tensor whose name a pattern matches, and say which."""
    for pattern in patterns:
        if not any(map(pattern.search, source.weights)):
            rule = f"--drop {shown(pattern.pattern)} fits no tensor's name"
            raise QgemmError(f"{shown_path(source.path)}: {rule}")
    dropped = [name for name in source.weights if any(pattern.search(name) for pattern in patterns)]
    if not dropped:
        return source
    weights = {name: weight for name, weight in source.weights.items() if name not in set(dropped)}
    shapes = {ORIGINAL_SHAPE + name for name in dropped}
    metadata = {key: source.metadata[key] for key in source.metadata if key not in shapes}
    notes = [*source.notes, f"left out by --drop: {names_in_short(dropped)}"]
    return replace(source, weights=weights, metadata=metadata, notes=notes)


def apply_renames(source: Source, renames: Sequence[Rename]) -> Source:
    """Replace every match of each pattern in the tensors' names, one pattern after another."""
    if not renames:
        return source
    where = shown_path(source.path)
    names = {name: name for name in source.weights}
    for pattern, text in renames:
        if not any(map(pattern.search, names.values())):
            raise QgemmError(f"{where}: --rename {shown(f'{pattern.pattern}={text}')} fits no tensor's name")
        try:
            renamed = {old: pattern.sub(text, name) for old, name in names.items()}
        except (re.error, IndexError) as error:
            raise QgemmError(f"{where}: --rename {shown(f'{pattern.pattern}={text}')}: {error}") from None
        if renamed == names:
            raise QgemmError(f"{where}: --rename {shown(f'{pattern.pattern}={text}')} changes no tensor's name")
        names = renamed
    weights: dict[str, Weight] = {}
    for old, new in names.items():
        if new in weights:
            raise QgemmError(f"{where}: tensor {shown(old)}: --rename makes it {shown(new)}, as it makes another")
        weights[new] = replace(source.weights[old], name=new)
    return replace(source, weights=weights, metadata=_with_shapes(source.metadata, names))


def _with_shapes(metadata: Mapping[str, Any], names: Mapping[str, str]) -> Mapping[str, Any]:
    """The metadata with the keys of original shapes under the tensors' new names."""
    if not any(key.startswith(ORIGINAL_SHAPE) for key in metadata):
        return metadata
    keys = {ORIGINAL_SHAPE + old: ORIGINAL_SHAPE + new for old, new in names.items()}
    return {keys.get(key, key): value for key, value in metadata.items()}


def check_names(path: str, weights: Iterable[tuple[str, int]]) -> None:
    """Refuse names too long for a .gguf file; weights: name, and the extra bytes of its parts' names."""
    for name, extra in weights:
        size = len(name.encode("utf-8", "surrogateescape"))
        limit = MAX_NAME_BYTES - extra
        if size > limit:
            rule = f"its name has {size} bytes, a .gguf file holds {limit}"
            raise QgemmError(f"{shown_path(path)}: tensor {shown(name)}: {rule}: --rename REGEX=NEW gives it another")


def restore_shapes(path: str, metadata: Mapping[str, Any], weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """The tensors of a .gguf file, with their original shapes from its metadata."""
    restored = dict(weights)
    for key in metadata:
        name = key.removeprefix(ORIGINAL_SHAPE)
        if name == key or name not in weights:
            continue
        shape = metadata[key]
        valid = isinstance(shape, np.ndarray) and shape.dtype.kind in "iu" and shape.ndim == 1
        if not valid or prod(map(int, shape)) != weights[name].size or min(shape) < 1:
            raise GGUFError(f"{shown_path(path)}: key {shown(key)}: is no shape of {weights[name].size} weights")
        restored[name] = replace(weights[name], original=tuple(map(int, shape)))
    return restored


def shape_keys(weights: Iterable[Weight]) -> dict[str, NDArray[np.int32]]:
    """The metadata keys that record original shapes."""
    keys = {}
    for weight in weights:
        if weight.original is not None:
            if max(weight.original) > np.iinfo(np.int32).max:
                raise QgemmError(f"tensor {shown(weight.name)}: shape {weight.original} is beyond INT32")
            keys[ORIGINAL_SHAPE + weight.name] = np.array(weight.original, np.int32)
    return keys

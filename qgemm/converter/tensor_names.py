"""Names and shapes that a .gguf file cannot hold: other names, and five dimensions as ComfyUI stores them.

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

from .weight import Source, Weight

ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
Rename = tuple[re.Pattern[str], str]


def rename(text: str) -> Rename:
    """REGEX=NEW, where NEW may have what REGEX found: \\1, \\g<name>."""
    pattern, equals, new = text.rpartition("=")
    if not equals:
        raise QgemmError(f"{text!r} is not REGEX=NEW")
    try:
        return re.compile(pattern), new
    except re.error as error:
        raise QgemmError(f"{pattern!r} is not a regular expression: {error}") from None


def renamed(source: Source, renames: Sequence[Rename]) -> Source:
    """The source with every match of each pattern in its tensors' names replaced, one pattern after another."""
    where = shown_path(source.path)
    names = {name: name for name in source.weights}
    for pattern, text in renames:
        if not any(map(pattern.search, names.values())):
            raise QgemmError(f"{where}: --rename {shown(f'{pattern.pattern}={text}')} fits no tensor's name")
        try:
            names = {old: pattern.sub(text, name) for old, name in names.items()}
        except (re.error, IndexError) as error:
            raise QgemmError(f"{where}: --rename {shown(f'{pattern.pattern}={text}')}: {error}") from None
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
    """Refuse names that are too long for a .gguf file at this path; with each, how much longer its parts' are."""
    for name, longer in weights:
        size = len(name.encode("utf-8", "surrogateescape"))
        most = MAX_NAME_BYTES - longer
        if size > most:
            rule = f"its name has {size} bytes, a .gguf file holds {most}"
            raise QgemmError(f"{shown_path(path)}: tensor {shown(name)}: {rule}: --rename REGEX=NEW gives it another")


def original_shapes(path: str, metadata: Mapping[str, Any], weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """The tensors of a .gguf file, each with the shape that its metadata say it has elsewhere."""
    found = dict(weights)
    for key in metadata:
        name = key.removeprefix(ORIGINAL_SHAPE)
        if name == key or name not in weights:
            continue
        shape = metadata[key]
        whole = isinstance(shape, np.ndarray) and shape.dtype.kind in "iu" and shape.ndim == 1
        if not whole or prod(map(int, shape)) != weights[name].size or min(shape) < 1:
            raise GGUFError(f"{shown_path(path)}: key {shown(key)}: is no shape of {weights[name].size} weights")
        found[name] = replace(weights[name], original=tuple(map(int, shape)))
    return found


def shape_keys(weights: Iterable[Weight]) -> dict[str, NDArray[np.int32]]:
    """The keys of metadata by which tensors whose shape is another outside the file can be given it back."""
    found = {}
    for weight in weights:
        if weight.original is not None:
            if max(weight.original) > np.iinfo(np.int32).max:
                raise QgemmError(f"tensor {shown(weight.name)}: shape {weight.original} is beyond INT32")
            found[ORIGINAL_SHAPE + weight.name] = np.array(weight.original, np.int32)
    return found

"""Changes of a .gguf model on its way: metadata set and removed, layers left out.

--override-kv and --prune-layers have the syntax and the effect that llama-quantize gives them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import Keys

from qgemm.errors import QgemmError
from qgemm.files.gguf.layout import ALIGNMENT, SPLIT_KEYS
from qgemm.files.paths import shown, shown_path

from .diffusion import with_architecture
from .keep_rules import PROJECTOR
from .tensor_names import ORIGINAL_SHAPE
from .weight import Source

LAYER = re.compile(r"^(blk|enc\.blk|dec\.blk)\.(\d+)\.")
FIXED = (ALIGNMENT, *SPLIT_KEYS)


def _boolean(text: str) -> np.bool_:
    if text not in ("true", "false"):
        raise ValueError
    return np.bool_(text == "true")


def _integer(text: str, kind: type[np.integer[Any]] = np.uint32) -> np.integer[Any]:
    number, limits = int(text), np.iinfo(kind)
    if not limits.min <= number <= limits.max:  # NumPy before 2 would wrap around
        raise ValueError
    return kind(number)


def _finite(text: str, kind: type[np.floating[Any]] = np.float32) -> np.floating[Any]:
    number = float(text)
    if not abs(number) <= float(np.finfo(kind).max):
        raise ValueError
    return kind(number)


TYPES: dict[str, Callable[[str], Any]] = {  # the types of GGUF that llama-quantize stores
    "int": _integer,
    "float": _finite,
    "bool": _boolean,
    "str": str,
}


class Edits(NamedTuple):
    """architecture: general.architecture. values: metadata to set. removed: keys to remove. layers: to leave out."""

    architecture: str = ""
    values: Mapping[str, Any] = {}
    removed: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()


NO_EDITS = Edits()


def parse_override(text: str, old: Mapping[str, Any] = {}, option: str = "--override-kv") -> tuple[str, Any]:
    """Parse KEY=TYPE:VALUE of an option. A number gets the type that the key has in `old`, where that fits TYPE."""
    key, _, typed = text.partition("=")
    kind, colon, value = typed.partition(":")
    try:
        if not key or not colon or kind not in TYPES:
            raise ValueError
        present = old.get(key)
        if kind == "int" and isinstance(present, np.integer):
            return key, _integer(value, type(present))
        if kind == "float" and isinstance(present, np.floating):
            return key, _finite(value, type(present))
        return key, TYPES[kind](value)
    except (ValueError, OverflowError):
        raise QgemmError(f"{option} {shown(text)} is not KEY=TYPE:VALUE, TYPE {', '.join(TYPES)}") from None


def parse_layers(text: str) -> tuple[int, ...]:
    """Parse numbers of layers, 3,5-7."""
    layers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part.strip())
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise QgemmError(f"--prune-layers {shown(text)} is not a list of numbers or ranges, such as 3,5-7")
        layers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(layers))


def parse_size(size: int | str) -> int:
    """Bytes, or a number and M or G, as gguf-split counts them; 0 for no limit."""
    match = re.fullmatch(r"([0-9]{1,15})([MG]?)", str(size))
    if match is None or (size != 0 and not int(match[1])):
        raise QgemmError(f"--split-max-size {shown(str(size))} is not a number of bytes, nor one with M or G")
    return int(match[1]) * {"": 1, "M": 10**6, "G": 10**9}[match[2]]


def apply_edits(source: Source, edits: Edits) -> Source:
    """The source with all changes."""
    source = with_architecture(source, edits.architecture)
    if edits.layers:
        source = without_layers(source, edits.layers)
    metadata = dict(source.metadata) if edits.removed or edits.values else source.metadata
    for key in edits.removed:
        if key not in metadata:
            raise _refusal(source, f"--remove-kv {shown(key)}: there is no such key")
    check_keys(source.path, (*edits.removed, *edits.values))
    others = {key: metadata[key] for key in metadata if key not in edits.removed}
    return replace(source, metadata={**others, **edits.values}) if edits.removed or edits.values else source


def check_keys(path: str, keys: Iterable[str]) -> None:
    """QgemmError for keys that are neither set nor removed."""
    for key in keys:
        if key in FIXED or key.startswith(ORIGINAL_SHAPE):
            rule = "follows from the tensors and is not set or removed"
            raise QgemmError(f"{shown_path(path)}: key {shown(key)}: {rule}")


def without_layers(source: Source, layers: tuple[int, ...]) -> Source:
    """The model without some layers, those after them renumbered, and the number of layers in its metadata."""
    if source.metadata.get(Keys.General.ARCHITECTURE) == PROJECTOR:
        raise _refusal(source, "--prune-layers: the layers of a projector feed one that is trained for all of them")
    numbers = sorted({int(match[2]) for name in source.weights if (match := LAYER.match(name))})
    missing = sorted(set(layers) - set(numbers))
    if missing or len(layers) == len(numbers):
        rule = f"there is no layer {missing[0]}" if missing else "no layer would be left"
        raise _refusal(source, f"--prune-layers: {rule} of {len(numbers)}")
    new = {number: index for index, number in enumerate(n for n in numbers if n not in layers)}
    weights = {}
    for name, weight in source.weights.items():
        match = LAYER.match(name)
        if match is None:
            weights[name] = weight
        elif int(match[2]) in new:
            renamed = f"{match[1]}.{new[int(match[2])]}.{name[match.end() :]}"
            weights[renamed] = replace(weight, name=renamed)
    architecture = str(source.metadata.get(Keys.General.ARCHITECTURE, ""))
    metadata = {}
    for key in source.metadata:
        value = source.metadata[key]
        if key.startswith(f"{architecture}.") and isinstance(value, np.ndarray) and len(value) == len(numbers):
            value = value[list(new)]  # one number of each layer
        metadata[key] = type(value)(len(new)) if key == f"{architecture}.block_count" else value
    return replace(source, weights=weights, metadata=metadata)


def _refusal(source: Source, rule: str) -> QgemmError:
    return QgemmError(f"{shown_path(source.path)}: {rule}")

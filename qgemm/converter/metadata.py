"""Metadata of the new file: the source's, and the keys that llama-quantize writes for types and importance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_VERSION, Keys, LlamaFileType

from qgemm.codec.format import Format
from qgemm.files.gguf.layout import SPLIT_COUNT, SPLIT_NO, SPLIT_TENSORS
from qgemm.files.gguf.parts import ARCHITECTURE, OURS
from qgemm.files.imatrix import Importances

from .mixture import FILE_TYPES
from .rules import Options, Step
from .tensor_names import shape_keys
from .weight import Source

IMATRIX = "quantize.imatrix."
MAX_STRING_BYTES = 127  # limit of the strings that llama-quantize writes


def metadata(source: Source, steps: Sequence[Step], options: Options) -> Mapping[str, Any]:
    """The keys of a file, or of the first of several shards."""
    number = np.uint32(file_type(options.type, options.mixture))
    type_changes = options.mixture and source.metadata.get(Keys.General.FILE_TYPE, number) != number
    if source.is_gguf and all(step.copied for step in steps) and not type_changes:
        return source.metadata
    model = {} if source.is_gguf else {ARCHITECTURE: OURS}  # marks the file as no runnable model
    changed: dict[str, Any] = {  # written last, in llama-quantize's order
        Keys.General.QUANTIZATION_VERSION: np.uint32(GGML_QUANT_VERSION),
        Keys.General.FILE_TYPE: number,
        **importance_keys(options),
    }
    others = {key: value for key, value in source.metadata.items() if key not in changed}
    return {**model, **others, **changed, **shape_keys(step.weight for step in steps)}


def file_type(fmt: Format, mixture: str) -> int:
    """llama.cpp's number of a file type or of a type's file type; GUESSED where it has none."""
    if mixture:
        return FILE_TYPES[mixture].number
    names = (f"MOSTLY_{fmt}", f"ALL_{fmt}", f"MOSTLY_{fmt}_MOE")
    return next((kind.value for kind in LlamaFileType if kind.name in names), LlamaFileType.GUESSED.value)


def importance_keys(options: Options) -> dict[str, Any]:
    """The provenance of the importance matrix: its file, text, entries and chunks, as far as recorded."""
    importances = options.importance
    if not isinstance(importances, Importances):
        return {}
    file, dataset, chunks = importances.origin
    keys: dict[str, Any] = {f"{IMATRIX}file": _short(file)}
    if dataset:
        keys[f"{IMATRIX}dataset"] = _short(dataset)
    keys[f"{IMATRIX}entries_count"] = np.uint32(len(importances))
    if chunks > 0:
        keys[f"{IMATRIX}chunks_count"] = np.uint32(chunks)
    return keys


def shard_keys(number: int, count: int, tensors: int) -> dict[str, Any]:
    """The position of a shard, from 0, in a split model of `tensors` tensors; the first also has the model's keys."""
    return {SPLIT_NO: np.uint16(number), SPLIT_COUNT: np.uint16(count), SPLIT_TENSORS: np.int32(tensors)}


def _short(text: str) -> str:
    return text.encode("utf-8", "surrogateescape")[:MAX_STRING_BYTES].decode("utf-8", "ignore")

"""Metadata of the file that is written: the source's, what its types make of it, as llama-quantize writes it."""

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
LONGEST = 127  # bytes of a string among llama-quantize's keys


def metadata(source: Source, steps: Sequence[Step], options: Options) -> Mapping[str, Any]:
    """The keys of a file, or of the first of several."""
    number = np.uint32(file_type(options.type, options.mixture))
    another = options.mixture and source.metadata.get(Keys.General.FILE_TYPE, number) != number
    if source.is_gguf and all(step.copied for step in steps) and not another:
        return source.metadata
    model = {} if source.is_gguf else {ARCHITECTURE: OURS}  # nobody shall take it for a model that can be run
    changed: dict[str, Any] = {  # behind all others, in llama-quantize's order
        Keys.General.QUANTIZATION_VERSION: np.uint32(GGML_QUANT_VERSION),
        Keys.General.FILE_TYPE: number,
        **importance_keys(options),
    }
    others = {key: value for key, value in source.metadata.items() if key not in changed}
    return {**model, **others, **changed, **shape_keys(step.weight for step in steps)}


def file_type(fmt: Format, mixture: str) -> int:
    """llama.cpp's number for a file type, or one of mostly this type; GUESSED for what it has no number for."""
    if mixture:
        return FILE_TYPES[mixture].number
    names = (f"MOSTLY_{fmt}", f"ALL_{fmt}", f"MOSTLY_{fmt}_MOE")
    return next((kind.value for kind in LlamaFileType if kind.name in names), LlamaFileType.GUESSED.value)


def importance_keys(options: Options) -> dict[str, Any]:
    """Which importance matrix was used: its file, text, entries and chunks, as far as they are known."""
    known = options.importance
    if not isinstance(known, Importances):
        return {}
    file, dataset, chunks = known.origin
    found: dict[str, Any] = {f"{IMATRIX}file": _short(file)}
    if dataset:
        found[f"{IMATRIX}dataset"] = _short(dataset)
    found[f"{IMATRIX}entries_count"] = np.uint32(len(known))
    if chunks > 0:
        found[f"{IMATRIX}chunks_count"] = np.uint32(chunks)
    return found


def shard_keys(number: int, count: int, tensors: int) -> dict[str, Any]:
    """The place of a shard, from 0, in a split model of so many tensors; the first one has the model's keys as well."""
    return {SPLIT_NO: np.uint16(number), SPLIT_COUNT: np.uint16(count), SPLIT_TENSORS: np.int32(tensors)}


def _short(text: str) -> str:
    return text.encode("utf-8", "surrogateescape")[:LONGEST].decode("utf-8", "ignore")

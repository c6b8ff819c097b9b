"""Lay a checkpoint out like a .gguf file of the same model: its metadata, names, order and layout, with other weights.

Names go through the gguf package's tensor name map. The other changes that llama.cpp's converter makes are detected
from the file, whose weights are the checkpoint's but for rounding:

    rows of attn_q and attn_k   within a head, the halves of rotary pairs interleaved, or unchanged
    experts                     matrices with a number in their names, stacked
    norms                       unchanged, or plus one
    vectors without a source    tensors that the converter computes (rope_freqs), copied from the file

Signs identify the layout: they survive rounding to a few bits, and the scales that AWQ moves between layers. Signs of
an unrelated matrix, or of rows in another order, agree by half.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from math import lcm
from typing import Any

import numpy as np
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from gguf.constants import Keys

from qgemm.codec.packing import Floats
from qgemm.errors import QgemmError
from qgemm.files.gguf.reader import GGUFFile
from qgemm.files.gguf.reader import open as open_gguf
from qgemm.files.paths import PathLike, path_string, shown, shown_path
from qgemm.tensor import Tensor

from .hf_names import LEFT_OUT, NUMBERED, OUTPUT, left_out_notes, rotary_order, spellings
from .weight import Source, Weight, weight_from_tensor
from .weight_views import add_one, reorder_rows, stack_matrices

OTHER_FILES = ("split.", "quantize.imatrix.")  # keys about the template's own shards and quantization
SAMPLE = 1 << 16  # weights of a tensor, at least, that are compared to detect its layout
MIN_AGREEMENT = 0.75  # least share of equal signs; unrelated matrices have 0.5, weights of 2 bits 0.9


def match_layout(source: Source, path: PathLike) -> Source:
    """The source in the layout of `path`, a .gguf file of the same model; closing it closes both.

    QgemmError for a tensor without a counterpart in the file or the reverse, another shape or another model.
    """
    with ExitStack() as cleanup:
        template = open_gguf(path, copy=True)
        cleanup.callback(template.close)
        matched = _MatchedTensors(source, template, path_string(path))
        weights = {name: matched.filled(tensor) for name, tensor in template.items()}
        metadata = {key: template.metadata[key] for key in template.metadata if not key.startswith(OTHER_FILES)}
        cleanup.callback(source.close)
        files = [*source.files, *template.paths]
        notes = [*source.notes, *left_out_notes(matched.left_out)]
        return replace(
            source, weights=weights, metadata=metadata, is_gguf=True, files=files, close=cleanup.pop_all().close,
            notes=notes,
        )  # fmt: skip


class _MatchedTensors:
    """The tensors of a checkpoint under the names of a .gguf file of the model."""

    def __init__(self, source: Source, template: GGUFFile, path: str) -> None:
        self.path, self.template = shown_path(source.path), template
        self.where = shown_path(path)
        self.architecture = str(template.metadata.get(Keys.General.ARCHITECTURE, ""))
        self.experts_by_name: dict[str, dict[int, Weight]] = {}  # GGUF name -> number of the expert -> tensor
        self.left_out: list[str] = []
        gguf_name = self._names()
        for old, weight in source.weights.items():
            new = next((new for name in spellings(old) if (new := gguf_name(name))), None)
            if new not in template:
                if new == OUTPUT or LEFT_OUT.search(old):
                    self.left_out.append(old)
                    continue
                raise self._refusal(old, f"has no place in {self.where}" + (f", as {shown(new)} would" if new else ""))
            assert new is not None
            number = NUMBERED.search(old)
            experts = self.experts_by_name.setdefault(new, {})
            if experts.setdefault(int(number[2]) if number else 0, weight) is not weight:
                raise self._refusal(old, f"would be {shown(new)}, as another tensor is already")

    def filled(self, tensor: Tensor) -> Weight:
        """The checkpoint's weights for a tensor of the file."""
        experts = self.experts_by_name.get(tensor.name)
        if experts is None:
            if tensor.ndim > 1:
                raise self._refusal(tensor.name, f"is in {self.where}, and no tensor here has its place")
            return weight_from_tensor(tensor)
        if len(experts) > 1 and sorted(experts) != list(range(len(experts))):
            raise self._refusal(tensor.name, f"of {max(experts) + 1} experts there are {len(experts)}")
        weights = [experts[number] for number in sorted(experts)]
        weight = stack_matrices(tensor.name, weights) if tensor.ndim > len(weights[0].shape) else weights[0]
        if weight.shape != tensor.shape or len({part.shape for part in weights}) > 1:
            raise self._refusal(tensor.name, f"has shape {weight.shape}, and {tensor.shape} in {self.where}")
        weight = self._in_layout_of(weight, tensor)
        kept_as = tensor.format if tensor.format.plain else None
        return replace(weight, name=tensor.name, original=None, kept_as=kept_as)

    def _in_layout_of(self, weight: Weight, tensor: Tensor) -> Weight:
        """The weight in the file's layout: the candidate layout whose weights are nearest to the file's."""
        layouts = [weight]
        if weight.values is None or (read := weight_from_tensor(tensor).values) is None:
            return weight
        if tensor.ndim == 1 and "norm" in tensor.name:
            layouts.append(add_one(weight))
        rows = self._rows_of_a_head(tensor)
        if rows and rows % 2 == 0:
            layouts.append(reorder_rows(weight, rotary_order(rows)))
        unit = lcm(*(layout.step for layout in layouts), tensor.format.weights)
        count = min(weight.size, -(-SAMPLE // unit) * unit)
        reference = read(0, count)
        likeness = [_likeness(layout.values(0, count), reference) for layout in layouts if layout.values is not None]
        best = max(likeness)
        if tensor.ndim > 1 and best[0] < MIN_AGREEMENT:
            rule = f"is of another model than {self.where}: signs agree by {best[0]:.2f}"
            raise self._refusal(tensor.name, rule)
        return layouts[likeness.index(best)]

    def _rows_of_a_head(self, tensor: Tensor) -> int:
        """Rows per head of a matrix or bias of queries or keys; 0 for other tensors."""
        match = re.fullmatch(r"blk\.(\d+)\.attn_(q|k)\.(weight|bias)", tensor.name)
        if match is None:
            return 0
        heads = self._key("attention.head_count" if match[2] == "q" else "attention.head_count_kv")
        if heads is None:
            heads = self._key("attention.head_count")
        if isinstance(heads, np.ndarray):  # one number per layer
            heads = heads[int(match[1])] if int(match[1]) < heads.size else 0
        count = int(heads) if isinstance(heads, np.integer) else 0
        rows = tensor.shape[-2] if tensor.ndim > 1 else tensor.shape[-1]
        return rows // count if count > 0 and rows % count == 0 else 0

    def _names(self) -> Callable[[str], str | None]:
        """Maps a tensor's name to its name in the file, or to None."""
        kind = next((kind for kind, name in MODEL_ARCH_NAMES.items() if name == self.architecture), None)
        blocks = self._key("block_count")
        count = min(int(blocks), len(self.template)) if isinstance(blocks, np.integer) else 0
        names = None if kind is None else get_tensor_name_map(kind, count)

        def name(old: str) -> str | None:
            if old in self.template or names is None:
                return old if old in self.template else None
            mapped: str | None = names.get_name(old, try_suffixes=(".weight", ".bias"))
            return mapped

        return name

    def _key(self, name: str) -> Any:
        return self.template.metadata.get(f"{self.architecture}.{name}")

    def _refusal(self, name: str, rule: str) -> QgemmError:
        return QgemmError(f"{self.path}: tensor {shown(name)}: {rule}")


def _likeness(x: Floats, reference: Floats) -> tuple[float, float]:
    """The share of equal signs, then the negative relative distance, which decides for vectors of one sign (norms)."""
    with np.errstate(all="ignore"):  # files may hold any bits
        both = (x != 0) & (reference != 0)
        signs = float(np.mean((x > 0)[both] == (reference > 0)[both])) if both.any() else 1.0
        distance = float(np.median(np.abs(x - reference) / (np.abs(x) + np.abs(reference) + np.float32(1e-30))))
    return signs, -distance if np.isfinite(distance) else -1.0

"""A checkpoint made like a .gguf file of the same model: its metadata, names, order and layout, with other weights.

Names go through the gguf package's map of names. What llama.cpp's converter does to weights besides is found out from
the file itself, whose weights are those of the checkpoint but for rounding:

    rows of attn_q and attn_k   within a head, halves of rotary pairs beside each other, or as they are
    experts                     matrices with a number in their names, stacked
    norms                       as they are, or plus one
    what the checkpoint lacks   vectors that the converter makes up (rope_freqs), copied

Signs tell whether a matrix is the file's: they survive rounding to a few bits, and the scales that AWQ moves between
layers. Those of other matrices, or of rows in another order, agree by half.
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

from .hf_names import ELSEWHERE, EXPERT, OUTPUT, rotary_order, spellings
from .weight import Source, Weight, of_tensor
from .weight_views import in_order, plus_one, stacked

OTHER_FILES = ("split.", "quantize.imatrix.")  # keys that speak of that file's shards and of its quantization
LOOK = 1 << 16  # weights of a tensor, at least, by which layouts are told apart
AGREE = 0.75  # of the signs of a matrix at least, where chance gives 0.5, and weights of 2 bits 0.9


def alike(source: Source, path: PathLike) -> Source:
    """The source as `path`, a .gguf file of the same model, has it; closing it closes both.

    QgemmError for a tensor without a place in the file, a place without a tensor, another shape or another model.
    """
    with ExitStack() as undo:
        base = open_gguf(path)
        undo.callback(base.close)
        places = _Places(source, base, path_string(path))
        weights = {name: places.filled(tensor) for name, tensor in base.items()}
        metadata = {key: base.metadata[key] for key in base.metadata if not key.startswith(OTHER_FILES)}
        undo.callback(source.close)
        files = [*source.files, *base.paths]
        return replace(
            source, weights=weights, metadata=metadata, is_gguf=True, files=files, close=undo.pop_all().close
        )


class _Places:
    """The tensors of a checkpoint by the names that a .gguf file of the model has for them."""

    def __init__(self, source: Source, base: GGUFFile, path: str) -> None:
        self.path, self.base = shown_path(source.path), base
        self.where = shown_path(path)
        self.architecture = str(base.metadata.get(Keys.General.ARCHITECTURE, ""))
        self.found: dict[str, dict[int, Weight]] = {}  # by name, then by number of the expert
        named = self._names()
        for old, weight in source.weights.items():
            new = next((new for name in spellings(old) if (new := named(name))), None)
            if new not in base:
                if new == OUTPUT or ELSEWHERE.search(old):
                    continue
                raise self._refusal(old, f"has no place in {self.where}" + (f", as {shown(new)} would" if new else ""))
            assert new is not None
            number = EXPERT.search(old)
            experts = self.found.setdefault(new, {})
            if experts.setdefault(int(number[1]) if number else 0, weight) is not weight:
                raise self._refusal(old, f"would be {shown(new)}, as another tensor is already")

    def filled(self, tensor: Tensor) -> Weight:
        """What takes the place of a tensor of the file."""
        experts = self.found.get(tensor.name)
        if experts is None:
            if tensor.ndim > 1:
                raise self._refusal(tensor.name, f"is in {self.where}, and no tensor here has its place")
            return of_tensor(tensor)
        if len(experts) > 1 and sorted(experts) != list(range(len(experts))):
            raise self._refusal(tensor.name, f"of {max(experts) + 1} experts there are {len(experts)}")
        weights = [experts[number] for number in sorted(experts)]
        weight = stacked(tensor.name, weights) if tensor.ndim > len(weights[0].shape) else weights[0]
        if weight.shape != tensor.shape or len({each.shape for each in weights}) > 1:
            raise self._refusal(tensor.name, f"has shape {weight.shape}, and {tensor.shape} in {self.where}")
        weight = self._laid_out(weight, tensor)
        kept_as = tensor.format if tensor.format.plain else None
        return replace(weight, name=tensor.name, original=None, kept_as=kept_as)

    def _laid_out(self, weight: Weight, tensor: Tensor) -> Weight:
        """The weight in the layout of the file: of those that it may have, the one that is nearest."""
        layouts = [weight]
        if weight.values is None or (read := of_tensor(tensor).values) is None:
            return weight
        if tensor.ndim == 1 and "norm" in tensor.name:
            layouts.append(plus_one(weight))
        rows = self._rows_of_a_head(tensor)
        if rows and rows % 2 == 0:
            layouts.append(in_order(weight, rotary_order(rows)))
        unit = lcm(*(each.step for each in layouts), tensor.format.weights)
        count = min(weight.size, -(-LOOK // unit) * unit)
        want = read(0, count)
        likeness = [_likeness(each.values(0, count), want) for each in layouts if each.values is not None]
        best = max(likeness)
        if tensor.ndim > 1 and best[0] < AGREE:
            rule = f"is of another model than {self.where}: signs agree by {best[0]:.2f}"
            raise self._refusal(tensor.name, rule)
        return layouts[likeness.index(best)]

    def _rows_of_a_head(self, tensor: Tensor) -> int:
        """Of the matrices and biases that make queries and keys; 0 of others."""
        found = re.fullmatch(r"blk\.(\d+)\.attn_(q|k)\.(weight|bias)", tensor.name)
        if found is None:
            return 0
        heads = self._key("attention.head_count" if found[2] == "q" else "attention.head_count_kv")
        if heads is None:
            heads = self._key("attention.head_count")
        if isinstance(heads, np.ndarray):  # a number for each layer
            heads = heads[int(found[1])] if int(found[1]) < heads.size else 0
        count = int(heads) if isinstance(heads, np.integer) else 0
        rows = tensor.shape[-2] if tensor.ndim > 1 else tensor.shape[-1]
        return rows // count if count > 0 and rows % count == 0 else 0

    def _names(self) -> Callable[[str], str | None]:
        """The name in the file of a tensor, None if it has none."""
        kind = next((kind for kind, name in MODEL_ARCH_NAMES.items() if name == self.architecture), None)
        blocks = self._key("block_count")
        count = min(int(blocks), len(self.base)) if isinstance(blocks, np.integer) else 0
        names = None if kind is None else get_tensor_name_map(kind, count)

        def name(old: str) -> str | None:
            if old in self.base or names is None:
                return old if old in self.base else None
            found: str | None = names.get_name(old, try_suffixes=(".weight", ".bias"))
            return found

        return name

    def _key(self, name: str) -> Any:
        return self.base.metadata.get(f"{self.architecture}.{name}")

    def _refusal(self, name: str, rule: str) -> QgemmError:
        return QgemmError(f"{self.path}: tensor {shown(name)}: {rule}")


def _likeness(x: Floats, want: Floats) -> tuple[float, float]:
    """The share of signs that agree; then, for numbers of one sign, as the scales of norms are, how near they are."""
    with np.errstate(all="ignore"):  # whatever files hold is data here
        both = (x != 0) & (want != 0)
        signs = float(np.mean((x > 0)[both] == (want > 0)[both])) if both.any() else 1.0
        far = float(np.median(np.abs(x - want) / (np.abs(x) + np.abs(want) + np.float32(1e-30))))
    return signs, -far if np.isfinite(far) else -1.0

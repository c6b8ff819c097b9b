"""Packed layers of qgemm.torch in a checkpoint: a state dict, or the folder of `save_pretrained`.

    NAME.weight        uint8  [..., N, bytes of a row]  blocks as in a .gguf file
    NAME._extra_state  uint8  [bytes of a text]         format and shape: "q4_0 4096 14336"

No config is needed: the texts say all. A layer that shares its weight with another one may have the text alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod

from qgemm.codec.format import Blocks
from qgemm.errors import CheckpointError, QgemmError
from qgemm.files.paths import shown, shown_path
from qgemm.formats import format_named
from qgemm.tensor import Tensor

from ..array_weights import Stored
from ..weight import Weight, weight_from_tensor

STATE, WEIGHT = "._extra_state", ".weight"
TEXT = re.compile(rb"([a-z0-9_]+(?::[0-9a-f]+)?)((?: [0-9]{1,18}){2,3})")  # a codebook of its own follows the colon
MAX_TEXT = 4096  # bytes; other modules have longer states
VIEWS = "column_order", "factor", "divisor"  # buffers of a layer whose weight is not the blocks alone


def matrices(path: str, stored: Mapping[str, Stored]) -> tuple[dict[str, Weight], set[str]]:
    """The packed weights of a checkpoint by name, and the names of the texts that describe them."""
    texts = dict(_texts(stored))
    layers = [name.removesuffix(STATE) for name in texts if name.removesuffix(STATE) + WEIGHT in stored]
    weights = {f"{layer}{WEIGHT}": _matrix(path, layer, stored, *texts[layer + STATE]) for layer in layers}
    return weights, set(texts)


def _texts(stored: Mapping[str, Stored]) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Names of the texts, with the format's name and the shape [N, K] or [E, N, K]."""
    for name, (file, entry) in stored.items():
        if name.endswith(STATE) and entry.type == "U8" and len(entry.shape) == 1 and entry.shape[0] <= MAX_TEXT:
            match = TEXT.fullmatch(file.read(entry, 0, entry.shape[0]).tobytes())
            if match is not None:
                yield name, (match[1].decode(), tuple(map(int, match[2].split())))


def _matrix(path: str, layer: str, stored: Mapping[str, Stored], name: str, shape: tuple[int, ...]) -> Weight:
    """The weight of a layer; CheckpointError where its bytes are not those of its text."""
    where = f"{shown_path(path)}: tensor {shown(layer + WEIGHT)}"
    view = next((view for view in VIEWS if f"{layer}.{view}" in stored), None)
    if view is not None:
        raise CheckpointError(f"{where}: has a {view}, with which qgemm.torch alone reads it")
    try:
        fmt = format_named(name)
        row = fmt.blocks_in(shape[-1]) * fmt.block_bytes
    except QgemmError as error:
        raise CheckpointError(f"{where}: {error}") from None
    file, entry = stored[layer + WEIGHT]
    if (entry.type, entry.shape) != ("U8", (*shape[:-1], row)):
        need = f"{fmt} {list(shape)} is U8 {[*shape[:-1], row]}"
        raise CheckpointError(f"{where}: {need}, this is {entry.type} {list(entry.shape)}")

    def read(start: int, stop: int) -> Blocks:
        return file.read(entry, start * fmt.block_bytes, stop * fmt.block_bytes).view(fmt.dtype)

    def whole() -> Blocks:
        return read(0, prod(shape) // fmt.weights).reshape(*shape[:-1], -1)

    return weight_from_tensor(Tensor(fmt, shape, whole, layer + WEIGHT, read))

"""Names of a Hugging Face checkpoint's tensors as the gguf package's map of names knows them, and the order of rows."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

EXPERT = re.compile(r"\bexperts\.(\d+)\.")
WRAPPERS = ("model.language_model.", "language_model.model.", "language_model.")  # of a text model among others
ELSEWHERE = re.compile(  # what llama.cpp's converter leaves out, or puts into a file of its own
    r"rotary_emb\.inv_freq$|attn\.(masked_)?bias$|position_ids$"
    r"|\b(visual|vision\w*|audio\w*|multi_modal_projector|mm_projector)\."
)
OUTPUT = "output.weight"  # which a model whose output is tied to its embedding may hold, and its file does not


def spellings(name: str) -> Iterator[str]:
    """The names under which the gguf package may know a tensor: without the expert's number, without a wrapper."""
    merged = EXPERT.sub("experts.", name)
    yield merged
    for wrapper in WRAPPERS:
        if merged.startswith(wrapper):
            yield "model." + merged.removeprefix(wrapper)
            yield merged.removeprefix(wrapper)


def rotary_order(rows: int) -> NDArray[np.intp]:
    """The rows of a head of queries or keys in the order in which llama.cpp rotates them, [rows].

    Hugging Face's rotary embedding pairs row i of a head with row i + rows / 2, llama.cpp's of llama 2 i with 2 i + 1.
    """
    return np.arange(rows).reshape(2, rows // 2).T.ravel()

"""Limits on names and headers, so that a small file is refused at little cost.

A listed tensor costs memory and time before any of its data is read. So the first names are free, and each further one
must come with data: every model has far more than 4 KiB per tensor, and a file that lists a million empty tensors is
refused before the first is parsed.
"""

from __future__ import annotations

FREE_NAMES = 4096
BYTES_PER_NAME = 4096  # size of the file per further name
MAX_EMPTY = 256  # tensors without data in one file: a few are markers, thousands are a checkpoint that lost its weights
FREE_TEXT = 1 << 20  # bytes of a config or an index
FREE_HEADER = 2 << 20  # bytes of a header, most of which may be notes about training
DATA_PER_BYTE = 64  # bytes of weights per further byte of text
DATA_PER_TOKENIZER_BYTE = 2  # bytes of weights per byte of a tokenizer: six in Gemma 3 270M of four bits


def most_names(nbytes: int) -> int:
    """The most tensors, arrays or notes that a file of `nbytes` bytes may list."""
    return FREE_NAMES + nbytes // BYTES_PER_NAME


def longest_text(free: int, nbytes: int, share: int = DATA_PER_BYTE) -> int:
    """The most bytes of text that may describe `nbytes` bytes of weights; share: bytes of weights for one of text."""
    return free + nbytes // share

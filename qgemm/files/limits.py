"""What a file may claim: bounds on names and headers, so that a small file costs little before it is refused.

A tensor that is listed costs memory and time before any of its data is read. So the first ones are free, and each
further one needs data: every model has far more than 4 KiB a tensor, and a file that lists a million tensors of nothing
is refused before the first is looked at.
"""

from __future__ import annotations

FREE_NAMES = 4096
BYTES_A_NAME = 4096  # of the file, for each name beyond those
FREE_TEXT = 1 << 20  # bytes: of a config or an index
FREE_HEADER = 2 << 20  # bytes: of a header, most of which may be notes about a training
DATA_A_BYTE = 64  # bytes of weights, for each byte of text that describes them beyond those


def most_names(nbytes: int) -> int:
    """How many tensors, arrays or notes a file of so many bytes may list."""
    return FREE_NAMES + nbytes // BYTES_A_NAME


def longest_text(free: int, nbytes: int) -> int:
    """How many bytes of text may describe so many bytes of weights."""
    return free + nbytes // DATA_A_BYTE

"""Importance matrices: for each column of a weight the mean square of the activations that meet it.

llama.cpp keeps them in .gguf files (for each tensor NAME the float32 tensors NAME.in_sum2 [experts, K] and
NAME.counts [experts, 1]) and formerly in files of its own:

    i32 entries, then each: i32 length, name; i32 calls; i32 count, float32 sums [count]
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np

from qgemm.codec.packing import Floats
from qgemm.errors import CheckpointError
from qgemm.files.gguf.layout import MAGIC
from qgemm.files.gguf.reader import open as open_gguf

from .paths import Opened, PathLike, path_string, shown, shown_path

SUMS, COUNTS = ".in_sum2", ".counts"
INT = struct.Struct("<i")


def read_imatrix(path: PathLike) -> Mapping[str, Floats]:
    """By tensor, the importance [experts, K] or, in files of the old kind, [experts * K]; float32."""
    name = path_string(path)
    file = Opened(name, CheckpointError)
    try:
        if file.read(0, min(4, file.size)).tobytes() == MAGIC:
            found = _of_gguf(name)
        else:
            found = _of_legacy(shown_path(name), file.read(0, file.size).tobytes())
    finally:
        file.close()
    for tensor, values in found.items():
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise CheckpointError(f"{shown_path(name)}: {shown(tensor)}: an importance is negative or not finite")
    return found


def _of_gguf(path: str) -> dict[str, Floats]:
    found = {}
    with open_gguf(path) as file:
        for name in file:
            if not name.endswith(SUMS):
                continue
            tensor = name.removesuffix(SUMS)
            sums, counts = file[name], file.get(tensor + COUNTS)
            if counts is None or {str(sums.format), str(counts.format)} != {"F32"} or sums.ndim > 2:
                raise CheckpointError(f"{shown_path(path)}: {shown(tensor)}: needs {SUMS} and {COUNTS} of type F32")
            rows, number = sums.blocks.reshape(-1, sums.shape[-1]), counts.blocks.reshape(-1, 1)
            if len(rows) != len(number):
                raise CheckpointError(f"{shown_path(path)}: {shown(tensor)}: {len(rows)} sums, {len(number)} counts")
            with np.errstate(all="ignore"):
                found[tensor] = np.where(number > 0, rows / number, np.float32(1))  # an expert that saw nothing
    if not found:
        raise CheckpointError(f"{shown_path(path)}: is no importance matrix: it has no tensor NAME{SUMS}")
    return found


def _of_legacy(where: str, data: bytes) -> dict[str, Floats]:
    at = 0

    def take(size: int) -> bytes:
        nonlocal at
        if not 0 <= size <= len(data) - at:
            raise CheckpointError(f"{where}: is no importance matrix: {size} bytes needed at {at} of {len(data)}")
        at += size
        return data[at - size : at]

    def integer() -> int:
        number: int = INT.unpack(take(INT.size))[0]
        return number

    found: dict[str, Floats] = {}
    for _ in range(integer()):
        raw = take(integer())
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{where}: {shown(raw)}: the name is not UTF-8") from None
        calls, count = integer(), integer()
        sums = np.frombuffer(take(4 * count), "<f4")
        with np.errstate(all="ignore"):  # what is not finite is refused below
            found[name] = np.divide(sums, np.float32(max(calls, 1)), dtype=np.float32)
    if not found:
        raise CheckpointError(f"{where}: is no importance matrix: it has no entries")
    return found

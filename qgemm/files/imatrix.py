"""Importance matrices: for each column of a weight the mean square of the activations that meet it.

llama.cpp keeps them in .gguf files (for each tensor NAME the float32 tensors NAME.in_sum2 [experts, K] and
NAME.counts [experts, 1]) and formerly in files of its own:

    i32 entries, then each: i32 length, name; i32 calls; i32 count, float32 sums [count]
    i32 chunks; i32 length, name of the text         (newer files alone)

All values are checked when a file is opened; they are read again, in ranges, where they are used.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from qgemm.codec.packing import Floats
from qgemm.errors import CheckpointError
from qgemm.files.gguf.layout import MAGIC
from qgemm.files.gguf.reader import open as open_gguf

from .paths import Opened, PathLike, path_string, shown, shown_path

SUMS, COUNTS = ".in_sum2", ".counts"
DATASETS, CHUNKS = "imatrix.datasets", "imatrix.chunk_count"
INT = struct.Struct("<i")
TAIL = struct.Struct("<ii")  # chunks, length of a name
TOGETHER = 1 << 18  # values that are checked at a time

Read: TypeAlias = Callable[[int, int], Floats]  # values start to stop, counted over all experts


@dataclass(frozen=True)
class Importance:
    """The importance of a tensor's columns: its shape, [experts, K] or [experts * K], and its values in ranges."""

    shape: tuple[int, ...]
    read: Read

    @property
    def size(self) -> int:
        """How many values."""
        return int(np.prod(self.shape, dtype=object))


class Origin(NamedTuple):
    """Where importances come from: the file, the text that was evaluated, chunks of it; "" and 0 if nothing says."""

    file: str = ""
    dataset: str = ""
    chunks: int = 0


class Importances(Mapping[str, Floats]):
    """By tensor, the importance [experts, K] or, in files of the old kind, [experts * K]; float32.

    Values are read when they are asked for. origin: what the file says of itself.
    """

    def __init__(self, found: Mapping[str, Importance], origin: Origin | None = None) -> None:
        self._found, self.origin = found, Origin() if origin is None else origin

    def importance(self, name: str) -> Importance | None:
        """That of a tensor, of which nothing is read yet; None if there is none."""
        return self._found.get(name)

    def __getitem__(self, name: str) -> Floats:
        found = self._found[name]
        return found.read(0, found.size).reshape(found.shape)

    def __contains__(self, name: object) -> bool:
        return name in self._found  # Mapping's own would read the values

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def of_arrays(arrays: Mapping[str, Floats]) -> Importances:
    """Importances that are in memory."""
    return Importances({name: Importance(each.shape, _of_array(each)) for name, each in arrays.items()})


def _of_array(values: Floats) -> Read:
    return lambda start, stop: values.reshape(-1)[start:stop]


def read_imatrix(path: PathLike) -> Importances:
    """The importances in a file of either kind, which must not change while they are used."""
    name = path_string(path)
    file = Opened(name, CheckpointError)
    try:
        legacy = file.read(0, min(4, file.size)).tobytes() != MAGIC
        found, origin = _of_legacy(file) if legacy else _of_gguf(name)
    except BaseException:
        file.close()
        raise
    if not legacy:
        file.close()
    for tensor, each in found.items():
        for start in range(0, each.size, TOGETHER):
            values = each.read(start, min(start + TOGETHER, each.size))
            if not (np.isfinite(values).all() and (values >= 0).all()):
                raise CheckpointError(f"{shown_path(name)}: {shown(tensor)}: an importance is negative or not finite")
    return Importances(found, origin)


def _of_gguf(path: str) -> tuple[dict[str, Importance], Origin]:
    found: dict[str, Importance] = {}
    file = open_gguf(path)  # closed when nobody has its tensors any more
    for name in file:
        if not name.endswith(SUMS):
            continue
        tensor = name.removesuffix(SUMS)
        sums, counts = file[name], file.get(tensor + COUNTS)
        if counts is None or {str(sums.format), str(counts.format)} != {"F32"} or sums.ndim > 2:
            raise CheckpointError(f"{shown_path(path)}: {shown(tensor)}: needs {SUMS} and {COUNTS} of type F32")
        rows, number = sums.nbytes // 4 // sums.shape[-1], counts.read(0, counts.nbytes // 4)
        if rows != len(number):
            raise CheckpointError(f"{shown_path(path)}: {shown(tensor)}: {rows} sums, {len(number)} counts")
        found[tensor] = Importance((rows, sums.shape[-1]), _means(sums.read, number, sums.shape[-1]))
    if not found:
        raise CheckpointError(f"{shown_path(path)}: is no importance matrix: it has no tensor NAME{SUMS}")
    datasets, chunks = (file.metadata.get(key) for key in (DATASETS, CHUNKS))
    dataset = datasets[0] if isinstance(datasets, list) and datasets else ""
    return found, Origin(path, dataset, int(chunks) if isinstance(chunks, np.integer) else 0)


def _means(sums: Read, number: Floats, k: int) -> Read:
    """Sums [experts, K] over the calls of each expert; all alike for one that saw nothing."""

    def read(start: int, stop: int) -> Floats:
        of = number[np.arange(start, stop) // k]
        with np.errstate(all="ignore"):  # what is not finite is refused
            return np.where(of > 0, sums(start, stop) / of, np.float32(1))

    return read


def _of_legacy(file: Opened) -> tuple[dict[str, Importance], Origin]:
    where, at = shown_path(file.path), 0

    def skip(size: int) -> int:
        """Move over so many bytes, which must be there; returns where they start."""
        nonlocal at
        if not 0 <= size <= file.size - at:
            raise CheckpointError(f"{where}: is no importance matrix: {size} bytes needed at {at} of {file.size}")
        at += size
        return at - size

    def integer() -> int:
        number: int = INT.unpack(file.read(skip(INT.size), INT.size).tobytes())[0]
        return number

    def means(offset: int, calls: int) -> Read:
        def read(start: int, stop: int) -> Floats:
            sums: Floats = file.read(offset + 4 * start, 4 * (stop - start)).view("<f4")
            with np.errstate(all="ignore"):  # what is not finite is refused
                return np.divide(sums, np.float32(max(calls, 1)), dtype=np.float32)

        return read

    found: dict[str, Importance] = {}
    for _ in range(integer()):
        size = integer()
        raw = file.read(skip(size), size).tobytes()
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{where}: {shown(raw)}: the name is not UTF-8") from None
        calls, count = integer(), integer()
        found[name] = Importance((count,), means(skip(4 * count), calls))
    if not found:
        raise CheckpointError(f"{where}: is no importance matrix: it has no entries")
    return found, _origin(file, at)


def _origin(file: Opened, at: int) -> Origin:
    """What newer files say of themselves behind their entries; bytes there that say something else are passed over."""
    tail = TAIL.size
    if file.size - at < tail:
        return Origin(file.path)
    chunks, size = TAIL.unpack(file.read(at, tail).tobytes())
    if not 0 <= size <= file.size - at - tail:
        return Origin(file.path)
    return Origin(file.path, file.read(at + tail, size).tobytes().decode("utf-8", "replace"), chunks)

"""Importance matrices: for each column of a weight the mean square of its activations.

llama.cpp stores them in .gguf files (for each tensor NAME the float32 tensors NAME.in_sum2 [experts, K] and
NAME.counts [experts, 1]) and formerly in files of its own:

    i32 entries, then per entry: i32 length, name; i32 calls; i32 count, float32 sums [count]
    i32 chunks; i32 length, name of the text         (newer files only)

All values are checked when a file is opened, and read again, in ranges, where they are used.
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

from .kinds import LONGEST, hint
from .paths import PathLike, RegularFile, path_string, shown, shown_path

SUMS, COUNTS = ".in_sum2", ".counts"
DATASETS, CHUNKS = "imatrix.datasets", "imatrix.chunk_count"
INT = struct.Struct("<i")
TAIL = struct.Struct("<ii")  # chunks, length of a name
CHECKED_AT_ONCE = 1 << 18  # values

Read: TypeAlias = Callable[[int, int], Floats]  # (start, stop) -> values, counted over all experts


@dataclass(frozen=True)
class Importance:
    """The importance of a tensor's columns: its shape, [experts, K] or [experts * K], and a reader of its values."""

    shape: tuple[int, ...]
    read: Read

    @property
    def size(self) -> int:
        """The number of values."""
        return int(np.prod(self.shape, dtype=object))


class Origin(NamedTuple):
    """The provenance of importances: the file, the evaluated text, the number of its chunks; "" and 0 if unknown."""

    file: str = ""
    dataset: str = ""
    chunks: int = 0


class Importances(Mapping[str, Floats]):
    """Tensor name -> importance [experts, K] or, in files of the old kind, [experts * K]; float32.

    Values are read on look-up. origin: the provenance that the file records.
    """

    def __init__(self, importances: Mapping[str, Importance], origin: Origin | None = None) -> None:
        self._importances, self.origin = importances, Origin() if origin is None else origin

    def importance(self, name: str) -> Importance | None:
        """The importance of a tensor, not yet read; None if there is none."""
        return self._importances.get(name)

    def __getitem__(self, name: str) -> Floats:
        importance = self._importances[name]
        return importance.read(0, importance.size).reshape(importance.shape)

    def __contains__(self, name: object) -> bool:
        return name in self._importances  # Mapping's own would read the values

    def __iter__(self) -> Iterator[str]:
        return iter(self._importances)

    def __len__(self) -> int:
        return len(self._importances)


def importances_of_arrays(arrays: Mapping[str, Floats]) -> Importances:
    """Importances that are in memory."""
    return Importances({name: Importance(array.shape, _array_reader(array)) for name, array in arrays.items()})


def _array_reader(values: Floats) -> Read:
    return lambda start, stop: values.reshape(-1)[start:stop]


def read_imatrix(path: PathLike) -> Importances:
    """The importances in a file of either kind, which must not change while they are used."""
    name = path_string(path)
    file = RegularFile(name, CheckpointError)
    try:
        legacy = file.read(0, min(4, file.size)).tobytes() != MAGIC
        importances, origin = _read_legacy(file) if legacy else _read_gguf(name)
    except BaseException:
        file.close()
        raise
    if not legacy:
        file.close()
    for tensor, importance in importances.items():
        for start in range(0, importance.size, CHECKED_AT_ONCE):
            values = importance.read(start, min(start + CHECKED_AT_ONCE, importance.size))
            if not (np.isfinite(values).all() and (values >= 0).all()):
                raise CheckpointError(f"{shown_path(name)}: {shown(tensor)}: an importance is negative or not finite")
    return Importances(importances, origin)


def _read_gguf(path: str) -> tuple[dict[str, Importance], Origin]:
    importances: dict[str, Importance] = {}
    file = open_gguf(path, copy=True)  # closed with the last reference to its tensors
    for name in file:
        if name.endswith(COUNTS) and name.removesuffix(COUNTS) + SUMS not in file:
            raise CheckpointError(f"{shown_path(path)}: {shown(name)}: there is no {SUMS} beside these counts")
        if not name.endswith(SUMS):
            continue
        tensor = name.removesuffix(SUMS)
        sums, counts = file[name], file.get(tensor + COUNTS)
        if counts is None or {str(sums.format), str(counts.format)} != {"F32"} or sums.ndim > 2 or 0 in sums.shape:
            raise CheckpointError(
                f"{shown_path(path)}: {shown(tensor)}: needs {SUMS} and {COUNTS} of type F32, not empty"
            )
        rows, expert_calls = sums.nbytes // 4 // sums.shape[-1], counts.read(0, counts.nbytes // 4)
        if rows != len(expert_calls):
            raise CheckpointError(f"{shown_path(path)}: {shown(tensor)}: {rows} sums, {len(expert_calls)} counts")
        if not (np.isfinite(expert_calls) & (expert_calls >= 0)).all():
            raise CheckpointError(f"{shown_path(path)}: {shown(tensor)}: a count is negative or not finite")
        importances[tensor] = Importance((rows, sums.shape[-1]), _means(sums.read, expert_calls, sums.shape[-1]))
    if not importances:
        raise CheckpointError(f"{shown_path(path)}: is no importance matrix: it has no tensor NAME{SUMS}")
    datasets, chunks = (file.metadata.get(key) for key in (DATASETS, CHUNKS))
    dataset = datasets[0] if isinstance(datasets, list) and datasets else ""
    return importances, Origin(path, dataset, int(chunks) if isinstance(chunks, np.integer) and chunks < 2**32 else 0)


def _means(sums: Read, expert_calls: Floats, k: int) -> Read:
    """Sums [experts, K] divided by the calls of each expert; 1 for an expert without calls."""

    def read(start: int, stop: int) -> Floats:
        calls = expert_calls[np.arange(start, stop) // k]
        with np.errstate(all="ignore"):  # values that are not finite are refused later
            return np.where(calls > 0, sums(start, stop) / calls, np.float32(1))

    return read


def _read_legacy(file: RegularFile) -> tuple[dict[str, Importance], Origin]:
    where, position = shown_path(file.path), 0

    def skip(size: int) -> int:
        """Move past `size` bytes, which must exist; returns their offset."""
        nonlocal position
        if not 0 <= size <= file.size - position:
            rule = f"is no importance matrix: {size} bytes needed at {position} of {file.size}"
            raise CheckpointError(f"{where}: {rule}{hint(file.read(0, min(file.size, LONGEST)).tobytes())}")
        position += size
        return position - size

    def integer() -> int:
        number: int = INT.unpack(file.read(skip(INT.size), INT.size).tobytes())[0]
        return number

    def means(offset: int, calls: int) -> Read:
        def read(start: int, stop: int) -> Floats:
            sums: Floats = file.read(offset + 4 * start, 4 * (stop - start)).view("<f4")
            with np.errstate(all="ignore"):  # values that are not finite are refused later
                return np.divide(sums, np.float32(max(calls, 1)), dtype=np.float32)

        return read

    importances: dict[str, Importance] = {}
    for _ in range(integer()):
        size = integer()
        raw = file.read(skip(size), size).tobytes()
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{where}: {shown(raw)}: the name is not UTF-8") from None
        if name in importances:
            raise CheckpointError(f"{where}: {shown(name)}: comes twice")
        calls, count = integer(), integer()
        importances[name] = Importance((count,), means(skip(4 * count), calls))
    if not importances:
        raise CheckpointError(f"{where}: is no importance matrix: it has no entries")
    return importances, _origin(file, position)


def _origin(file: RegularFile, position: int) -> Origin:
    """The provenance that newer files record after their entries; other bytes there are ignored."""
    tail = TAIL.size
    if file.size - position < tail:
        return Origin(file.path)
    chunks, size = TAIL.unpack(file.read(position, tail).tobytes())
    if not 0 <= size <= file.size - position - tail:
        return Origin(file.path)
    return Origin(file.path, file.read(position + tail, size).tobytes().decode("utf-8", "replace"), chunks)

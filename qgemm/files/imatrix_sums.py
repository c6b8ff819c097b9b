"""The sums that an importance matrix stores: read, added up, merged and written as llama.cpp's GGUF file.

    NAME.in_sum2    float32 [experts, K]  squares of the inputs of each column, summed over tokens
    NAME.counts     float32 [experts, 1]  tokens
    NAME.fisher     float32 [experts, K]  squares of the inputs times squared gradients of the outputs (mean over
                                          outputs), summed over tokens

llama.cpp has the first two and ignores other tensors. The third, the diagonal of the Fisher information as a mean over
the rows of the matrix, is optional; the key qgemm.imatrix.lookups then has the squared gradients of the rows that the
token embedding looks up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.packing import Floats
from qgemm.errors import CheckpointError

from .gguf.layout import MAGIC
from .gguf.reader import open as open_gguf
from .gguf.writer import write
from .imatrix import CHUNKS, COUNTS, DATASETS, SUMS, read_imatrix
from .paths import PathLike, RegularFile, path_string, shown, shown_path

FISHER = ".fisher"
TYPE, CHUNK_SIZE = "general.type", "imatrix.chunk_size"
RUN, POSITION, LOOKUPS = (f"qgemm.imatrix.{key}" for key in ("run", "position", "lookups"))
OLD_CHUNK = 512  # tokens of a chunk in files of the old kind, which do not record it

Doubles = NDArray[np.float64]


@dataclass
class Sums:
    """The sums of one tensor: squares [experts, K], tokens [experts], Fisher information [experts, K] or None."""

    squares: Doubles
    tokens: Doubles
    fisher: Doubles | None = None

    def split(self, experts: int) -> Sums:
        """These sums for a number of experts, if one row has the columns of all, as in files of the old kind."""
        if len(self.tokens) != 1 or self.squares.size % experts:
            return self
        fisher = None if self.fisher is None else self.fisher.reshape(experts, -1)
        return Sums(self.squares.reshape(experts, -1), np.repeat(self.tokens, experts), fisher)

    def add(self, other: Sums) -> None:
        """Add the sums of other tokens; the Fisher information that only one of the two has is dropped."""
        self.squares = self.squares + other.squares
        self.tokens = self.tokens + other.tokens
        complete = self.fisher is not None and other.fisher is not None
        self.fisher = self.fisher + other.fisher if complete else None  # type: ignore[operator]


@dataclass
class SumsFile:
    """The content of a file: sums by tensor name, the texts, the number of chunks and the tokens of a chunk.

    lookups: squared gradients of the rows that the token embedding looks up, mean over columns, summed over tokens.
    run: a digest of the run that is being continued; position: its chunks that the sums contain.
    """

    sums: dict[str, Sums] = field(default_factory=dict)
    datasets: list[str] = field(default_factory=list)
    chunks: int = 0
    chunk_size: int = OLD_CHUNK
    lookups: float = 0.0
    run: str = ""
    position: int = 0

    def merge(self, other: SumsFile, path: PathLike) -> None:
        """Add the sums of another file; CheckpointError, naming `path`, if a tensor has another shape there."""
        for name, added in other.sums.items():
            own = self.sums.setdefault(name, added)
            if own is added:
                continue
            sums = added.split(len(own.tokens))
            own = self.sums[name] = own.split(len(sums.tokens))
            if own.squares.shape != sums.squares.shape:
                shapes = f"{sums.squares.shape}, elsewhere {own.squares.shape}"
                raise CheckpointError(f"{shown_path(path_string(path))}: {shown(name)}: has sums of shape {shapes}")
            own.add(sums)
        self.datasets += [dataset for dataset in other.datasets if dataset not in self.datasets]
        self.chunks += other.chunks
        self.lookups += other.lookups

    def write(self, path: PathLike) -> None:
        """Write the file, which replaces any old one whole. Tensors without a token are left out."""
        tensors: dict[str, NDArray[Any]] = {}
        for name, sums in sorted(self.sums.items()):
            if not sums.tokens.any():
                continue
            tensors[name + SUMS] = sums.squares.astype(np.float32)
            tensors[name + COUNTS] = sums.tokens.astype(np.float32)[:, None]
            if sums.fisher is not None:
                tensors[name + FISHER] = sums.fisher.astype(np.float32)
        metadata: dict[str, Any] = {
            TYPE: "imatrix",
            DATASETS: self.datasets,
            CHUNKS: np.uint32(self.chunks),
            CHUNK_SIZE: np.uint32(self.chunk_size),
        }
        if self.lookups:
            metadata[LOOKUPS] = np.float64(self.lookups)
        if self.run:
            metadata |= {RUN: self.run, POSITION: np.uint32(self.position)}
        write(path, tensors, metadata)


def read_sums(path: PathLike) -> SumsFile:
    """The sums in a file of either kind; those of the old kind are its means times the tokens of its chunks."""
    importances = read_imatrix(path)  # checks the values
    name = path_string(path)
    file = RegularFile(name, CheckpointError)
    try:
        legacy = file.read(0, min(4, file.size)).tobytes() != MAGIC
    finally:
        file.close()
    if legacy:
        _, dataset, chunks = importances.origin
        if chunks < 1:
            raise CheckpointError(f"{shown_path(name)}: is of the old kind and does not record its number of chunks")
        tokens = np.array([chunks * OLD_CHUNK], np.float64)
        sums = {name: Sums(importances[name].reshape(1, -1) * tokens[:, None], tokens) for name in importances}
        return SumsFile(sums, [dataset] * bool(dataset), chunks)
    with open_gguf(name, copy=True) as model:
        sums = {}
        for tensor in importances:
            shape, fisher = importances[tensor].shape, model.get(tensor + FISHER)
            if fisher is not None and fisher.shape != model[tensor + SUMS].shape:
                raise CheckpointError(f"{shown_path(name)}: {shown(tensor + FISHER)}: has another shape than sums")
            sums[tensor] = Sums(
                _doubles(model[tensor + SUMS]).reshape(shape),
                _doubles(model[tensor + COUNTS]).reshape(-1),
                None if fisher is None else _doubles(fisher).reshape(shape),
            )
        datasets = model.metadata.get(DATASETS)
        return SumsFile(
            sums,
            list(datasets) if isinstance(datasets, list) else [],
            _integer(model.metadata, CHUNKS),
            _integer(model.metadata, CHUNK_SIZE, OLD_CHUNK),
            _float(model.metadata, LOOKUPS),
            str(model.metadata.get(RUN, "")),
            _integer(model.metadata, POSITION),
        )


def _doubles(tensor: Any) -> Doubles:
    return np.asarray(tensor.dequantize(), np.float64)


def _float(metadata: Mapping[str, Any], key: str) -> float:
    value = metadata.get(key)
    return float(value) if isinstance(value, np.floating) else 0.0


def _integer(metadata: Mapping[str, Any], key: str, missing: int = 0) -> int:
    value = metadata.get(key)
    return int(value) if isinstance(value, np.integer) else missing


@dataclass
class Sensitivities:
    """The cost of a squared error: of each column by tensor name, [experts, K], and that of a looked-up row.

    Sums are divided by all tokens, so that they contain how often an expert is used.
    """

    fisher: Mapping[str, Floats] = field(default_factory=dict)
    lookups: float = 0.0


def read_sensitivities(path: PathLike) -> Sensitivities:
    """The sensitivities in a file; none in a file that was measured without."""
    file = read_sums(path)
    tokens = max((float(sums.tokens.max()) for sums in file.sums.values()), default=0.0)
    measured = {
        name: (sums.fisher / tokens).astype(np.float32) for name, sums in file.sums.items() if sums.fisher is not None
    }
    return Sensitivities(measured, file.lookups / tokens if tokens else 0.0)

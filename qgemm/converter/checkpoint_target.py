"""A checkpoint as a target: a folder with model.safetensors, in the parts of a layout, and the config that names it.

Blocks of a matrix arrive in order; rows are buffered, then written to their offsets in each part. The folder takes its
place when all of its files are complete (files/folders.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial
from glob import escape, glob
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.format import Blocks, Format
from qgemm.errors import QgemmError, QuantizeError
from qgemm.files import safetensors as files
from qgemm.files.atomic import allocate, write_at
from qgemm.files.documents import json_object
from qgemm.files.folders import Create, replacing_folder
from qgemm.files.paths import PathLike, path_string, shown, shown_path, system_errors
from qgemm.tensor import Tensor

from . import array_weights
from .checkpoints.configs import CONFIGS, MODEL, SECTIONS
from .checkpoints.write import LAYOUTS, WEIGHT, Layout, Part, rows_of, written_by
from .gguf_to_folder import DTYPES
from .rules import Options, Step
from .targets import SAFE_TYPES, Append, CreateFile, Keys, Target, shape_of
from .weight import GROUP_FAMILY, SAFETENSORS

FILE = "model.safetensors"
BESIDE = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template*", "generation_config.json")
FOREIGN = ("*.safetensors.index.json", *(name for name in CONFIGS if name != MODEL))
BUFFER = 16 << 20  # bytes of blocks that are buffered before their rows are written
ALIGNED = 32  # rows per write: 32 zeros of any width fill whole words


PLAIN = "huggingface"  # the layout of a folder without quantized matrices, which a .gguf model becomes


def layout_named(name: str) -> Layout:
    """The layout of this name; QgemmError names all."""
    if name not in LAYOUTS:
        raise QgemmError(f"there is no layout {name!r}, only {', '.join([*LAYOUTS, PLAIN])}")
    return LAYOUTS[name]


def check_layout(options: Options) -> None:
    """QgemmError if the layout does not exist, or cannot store the type."""
    if options.layout == PLAIN:
        if str(options.type).lower() not in DTYPES:
            raise QgemmError(f"a folder of {PLAIN} has tensors of {', '.join(DTYPES)}, not of {options.type}")
    elif options.layout:
        check_type(layout_named(options.layout), options.type)


def check_type(layout: Layout, fmt: Format) -> None:
    """QgemmError unless the layout can store the format's blocks."""
    if not layout.holds(fmt):
        raise QgemmError(f"a checkpoint of {layout.name} does not hold {fmt}; it holds {written_by(layout)}")


def layout_target(layout: Layout, steps: Sequence[Step]) -> Target:
    """The target that writes a checkpoint's file in a layout and reads it back."""
    return Target(partial(_write, layout), partial(_read, layout, steps), None)


def check_steps(path: str, layout: Layout, steps: Sequence[Step]) -> None:
    """QgemmError for tensors that a checkpoint in this layout cannot hold."""
    quantized = [step for step in steps if step.format.family == GROUP_FAMILY]
    for step in steps:
        prefix = f"{shown_path(path)}: tensor {shown(step.weight.name)}"
        if step.format.family != GROUP_FAMILY and str(step.format) not in SAFE_TYPES:
            raise QgemmError(
                f"{prefix}: this kind of file has no type for {step.format}, only for {', '.join(SAFE_TYPES)}"
            )
        if step in quantized:
            check_type(layout, step.format)
            if not step.weight.name.endswith(WEIGHT):
                raise QgemmError(f"{prefix}: a matrix of {layout.name} has a name that ends in {WEIGHT}")
    kinds = {str(step.format) for step in quantized}
    if not quantized or (layout.one_setting and len(kinds) > 1):
        formats = ", ".join(sorted(kinds)) or "no quantized matrix"
        raise QgemmError(f"{shown_path(path)}: {layout.name} has matrices of one format, here are {formats}")


def check_folder(path: str, inputs: Iterable[PathLike]) -> None:
    """Refuse a folder that holds inputs of this command, or files that are read together with the new ones."""
    if not os.path.isdir(path):
        return
    for file in map(path_string, inputs):
        for name in (file, os.path.realpath(file)):
            with suppress(OSError):
                if os.path.samefile(os.path.dirname(name) or ".", path):
                    rule = f"is the folder of {shown_path(file)}, a file of this very command: write to another"
                    raise QgemmError(f"{shown_path(path)}: {rule}")
    with system_errors(path, "read"):
        for name in sorted(os.listdir(path)):
            if any(fnmatchcase(name, pattern) for pattern in FOREIGN):
                rule = f"holds {shown(name)} of another checkpoint, which is read with any weights in its folder"
                raise QgemmError(f"{shown_path(path)}: {rule}: remove it, or write to another folder")


def replacing_checkpoint(path: str, replace: bool) -> AbstractContextManager[Create]:
    """A function that creates the files of a checkpoint, which replaces the one in the folder at `path`."""
    return replacing_folder(path, MODEL, belongs, replace)


def belongs(name: str) -> bool:
    """Whether a file of this name belongs to a checkpoint that this module writes."""
    return name in (FILE, MODEL) or any(fnmatchcase(name, pattern) for pattern in BESIDE)


def write_beside(folder: str, layout: Layout, steps: Sequence[Step], source: str, create: Create) -> None:
    """Write the config, with the other keys of the source's, and copy the tokenizer files of a source in a folder."""
    source_folder = source if os.path.isdir(source) else os.path.dirname(source)
    config_path = os.path.join(source_folder, MODEL)
    config = json_object(config_path) if os.path.lexists(config_path) else {}
    config = {key: value for key, value in config.items() if key not in SECTIONS}
    modules = {
        step.weight.name.removesuffix(WEIGHT): step.format for step in steps if step.format.family == GROUP_FAMILY
    }
    plain = [
        step.weight.name.removesuffix(WEIGHT)
        for step in steps
        if step.format.family != GROUP_FAMILY and len(step.weight.shape) == 2 and step.weight.name.endswith(WEIGHT)
    ]
    config["quantization_config"] = layout.config(modules, plain)
    files = {MODEL: (json.dumps(config, indent=2) + "\n").encode()}
    for pattern in BESIDE:
        for path in glob(os.path.join(escape(source_folder), pattern)):
            if os.path.isfile(path) or not os.path.exists(path):  # a link to nothing is an error
                with system_errors(path, "read"), open(path, "rb") as file:
                    files[os.path.basename(path)] = file.read()
    write_files(folder, files, create)


def write_files(folder: str, files: Mapping[str, bytes], create: Create) -> None:
    """Write small files of a folder."""
    for name, data in sorted(files.items()):
        with create(os.path.join(folder, name)) as fd:
            write_at(fd, 0, memoryview(data))


def _parts(layout: Layout, steps: Sequence[Step]) -> dict[str, dict[str, Part]]:
    """The tensors of the file by name, for each tensor of the source by name."""
    tensors: dict[str, dict[str, Part]] = {}
    for step in steps:
        name = step.weight.name
        if step.format.family == GROUP_FAMILY:
            parts = layout.parts(step.format, *step.weight.shape)
            tensors[name] = {f"{name.removesuffix(WEIGHT)}.{suffix}": part for suffix, part in parts.items()}
        else:
            tensors[name] = {name: Part(str(step.format), shape_of(step))}
    return tensors


@contextmanager
def _write(layout: Layout, path: str, steps: Sequence[Step], keys: Keys, create: CreateFile) -> Iterator[Append]:
    """Write the file: plain tensors, and matrices in their parts."""
    parts = _parts(layout, steps)
    strings = {key.removeprefix(SAFETENSORS): value for key, value in keys.items() if isinstance(value, str)}
    named = {name: part for tensors in parts.values() for name, part in tensors.items()}
    described = {name: (part.type, part.shape) for name, part in named.items()}
    header, offsets, size = files.file_layout(described, {"format": "pt", **strings})
    with create(path) as fd:
        allocate(fd, size)
        write_at(fd, 0, memoryview(header))
        matrices: dict[str, _Matrix] = {}
        for step in steps:
            if step.format.family == GROUP_FAMILY:
                matrices[step.weight.name] = _Matrix(layout, step, parts[step.weight.name], offsets, fd)

        def append(name: str, fmt: Format, blocks: Blocks) -> None:
            if name in matrices:
                matrices[name].append(blocks)
            else:
                offsets[name] += write_at(fd, offsets[name], blocks)

        yield append


class _Matrix:
    """A matrix that is being written: blocks not yet written, and the offsets of its parts in the file."""

    def __init__(
        self, layout: Layout, step: Step, parts: Mapping[str, Part], offsets: Mapping[str, int], fd: int
    ) -> None:
        self.layout, self.format, self.parts, self.offsets, self.fd = layout, step.format, parts, offsets, fd
        self.name = step.weight.name
        self.n, self.k = step.weight.shape
        self.width = self.k // self.format.weights  # blocks of a row
        self.waiting: list[Blocks] = []
        self.done = 0  # rows written
        for part, array in layout.constants(self.format, self.n, self.k).items():
            write_at(fd, offsets[self._full(part)], array)

    def _full(self, part: str) -> str:
        return f"{self.name.removesuffix(WEIGHT)}.{part}"

    def append(self, blocks: Blocks) -> None:
        """Buffer blocks; write whole rows once the buffer is full or the matrix complete."""
        self.waiting.append(blocks.reshape(-1))
        count = sum(map(len, self.waiting))
        if count * self.format.block_bytes < BUFFER and self.done + count // self.width < self.n:
            return
        whole = np.concatenate(self.waiting)
        rows = count // self.width
        rows = rows if self.done + rows == self.n else rows // ALIGNED * ALIGNED
        self.waiting = [whole[rows * self.width :]]
        if rows:
            self._rows(whole[: rows * self.width].reshape(rows, self.width))

    def _rows(self, blocks: Blocks) -> None:
        """Write some rows of W into every part."""
        rows = rows_of(self.format, blocks, self.k)
        if rows.zeros.max() >= 2**self.format.code_bits:
            rule = f"a zero of {rows.zeros.max()} is no code of {self.format.code_bits} bits"
            raise QuantizeError(f"tensor {shown(self.name)}: {rule}, as the zeros of {self.layout.name} are")
        for part, array in self.layout.rows(self.format, rows).items():
            self._put(self.parts[self._full(part)], self.offsets[self._full(part)], array)
        self.done += len(blocks)

    def _put(self, part: Part, offset: int, array: NDArray[Any]) -> None:
        """Write rows or columns of a part, which follow those of the rows of W already written."""
        array = np.ascontiguousarray(array)
        first = self.done * (part.shape[1] if part.across else part.shape[0]) // self.n
        stride = prod(part.shape[1:]) * array.itemsize
        if not part.across:
            write_at(self.fd, offset + first * stride, array)
        elif array.shape[1] == part.shape[1]:
            write_at(self.fd, offset, array)
        else:
            for row, values in enumerate(array):
                write_at(self.fd, offset + row * stride + first * array.itemsize, values)


def _read(layout: Layout, steps: Sequence[Step], path: str, fd: int, closing: ExitStack) -> Mapping[str, Tensor | None]:
    """Read back the tensors of a written file, matrices in the formats of their steps."""
    file = files.SafetensorsFile(path, fd)
    closing.callback(file.close)
    stored = {name: array_weights.Stored(file, entry) for name, entry in file.tensors.items()}
    tensors: dict[str, Tensor | None] = {}
    for step in steps:
        name = step.weight.name
        if step.format.family == GROUP_FAMILY:
            tensors[name] = _read_back(layout, name, stored, step.format)
        else:
            tensors[name] = array_weights.weight_from_stored(name, stored[name]).tensor
    return tensors


def _read_back(layout: Layout, name: str, stored: Mapping[str, array_weights.Stored], fmt: Format) -> Tensor:
    """A written matrix as a tensor of its step's format."""
    matrix = layout.matrix(name.removesuffix(WEIGHT), stored, fmt)
    width = matrix.k // fmt.weights

    def read(start: int, stop: int) -> Blocks:
        aligned = matrix.step * width  # blocks of `step` rows, the fewest that can be read
        first, last = start // aligned * matrix.step, min(-(-stop // aligned) * matrix.step, matrix.n)
        return matrix.blocks(fmt, first, last).reshape(-1)[start - first * width :][: stop - start]

    return Tensor(fmt, (matrix.n, matrix.k), lambda: read(0, matrix.n * width).reshape(-1, width), name, read)

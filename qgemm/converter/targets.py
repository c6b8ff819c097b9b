"""The files that are written: each takes the blocks of its tensors in order, one range at a time.

Before a file replaces an old one, the strict reader reads it back through its descriptor, and the bytes of every tensor
are compared with the hash of the bytes that were to be written.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from math import prod
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
from numpy.lib import format as npy_format

from qgemm.codec.format import CHUNK, Blocks, Format
from qgemm.errors import QgemmError
from qgemm.files import safetensors as layout
from qgemm.files.atomic import allocate, write_at
from qgemm.files.folders import Create
from qgemm.files.gguf.layout import SPLIT_COUNT
from qgemm.files.gguf.parts import codebook_of, fields_of, longest_part
from qgemm.files.gguf.reader import GGUFFile
from qgemm.files.gguf.shard import Shard
from qgemm.files.gguf.writer import drafting
from qgemm.files.npz import open_npz
from qgemm.files.paths import PathLike, path_string, shown, shown_path
from qgemm.parallel import workers
from qgemm.tensor import Tensor

from . import array_weights
from .rules import Step
from .tensor_names import check_names
from .weight import SAFETENSORS

Append = Callable[[str, Format, Blocks], None]
CreateFile = Callable[[str], AbstractContextManager[int]]
Keys = Mapping[str, Any]


class Write(Protocol):
    """Writes one kind of file: a context that takes blocks. keys: its metadata; create: opens the file."""

    def __call__(
        self, path: str, steps: Sequence[Step], keys: Keys, create: CreateFile
    ) -> AbstractContextManager[Append]: ...


class Target(NamedTuple):
    """A kind of file.

    read: (path, descriptor, stack of things to close) -> the tensors in it, by name.
    types: the types that a tensor may have there; None: any type of ggml or kbit.
    """

    write: Write
    read: Callable[[str, int, ExitStack], Mapping[str, Tensor | None]]
    types: frozenset[str] | None


def target_for(path: str) -> Target:
    """The target for the suffix of a path."""
    for suffix, target in TARGETS.items():
        if path.lower().endswith(suffix):
            return target
    raise QgemmError(f"{shown_path(path)}: the name must end in {', '.join(TARGETS)}")


def is_gguf_path(path: PathLike) -> bool:
    """Whether the path has the suffix of models that llama.cpp loads."""
    return path_string(path).lower().endswith(".gguf")


def check_target(path: str, steps: Sequence[Step]) -> None:
    """Refuse tensors that the file at a path cannot hold."""
    types = target_for(path).types
    if types is None:
        check_names(path, [(step.weight.name, longest_part(step.format)) for step in steps])
        return
    for step in steps:
        if str(step.format) not in types:
            prefix = f"{shown_path(path)}: tensor {shown(step.weight.name)}"
            raise QgemmError(
                f"{prefix}: this kind of file has no type for {step.format}, only for {', '.join(sorted(types))}"
            )


@contextmanager
def verified_file(path: str, steps: Sequence[Step], keys: Keys, target: Target, create: Create) -> Iterator[Append]:
    """Write a file, then verify the bytes that the disk holds."""
    hashes = {step.weight.name: hashlib.sha256() for step in steps}

    def check(fd: int) -> None:
        written = {name: value.hexdigest() for name, value in hashes.items()}
        with ExitStack() as closing:
            stored = digests(target.read(path, fd, closing))
        for name in {**written, **stored}:
            if written.get(name) != stored.get(name):
                raise QgemmError(f"{shown_path(path)}: tensor {shown(name)}: the disk does not hold what was written")

    with target.write(path, steps, keys, partial(create, check=check)) as append:

        def hashing(name: str, fmt: Format, blocks: Blocks) -> None:
            hashes[name].update(np.ascontiguousarray(blocks).view(np.uint8).data)
            append(name, fmt, blocks)

        yield hashing


def digests(tensors: Mapping[str, Tensor | None]) -> dict[str, str]:
    """The SHA-256 of each tensor's bytes by name; every tensor that this library writes is a Tensor."""

    def digest(tensor: Tensor | None) -> str:
        assert tensor is not None, "this library writes no others"
        sha256 = hashlib.sha256()
        count = prod(tensor.shape) // tensor.format.weights
        step = max(1, CHUNK // tensor.format.weights)
        for start in range(0, count, step):
            sha256.update(tensor.read(start, min(start + step, count)).view(np.uint8).data)
        return sha256.hexdigest()

    with ThreadPoolExecutor(workers()) as pool:
        return dict(zip(tensors, pool.map(digest, tensors.values()), strict=True))


# ---------------------------------------------------------------- .gguf


@contextmanager
def write_gguf(path: str, steps: Sequence[Step], keys: Keys, create: CreateFile) -> Iterator[Append]:
    """Tensors of any format, and metadata: a whole model, or one shard of it."""

    def none() -> Blocks:
        raise AssertionError("a draft asks for no blocks")

    tensors = {step.weight.name: Tensor(step.format, step.weight.shape, none) for step in steps}
    with drafting(path, tensors, keys, create, part=int(keys.get(SPLIT_COUNT, 1)) > 1) as draft:
        for step in steps:
            if step.format.stored_in_parts:
                draft.append(*codebook_of(step.weight.name, step.format))

        def append(name: str, fmt: Format, blocks: Blocks) -> None:
            for part, data in fields_of(name, fmt, blocks).items():
                draft.append(part, data)

        yield append


def read_gguf(path: str, fd: int, closing: ExitStack) -> Mapping[str, Tensor]:
    """The tensors of a file; those stored in parts are joined."""
    return closing.enter_context(GGUFFile([Shard(path, fd, copy=True)], part=True))


# ---------------------------------------------------------------- arrays


@contextmanager
def write_safetensors(path: str, steps: Sequence[Step], keys: Keys, create: CreateFile) -> Iterator[Append]:
    """Plain tensors, and the strings of the metadata."""
    tensors = {step.weight.name: (str(step.format), shape_of(step)) for step in steps}
    strings = {key.removeprefix(SAFETENSORS): v for key, v in keys.items() if isinstance(v, str)}
    header, offsets, size = layout.file_layout(tensors, strings)
    with create(path) as fd:
        allocate(fd, size)
        write_at(fd, 0, memoryview(header))

        def append(name: str, fmt: Format, blocks: Blocks) -> None:
            offsets[name] += write_at(fd, offsets[name], blocks)

        yield append


def read_safetensors(path: str, fd: int, closing: ExitStack) -> Mapping[str, Tensor | None]:
    """The tensors of a file."""
    file = layout.SafetensorsFile(path, fd)
    closing.callback(file.close)
    return {
        name: array_weights.weight_from_stored(name, array_weights.Stored(file, entry)).tensor
        for name, entry in file.tensors.items()
    }


@contextmanager
def write_npz(path: str, steps: Sequence[Step], keys: Keys, create: CreateFile) -> Iterator[Append]:
    """Arrays, uncompressed."""
    shapes = {step.weight.name: shape_of(step) for step in steps}
    with (
        create(path) as fd,
        open(fd, "r+b", closefd=False) as file,
        zipfile.ZipFile(file, "w", allowZip64=True) as archive,
    ):
        member: IO[bytes] | None = None
        left = 0

        def append(name: str, fmt: Format, blocks: Blocks) -> None:
            nonlocal member, left
            if member is None:
                info = zipfile.ZipInfo(f"{name}.npy")  # dated 1980, so that the bytes do not depend on the time
                member, left = archive.open(info, "w", force_zip64=True), prod(shapes[name])
                head = {"descr": fmt.dtype.str, "fortran_order": False, "shape": shapes[name]}
                npy_format.write_array_header_1_0(member, head)
            member.write(np.ascontiguousarray(blocks).view(np.uint8).data)
            left -= blocks.size
            if not left:
                member.close()
                member = None

        try:
            yield append
        except BaseException:
            if member is not None:  # closing the archive with an open member fails, which would hide this error
                with suppress(Exception):
                    member.close()
            raise


def read_npz(path: str, fd: int, closing: ExitStack) -> Mapping[str, Tensor | None]:
    """The arrays of an archive."""
    return {name: array_weights.weight_from_npy(array).tensor for name, array in open_npz(path, closing, fd).items()}


def shape_of(step: Step) -> tuple[int, ...]:
    """The shape of a tensor in a file without a limit on dimensions."""
    return step.weight.original or step.weight.shape


SAFE_TYPES = sorted(layout.DTYPES)
TARGETS = {
    ".gguf": Target(write_gguf, read_gguf, None),
    ".safetensors": Target(write_safetensors, read_safetensors, frozenset(SAFE_TYPES)),
    ".npz": Target(write_npz, read_npz, frozenset({"F64", "F32", "F16", "I64", "I32", "I16", "I8"})),  # NumPy's own
}

"""The files that are written: each takes the blocks of its tensors in order, a range at a time.

Before a file takes its place it is opened again by the strict reader, and the bytes of every tensor are held against
the hash of what was to be written.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from math import prod
from typing import IO, Any, Protocol

import numpy as np
from gguf.constants import GGML_QUANT_VERSION, Keys, LlamaFileType
from numpy.lib import format as npy_format

from qgemm.codec.format import CHUNK, Blocks, Format
from qgemm.errors import QgemmError
from qgemm.files import safetensors as layout
from qgemm.files.gguf.parts import ARCHITECTURE, OURS, codebook_of, fields_of
from qgemm.files.gguf.writer import drafting
from qgemm.files.paths import allocate, replacing, shown, shown_path, system_errors, write_at
from qgemm.parallel import workers
from qgemm.tensor import Tensor

from .rules import Step
from .sources import open_source
from .weight import SAFETENSORS, Source

Append = Callable[[str, Format, Blocks], None]


class Target(Protocol):
    """How a kind of file is written: a context that takes blocks, and replaces the file when all went well."""

    def __call__(
        self, path: str, steps: Sequence[Step], source: Source, fmt: Format, check: Callable[[str], None]
    ) -> AbstractContextManager[Append]: ...


def target_of(path: str) -> Target:
    """By the end of the path."""
    for suffix, target in TARGETS.items():
        if path.endswith(suffix):
            return target
    raise QgemmError(f"{shown_path(path)}: the name must end in {', '.join(TARGETS)}")


@contextmanager
def checked(path: str, steps: Sequence[Step], source: Source, fmt: Format) -> Iterator[Append]:
    """A file of any kind, and its hashes in `digests` once the body is done."""
    hashes = {step.weight.name: hashlib.sha256() for step in steps}

    def check(temporary: str) -> None:
        written = {name: value.hexdigest() for name, value in hashes.items()}
        found = dict(digests(temporary, os.path.splitext(path)[1]))
        for name in {**written, **found}:
            if written.get(name) != found.get(name):
                raise QgemmError(f"{shown_path(path)}: tensor {shown(name)}: the disk does not hold what was written")

    with target_of(path)(path, steps, source, fmt, check) as append:

        def hashing(name: str, fmt: Format, blocks: Blocks) -> None:
            hashes[name].update(np.ascontiguousarray(blocks).view(np.uint8).data)
            append(name, fmt, blocks)

        yield hashing


def digests(path: str, kind: str = "") -> Iterator[tuple[str, str]]:
    """By name, the SHA-256 of each tensor's bytes in a file; `kind` stands for the end of its name."""

    def digest(tensor: Tensor) -> str:
        found = hashlib.sha256()
        count = prod(tensor.shape) // tensor.format.weights
        step = max(1, CHUNK // tensor.format.weights)
        for start in range(0, count, step):
            found.update(tensor.read(start, min(start + step, count)).view(np.uint8).data)
        return found.hexdigest()

    with open_source(path, kind) as source, ThreadPoolExecutor(workers()) as pool:
        tensors = {name: weight.tensor for name, weight in source.weights.items()}
        assert None not in tensors.values(), "this library writes no others"
        yield from zip(tensors, pool.map(digest, tensors.values()), strict=True)


# ---------------------------------------------------------------- .gguf


@contextmanager
def gguf(
    path: str, steps: Sequence[Step], source: Source, fmt: Format, check: Callable[[str], None]
) -> Iterator[Append]:
    """Tensors of any format, and the metadata of the source."""

    def none() -> Blocks:
        raise AssertionError("a draft asks for no blocks")

    tensors = {step.weight.name: Tensor(step.format, step.weight.shape, none) for step in steps}
    with drafting(path, tensors, metadata(source, steps, fmt), check) as draft:
        for step in steps:
            if step.format.stored_in_parts:
                draft.append(*codebook_of(step.weight.name, step.format))

        def append(name: str, fmt: Format, blocks: Blocks) -> None:
            for part, data in fields_of(name, fmt, blocks).items():
                draft.append(part, data)

        yield append


def metadata(source: Source, steps: Sequence[Step], fmt: Format) -> Mapping[str, Any]:
    """The source's, with what the file's types make of the two keys that speak of them."""
    if source.is_gguf and all(step.copied for step in steps):
        return source.metadata
    model = {} if source.is_gguf else {ARCHITECTURE: OURS}  # nobody shall take it for a model that can be run
    changed: dict[str, Any] = {Keys.General.FILE_TYPE: np.uint32(file_type(fmt))}
    if any(not step.format.plain for step in steps):
        changed[Keys.General.QUANTIZATION_VERSION] = np.uint32(GGML_QUANT_VERSION)
    return {**model, **source.metadata, **changed}


def file_type(fmt: Format) -> int:
    """llama.cpp's number for a file of mostly this type; GUESSED for what it has no number for."""
    names = (f"MOSTLY_{fmt}", f"ALL_{fmt}", f"MOSTLY_{fmt}_MOE")
    return next((kind.value for kind in LlamaFileType if kind.name in names), LlamaFileType.GUESSED.value)


# ---------------------------------------------------------------- arrays


@contextmanager
def safetensors(
    path: str, steps: Sequence[Step], source: Source, fmt: Format, check: Callable[[str], None]
) -> Iterator[Append]:
    """Plain tensors, and the strings of the metadata."""
    _check_plain(path, steps, {str(kind) for kind in layout.DTYPES})
    tensors = {step.weight.name: (str(step.format), step.weight.shape) for step in steps}
    strings = {key.removeprefix(SAFETENSORS): v for key, v in source.metadata.items() if isinstance(v, str)}
    start, places, size = layout.laid_out(tensors, strings)
    with system_errors(path, "written"), replacing(path) as temporary, open(temporary, "r+b", buffering=0) as file:
        allocate(file.fileno(), size)
        write_at(file.fileno(), 0, memoryview(start))

        def append(name: str, fmt: Format, blocks: Blocks) -> None:
            places[name] += write_at(file.fileno(), places[name], blocks)

        yield append
        os.fsync(file.fileno())
        check(temporary)


@contextmanager
def npz(
    path: str, steps: Sequence[Step], source: Source, fmt: Format, check: Callable[[str], None]
) -> Iterator[Append]:
    """Arrays, uncompressed; bfloat16, which NumPy does not have, is refused."""
    _check_plain(path, steps, {"F64", "F32", "F16", "I64", "I32", "I16", "I8"})
    shapes = {step.weight.name: step.weight.shape for step in steps}
    with system_errors(path, "written"), replacing(path) as temporary, open(temporary, "r+b") as file:
        with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
            member: IO[bytes] | None = None
            left = 0

            def append(name: str, fmt: Format, blocks: Blocks) -> None:
                nonlocal member, left
                if member is None:
                    info = zipfile.ZipInfo(f"{name}.npy")  # of 1980: the same bytes at any time
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
                if member is not None:  # the archive could not be closed otherwise, and would say so instead
                    with suppress(Exception):
                        member.close()
                raise
        file.flush()
        os.fsync(file.fileno())
        check(temporary)


def _check_plain(path: str, steps: Sequence[Step], kinds: Collection[str]) -> None:
    """Refuse what such a file has no type for."""
    for step in steps:
        if str(step.format) not in kinds:
            who = f"{shown_path(path)}: tensor {shown(step.weight.name)}"
            raise QgemmError(f"{who}: such a file has no type for {step.format}, only for {', '.join(sorted(kinds))}")


TARGETS: dict[str, Target] = {".gguf": gguf, ".safetensors": safetensors, ".npz": npz}

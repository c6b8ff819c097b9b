"""The conversion: plan, encode in parallel, write, verify, report."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from qgemm.codec.format import Blocks, Format
from qgemm.errors import QgemmError, QuantizeError, UnsupportedError
from qgemm.files.atomic import replacing
from qgemm.files.folders import Create, replacing_files
from qgemm.files.gguf.parts import longest_part
from qgemm.files.outputs import check_output
from qgemm.files.paths import PathLike, path_string, shown, shown_path
from qgemm.files.shards import ShardName
from qgemm.parallel import workers

from .checkpoint_target import (
    FILE,
    PLAIN,
    check_folder,
    check_steps,
    layout_named,
    layout_target,
    replacing_checkpoint,
    write_beside,
    write_files,
)
from .metadata import metadata, shard_keys
from .notes import notes
from .range_encoding import (
    EncodedRange,
    Encoder,
    UnencodableRange,
    choose_encoder,
    encode_range,
    find_faults,
    range_size,
    ranges,
)
from .report import Line, relative, report_line
from .rules import Options, Step, plan
from .targets import Append, Keys, Target, check_target, is_gguf_path, target_for, verified_file
from .weight import Source

if TYPE_CHECKING:
    from .device import Device

BACKENDS = ("cpu", "cuda")
GGUF = ".gguf"
AHEAD = 2  # ranges per thread that are being encoded or waiting to be written

# Bytes of one allocation that makes glibc keep freed memory up to twice its size, instead of returning it to the OS.
# The temporary arrays of all ranges then reuse the same pages, which saves a third of the time on 2 cores.
HEAP = 24 << 20

ConvertRange = Callable[[Step, int, int], EncodedRange]
Job = TypeVar("Job")
Result = TypeVar("Result")


def convert(
    source: Source,
    target: PathLike,
    options: Options,
    *,
    dry_run: bool = False,
    threads: int | None = None,
    backend: str = "cpu",
    max_error: float | None = None,
    force: bool = False,
    advance: Callable[[int], object] = lambda nbytes: None,
    note: Callable[[str], object] = lambda text: None,
) -> list[Line]:
    """Write the tensors of an open source to `target` in the types that `options` give them; returns a line for each.

    options.keep_split: one file per shard of the source, STEM-00001-of-0000N.gguf. options.layout: a folder.
    force: replace an existing file, folder or set of shards, whole or not at all. A file of the source is never
    replaced.
    backend: "cpu", or "cuda" to encode on the current CUDA device, into the same bytes; copied codes, searches, f32,
    f16 and bf16 stay on the CPU. threads: one per core by default, at most 4 with a GPU.
    advance: called with the bytes of the source that were converted. note: called with each sentence of notes.py.

    Raises QuantizeError for weights that are not finite or that a format cannot hold, UnsupportedError without a GPU,
    QgemmError for other faults; an old file at `target` stays intact then.
    """
    _check_arguments(backend, threads, max_error, dry_run)
    path = path_string(target)
    steps = plan(source, options)
    for sentence in notes(source, options, steps):
        note(sentence)
    files = _checked_files(path, steps, source, options)
    device = _device() if backend == "cuda" else None
    if device is not None and not any(device.supports(step, choose_encoder(step, options)) for step in steps):
        note("--backend cuda encodes no tensor: copies, plain types and unweighted searches stay on the CPU")
    if dry_run:
        return [report_line(step, None) for step in steps]
    lines = []
    with ExitStack() as writing:
        create = writing.enter_context(_creating(path, files, bool(options.layout), force))
        if options.layout == PLAIN:
            write_files(path, source.beside, create)
        elif options.layout:
            write_beside(path, layout_named(options.layout), steps, source.path, create)
        appends = [writing.enter_context(verified_file(*file, create)) for file in files]
        shard_of = {
            step.weight.name: append for file, append in zip(files, appends, strict=True) for step in file.steps
        }

        def append(name: str, fmt: Format, blocks: Blocks) -> None:
            shard_of[name](name, fmt, blocks)

        for step, error in _convert_steps(steps, options, threads or workers(), device, append, advance, source.path):
            lines.append(report_line(step, error))
            if max_error is not None and not error <= max_error:
                prefix = f"{shown_path(source.path)}: tensor {shown(step.weight.name)}"
                raise QuantizeError(f"{prefix}: relative RMS error {error:.3g} in {step.format} is above {max_error}")
    return lines


def _check_arguments(backend: str, threads: int | None, max_error: float | None, dry_run: bool) -> None:
    """UnsupportedError for arguments that no source and no target would fit."""
    if backend not in BACKENDS:
        raise UnsupportedError(f"there is no backend {backend!r}, only {' and '.join(map(repr, BACKENDS))}")
    if threads is not None and threads < 1:
        raise UnsupportedError(f"a conversion needs a thread at least, got {threads}")
    if max_error is not None and dry_run:
        raise UnsupportedError("a dry run computes no errors, so that none can be above the largest (max_rel_error)")
    if max_error is not None and not max_error >= 0:
        raise UnsupportedError(f"the largest relative error that is let pass is a number from 0 on, got {max_error}")


def _checked_files(path: str, steps: Sequence[Step], source: Source, options: Options) -> list[_File]:
    """The files to write; an error if one cannot hold its tensors, or is a file of the source."""
    if options.layout in ("", PLAIN):
        check_target(os.path.join(path, FILE) if options.layout else path, steps)
    else:
        check_steps(path, layout_named(options.layout), steps)
    files = _files(path, steps, source, options)
    if options.layout:
        check_folder(path, source.files)
    else:
        for file in files:
            check_output(file.path, source.files)
    return files


def _creating(path: str, files: Sequence[_File], folder: bool, force: bool) -> AbstractContextManager[Create]:
    """The function that creates the output: a file, a folder, or several shards."""
    if folder:
        return replacing_checkpoint(path, force)
    if len(files) > 1:
        return replacing_files([file.path for file in files], force)
    return nullcontext(partial(replacing, replace=force))


class _File(NamedTuple):
    """One file to write: its tensors and its metadata."""

    path: str
    steps: Sequence[Step]
    keys: Keys
    target: Target


def _files(path: str, steps: Sequence[Step], source: Source, options: Options) -> list[_File]:
    """The file at a path, or its shards: as the source has them, or as many as a largest size demands."""
    keys = metadata(source, steps, options)
    if options.layout:
        if option := splitting(options):
            raise QgemmError(f"{shown_path(path)}: {option} is for .gguf files, not for checkpoints of a --layout")
        strings = {} if source.is_gguf else source.metadata
        plain = options.layout == PLAIN
        target = target_for(FILE) if plain else layout_target(layout_named(options.layout), steps)
        return [_File(os.path.join(path, FILE), steps, strings, target)]
    option = splitting(options)
    if options.keep_split and options.split_size:
        raise QgemmError(f"{shown_path(path)}: --keep-split and --split-max-size each choose the shards: give one")
    if not option:
        return [_File(path, steps, keys, target_for(path))]
    numbers = shards_of(steps, options)
    count = 1 + max(numbers, default=0)
    if (count == 1 and options.keep_split) or not is_gguf_path(path):
        rule = "is no split model" if is_gguf_path(path) else f"becomes {shown_path(path)}, which is no {GGUF} file"
        raise QgemmError(f"{shown_path(source.path)}: {rule}: {option} is for a {GGUF} file in shards")
    if count == 1:
        return [_File(path, steps, keys, target_for(path))]
    if any(longest_part(step.format) for step in steps):
        raise QgemmError(f"{shown_path(path)}: kbit tensors are not written to shards, nor are others in parts")
    files = []
    for number in range(count):
        position = shard_keys(number, count, len(steps))
        name = ShardName(path[: -len(GGUF)], number + 1, count, path[-len(GGUF) :]).path(number + 1)
        own = [step for step, shard in zip(steps, numbers, strict=True) if shard == number]
        files.append(_File(name, own, position if number else {**keys, **position}, target_for(name)))
    return files


def splitting(options: Options) -> str:
    """The option by which the output has shards, "" without one."""
    return "--keep-split" if options.keep_split else "--split-max-size" if options.split_size else ""


def shards_of(steps: Sequence[Step], options: Options) -> list[int]:
    """The number of each tensor's shard: that of the source, or the next where a shard would exceed the largest size.

    A tensor larger than that has a shard of its own.
    """
    if options.keep_split:
        return [step.weight.shard for step in steps]
    numbers, number, size = [], 0, 0
    for step in steps:
        if size and size + step.nbytes > options.split_size:
            number, size = number + 1, 0
        size += step.nbytes
        numbers.append(number)
    return numbers


def _convert_steps(
    steps: Sequence[Step],
    options: Options,
    threads: int,
    device: Device | None,
    append: Append,
    advance: Callable[[int], object],
    path: str,
) -> Iterator[tuple[Step, float]]:
    """Convert and append all steps; yields each when its blocks are written, with its relative RMS error."""
    encoders = [choose_encoder(step, options) for step in steps]
    pairs = list(zip(steps, encoders, strict=True))
    if device is not None and not any(encoder.search and not device.supports(step, encoder) for step, encoder in pairs):
        threads = min(max(threads, 2), device.streams)  # one thread reads while another waits for the GPU
    works = [_range_work(step, encoder, threads, device) for step, encoder in pairs]
    jobs = (
        (convert_range, step, start, stop)
        for step, (convert_range, parts) in zip(steps, works, strict=True)
        for start, stop in parts
    )
    error = power = 0.0
    try:
        for (_, step, start, stop), encoded in ordered_results(lambda job: job[0](*job[1:]), jobs, threads):
            append(step.weight.name, step.format, encoded.blocks)
            error, power = error + encoded.error, power + encoded.power
            advance((stop - start) * step.weight.nbytes // step.weight.size)
            if stop == step.weight.size:
                yield step, relative(error, power)
                error = power = 0.0
    except UnencodableRange as refused:
        raise _refusal(path, refused.step, options) from None


def _device() -> Device:
    """The current CUDA device. Its module, which needs the CUDA backend, is imported here."""
    from .device import Device

    return Device()


def _range_work(
    step: Step, encoder: Encoder, threads: int, device: Device | None
) -> tuple[ConvertRange, list[tuple[int, int]]]:
    """The function that converts a range of a step, and the step's ranges."""
    if device is not None and device.supports(step, encoder):
        return partial(device.encode_range, importance=encoder.importance), ranges(step, device.range, encoder.search)
    return partial(encode_range, encode=encoder.encode), ranges(step, range_size(threads), encoder.search)


def ordered_results(work: Callable[[Job], Result], jobs: Iterable[Job], threads: int) -> Iterator[tuple[Job, Result]]:
    """Each job with its result, in order; threads run ahead of the consumer by at most AHEAD jobs each."""
    waiting: deque[tuple[Job, Future[Result]]] = deque()
    np.empty(HEAP, np.uint8)  # freed at once: see HEAP
    pool = ThreadPoolExecutor(threads)
    try:
        for job in jobs:
            waiting.append((job, pool.submit(work, job)))
            if len(waiting) > AHEAD * threads:
                first, future = waiting.popleft()
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _refusal(path: str, step: Step, options: Options) -> QuantizeError:
    """The error for a tensor with faulty weights: reads all of it, to count them."""
    weight, fmt = step.weight, step.format
    encoder = choose_encoder(step, options)
    count, position, reason = 0, -1, ""
    for start, stop in ranges(step, range_size(workers()), encoder.search):
        faults = find_faults(step, start, stop, encoder.encode)
        if faults is None or (reason and faults[0] != reason):
            continue
        reason, mask = faults
        if position < 0:
            position = start + int(mask.argmax()) * ((stop - start) // mask.size)
        count += int(np.count_nonzero(mask))
    index = [int(i) for i in np.unravel_index(position, weight.shape)]
    noun = "weight" if "NaN" in reason or fmt.plain else "block"
    number = f"{count} {noun} is" if count == 1 else f"{count} {noun}s are"
    return QuantizeError(f"{shown_path(path)}: tensor {shown(weight.name)}: {number} {reason}, the first at {index}")

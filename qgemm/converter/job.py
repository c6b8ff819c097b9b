"""The conversion: plan, stream, check, report."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from qgemm.codec.format import Blocks, Format
from qgemm.errors import QgemmError, QuantizeError, UnsupportedError
from qgemm.files.atomic import exists
from qgemm.files.gguf.parts import longest_part
from qgemm.files.outputs import check_output
from qgemm.files.paths import PathLike, path_string, shown, shown_path, system_errors
from qgemm.files.shards import ShardName
from qgemm.parallel import workers

from .checkpoint_target import FILE, check_steps, layout_named, target_of_layout, write_beside
from .encode import Encoder, Piece, Unfit, encoder, faults, piece, ranges, share
from .metadata import metadata, shard_keys
from .report import Line, line, relative
from .rules import Options, Step, planned
from .targets import Append, Keys, Target, check_target, checked, target_of
from .weight import Source

if TYPE_CHECKING:
    from .device import Device

BACKENDS = ("cpu", "cuda")
GGUF = ".gguf"
AHEAD = 2  # ranges in the making, or made and not yet written, for each thread

# glibc gives memory back to the system when more than twice the largest allocation so far is free. Once this much
# was, the temporary arrays of all ranges share the same pages, which saves a third of the time on 2 cores.
HEAP = 24 << 20

Make = Callable[[Step, int, int], Piece]
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
) -> list[Line]:
    """Write the tensors of an open source to `target` in the types that `options` give them; a line for each.

    With options.keep_split a file for each shard of the source, STEM-00001-of-0000N.gguf, each whole or not at all.
    force: replace a file that is there, as a whole or not at all. One of the source's own is never replaced.
    backend: "cpu", or "cuda" to encode on the current CUDA device, into the same file; the rest stays on the CPU:
    codes that are copied, searches, f32, f16 and bf16. threads: default one for each core, at most 4 beside a GPU.
    advance is told the bytes of the source that were dealt with.

    Raises QuantizeError for weights that are not finite or that a format cannot hold, UnsupportedError where there is
    no GPU, QgemmError for what else is wrong; then an old file at `target` is intact.
    """
    if backend not in BACKENDS:
        raise UnsupportedError(f"there is no backend {backend!r}, only {' and '.join(map(repr, BACKENDS))}")
    if max_error is not None and not max_error >= 0:
        raise UnsupportedError(f"the largest relative error that is let pass is a number from 0 on, got {max_error}")
    path = path_string(target)
    steps = planned(source, options)
    layout = layout_named(options.layout) if options.layout else None
    if layout is None:
        check_target(path, steps)
    else:
        check_steps(path, layout, steps)
    files = _files(path, steps, source, options)
    if layout is not None and not os.path.isdir(path):
        if dry_run:
            return [line(step, None) for step in steps]
        with system_errors(path, "made"):
            os.makedirs(path)
    for each in files:
        check_output(each.path, source.files)
        if not (force or dry_run) and os.path.exists(each.path):
            raise exists(shown_path(each.path))
    device = _device() if backend == "cuda" else None
    if dry_run:
        return [line(step, None) for step in steps]
    lines = []
    with ExitStack() as writing:
        appends = [writing.enter_context(checked(*each, force)) for each in files]
        shard_of = {
            step.weight.name: append for each, append in zip(files, appends, strict=True) for step in each.steps
        }

        def append(name: str, fmt: Format, blocks: Blocks) -> None:
            shard_of[name](name, fmt, blocks)

        for step, error in _converted(steps, options, threads or workers(), device, append, advance, source.path):
            lines.append(line(step, error))
            if max_error is not None and not error <= max_error:
                who = f"{shown_path(source.path)}: tensor {shown(step.weight.name)}"
                raise QuantizeError(f"{who}: relative RMS error {error:.3g} in {step.format} is above {max_error}")
    if layout is not None:
        write_beside(path, layout, steps, source.path)
    return lines


class _File(NamedTuple):
    """One file to write: its tensors and its metadata."""

    path: str
    steps: Sequence[Step]
    keys: Keys
    target: Target


def _files(path: str, steps: Sequence[Step], source: Source, options: Options) -> list[_File]:
    """The file at a path, or one for each of the source's shards with the numbers of shards in its name."""
    keys = metadata(source, steps, options)
    if options.layout:
        if options.keep_split:
            raise QgemmError(f"{shown_path(path)}: --keep-split is for .gguf files, not for checkpoints of a --layout")
        strings = {} if source.is_gguf else source.metadata
        target = target_of_layout(layout_named(options.layout), steps)
        return [_File(os.path.join(path, FILE), steps, strings, target)]
    if not options.keep_split:
        return [_File(path, steps, keys, target_of(path))]
    count = 1 + max((step.weight.shard for step in steps), default=0)
    if count == 1 or not path.endswith(GGUF):
        rule = "is no split model" if count == 1 else f"becomes {shown_path(path)}, which is no {GGUF} file"
        raise QgemmError(f"{shown_path(source.path)}: {rule}: --keep-split is for a {GGUF} file in shards")
    if any(longest_part(step.format) for step in steps):
        raise QgemmError(f"{shown_path(path)}: kbit tensors are not written to shards, nor are others in parts")
    found = []
    for number in range(count):
        place = shard_keys(number, count, len(steps))
        name = ShardName(path.removesuffix(GGUF), number + 1, count, GGUF).path(number + 1)
        own = [step for step in steps if step.weight.shard == number]
        found.append(_File(name, own, place if number else {**keys, **place}, target_of(name)))
    return found


def _converted(
    steps: Sequence[Step],
    options: Options,
    threads: int,
    device: Device | None,
    append: Append,
    advance: Callable[[int], object],
    path: str,
) -> Iterator[tuple[Step, float]]:
    """Each step when its blocks are written, with its relative RMS error."""
    encoders = [encoder(step, options) for step in steps]
    pairs = list(zip(steps, encoders, strict=True))
    if device is not None and not any(each.search and not device.serves(step, each) for step, each in pairs):
        threads = min(max(threads, 2), device.streams)  # while one waits for its range another reads
    makers = [_maker(step, each, threads, device) for step, each in pairs]
    jobs = ((make, step, start, stop) for step, (make, each) in zip(steps, makers, strict=True) for start, stop in each)
    error = power = 0.0
    try:
        for (_, step, start, stop), made in in_order(lambda job: job[0](*job[1:]), jobs, threads):
            append(step.weight.name, step.format, made.blocks)
            error, power = error + made.error, power + made.power
            advance((stop - start) * step.weight.nbytes // step.weight.size)
            if stop == step.weight.size:
                yield step, relative(error, power)
                error = power = 0.0
    except Unfit as unfit:
        raise _refusal(path, unfit.step, options) from None


def _device() -> Device:
    """The current CUDA device; its module, which needs the CUDA backend, is imported now."""
    from .device import Device

    return Device()


def _maker(step: Step, each: Encoder, threads: int, device: Device | None) -> tuple[Make, list[tuple[int, int]]]:
    """What converts the ranges of a step, and those ranges."""
    if device is not None and device.serves(step, each):
        return partial(device.piece, importance=each.importance), ranges(step, device.range, each.search)
    return partial(piece, encode=each.encode), ranges(step, share(threads), each.search)


def in_order(work: Callable[[Job], Result], jobs: Iterable[Job], threads: int) -> Iterator[tuple[Job, Result]]:
    """Each job with its result, in order; threads are ahead of who takes them, but not far."""
    waiting: deque[tuple[Job, Future[Result]]] = deque()
    np.empty(HEAP, np.uint8)  # and gone
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
    """The error for a tensor with bad weights: goes over all of it, to count them."""
    weight, fmt = step.weight, step.format
    each = encoder(step, options)
    count, where, why = 0, -1, ""
    for start, stop in ranges(step, share(workers()), each.search):
        found = faults(step, start, stop, each.encode)
        if found is None or (why and found[0] != why):
            continue
        why, mask = found
        if where < 0:
            where = start + int(mask.argmax()) * ((stop - start) // mask.size)
        count += int(np.count_nonzero(mask))
    index = [int(i) for i in np.unravel_index(where, weight.shape)]
    what = "weight" if "NaN" in why or fmt.plain else "block"
    number = f"{count} {what} is" if count == 1 else f"{count} {what}s are"
    return QuantizeError(f"{shown_path(path)}: tensor {shown(weight.name)}: {number} {why}, the first at {index}")

"""qgemm info: the content of a file of weights, and the products that this machine can compute with it."""

from __future__ import annotations

import argparse
import glob
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import prod
from typing import Any, NamedTuple

from qgemm.arguments import ACTIVATIONS
from qgemm.backend import Status, backends
from qgemm.codec.format import Format
from qgemm.errors import QgemmError
from qgemm.files.gguf.reader import open as open_gguf
from qgemm.files.paths import shown, shown_path
from qgemm.text import (
    MAX_HINTS,
    binary_size,
    cut,
    fitted,
    json_lines,
    json_text,
    json_value,
    printable,
    terminal_width,
)

from .abilities import Ability, cuda_sm, on_cpu
from .common import Command, add_json, add_pattern, is_gguf, selected
from .groups import Entry, grouped, single

KEY_WIDTH = 40  # characters reserved for a metadata key; a longer key shortens its value
FIRST = 16  # elements of an array that are printed


class Content(NamedTuple):
    """The content of a file. gguf: version and alignment of a .gguf file, whose tensors products accept as they are."""

    path: str
    paths: Sequence[str]
    metadata: Mapping[str, Any]
    entries: list[Entry]
    gguf: tuple[int, int] | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """FILE [--json] [--tensors REGEX] [--all | --no-tensors]."""
    parser.add_argument(
        "file", metavar="FILE", help="a .gguf file, the first shard of a split model, or what `qgemm convert` reads"
    )
    add_json(parser, "all metadata, and an entry for each tensor,")
    add_pattern(parser)
    tensors = parser.add_mutually_exclusive_group()
    tensors.add_argument("--all", action="store_true", help="a line for each tensor, not one for all layers")
    tensors.add_argument("--no-tensors", action="store_true", help="no list of tensors")


def _on_cuda(fmt: Format, sm: int, ndim: int = 2) -> Ability:
    """As on_cuda of gpu_abilities.py, which a machine without a GPU does not import: it is half of a start."""
    from .gpu_abilities import on_cuda

    return on_cuda(fmt, sm, ndim)


def run(args: argparse.Namespace) -> int:
    """Print the facts, metadata, types and tensors of the file."""
    with ExitStack() as stack:
        content = opened(args.file, stack)
        by_name = {entry.name: entry for entry in content.entries}
        content = content._replace(entries=[by_name[name] for name in selected(by_name, args.tensors)])
        states = backends()
        if args.json:
            print(*json_lines(document(content, list(by_name.values()), states, not args.no_tensors)), sep="\n")
            return 0
        width = terminal_width()
        parts = [
            facts(content, list(by_name.values()), width),
            backend_lines(states, width),
            metadata(content, width),
            types(content, width),
            kernels(content, states["cuda"], width),
        ]
        if not args.no_tensors:
            parts.append(listing(content, args.all, width))
        print(*filter(None, parts), sep="\n\n")
    return 0


def opened(path: str, stack: ExitStack) -> Content:
    """The content of the file at a path, or of a folder's only .gguf file; it stays open as long as the stack."""
    ggufs = sorted(glob.glob(os.path.join(glob.escape(path), "*.gguf"))) if os.path.isdir(path) else []
    if ggufs and not glob.glob(os.path.join(glob.escape(path), "*.safetensors")):
        if len(ggufs) > 1:
            names = ", ".join(shown(os.path.basename(name)) for name in ggufs[:MAX_HINTS])
            raise QgemmError(f"{shown_path(path)}: holds {len(ggufs)} .gguf files: name one, as {names}")
        path = ggufs[0]
    if is_gguf(path):
        file = stack.enter_context(open_gguf(path, copy=True))
        entries = [
            Entry(name, str(tensor.format), tensor.shape, tensor.nbytes, tensor) for name, tensor in file.items()
        ]
        return Content(file.path, file.paths, file.metadata, entries, (file.version, file.alignment))
    from qgemm.converter.source_readers import open_source

    source = stack.enter_context(open_source(path, copy=True))
    entries = [Entry(name, weight.type, weight.shape, weight.nbytes) for name, weight in source.weights.items()]
    return Content(source.path, [source.path], source.metadata, entries)


def facts(content: Content, entries: Sequence[Entry], width: int) -> str:
    """The file as a whole: kind, size, number of weights."""
    weights = sum(prod(entry.shape) for entry in entries)
    packed = sum(entry.nbytes for entry in entries)
    bpw = f", {_bpw(entries):.3f} bits per weight" if weights else ""
    more = f" and {len(content.paths) - 1} more shards" if len(content.paths) > 1 else ""
    rows = [("file", printable(content.path) + more)]
    if content.gguf is None:
        rows.append(("data", f"{binary_size(packed)} ({packed} bytes); `qgemm convert` makes a .gguf file of it"))
    else:
        size = _size(content.paths)
        rows.append(("size", f"{binary_size(size)} ({size} bytes)"))
        rows.append(("GGUF", "version {}, alignment {}".format(*content.gguf)))
    rows.append(("tensors", f"{len(entries)} of {weights} weights{bpw}"))
    return fitted("<<", rows, width)


def backend_lines(states: dict[str, Status], width: int) -> str:
    """A line for each backend: its device and versions, or why it does not work here."""
    words = {True: "available", False: "not available"}
    return fitted("<<<", [(name, words[b.available], printable(b.detail)) for name, b in states.items()], width)


def metadata(content: Content, width: int) -> str:
    """A line for each key, and as much of its value as fits."""
    longest = max((len(printable(key)) for key in content.metadata), default=0)
    space = width - min(longest, KEY_WIDTH) - 2
    rows = [(printable(key), cut(shown_value(value, space), space)) for key, value in content.metadata.items()]
    return fitted("<<", [("metadata", ""), *rows], width) if rows else ""


def shown_value(value: Any, space: int) -> str:
    """A metadata value in a line; for an array its length, its type and the first elements."""
    if isinstance(value, str):
        return printable(value[: space + 1])
    if not hasattr(value, "__len__"):
        return printable(str(value))
    kind = f"{value.dtype.name}" if hasattr(value, "dtype") else "strings"
    dots = ["..."] * (len(value) > FIRST)
    return f"{len(value)} {kind}: " + ", ".join([*(shown_value(item, space) for item in value[:FIRST]), *dots])


def types(content: Content, width: int) -> str:
    """A line for each type: numbers of tensors, weights and bytes, and for a .gguf file the abilities of the CPU."""
    rows = [("type", "tensors", "weights", "bytes", "bpw", *["cpu"] * (content.gguf is not None))]
    for name, entries in by_type(content).items():
        weights, packed = sum(prod(entry.shape) for entry in entries), sum(entry.nbytes for entry in entries)
        fmt, ndim = _kind(entries)
        abilities = [] if fmt is None else [str(on_cpu(fmt, ndim))]
        rows.append((name, str(len(entries)), str(weights), str(packed), f"{_bpw(entries):g}", *abilities))
    return fitted("<>>>><"[: len(rows[0])], rows, width)


def kernels(content: Content, cuda: Status, width: int) -> str:
    """For each type the kernels that serve its matrices on this machine's GPU; empty without a GPU."""
    sm = cuda_sm(cuda)
    if sm is None or content.gguf is None:
        return ""
    rows = [("type", *(f"cuda {activation}" for activation in ACTIVATIONS))]
    for name, entries in by_type(content).items():
        fmt, ndim = _kind(entries)
        if fmt is not None and ndim > 1:
            products = _on_cuda(fmt, sm).products
            rows.append((name, *(", ".join(products.get(activation, "-")) for activation in ACTIVATIONS)))
    return f"kernels of sm_{sm}, from small to large M\n{fitted('<' * len(rows[0]), rows, width)}"


def listing(content: Content, every: bool, width: int) -> str:
    """A line for each tensor, or a line for tensors that differ only in their layer."""
    groups = single(content.entries) if every else grouped(content.entries)
    rows = [("tensor", "type", "shape (N, K)", "count", "bytes")]
    for group in groups:
        first = group.first
        rows.append((group.name, first.type, str(first.shape), str(group.tensors), str(group.tensors * first.nbytes)))
    text = fitted("<<<>>", rows, width)
    return text if len(groups) == len(content.entries) else f"{text}\n\n--all has a line for each tensor"


def document(content: Content, entries: Sequence[Entry], states: dict[str, Status], listed: bool) -> dict[str, Any]:
    """The content of a file, for JSON."""
    sm = cuda_sm(states["cuda"])
    version, alignment = content.gguf or (None, None)
    text = {
        "path": json_text(content.path),
        "paths": list(map(json_text, content.paths)),
        "bytes": _size(content.paths) if content.gguf else sum(entry.nbytes for entry in entries),
        "version": version,
        "alignment": alignment,
        "metadata": {json_text(key): json_value(value) for key, value in content.metadata.items()},
        "backends": {name: backend._asdict() for name, backend in states.items()},
        "cuda_sm": sm,
        "types": [
            {
                "type": name,
                "tensors": len(entries),
                "weights": sum(prod(entry.shape) for entry in entries),
                "bytes": sum(entry.nbytes for entry in entries),
                "bpw": _bpw(entries),
            }
            for name, entries in by_type(content).items()
        ],
    }
    return {**text, "tensors": [_item(entry, sm) for entry in content.entries]} if listed else text


def by_type(content: Content) -> dict[str, list[Entry]]:
    """The tensors of each type, the type with most bytes first."""
    entries: dict[str, list[Entry]] = {}
    for entry in content.entries:
        entries.setdefault(entry.type, []).append(entry)
    return dict(sorted(entries.items(), key=lambda item: -sum(entry.nbytes for entry in item[1])))


def _item(entry: Entry, sm: int | None) -> dict[str, Any]:
    """A tensor for JSON. cpu, cuda: null for tensors that must be converted first; cuda also without a GPU."""
    fmt, ndim = _kind([entry])
    return {
        "name": json_text(entry.name),
        "type": entry.type,
        "ne": entry.shape[::-1],
        "shape": entry.shape,
        "bytes": entry.nbytes,
        "cpu": None if fmt is None else on_cpu(fmt, ndim)._asdict(),
        "cuda": None if fmt is None or sm is None else _on_cuda(fmt, sm, ndim)._asdict(),
    }


def _kind(entries: Sequence[Entry]) -> tuple[Format | None, int]:
    """The format of tensors of one type, and their number of axes: 2 if any of them is a matrix."""
    formats = [entry.tensor.format for entry in entries if entry.tensor is not None]
    axes = {len(entry.shape) for entry in entries}
    return formats[0] if formats else None, 2 if 2 in axes else max(axes)


def _bpw(entries: Sequence[Entry]) -> float:
    """Bits per weight, 0 where there are none."""
    weights = sum(prod(entry.shape) for entry in entries)
    return 8 * sum(entry.nbytes for entry in entries) / weights if weights else 0.0


def _size(paths: Sequence[str]) -> int:
    return sum(os.stat(path).st_size for path in paths)


COMMAND = Command(
    "info",
    "show a file's content, and the products possible here",
    """\
Show the size, metadata, types and tensors of a file, and for a .gguf file the products that this machine can compute
with each type. Tensors that differ only in their layer share a line.

Column cpu lists the activations that products accept; cuda the kernels of this machine's GPU, from small to large M
(`qgemm routes` has the limits).""",
    "qgemm info model.gguf --tensors 'blk\\.0\\.'\n"
    """  qgemm info model.gguf --json | jq '.tensors[] | select(.type == "Q4_0") | .name'""",
    add_arguments,
    run,
)

"""qgemm info: what a .gguf file holds, and what each backend can do with it."""

from __future__ import annotations

import argparse
import os
from math import prod
from typing import Any

from qgemm.backend import Status, backends
from qgemm.codec.format import Format
from qgemm.files.gguf.reader import GGUFFile
from qgemm.files.gguf.reader import open as open_gguf
from qgemm.tensor import Tensor
from qgemm.text import binary_size, columns, json_lines, json_text, json_value, printable

from .abilities import cuda_sm, on_cpu, on_cuda
from .common import Command, add_file, add_pattern, dims, selected

LONGEST_LINE = 200  # characters of a metadata value that are shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """FILE [--json] [--tensors REGEX]."""
    add_file(parser)
    parser.add_argument("--json", action="store_true", help="strict JSON, with all metadata")
    add_pattern(parser)


def run(args: argparse.Namespace) -> int:
    """Print the file's facts, its types, its tensors."""
    with open_gguf(args.file) as file:
        tensors = [file[name] for name in selected(file, args.tensors)]
        found = backends()
        if args.json:
            print("\n".join(json_lines(document(file, tensors, found))))
        else:
            print(facts(file), backend_lines(found), types(tensors), listing(tensors, found), sep="\n\n")
    return 0


def facts(file: GGUFFile) -> str:
    """The file as a whole: format version, size, what it says it is."""
    weights = sum(prod(tensor.shape) for tensor in file.values())
    packed = sum(tensor.nbytes for tensor in file.values())
    bpw = f", {8 * packed / weights:.3f} bits per weight" if weights else ""
    rows = [
        ("file", printable(file.path) + (f" and {len(file.paths) - 1} more shards" if len(file.paths) > 1 else "")),
        ("size", f"{binary_size(_size(file))} ({_size(file)} bytes)"),
        ("GGUF", f"version {file.version}, alignment {file.alignment}"),
        *((key, _line(file.metadata[key])) for key in ("general.architecture", "general.name") if key in file.metadata),
        ("metadata", f"{len(file.metadata)} keys"),
        ("tensors", f"{len(file)} of {weights} weights{bpw}"),
    ]
    return columns("<<", rows)


def backend_lines(found: dict[str, Status]) -> str:
    """A line for each backend: whether it works here, with what or why not."""
    words = {True: "available", False: "not available"}
    return columns("<<<", [(name, words[b.available], printable(b.detail)) for name, b in found.items()])


def types(tensors: list[Tensor]) -> str:
    """A line for each type: how many tensors, weights and bytes."""
    rows = [("type", "tensors", "weights", "bytes", "bpw")]
    for fmt, count, weights, packed in _totals(tensors):
        rows.append((str(fmt), str(count), str(weights), str(packed), f"{fmt.bpw:g}"))
    return columns("<>>>>", rows)


def listing(tensors: list[Tensor], found: dict[str, Status]) -> str:
    """A line for each tensor."""
    sm = cuda_sm(found["cuda"])
    rows = [("tensor", "type", "ne [K, N]", "shape (N, K)", "bytes", "cpu", f"cuda (sm_{sm}, from small to large M)")]
    for tensor in tensors:
        fmt, ndim = tensor.format, tensor.ndim
        cpu, cuda = on_cpu(fmt, ndim), on_cuda(fmt, sm, ndim)
        rows.append((printable(tensor.name), str(fmt), *dims(tensor), str(tensor.nbytes), str(cpu), str(cuda)))
    return columns("<<<<><<", rows)


def document(file: GGUFFile, tensors: list[Tensor], found: dict[str, Status]) -> dict[str, Any]:
    """All of it for JSON."""
    sm = cuda_sm(found["cuda"])
    return {
        "path": json_text(file.path),
        "paths": list(map(json_text, file.paths)),
        "bytes": _size(file),
        "version": file.version,
        "alignment": file.alignment,
        "metadata": {key: json_value(value) for key, value in file.metadata.items()},
        "backends": {name: backend._asdict() for name, backend in found.items()},
        "cuda_sm": sm,
        "types": [
            {"type": str(fmt), "tensors": count, "weights": weights, "bytes": packed, "bpw": fmt.bpw}
            for fmt, count, weights, packed in _totals(tensors)
        ],
        "tensors": [
            {
                "name": json_text(tensor.name),
                "type": str(tensor.format),
                "ne": tensor.shape[::-1],
                "shape": tensor.shape,
                "bytes": tensor.nbytes,
                "cpu": on_cpu(tensor.format, tensor.ndim)._asdict(),
                "cuda": on_cuda(tensor.format, sm, tensor.ndim)._asdict(),
            }
            for tensor in tensors
        ],
    }


def _totals(tensors: list[Tensor]) -> list[tuple[Format, int, int, int]]:
    """(format, tensors, weights, bytes) of each format, the most bytes first."""
    totals: dict[str, tuple[Format, int, int, int]] = {}  # by name: a codebook makes no type of its own
    for tensor in tensors:
        fmt, count, weights, packed = totals.get(tensor.format.name, (tensor.format, 0, 0, 0))
        totals[fmt.name] = fmt, count + 1, weights + prod(tensor.shape), packed + tensor.nbytes
    return sorted(totals.values(), key=lambda total: -total[3])


def _size(file: GGUFFile) -> int:
    return sum(os.stat(path).st_size for path in file.paths)


def _line(value: Any) -> str:
    text = str(value)
    return printable(text[:LONGEST_LINE]) + "..." * (len(text) > LONGEST_LINE)


COMMAND = Command(
    "info",
    "what a file holds, and what each backend can do with it",
    """\
What a .gguf file holds: its facts, its types, its tensors, and for each tensor what each backend can do with it.

cpu lists the activations that a product takes; cuda the kernels that serve them, from small to large M
(`qgemm routes` has the limits), on this machine's GPU or, without one, on the least that is supported.""",
    "qgemm info model.gguf --tensors 'blk\\.0\\.'\n"
    """  qgemm info model.gguf --json | jq '.tensors[] | select(.type == "Q4_0") | .name'""",
    add_arguments,
    run,
)

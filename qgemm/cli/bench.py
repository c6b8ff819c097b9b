"""qgemm bench: how fast this machine is, beside cuBLAS and the speed of its memory or, on a CPU, the gguf package."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from qgemm.arguments import ACTIVATIONS
from qgemm.backend import backends
from qgemm.bench import convert, cpu, encode, gpu, results, sweep
from qgemm.bench.results import Results
from qgemm.codec.format import Format
from qgemm.errors import QgemmError, UnsupportedError
from qgemm.files.atomic import write_file
from qgemm.formats import FORMATS, format_named
from qgemm.formats.q8_1 import FORMAT as Q8_1
from qgemm.text import json_lines

from .abilities import served
from .common import Command, count, counts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """[--gpu | --cpu | --convert | --encode] [--formats ...] [--activations ...] [--shapes ...] [--m ...] ..."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--gpu", action="store_true", help="the CUDA kernels (default where there is a GPU)")
    where.add_argument("--cpu", action="store_true", help="the NumPy backend against the gguf package, 4096x4096")
    where.add_argument(
        "--convert", action="store_true", help="`qgemm convert` against a loop of the gguf package, 2 GiB"
    )
    where.add_argument("--encode", action="store_true", help="host memory into blocks on the GPU and back, no disk")
    parser.add_argument("--out", metavar="PATH", type=Path, help="write JSON; a folder gets GPU.json or cpu.json")
    gpu = parser.add_argument_group("of --gpu")
    gpu.add_argument("--formats", metavar="F,...", type=formats, help="default: every block format that has a kernel")
    gpu.add_argument("--activations", metavar="A,...", type=activations, default=ACTIVATIONS, help="default a16,a8")
    gpu.add_argument("--shapes", metavar="NxK,...", type=shapes, help="default: five from 4096x4096 to 28672x8192")
    gpu.add_argument("--m", metavar="M,...", type=counts, help="rows of x; default 1,2,4,8,... to 4096")
    gpu.add_argument("--repeats", metavar="R", type=count, default=9, help="replays that count (default 9)")
    gpu.add_argument("--dequantize", action="store_true", help="also time dequantize + cuBLAS for M of 1, 16 and 64")
    gpu.add_argument("--sweep", action="store_true", help="also time every eighth M from 16 to 512, and tile edges")
    gpu.add_argument("--sustained", action="store_true", help="also time each row without a rest, at the power limit")
    gpu.add_argument("--mma", action="store_true", help="also time the kernels of sm_80 to sm_89, for M from 16 on")
    gpu.add_argument("--merge", action="store_true", help="keep the other rows of PATH if GPU and kernels are the same")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table; 1 if a product was wrong or a goal was missed."""
    if args.cpu or args.convert:
        return on_cpu(args)
    cuda = backends()["cuda"]
    if cuda.available:
        return encoding(args) if args.encode else on_gpu(args)
    if args.gpu or args.encode:
        raise QgemmError(cuda.detail)
    return on_cpu(args)


def on_cpu(args: argparse.Namespace) -> int:
    """The rows of qgemm.bench.cpu or, with --convert, of qgemm.bench.convert."""
    rows = convert.run() if args.convert else cpu.run()
    print(cpu.table(rows, "whole processes" if args.convert else " x ".join(map(str, cpu.SHAPE))))
    if args.out is not None:
        text = json.dumps([{**row._asdict(), "ratio": row.ratio} for row in rows], indent=1)
        write_file(file_at(args.out, "convert" if args.convert else "cpu"), f"{text}\n".encode())
    return verdict(rows)


def encoding(args: argparse.Namespace) -> int:
    """The rows of qgemm.bench.encode."""
    rows = encode.run()
    print(encode.table(rows))
    if args.out is not None:
        found = {"device": backends()["cuda"].facts["device"], "rows": [row._asdict() for row in rows]}
        write_file(file_at(args.out, "encode"), ("\n".join(json_lines(found)) + "\n").encode())
    return verdict(rows)


def verdict(rows: Sequence[Any]) -> int:
    """How many rows missed their goal; 1 if one did."""
    missed = sum(row.missed for row in rows)
    print(f"{missed} of {sum(row.wanted > 0 for row in rows)} goals missed", file=sys.stderr)
    return 1 if missed else 0


def on_gpu(args: argparse.Namespace) -> int:
    """The rows of qgemm.bench.gpu."""
    options = gpu.Options(
        args.formats or weight_formats(),
        args.activations,
        args.shapes or gpu.SHAPES,
        args.m or gpu.M,
        args.repeats,
        args.dequantize,
        args.sweep,
        args.sustained,
        args.mma,
    )
    found, failures = gpu.run(options, partial(keep, args.out, args.merge))
    print(f"{found['device']}, driver {found['driver']}, clocks {found['clocks']}, reads {found['read_gbs']} GB/s")
    slowest = found["host_slowest_us"]
    calls = (f"{name} {us} (slowest CPU {slowest[name]})" for name, us in found["host_us"].items())
    print("us of the host for a call:", ", ".join(calls))
    packing = (f"{name} {rate['gbs']:.0f} ({rate['share']:.0%})" for name, rate in found["pack"].items())
    print("GB/s of packing (share of a device copy):", ", ".join(packing))
    for what, times in found["sweep"].items():
        print("{}: time grows by {:.2f} at most from one M to the next, at {}".format(what, *sweep.steepest(times)))
    print(results.table(found["rows"]))
    for text in results.short_tables(found):
        print(f"\n{text}")
    for failure in failures:
        print(f"qgemm: {failure}", file=sys.stderr)
    return 1 if failures else 0


def weight_formats() -> list[Format]:
    """The block formats with a kernel, but for that of the activations, and kbit with absmax as E4M4 alone."""
    fused = (fmt for fmt in FORMATS.values() if fmt.slots and fmt is not Q8_1)
    fused = (fmt for fmt in fused if not (fmt.bit_planes and fmt.scale_fields))
    return [fmt for fmt in fused if any(served(fmt, activation) for activation in ACTIVATIONS)]


def keep(out: Path | None, merging: bool, found: Results) -> None:
    """Write the results so far; with `merging` beside the rows that are in the file."""
    if out is None:
        return
    path = file_at(out, results.file_stem(found["device"]))
    if merging and path.exists():
        found = results.merge(results.load(path), found)
    results.write(path, found)


def file_at(out: Path, stem: str) -> Path:
    """The file that --out means."""
    return out / f"{stem}.json" if out.is_dir() else out


def formats(text: str) -> list[Format]:
    """An argument of names of formats with commas between."""
    try:
        return [format_named(word) for word in text.split(",")]
    except UnsupportedError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def activations(text: str) -> list[str]:
    """An argument of some of ACTIVATIONS with commas between."""
    words = text.split(",")
    if not set(words) <= set(ACTIVATIONS):
        raise argparse.ArgumentTypeError(f"{text!r}: activations are {', '.join(ACTIVATIONS)}")
    return words


def shapes(text: str) -> list[tuple[int, int]]:
    """An argument of shapes N x K, e.g. 4096x4096,8192x8192."""
    found = [tuple(counts(word.replace("x", ","))) for word in text.split(",")]
    if any(len(shape) != 2 for shape in found):
        raise argparse.ArgumentTypeError(f"{text!r}: shapes are NxK, with commas between")
    return [(shape[0], shape[1]) for shape in found]


COMMAND = Command(
    "bench",
    "measure this machine's GPU, or its CPU",
    "On a GPU: microseconds of products on random packed weights that come from memory, not from a cache, beside\n"
    "cuBLAS in float16 and the time that merely reading the packed bytes takes. On a CPU: beside the gguf package.",
    "qgemm bench --formats q4_0,q8_0 --shapes 4096x4096,8192x8192 --m 1,8,16 --out .",
    add_arguments,
    run,
)

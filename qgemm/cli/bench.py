"""qgemm bench: how fast this machine is, beside cuBLAS and the speed of its memory or, on a CPU, the gguf package."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from qgemm.arguments import ACTIVATIONS, KINDS
from qgemm.backend import backends
from qgemm.bench import contest, convert, cpu, encode, encoders, gpu, model, moe, moe_host, results, sweep, timing
from qgemm.bench.results import Results
from qgemm.codec.format import Format
from qgemm.errors import QgemmError, UnsupportedError
from qgemm.files.atomic import write_file
from qgemm.formats import FORMATS, format_named
from qgemm.formats.q8_1 import FORMAT as Q8_1
from qgemm.text import json_lines

from .abilities import served
from .common import Command, UsageError, count, counts

WHERE = ("gpu", "cpu", "convert", "encode", "moe", "shard")  # what is measured instead of products, and on what
OF_BOTH = ("formats", "activations", "shapes", "m", "repeats")  # options of --gpu and --cpu
OF_GPU = ("dequantize", "sweep", "sustained", "mma", "step", "merge")
OF_GGML = ("ggml", "ggml_avx2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """[--gpu | --cpu | --convert | --encode | --moe | --shard] [--model ...] [--formats ...] ..."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--gpu", action="store_true", help="the CUDA kernels (default where there is a GPU)")
    where.add_argument(
        "--cpu", action="store_true", help="the NumPy backend beside the gguf package (default elsewhere)"
    )
    where.add_argument(
        "--convert", action="store_true", help="`qgemm convert` against a loop of the gguf package, 2 GiB"
    )
    where.add_argument(
        "--encode",
        action="store_true",
        help="host memory into blocks on the GPU and back, no disk; with --ggml on the CPU",
    )
    where.add_argument("--moe", action="store_true", help="layers of experts of three models, 1 to 4096 tokens")
    where.add_argument("--shard", action="store_true", help="layers cut over the GPUs of one host, under torchrun")
    parser.add_argument(
        "--model", metavar="NAME,...", type=models,
        help=f"tokens a second of whole models with random weights, by transformers: {', '.join(model.MODELS)}",
    )  # fmt: skip
    parser.add_argument("--out", metavar="PATH", type=Path, help="write JSON; a folder gets GPU.json, cpu.json ...")
    parser.add_argument("--limit", metavar="SECONDS", type=count, help="of --moe: begin no row after so many")
    parser.add_argument("--goals", action="store_true", help="beside the project's own goals; exit 1 if one is missed")
    both = parser.add_argument_group("of --gpu and --cpu")
    both.add_argument("--formats", metavar="F,...", type=formats, help="default: every block format that has a kernel")
    both.add_argument("--activations", metavar="A,...", type=activations, help=f"of {', '.join(KINDS)}; default a16,a8")
    both.add_argument("--shapes", metavar="NxK,...", type=shapes, help="default: five from 4096x4096 to 28672x8192")
    both.add_argument("--m", metavar="M,...", type=counts, help="rows of x; default 1,2,4,8,... to 4096")
    both.add_argument("--repeats", metavar="R", type=count, help=f"runs that count (default {timing.REPEATS})")
    gpu = parser.add_argument_group("of --gpu; --merge also of --moe")
    gpu.add_argument("--dequantize", action="store_true", help="also time dequantize + cuBLAS for M of 1, 16 and 64")
    gpu.add_argument("--sweep", action="store_true", help="also time every eighth M from 16 to 512, and tile edges")
    gpu.add_argument("--sustained", action="store_true", help="also time each row without a rest, at the power limit")
    gpu.add_argument("--mma", action="store_true", help="also time the kernels of sm_80 to sm_89, for M from 16 on")
    gpu.add_argument(
        "--step", action="store_true", help="also time all linear layers of a Llama-3-8B for 1 and 8 tokens"
    )
    gpu.add_argument("--merge", action="store_true", help="keep the other rows of PATH if GPU and kernels are the same")
    beside = parser.add_argument_group("of --cpu and --encode")
    beside.add_argument(
        "--ggml", metavar="PATH", type=Path, nargs="+", help="beside ggml's CPU library, built below these folders"
    )
    beside.add_argument("--ggml-avx2", metavar="PATH", type=Path, help="also without AVX-512, beside this build")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table; 1 if a product was wrong or, with --goals, a goal was missed."""
    if args.model:
        refuse(args, "--model", WHERE)
    if args.convert:
        refuse(args, "--convert", (*OF_BOTH, *OF_GPU, *OF_GGML))
        return on_cpu(args, convert.run(), "whole processes")
    cuda = backends()["cuda"]
    if args.encode and args.ggml:
        return encoders_beside_ggml(args)
    for name in ("encode", "moe", "model"):
        if getattr(args, name):
            of_gpu = (option for option in OF_GPU if (name, option) != ("moe", "merge"))
            refuse(args, f"--{name}", (*OF_BOTH, *of_gpu, *OF_GGML))
    if args.limit and not args.moe:
        raise UsageError("--limit says something to --moe alone")
    if args.shard:
        refuse(args, "--shard", ("activations", "shapes", *OF_GPU, *OF_GGML))
    if (args.gpu or args.encode or args.moe or args.shard or args.model) and not cuda.available:
        raise QgemmError(cuda.detail)
    if args.model:
        return of_models(args)
    if args.encode:
        return encoding(args)
    if args.moe:
        return experts(args)
    if args.shard:
        return sharded(args)
    if cuda.available and not args.cpu:
        refuse(args, "a GPU", OF_GGML)
        return on_gpu(args)
    refuse(args, "the CPU", OF_GPU)
    if args.ggml or args.ggml_avx2:
        return beside_ggml(args)
    given = {name: getattr(args, name) for name in OF_BOTH if getattr(args, name) is not None}
    options = cpu.Options(**given)
    what = f"{options.shapes[0][0]} x {options.shapes[0][1]}" if len(options.shapes) == 1 else "several shapes"
    return on_cpu(args, cpu.run(options), what)


def encoders_beside_ggml(args: argparse.Namespace) -> int:
    """The rows of qgemm.bench.encoders."""
    refuse(args, "encoders", ("activations", "m", "shapes", "ggml_avx2", *OF_GPU))
    names = [fmt.name for fmt in args.formats] if args.formats else encoders.NAMES
    if unknown := [name for name in names if name not in encoders.NAMES]:
        raise UsageError(f"ggml encodes {', '.join(encoders.NAMES)}, not {', '.join(unknown)}")
    found = encoders.run(args.ggml[0], names, args.repeats or encoders.ROUNDS)
    return shown(args, encoders, found, "encode_cpu")


def refuse(args: argparse.Namespace, what: str, names: Sequence[str]) -> None:
    """A UsageError for an option that says nothing to what is measured: it would be ignored."""
    for name in names:
        if getattr(args, name):
            raise UsageError(f"--{name.replace('_', '-')} says nothing to a benchmark of {what}")


def on_cpu(args: argparse.Namespace, rows: Sequence[cpu.Row], what: str) -> int:
    """The rows of qgemm.bench.cpu or qgemm.bench.convert."""
    print(cpu.table(rows, what, args.goals))
    if not args.convert:
        print(f"\n{cpu.EXPLAINED}")
    if args.out is not None:
        text = json.dumps([row.document() for row in rows], indent=1)
        write_file(file_at(args.out, "convert" if args.convert else "gguf"), f"{text}\n".encode())
    return verdict(args, rows)


def beside_ggml(args: argparse.Namespace) -> int:
    """The rows of qgemm.bench.contest."""
    if not args.ggml:
        raise UsageError("--ggml-avx2 needs --ggml")
    refuse(args, "--ggml", ("activations", "m"))
    names = [fmt.name for fmt in args.formats] if args.formats else contest.NAMES
    if unknown := [name for name in names if name not in contest.GOALS]:
        raise UsageError(f"--ggml compares {', '.join(contest.NAMES)}, not {', '.join(unknown)}")
    options = contest.Options(args.ggml, args.ggml_avx2, names, args.shapes or contest.SHAPES)
    found = contest.run(options._replace(rounds=args.repeats) if args.repeats else options)
    return shown(args, contest, found, "cpu")


def shown(args: argparse.Namespace, of: ModuleType, found: Any, stem: str) -> int:
    """Print what a benchmark beside ggml found, write it to STEM.json where --out says so; 1 if goals were missed."""
    print(of.table(found))
    if args.out is not None:
        write_file(file_at(args.out, stem), of.document(found).encode())
    if args.goals and (missed := of.missed(found)):
        print(f"{missed} goals missed", file=sys.stderr)
        return 1
    return 0


def encoding(args: argparse.Namespace) -> int:
    """The rows of qgemm.bench.encode."""
    rows = encode.run()
    print(encode.table(rows, args.goals))
    if args.out is not None:
        found = {"device": backends()["cuda"].facts["device"], "rows": [row._asdict() for row in rows]}
        write_file(file_at(args.out, "encode"), ("\n".join(json_lines(found)) + "\n").encode())
    return verdict(args, rows)


def experts(args: argparse.Namespace) -> int:
    """The rows of qgemm.bench.moe; 1 if a layer was wrong."""
    found, failures = moe.run(partial(keep_experts, args.out, args.merge), args.limit or 0)
    print(moe.table(found[results.EXPERTS]))
    print(moe_host.line(found[results.EXPERTS_HOST]))
    for failure in failures:
        print(f"qgemm: {failure}", file=sys.stderr)
    return 1 if failures else 0


def keep_experts(out: Path | None, merging: bool, found: Results) -> None:
    """Write the layers so far; with `merging` beside all that the file of this GPU holds."""
    if out is None:
        return
    path = file_at(out, results.file_stem(found["device"]) if merging else "moe")
    if merging and path.exists():
        found = results.merge_lists(results.load(path), found, (results.EXPERTS, results.EXPERTS_HOST))
    results.write(path, found)


def of_models(args: argparse.Namespace) -> int:
    """The rows of qgemm.bench.model."""
    found: Results = {"device": backends()["cuda"].facts["device"], "versions": model.versions(), "rows": []}

    def keep_row(row: results.Row) -> None:
        found["rows"].append(row)
        if args.out is not None:
            write_file(file_at(args.out, "model"), ("\n".join(json_lines(found)) + "\n").encode())

    model.run(args.model, "q4_k_m", keep_row)
    print(f"{found['device']}, {found['versions']}\n{model.table(found['rows'])}")
    return 0


def sharded(args: argparse.Namespace) -> int:
    """The rows of qgemm.bench.shard, which needs torch: written and printed by rank 0."""
    shard = import_module("qgemm.bench.shard")

    def keep(found: dict[str, Any]) -> None:
        if args.out is not None:
            path = file_at(args.out, f"{results.file_stem(found['device'])}_x{found['gpus']}")
            write_file(path, ("\n".join(json_lines(found)) + "\n").encode())

    names = [fmt.name for fmt in args.formats or ()] or shard.FORMATS_OF_PAIRS
    found = shard.run(names, args.m or shard.M, args.repeats or timing.REPEATS, keep)
    if found["rank"] == 0:
        print(shard.table(found))
    return 0


def verdict(args: argparse.Namespace, rows: Sequence[Any]) -> int:
    """With --goals how many rows missed theirs; 1 if one did."""
    if not args.goals:
        return 0
    missed = sum(row.missed for row in rows)
    print(f"{missed} of {sum(row.wanted > 0 for row in rows)} goals missed", file=sys.stderr)
    return 1 if missed else 0


def on_gpu(args: argparse.Namespace) -> int:
    """The rows of qgemm.bench.gpu."""
    options = gpu.Options(
        args.formats or weight_formats(),
        args.activations or ACTIVATIONS,
        args.shapes or gpu.SHAPES,
        args.m or gpu.M,
        args.repeats or timing.REPEATS,
        args.dequantize,
        args.sweep,
        args.sustained,
        args.mma,
        args.step,
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
    fused = (fmt for fmt in FORMATS.values() if fmt.tiled and fmt is not Q8_1)
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


def models(text: str) -> list[str]:
    """An argument of names of qgemm.bench.model with commas between."""
    names = text.split(",")
    if not set(names) <= set(model.MODELS):
        raise argparse.ArgumentTypeError(f"{text!r}: models are {', '.join(model.MODELS)}")
    return names


def activations(text: str) -> list[str]:
    """An argument of some of KINDS with commas between."""
    words = text.split(",")
    if not set(words) <= set(KINDS):
        raise argparse.ArgumentTypeError(f"{text!r}: activations are {', '.join(KINDS)}")
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
    "cuBLAS in float16 and the time that merely reading the packed bytes takes. On a CPU: milliseconds and GB/s of\n"
    "encoding, decoding and products, beside the gguf package.",
    "qgemm bench --formats q4_0,q8_0 --shapes 4096x4096,8192x8192 --m 1,8,16 --out .",
    add_arguments,
    run,
)

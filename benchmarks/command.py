"""The command line of the benchmarks: `python -m benchmarks`.

python -m benchmarks --out tools/results --merge   measure into the results file of this GPU
python -m benchmarks --all --out tools/results --merge --limit 540
                                                   measure the rows that the documents show and files lack
python -m benchmarks --report                      draw the plots, rewrite the documents' tables, check the targets
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from qgemm.arguments import ACTIVATIONS, KINDS
from qgemm.backend import backends
from qgemm.cli import bench_model, model_bench, timing
from qgemm.cli import main as cli
from qgemm.cli.bench import activations, formats, shapes
from qgemm.cli.common import UsageError, count, counts
from qgemm.cli.gpu_abilities import served
from qgemm.codec.format import Format
from qgemm.errors import QgemmError
from qgemm.files.atomic import write_file
from qgemm.formats import FORMATS
from qgemm.formats.q8_1 import FORMAT as Q8_1
from qgemm.text import json_lines

from . import contest, convert, cpu, encode, encoders, gpu, job, model, moe, moe_host, results, stale, sweep
from .report import tables, targets
from .results import Results

MODES = ("gpu", "all", "cpu", "convert", "encode", "moe", "shard")  # exclusive: benchmarks, and the device of products
SHARED_OPTIONS = ("formats", "activations", "shapes", "m", "repeats")  # valid with --gpu and --cpu
GPU_OPTIONS = ("x", "dequantize", "sweep", "sustained", "mma", "step", "merge")
KEPT = {"moe": ("x", "merge"), "all": ("x", "merge")}  # GPU_OPTIONS that other modes have, by mode
GGML_OPTIONS = ("ggml", "ik", "avx2")


DESCRIPTION = """\
On a GPU: microseconds of products on random packed weights that come from memory, not from a cache, beside cuBLAS in
float16 and the time that only reading the packed bytes needs. On a CPU: milliseconds and GB/s of encoding, decoding and
products, beside the gguf package."""
EXAMPLE = """\
example:
  python -m benchmarks --formats q4_0,q8_0 --shapes 4096x4096,8192x8192 --m 1,8,16 --out .
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure or report; returns the exit code."""
    return cli.run(parser, argv)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = cli.OneLineParser(
        prog="python -m benchmarks",
        formatter_class=cli.Help,
        description=DESCRIPTION,
        epilog=EXAMPLE,
        allow_abbrev=False,
    )
    add_arguments(top)
    top.add_argument("--debug", action="store_true", help="show the traceback of an error")
    top.set_defaults(run=run)
    return top


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """[--gpu | --all | --cpu | --convert | --encode | --moe | --shard | --report] [--model ...] [--formats ...] ..."""
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--gpu", action="store_true", help="the CUDA kernels (default where there is a GPU)")
    modes.add_argument(
        "--all", action="store_true", help="all rows of the documents' tables, into the files of the folder --out"
    )  # fmt: skip
    modes.add_argument("--cpu", action="store_true", help="the CPU backend beside the gguf package (default elsewhere)")
    modes.add_argument("--convert", action="store_true", help="`qgemm convert` of 2 GiB beside the gguf package")
    modes.add_argument(
        "--encode", action="store_true", help="encoding by the GPU, from and to host memory; with --ggml by the CPU"
    )  # fmt: skip
    modes.add_argument("--moe", action="store_true", help="layers of experts of three models, 1 to 4096 tokens")
    modes.add_argument("--shard", action="store_true", help="layers sharded over the GPUs of one host, under torchrun")
    modes.add_argument(
        "--report", metavar="RESULTS", type=Path, nargs="?", const=tables.RESULTS,
        help="targets beside a results file and its plots; of the default file also the tables of the documents",
    )  # fmt: skip
    parser.add_argument("--out", metavar="PATH", type=Path, help="write JSON; a folder gets GPU.json, cpu.json ...")
    parser.add_argument(
        "--limit", metavar="SECONDS", type=count, help="with --all and --moe: start no row after this time"
    )
    parser.add_argument("--goals", action="store_true", help="beside the project's own goals; exit 1 if one is missed")
    bench_model.add_arguments(parser)
    products = parser.add_argument_group("with --gpu and --cpu")
    products.add_argument("--formats", metavar="F,...", type=formats, help="default: every block format with a kernel")
    products.add_argument(
        "--activations", metavar="A,...", type=activations, help=f"{', '.join(KINDS)}; default a16,a8"
    )
    products.add_argument("--shapes", metavar="NxK,...", type=shapes, help="default: five from 4096x4096 to 28672x8192")
    products.add_argument("--m", metavar="M,...", type=counts, help="rows of x; default 1,2,4,8,... to 4096")
    products.add_argument("--repeats", metavar="R", type=count, help=f"timed runs (default {timing.REPEATS})")
    gpu = parser.add_argument_group("with --gpu; --x and --merge also with --all and --moe")
    gpu.add_argument(
        "--x",
        metavar="T,...",
        type=bench_model.one_of(results.X_TYPES),
        help=f"types of x; default {','.join(results.X_TYPES)}",
    )
    gpu.add_argument("--dequantize", action="store_true", help="also time dequantize + cuBLAS for M of 1, 16 and 64")
    gpu.add_argument("--sweep", action="store_true", help="also time every eighth M from 16 to 512, and tile edges")
    gpu.add_argument("--sustained", action="store_true", help="also time each row without pauses, at the power limit")
    gpu.add_argument("--mma", action="store_true", help="also time the kernels of sm_80 to sm_89, for M from 16 on")
    gpu.add_argument(
        "--step", action="store_true", help="also time all linear layers of a Llama-3-8B for 1 and 8 tokens"
    )
    gpu.add_argument("--merge", action="store_true", help="keep the other rows of PATH if GPU and kernels are the same")
    ggml = parser.add_argument_group("with --cpu and --encode")
    ggml.add_argument("--ggml", metavar="PATH", type=Path, nargs="+", help="folders with builds of ggml's CPU library")
    ggml.add_argument("--ik", metavar="PATH", type=Path, help="a folder with a build of ik_llama.cpp's ggml library")
    ggml.add_argument("--avx2", action="store_true", help="AVX2 alone, for which those libraries are built as well")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table; 1 if a product was wrong or, with --goals, a goal was missed."""
    if args.report is not None:
        return report(args.report)
    bench_model.refuse_without_model(args)
    if args.model:
        refuse(args, "--model", MODES)
    if args.convert:
        refuse(args, "--convert", (*SHARED_OPTIONS, *GPU_OPTIONS, *GGML_OPTIONS))
        return run_cpu(args, convert.run(), "whole processes")
    cuda = backends()["cuda"]
    if args.encode and args.ggml:
        return run_encoders_beside_ggml(args)
    for name in ("encode", "moe", "model", "all"):
        if getattr(args, name):
            gpu_options = (option for option in GPU_OPTIONS if option not in KEPT.get(name, ()))
            refuse(args, f"--{name}", (*SHARED_OPTIONS, *gpu_options, *GGML_OPTIONS))
    if args.limit and not (args.moe or args.all):
        raise UsageError("--limit says something to --all and --moe alone")
    if args.shard:
        refuse(args, "--shard", ("activations", "shapes", *GPU_OPTIONS, *GGML_OPTIONS))
    if (args.gpu or args.all or args.encode or args.moe or args.shard or args.model) and not cuda.available:
        raise QgemmError(cuda.detail)
    if args.model:
        return run_models(args)
    if args.encode:
        return run_encoding(args)
    if args.moe:
        return run_experts(args)
    if args.all:
        return run_all(args)
    if args.shard:
        return run_shard(args)
    if cuda.available and not args.cpu:
        refuse(args, "a GPU", GGML_OPTIONS)
        return run_gpu(args)
    refuse(args, "the CPU", GPU_OPTIONS)
    if args.ggml or args.ik or args.avx2:
        return run_beside_ggml(args)
    options = cpu.Options(**{name: value for name in SHARED_OPTIONS if (value := getattr(args, name)) is not None})
    size = f"{options.shapes[0][0]} x {options.shapes[0][1]}" if len(options.shapes) == 1 else "several shapes"
    return run_cpu(args, cpu.run(options), size)


def report(path: Path) -> int:
    """Print the targets and draw the plots of a results file; 1 if a target is missed. The documents show one file."""
    status = targets.main(path)
    if path == tables.RESULTS:
        subprocess.run([sys.executable, tables.ROOT / "tools" / "readme.py"], check=True)
    return status


def run_encoders_beside_ggml(args: argparse.Namespace) -> int:
    """The rows of benchmarks.encoders."""
    refuse(args, "encoders", ("activations", "m", "shapes", "ik", "avx2", *GPU_OPTIONS))
    names = [fmt.name for fmt in args.formats] if args.formats else encoders.NAMES
    if unknown := [name for name in names if name not in encoders.NAMES]:
        raise UsageError(f"ggml encodes {', '.join(encoders.NAMES)}, not {', '.join(unknown)}")
    results = encoders.run(args.ggml[0], names, args.repeats or encoders.ROUNDS)
    return show_beside_ggml(args, encoders, results, "encode_cpu", lambda path: encoders.document(results))


def refuse(args: argparse.Namespace, benchmark: str, names: Sequence[str]) -> None:
    """A UsageError for an option that the benchmark would ignore."""
    for name in names:
        if getattr(args, name):
            raise UsageError(f"--{name.replace('_', '-')} says nothing to a benchmark of {benchmark}")


def run_cpu(args: argparse.Namespace, rows: Sequence[cpu.Row], size: str) -> int:
    """The rows of benchmarks.cpu or benchmarks.convert."""
    print(cpu.table(rows, size, args.goals))
    if not args.convert:
        print(f"\n{cpu.EXPLAINED}")
    if args.out is not None:
        text = json.dumps([row.document() for row in rows], indent=1)
        write_file(output_path(args.out, "convert" if args.convert else "gguf"), f"{text}\n".encode())
    return check_goals(args, rows)


def run_beside_ggml(args: argparse.Namespace) -> int:
    """The rows of benchmarks.contest."""
    if not args.ggml:
        raise UsageError(f"--{'ik' if args.ik else 'avx2'} needs --ggml")
    refuse(args, "--ggml", ("activations", "m"))
    names = [fmt.name for fmt in args.formats] if args.formats else contest.NAMES
    if unknown := [name for name in names if name not in contest.NAMES]:
        raise UsageError(f"--ggml compares {', '.join(contest.NAMES)}, not {', '.join(unknown)}")
    options = contest.Options(args.ggml, args.ik, args.avx2, names, args.shapes or contest.SHAPES)
    results = contest.run(options._replace(rounds=args.repeats) if args.repeats else options)
    return show_beside_ggml(
        args, contest, results, "cpu", lambda path: contest.file_text(contest.merged(path, results))
    )


def show_beside_ggml(
    args: argparse.Namespace, benchmark: ModuleType, results: Any, stem: str, document: Callable[[Path], str]
) -> int:
    """Print the results of a benchmark beside ggml, write them to STEM.json under --out; 1 if goals were missed."""
    print(benchmark.table(results))
    if args.out is not None:
        path = output_path(args.out, stem)
        write_file(path, document(path).encode())
    if args.goals and (missed := benchmark.missed(results)):
        print(f"{missed} goals missed", file=sys.stderr)
        return 1
    return 0


def run_encoding(args: argparse.Namespace) -> int:
    """The rows of benchmarks.encode."""
    rows = encode.run()
    print(encode.table(rows, args.goals))
    if args.out is not None:
        results = {"device": backends()["cuda"].facts["device"], "rows": [row._asdict() for row in rows]}
        write_results(output_path(args.out, "encode"), results)
    return check_goals(args, rows)


def run_experts(args: argparse.Namespace) -> int:
    """The rows of benchmarks.moe; 1 if a layer was wrong."""
    types = args.x or results.X_TYPES
    measured, failures = moe.run(partial(save_experts, args.out, args.merge), args.limit or 0, types)
    print(moe.table(measured[results.EXPERTS]))
    print(moe_host.line(measured[results.EXPERTS_HOST]))
    return show_failures(failures)


def run_all(args: argparse.Namespace) -> int:
    """The rows of benchmarks.plan; 1 if a product was wrong."""
    if args.out is None:
        raise UsageError("--all needs a folder for its files: --out")
    args.out.mkdir(parents=True, exist_ok=True)
    return show_failures(job.run(args.out, args.x or results.X_TYPES, args.limit or 0, args.merge))


def save_experts(out: Path | None, merging: bool, measured: Results) -> None:
    """Write the layers so far; with `merging` together with everything else in the file of this GPU."""
    if out is None:
        return
    measured = stale.stamped(measured)
    path = output_path(out, results.file_stem(measured["device"]) if merging else "moe")
    if merging and path.exists():
        measured = results.merge_lists(results.load(path), measured, (results.EXPERTS, results.EXPERTS_HOST))
    results.write(path, measured)


def run_models(args: argparse.Namespace) -> int:
    """The rows of benchmarks.model."""
    rows = model.run(args, None if args.out is None else output_path(args.out, "model"))
    print(bench_model.heading("cuda"), "", model_bench.table(rows), sep="\n")
    return 0


def run_shard(args: argparse.Namespace) -> int:
    """The rows of benchmarks.shard, which needs torch: written and printed by rank 0."""
    shard = import_module("benchmarks.shard")

    def save_rows(measured: dict[str, Any]) -> None:
        if args.out is not None:
            stem = f"{results.file_stem(measured['device'])}_x{measured['gpus']}"
            write_results(output_path(args.out, stem), measured)

    names = [fmt.name for fmt in args.formats or ()] or shard.FORMATS_OF_PAIRS
    measured = shard.run(names, args.m or shard.M, args.repeats or timing.REPEATS, save_rows)
    if measured["rank"] == 0:
        print(shard.table(measured))
    return 0


def run_gpu(args: argparse.Namespace) -> int:
    """The rows of benchmarks.gpu."""
    options = gpu.Options(
        args.formats or weight_formats(),
        args.activations or ACTIVATIONS,
        args.shapes or gpu.SHAPES,
        args.m or gpu.M,
        args.repeats or gpu.REPEATS,
        args.dequantize,
        args.sweep,
        args.sustained,
        args.mma,
        args.step,
        x=args.x or results.X_TYPES,
    )
    measured, failures = gpu.run(options, partial(save, args.out, args.merge))
    facts = measured["device"], measured["driver"], measured["clocks"], measured["read_gbs"]
    print("{}, driver {}, clocks {}, reads {} GB/s".format(*facts))
    slowest = measured["host_slowest_us"]
    calls = (f"{name} {us} (slowest CPU {slowest[name]})" for name, us in measured["host_us"].items())
    print("us of the host for a call:", ", ".join(calls))
    packing = (f"{name} {rate['gbs']:.0f} ({rate['share']:.0%})" for name, rate in measured["pack"].items())
    print("GB/s of packing (share of a device copy):", ", ".join(packing))
    for name, times in measured["sweep"].items():
        print("{}: time grows by {:.2f} at most from one M to the next, at {}".format(name, *sweep.steepest(times)))
    print(results.table(measured["rows"]))
    for text in results.short_tables(measured):
        print(f"\n{text}")
    return show_failures(failures)


def weight_formats() -> list[Format]:
    """The block formats with a kernel, except that of activations and kbit formats whose absmax is not E4M4."""
    tiled = (fmt for fmt in FORMATS.values() if fmt.tiled and fmt is not Q8_1)
    tiled = (fmt for fmt in tiled if not (fmt.tile.bit_planes and fmt.scale_fields))
    return [fmt for fmt in tiled if any(served(fmt, activation) for activation in ACTIVATIONS)]


def save(out: Path | None, merging: bool, measured: Results) -> None:
    """Write the results so far; with `merging` together with the other rows in the file."""
    if out is None:
        return
    measured = stale.stamped(measured)
    path = output_path(out, results.file_stem(measured["device"]))
    if merging and path.exists():
        measured = results.merge(results.load(path), measured)
    results.write(path, measured)


def show_failures(failures: Sequence[str]) -> int:
    """Print failed rows on stderr; 1 if there are any."""
    for failure in failures:
        print(f"qgemm: {failure}", file=sys.stderr)
    return 1 if failures else 0


def check_goals(args: argparse.Namespace, rows: Sequence[cpu.Row] | Sequence[encode.Row]) -> int:
    """With --goals the number of rows that miss theirs; 1 if there are any."""
    if not args.goals:
        return 0
    missed = sum(row.missed for row in rows)
    print(f"{missed} of {sum(row.goal > 0 for row in rows)} goals missed", file=sys.stderr)
    return 1 if missed else 0


def write_results(path: Path, document: Results) -> None:
    """Replace a JSON file."""
    write_file(path, ("\n".join(json_lines(document)) + "\n").encode())


def output_path(out: Path, stem: str) -> Path:
    """The file that --out names: itself, or STEM.json in a folder."""
    return out / f"{stem}.json" if out.is_dir() else out

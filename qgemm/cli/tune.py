"""qgemm tune: time the configs of a model's products on this machine's GPU, so that they use the fastest."""

from __future__ import annotations

import argparse
import sys

from qgemm.cuda.driver import tuned
from qgemm.files.atomic import check_replaceable, write_file
from qgemm.files.gguf.reader import open as open_gguf
from qgemm.preparation import DTYPES
from qgemm.text import json_lines, printable
from qgemm.tuning import MINUTES, tune

from .bench import activations
from .bench_model import minutes, one_of
from .common import Command, add_file, add_pattern, counts, need_gguf, selected

AGAIN = "run the same command again to time the rest"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """FILE [--minutes N] [--m M,...] [--activations A,...] [--dtypes D,...] [--tensors REGEX] [--report REPORT]."""
    add_file(parser)
    parser.add_argument(
        "--minutes", metavar="N", type=minutes, default=MINUTES, help=f"time at most this long (default {MINUTES:g})"
    )
    parser.add_argument("--m", metavar="M,...", type=counts, help="rows of x (default: 12 numbers from 1 to 4096)")
    parser.add_argument("--activations", metavar="A,...", type=activations, help="default: a16,a8")
    parser.add_argument(
        "--dtypes", metavar="D,...", type=one_of(DTYPES), help="types of x and y (default: float16,bfloat16)"
    )
    add_pattern(parser)
    parser.add_argument("--report", metavar="REPORT", help="write the times of this GPU to a file, to contribute them")


def run(args: argparse.Namespace) -> int:
    """Tune; print the number of products and the gain; write the report."""
    need_gguf(args.file)
    if args.report:
        check_replaceable(args.report)
    with open_gguf(args.file, copy=True) as model:
        tensors = [model[name] for name in selected(model, args.tensors)]
        try:
            done = tune(tensors, args.m, activation=args.activations, dtype=args.dtypes, minutes=args.minutes)
        except KeyboardInterrupt:
            print(f"the times up to now are kept: {AGAIN}", file=sys.stderr)
            raise
    print(done)
    if not done.finished:
        print(f"{args.minutes:g} minutes were too short for all configs: {AGAIN}")
    if not done.stored:
        print("the times are lost when this process ends: set QGEMM_CACHE_DIR to a folder to which only you can write")
    if args.report:
        write_file(args.report, "".join(f"{line}\n" for line in json_lines(tuned.report(tuned.machine(0)))).encode())
        print(f"{printable(args.report)} has the times of this GPU; docs/gpus.md says where to send it")
    return 0


COMMAND = Command(
    "tune",
    "time the configs of a model's products on this GPU",
    """\
Time the configs of every kernel that can multiply by the matrices of a file on this machine's GPU, for several numbers
of rows of x, and keep the times beside the compiled kernels. Products use the fastest from then on.

Ctrl-C keeps the times; the same command goes on where an earlier one ended.""",
    "qgemm tune model.gguf --minutes 5 --report report.json",
    add_arguments,
    run,
)

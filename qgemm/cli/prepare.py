"""qgemm prepare: compile a model's kernels before its first product."""

from __future__ import annotations

import argparse

from qgemm.arguments import KINDS
from qgemm.cpu.native import reason
from qgemm.files.compiled import cache_dir
from qgemm.files.gguf.reader import open as open_gguf
from qgemm.preparation import DTYPES, prepare
from qgemm.text import printable

from .common import Command, add_file, counts, need_gguf

NO_FOLDER = "this user has no home folder; set QGEMM_CACHE_DIR to one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """FILE [--m M,...] [--activation a16|a8|a8_g256|e4m3_g256] [--dtype DTYPE]."""
    add_file(parser)
    parser.add_argument("--m", metavar="M,...", type=counts, help="rows of x (default: any from 1 to 4096)")
    parser.add_argument("--activation", choices=KINDS, help="default: a16")
    parser.add_argument("--dtype", choices=DTYPES, help="the type of x (default: all)")


def run(args: argparse.Namespace) -> int:
    """Compile; print the number of kernels, the seconds, and the cache folder."""
    need_gguf(args.file)
    with open_gguf(args.file, copy=True) as model:
        done = prepare(model, args.m, activation=args.activation, dtype=args.dtype)
    if done.kernels:
        print(f"{done}, kept in {printable(str(cache_dir()))}" if cache_dir() else f"{done}, kept nowhere: {NO_FOLDER}")
    else:
        print(f"nothing is compiled: {printable(reason()) or 'no format of these tensors has compiled code here'}")
    return 0


COMMAND = Command(
    "prepare",
    "compile a model's kernels before its first product",
    "Compile the code that products with a file's tensors need, on all cores, into the cache ($QGEMM_CACHE_DIR, or\n"
    "~/.cache/qgemm): for the GPU of this machine, or for its CPU if it has no GPU.",
    "qgemm prepare model.gguf --m 1,512 --dtype float16",
    add_arguments,
    run,
)

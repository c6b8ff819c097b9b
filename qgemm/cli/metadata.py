"""qgemm metadata: set and remove keys of a .gguf file."""

from __future__ import annotations

import argparse

from qgemm.converter.edits import parse_override
from qgemm.converter.file_metadata import set_metadata
from qgemm.errors import QgemmError
from qgemm.files.gguf.reader import open as open_gguf
from qgemm.text import printable

from .common import Command, UsageError, need_gguf


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """FILE [--set KEY=TYPE:VALUE ...] [--remove KEY ...]."""
    parser.add_argument("file", metavar="FILE", help="a .gguf file, or one shard of a split model")
    parser.add_argument(
        "--set", metavar="KEY=TYPE:VALUE", action="append", default=[],
        help="set a key; TYPE int, float, bool, str; a number keeps the type that it has; repeatable",
    )  # fmt: skip
    parser.add_argument("--remove", metavar="KEY", action="append", default=[], help="remove a key; repeatable")


def run(args: argparse.Namespace) -> int:
    """Change the keys, and print how."""
    if not args.set and not args.remove:
        raise UsageError("name a change: --set KEY=TYPE:VALUE or --remove KEY; `qgemm info` lists the keys")
    need_gguf(args.file)
    with open_gguf(args.file, copy=True, part=True) as file:
        old = dict(file.metadata)
    try:
        values = dict(parse_override(text, old, "--set") for text in args.set)
    except QgemmError as error:
        raise UsageError(str(error)) from None
    in_place = set_metadata(args.file, values, args.remove)
    how = "in place" if in_place else "in a new file, which has replaced the old one"
    noun = "key" if len(values) == 1 else "keys"
    print(f"{printable(args.file)}: {len(values)} {noun} set, {len(set(args.remove))} removed, {how}")
    return 0


COMMAND = Command(
    "metadata",
    "set and remove keys of a .gguf file",
    "Set and remove keys of a .gguf file. Tensors keep their bytes and are not decoded. The file is changed in place\n"
    "where a crash cannot leave half of the change (a number of the same type, a text of the same length); otherwise\n"
    "a new file replaces it, whole or not at all.",
    "qgemm metadata model.gguf --set llama.rope.freq_base=float:5e5 --remove tokenizer.chat_template",
    add_arguments,
    run,
)

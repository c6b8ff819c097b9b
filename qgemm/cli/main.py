"""The command `qgemm`: data on stdout, messages on stderr.

Exit codes: 0 success, 1 the check or the work failed, 2 the command line is wrong, 130 interrupted, 141 (as in shells)
the reader of stdout went away.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from qgemm.backend import backends
from qgemm.text import filled, printable, terminal_width
from qgemm.version import __version__

from .common import Command, UsageError

COMMANDS = (  # modules of this folder
    "info", "convert", "metadata", "imatrix", "verify", "compare", "matmul", "prepare", "tune", "routes", "bench",
)  # fmt: skip

EMPTY = re.compile(r"(--[a-z-]+=)?")  # an argument without a value, as of a shell's variable that is not set

# Errors of files, arguments and devices (CUDA raises RuntimeError). Anything else is a bug of this package.
EXPECTED = (OSError, ValueError, TypeError, RuntimeError, MemoryError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of `qgemm`; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    return run(partial(parser, words), words)


def run(parser: Callable[[], argparse.ArgumentParser], argv: Sequence[str] | None = None) -> int:
    """Parse a command line (default: that of the process) and call its `run`; errors become a line and an exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        try:
            _print_anything()
            args = parser().parse_args(arguments)
            status: int = args.run(args)
        finally:
            _flush()
    except BrokenPipeError:
        return 141
    except KeyboardInterrupt:
        print("qgemm: interrupted", file=sys.stderr)
        return 130
    except UsageError as error:
        return _complain(error, 2)
    except EXPECTED as error:
        if "--debug" in arguments:
            traceback.print_exc()
        return _complain(error, 1)
    return status


def command_named(name: str) -> Command:
    """The command of a module, which is imported now."""
    command: Command = import_module(f".{name}", __package__).COMMAND
    return command


def commands_of(arguments: Sequence[str]) -> list[Command]:
    """The command that the arguments begin with, else all commands: a start that imports one is shorter."""
    names = [name for name in COMMANDS if name in arguments[:1]]
    return list(map(command_named, names or COMMANDS))


def parser(arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The command line, with a subparser for each of `commands_of`."""
    top = OneLineParser(
        prog="qgemm",
        description="Matrix products directly on the packed tensors of .gguf files.",
        epilog="`qgemm COMMAND --help` has more, with an example.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action=_Version, help="print the version and the state of the backends, then exit")
    words = top.add_subparsers(title="commands", metavar="COMMAND", parser_class=CommandParser)
    for command in commands_of(arguments):
        word = words.add_parser(
            command.name,
            help=command.summary,
            description=command.description,
            epilog=f"example:\n  {command.example}",
            formatter_class=Help,
            allow_abbrev=False,
        )
        command.add_arguments(word)
        word.set_defaults(run=command.run)
    top.set_defaults(run=_no_command)
    for command_parser in (top, *words.choices.values()):
        command_parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return top


def _no_command(args: argparse.Namespace) -> NoReturn:
    raise UsageError(f"name a command: {', '.join(COMMANDS)} (`qgemm --help` has more)")


class Help(argparse.RawDescriptionHelpFormatter):
    """Text in the width of the terminal: paragraphs are filled, rows of tables and lists continue below their text."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(filled(part, width) for part in text.split("\n\n"))


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, as all errors of a command are."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (`{self.prog} --help` has more)")


class CommandParser(OneLineParser):
    """The parser of one command: options may stand anywhere, as in `convert SRC DST --force q8_0`.

    argparse alone takes an optional positional as left out once an option stands before it, on Python up to 3.12.
    """

    _intermixed = False  # argparse calls parse_known_args again for each of its two passes

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The arguments; an error names those that this command does not have."""
        if self._intermixed:
            return super().parse_known_args(args, namespace)
        for before, word in zip(["", *args], args, strict=False):
            if EMPTY.fullmatch(word):
                self.error(f"the argument after {before!r} is empty: {word!r}" if before else "an argument is empty")
        self._intermixed = True
        values, rest = self.parse_known_intermixed_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return values, rest


class _Version(argparse.Action):
    """--version: looks for a GPU only if the option is there."""

    def __init__(self, option_strings: list[str], dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> NoReturn:
        from .info import backend_lines

        print(f"qgemm {__version__}", backend_lines(backends(), terminal_width()), sep="\n")
        parser.exit()


def _complain(error: BaseException, status: int) -> int:
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{os.fsdecode(error.filename)}: {error.strerror}"
    else:
        text = str(error) or ("out of memory" if isinstance(error, MemoryError) else type(error).__name__)
    print(f"qgemm: error: {printable(text)}", file=sys.stderr)
    return status


def _print_anything() -> None:
    """Print characters that the encoding of stdout lacks as escapes, so that they cannot raise an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _flush() -> None:
    """Flush stdout; if that fails, redirect it, because Python would flush again at exit and report the error."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise

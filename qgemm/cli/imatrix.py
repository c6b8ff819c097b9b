"""qgemm imatrix: measure, merge and show importance matrices."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from qgemm.errors import QgemmError, UnsupportedError
from qgemm.files.gguf.reader import open as open_gguf
from qgemm.files.imatrix_statistics import Statistics, statistics
from qgemm.files.imatrix_sums import SumsFile, read_sums
from qgemm.files.outputs import check_output
from qgemm.files.paths import shown_path
from qgemm.text import columns, json_lines, json_text, json_value, printable
from qgemm.version import pip_install

from .common import Command, Progress, UsageError, add_json, count

CHUNK = 512  # tokens
SHARDS = (".safetensors", ".bin")  # files of weights in a Hugging Face folder

DESCRIPTION = """\
Measure the importance matrix of MODEL on a text: the sum of squares of each column of the inputs of every matrix, for
experts one by one, in llama.cpp's .gguf form. `qgemm convert --imatrix` and llama-quantize read it.

  MODEL  a Hugging Face folder, or a .gguf file, whose weights stay packed; transformers runs it

The text is cut into chunks as llama-imatrix cuts it. Ctrl-C ends the run after the current chunk and writes the sums so
far; --resume continues them. Without --text the command merges the files of --in-file, or shows (--show) their
statistics."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """[MODEL] --text FILE -o OUT, and the options of the measurement."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help="the model; left out to merge or show files")
    parser.add_argument("--text", metavar="FILE", help="the text to run the model on, UTF-8")
    parser.add_argument("-o", "--output", metavar="OUT", help="the importance matrix to write, .gguf")
    parser.add_argument("--chunks", metavar="N", type=count, help="at most N chunks (default: the whole text)")
    parser.add_argument("--chunk-size", metavar="T", type=count, default=CHUNK, help="tokens of a chunk (default 512)")
    parser.add_argument(
        "--in-file", metavar="FILE", action="append", default=[], help="add the sums of this file; repeatable"
    )
    parser.add_argument("--process-output", action="store_true", help="measure the output matrix too")
    parser.add_argument(
        "--sensitivity",
        action="store_true",
        help="also measure by a backward pass how much an error of each matrix changes the predictions, which\n"
        "`qgemm convert --size` reads; implies --process-output",
    )
    parser.add_argument("--resume", action="store_true", help="continue OUT where an interrupted run ended")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--save-every", metavar="N", type=count, default=10, help="write OUT every N chunks (10)")
    add_device(parser)
    parser.add_argument("--show", action="store_true", help="print statistics of each tensor, of OUT or of --in-file")
    add_json(parser, "the statistics")


def add_device(parser: argparse.ArgumentParser) -> None:
    """--device and --dtype of a model that transformers runs."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the model runs (default: cpu)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32",
        help="of activations, and of weights that are not packed (default: float32)",
    )  # fmt: skip


def evaluation(module: str, command: str) -> Any:
    """A module of qgemm.evaluation; UnsupportedError without torch or transformers."""
    try:
        return import_module(f"qgemm.evaluation.{module}")
    except ImportError as error:
        rule = f"qgemm {command} runs models by transformers, which cannot be imported ({error})"
        raise UnsupportedError(f"{rule}: {pip_install('transformers')}") from None


def size_of(path: str) -> int:
    """The bytes of a model: of the tensors of a .gguf file, of the files of weights in a folder.

    A wrong path is an error here, before torch and transformers are imported, which takes seconds.
    """
    if not os.path.isdir(path):
        with open_gguf(path, copy=True) as file:
            return sum(tensor.nbytes for tensor in file.values())
    size = sum(entry.stat().st_size for entry in os.scandir(path) if entry.name.endswith(SHARDS))
    if not size:
        raise QgemmError(f"{shown_path(path)}: the folder has no weights")
    return size


def say_loading(command: str, paths: Sequence[str]) -> None:
    """Tell a terminal which models are loaded: that takes seconds without a bar."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"qgemm {command}: loading {', '.join(map(printable, paths))}", file=sys.stderr)


def read_text(path: str) -> str:
    """The text of a file; QgemmError if it is not UTF-8."""
    with open(path, "rb") as file:
        data = file.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise QgemmError(f"{shown_path(path)}: is no UTF-8 text: byte {error.start}") from None


def run(args: argparse.Namespace) -> int:
    """Measure, merge or show; 130 if Ctrl-C ended the run early."""
    check_arguments(args)
    file, complete = SumsFile(), True
    if args.resume:
        file = read_sums(args.output)
    else:
        for path in args.in_file:
            file.merge(read_sums(path), path)
    if args.model is not None:
        complete = measure(args, file)
    elif args.output is not None:
        file.write(args.output)
    if args.show:
        show(args, statistics(file.sums))
    return 0 if complete else 130


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse combinations without a meaning, and an output that may not be replaced, before any work."""
    if args.model is None and not args.in_file:
        raise UsageError("name a MODEL with --text, or files to merge or show by --in-file")
    if (args.model is None) != (args.text is None):
        raise UsageError("MODEL and --text belong together")
    if args.output is None and (args.model is not None or not args.show):
        raise UsageError("-o names the file to write")
    if args.resume and (args.model is None or args.force or args.in_file):
        raise UsageError("--resume continues the run of a MODEL, whose file has the sums of --in-file already")
    if args.output is None:
        return
    check_output(args.output, [path for path in (args.model, args.text, *args.in_file) if path is not None])
    if args.resume and not os.path.exists(args.output):
        raise QgemmError(f"{shown_path(args.output)}: does not exist, so that --resume has nothing to continue")
    if not (args.resume or args.force) and os.path.exists(args.output):
        raise QgemmError(f"{shown_path(args.output)}: exists; --force replaces it, --resume continues it")


def measure(args: argparse.Namespace, file: SumsFile) -> bool:
    """Run the model over the text and write the sums; returns whether all chunks are done."""
    text = read_text(args.text)
    size_of(args.model)
    say_loading("imatrix", [args.model])
    models, imatrix = evaluation("models", "imatrix"), evaluation("imatrix", "imatrix")
    model = models.load(args.model, args.device, args.dtype)
    chunks = model.chunks(text, args.chunk_size)
    digest = imatrix.run_digest(model, chunks, args.process_output, args.sensitivity)
    if args.resume and file.run != digest:
        rule = "is the file of another run: the model, the text, the size of chunks and the options must be the same"
        raise QgemmError(f"{shown_path(args.output)}: {rule}")
    if not args.resume:
        file.run, file.position, file.chunk_size = digest, 0, args.chunk_size
        file.datasets += [name for name in [imatrix.dataset_name(args.text)] if name not in file.datasets]
    chunks = chunks[: args.chunks]
    rest = max(len(chunks) - file.position, 0)
    with Progress("imatrix", rest, unit="chunk") as progress, stopping("imatrix") as stopped:
        complete: bool = imatrix.collect(
            model, chunks, args.output, file, output=args.process_output, sensitivity=args.sensitivity,
            save_every=args.save_every, advance=progress.advance, stopped=stopped,
        )  # fmt: skip
    if not args.json:
        state = "" if complete else "interrupted; --resume continues: "
        print(f"{state}{file.position} of {len(chunks)} chunks, {len(file.sums)} tensors: {printable(args.output)}")
    return complete


@contextmanager
def stopping(command: str) -> Iterator[Callable[[], bool]]:
    """A function that tells whether Ctrl-C was pressed; a second Ctrl-C interrupts at once."""
    pressed = False

    def press(number: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        print(f"qgemm {command}: stops after this chunk; Ctrl-C again drops it", file=sys.stderr)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def show(args: argparse.Namespace, lines: list[Statistics]) -> None:
    """Print the statistics as a table or as JSON."""
    if args.json:
        tensors = [
            {key: json_text(value) if isinstance(value, str) else json_value(value) for key, value in row.items()}
            for row in (line._asdict() for line in lines)
        ]
        print(*json_lines({"tensors": tensors}), sep="\n")
        return
    head = (
        "tensor", "tokens", "sum", "min", "max", "mean", "std", "active", "columns", "entropy", "z > 1", "cosine",
        "sensitivity",
    )  # fmt: skip
    rows = [
        (
            printable(line.name), str(line.tokens), f"{line.total:.2f}", f"{line.least:.4f}", f"{line.greatest:.4f}",
            f"{line.mean:.4f}", f"{line.deviation:.4f}", f"{line.active:.2%}", str(line.columns), f"{line.entropy:.2%}",
            f"{line.outliers:.2%}", "-" if line.cosine is None else f"{line.cosine:.4f}",
            "-" if line.sensitivity is None else f"{line.sensitivity:.3g}",
        )
        for line in lines
    ]  # fmt: skip
    print(columns("<" + ">" * (len(head) - 1), [head, *rows]))


COMMAND = Command(
    "imatrix",
    "an importance matrix, measured on a text by running the model",
    DESCRIPTION,
    "qgemm imatrix ./Llama-3.2-1B --text calibration.txt --sensitivity -o llama.imatrix.gguf",
    add_arguments,
    run,
)

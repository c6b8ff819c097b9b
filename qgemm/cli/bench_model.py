"""qgemm bench --model: the options of a benchmark of whole models, and its document."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from qgemm.backend import backends
from qgemm.errors import QgemmError
from qgemm.text import json_lines, json_text, printable

from . import model_bench
from .common import UsageError, count, counts, need_gguf
from .model_bench import Row
from .random_models import HEADS, MODELS, Sizes, write_file

OPTIONS = ("types", "dtypes", "variants", "batches", "prompts", "layers", "minutes")
TYPES = ("q4_k_m",)  # default types for random weights
RESERVE = 0.15  # part of the GPU's memory for caches and activations


class Model(NamedTuple):
    """The model of --model: a file, or one of MODELS by its name."""

    name: str
    path: Path | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """[--model NAME,... | FILE.gguf] [--types T,...] [--dtypes D,...] [--variants V,...] [--minutes N] ..."""
    group = parser.add_argument_group("whole models, by transformers")
    group.add_argument(
        "--model", metavar="NAME|FILE", type=model,
        help=f"a .gguf file, or random weights in the sizes of {', '.join(MODELS)}",
    )  # fmt: skip
    group.add_argument(
        "--types", metavar="T,...", type=one_of(HEADS), help=f"of random weights: {', '.join(HEADS)} (q4_k_m)"
    )
    group.add_argument(
        "--dtypes",
        metavar="D,...",
        type=one_of(model_bench.ALL_TYPES),
        help="of activations: bfloat16,float16 on a GPU, float32 on a CPU",
    )
    group.add_argument(
        "--variants", metavar="V,...", type=one_of(model_bench.VARIANTS),
        help=f"prompts by an activation, ways to generate tokens: {', '.join(model_bench.VARIANTS)}",
    )  # fmt: skip
    group.add_argument("--batches", metavar="B,...", type=counts, help="sequences at a time (1,16)")
    group.add_argument("--prompts", metavar="T,...", type=counts, help="tokens of a prompt (512,4096)")
    group.add_argument("--layers", metavar="N", type=count, help="layers with random weights (as many as fit)")
    group.add_argument("--minutes", metavar="N", type=minutes, help="start no variant of a file later (4)")


def refuse_without_model(args: argparse.Namespace) -> None:
    """A UsageError for options that need --model."""
    options = [name for name in OPTIONS if getattr(args, name) is not None]
    if options and args.model is None:
        raise UsageError(f"--{options[0]} says something to --model alone")


def run(args: argparse.Namespace) -> int:
    """Measure the model, print the table or the document."""
    device = device_of(args)
    rows = []
    for row in model_rows(args, device):
        rows.append(row)
        if not args.json and sys.stderr.isatty():
            print(f"{row['variant']} {row['road']} {row['dtype']}", file=sys.stderr)
    if args.json:
        print(*json_lines(document(device, rows)), sep="\n")
    else:
        print(heading(device), "", model_bench.table(rows), sep="\n")
    return 0


def device_of(args: argparse.Namespace) -> str:
    """torch's name of the device."""
    cuda = backends()["cuda"]
    if args.gpu and not cuda.available:
        raise QgemmError(cuda.detail)
    return "cuda" if cuda.available and not args.cpu else "cpu"


def heading(device: str) -> str:
    """The machine, and the versions."""
    return f"{printable(backends()[device].detail)}, {model_bench.versions()}; tokens a second, torch's defaults"


def document(device: str, rows: list[Row]) -> dict[str, Any]:
    """The rows for JSON."""
    backend = {"name": device, **backends()[device]._asdict()}
    rows = [{**row, "model": json_text(row["model"])} for row in rows]
    return {"backend": backend, "versions": model_bench.versions(), "rows": rows}


def model_rows(args: argparse.Namespace, device: str) -> Iterator[Row]:
    """The rows of a file, or of a random file for each of --types."""
    model_bench.versions()  # an error before any file is written
    names = ("dtypes", "variants", "batches", "prompts", "minutes")
    chosen = {name: value for name in names if (value := getattr(args, name)) is not None}
    options = model_bench.Options(**{"dtypes": model_bench.TYPES[device], **chosen})
    if args.model.path is not None:
        yield from model_bench.rows(args.model.path.resolve(), args.model.name, "file", device, options)
        return
    for types in args.types or TYPES:
        sizes = MODELS[args.model.name]
        layers = min(args.layers or fitting_layers(sizes, types, device), sizes.num_hidden_layers)
        with TemporaryDirectory() as folder:
            path = Path(folder, "model.gguf")
            write_file(path, sizes._replace(num_hidden_layers=layers), types)
            yield from model_bench.rows(path, args.model.name, types, device, options)


def fitting_layers(sizes: Sizes, mixture: str, device: str) -> int:
    """Layers of which the GPU holds the dense and the packed weights; all of them on a CPU."""
    free = model_bench.free_memory(device) * (1 - RESERVE)
    if not free:
        return sizes.num_hidden_layers
    bytes_a_weight = 2 + {"q8_0": 1.07}.get(mixture, 0.62)
    table = sizes.weights - sizes.num_hidden_layers * sizes.layer_weights
    return max(1, int((free / bytes_a_weight - table) // sizes.layer_weights))


def model(text: str) -> Model:
    """An argument: a name of MODELS, or a .gguf file."""
    if text in MODELS:
        return Model(text, None)
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r}: is neither a file nor one of {', '.join(MODELS)}")
    need_gguf(text)
    return Model(path.name, path)


def one_of(names: Any) -> Any:
    """An argument's type: some of these names, separated by commas."""

    def words(text: str) -> list[str]:
        selected = text.split(",")
        if not set(selected) <= set(names):
            raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(names)}")
        return selected

    return words


def minutes(text: str) -> float:
    """An argument: a positive number of minutes."""
    try:
        number = float(text)
    except ValueError:
        number = 0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a positive number")
    return number

"""qgemm routes: the dispatch table of the GPU, and which kernels serve which format."""

from __future__ import annotations

import argparse

from qgemm.arguments import ACTIVATIONS
from qgemm.cuda.kernels.routes import ANY, ROUTES, route
from qgemm.cuda.problem import TUNED_SMS, TYPES, Problem
from qgemm.formats import FORMATS
from qgemm.text import columns

from .abilities import on_cpu, served
from .common import Command, count

EXAMPLE = "q4_0 a16 M=64 N=8192 K=8192"


SHOWN = 5  # configs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """[--problem "FORMAT a16|a8 M=M N=N K=K [x=half|bf16|float]" [--sm SM] [--sms COUNT]]."""
    parser.add_argument(
        "--problem", metavar="P", type=problem,
        help=f'the kernel and config for one product, e.g. "{EXAMPLE}"; x=bf16 or x=float where x is not half',
    )  # fmt: skip
    parser.add_argument("--sm", metavar="SM", type=count, default=90, help="compute capability, 90 is 9.0 (default 90)")
    parser.add_argument("--sms", metavar="COUNT", type=count, default=TUNED_SMS, help="SMs of the GPU (default 132)")


def run(args: argparse.Namespace) -> int:
    """Print both tables, or what one product gets."""
    if args.problem is None:
        print(route_table(), format_table(), sep="\n\n")
    else:
        print(choice(args.problem._replace(sm=args.sm, sms=args.sms)))
    return 0


def problem(text: str) -> Problem:
    """Parse "q4_0 a16 M=64 N=8192 K=8192": the words in any order."""
    fields = dict(word.lower().split("=", 1) for word in text.split() if "=" in word)
    words = [word for word in text.split() if "=" not in word]
    formats = [FORMATS[word.lower()] for word in words if word.lower() in FORMATS]
    activations = [word for word in words if word in ACTIVATIONS]
    x = fields.pop("x", "half")
    named = len(formats) == len(activations) == 1 and len(words) == 2
    if not named or set(fields) != {"m", "n", "k"} or x not in TYPES:
        raise argparse.ArgumentTypeError(f"not a problem: {text!r}; one is {EXAMPLE!r}, also with x=bf16 or x=float")
    m, n, k = (count(fields[name]) for name in ("m", "n", "k"))
    return Problem(formats[0], activations[0], m, n, k, 90, x)


def choice(p: Problem) -> str:
    """The route of a problem and its config, with the configs that come next and what the cost model predicts."""
    kernel = route(p).kernel
    lines = [f"{p}, {p.sms} SMs: {kernel.name}"]
    asked = p._replace(x=kernel.reads(p)[0])
    found = [(str(config), us) for config, us in kernel.ranked(asked) if config is not None]
    if not found:
        return lines[0] + ", which has no configs"
    if found[0][1] is None:
        lines.append(f"{len(found)} of its configs can serve it; the first, by their table, is launched")
        return "\n".join([*lines, *(config for config, _ in found[:SHOWN])])
    lines.append(f"{len(found)} of its configs can serve it; the one of least predicted time is launched")
    rows = [("config", "us"), *((config, f"{us:.2f}") for config, us in found[:SHOWN])]
    return "\n".join([*lines, columns("<>", rows)])


def route_table() -> str:
    """ROUTES, of which a product takes the first row that fits it."""
    rows = [("kernel", "activation", "x", "M <=", "GPUs", "formats", "token tiles", "what it does")]
    for row in ROUTES:
        most = "any" if row.most == ANY else str(row.most)
        tiles = ", ".join(map(str, row.tokens)) or "-"
        types = ", ".join(row.types)
        rows.append(
            (row.kernel.name, ", ".join(row.activations), types, most, row.gpus, row.formats.label, tiles, row.what)
        )
    return columns("<<<><<<<", rows)


def format_table() -> str:
    """A line for each format: its size, and who multiplies it with which activations."""
    rows = [("format", "bpw", "cpu", *(f"cuda {activation}" for activation in ACTIVATIONS))]
    for fmt in FORMATS.values():
        kernels = (", ".join(served(fmt, activation)) or "-" for activation in ACTIVATIONS)
        rows.append((str(fmt), f"{fmt.bpw:g}", str(on_cpu(fmt)), *kernels))
    return columns("<><<<", rows)


COMMAND = Command(
    "routes",
    "the table of GPU kernels, and the formats they serve",
    "The dispatch table of the GPU: a product takes the first row that fits it. Then each format with its kernels.",
    f'qgemm routes --problem "{EXAMPLE}"',
    add_arguments,
    run,
)

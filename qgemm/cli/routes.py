"""qgemm routes: the dispatch table of the GPU, and which kernels serve which format."""

from __future__ import annotations

import argparse

from qgemm.arguments import ACTIVATIONS
from qgemm.backend import backends
from qgemm.cuda.kernels.routes import ANY, ROUTES, Route, route
from qgemm.cuda.problem import TUNED_SMS, TYPES, Gpu, Problem, gpu
from qgemm.formats import FORMATS
from qgemm.text import columns, printable

from .abilities import on_cpu
from .common import Command, UsageError, count
from .gpu_abilities import served

EXAMPLE = "q4_0 a16 M=64 N=8192 K=8192"
SHOWN = 5  # configs that are printed
TUNED_SM = 90  # compute capability on which the configs were measured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """[--problem "FORMAT a16|a8 M=M N=N K=K [x=half|bf16|float]" [--sms COUNT]] [--sm SM]."""
    parser.add_argument(
        "--problem", metavar="P", type=problem,
        help=f'print the kernel and config of one product, e.g. "{EXAMPLE}"; add x=bf16 or x=float unless x is half',
    )  # fmt: skip
    parser.add_argument(
        "--sm", metavar="SM", type=count,
        help=f"compute capability, 90 is 9.0: only its rows; the GPU of P (default: this machine's, else {TUNED_SM})",
    )  # fmt: skip
    parser.add_argument(
        "--sms", metavar="COUNT", type=count, help=f"SMs for P (default: this machine's, else {TUNED_SMS})"
    )


def run(args: argparse.Namespace) -> int:
    """Print both tables, or the kernel and config of one product."""
    here = gpu_here()
    if args.problem is None:
        print(route_table(args.sm), format_table(args.sm), sep="\n\n")
        if args.sm is None:
            print(f"\n{machine(here)}")
    else:
        on = Gpu(0, TUNED_SM, TUNED_SMS) if here is None or args.sm else here
        print(choice(args.problem._replace(sm=args.sm or on.sm, sms=args.sms or on.sms)))
    return 0


def gpu_here() -> Gpu | None:
    """This machine's GPU, if it is usable."""
    return gpu(0) if backends()["cuda"].available else None


def machine(here: Gpu | None) -> str:
    """A sentence about the rows that apply to this machine."""
    if here is None:
        return f"None of these serves this machine: {printable(backends()['cuda'].detail)}"
    return f"This machine's GPU is sm_{here.sm}: --sm {here.sm} lists its rows alone."


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
    return Problem(formats[0], activations[0], m, n, k, TUNED_SM, x)


def choice(p: Problem) -> str:
    """The route and config of a problem, and the next best configs with the times that the cost model predicts."""
    kernel = route(p).kernel
    lines = [f"{p}, {p.sms} SMs: {kernel.name}"]
    problem_of_kernel = p._replace(x=kernel.reads(p)[0])
    ranked = [(str(config), us) for config, us in kernel.ranked(problem_of_kernel) if config is not None]
    if not ranked:
        return lines[0] + ", which has no configs"
    if ranked[0][1] is None:
        lines.append(f"{len(ranked)} of its configs can serve it; the first, by their table, is launched")
        return "\n".join([*lines, *(config for config, _ in ranked[:SHOWN])])
    lines.append(f"{len(ranked)} of its configs can serve it; the one of least predicted time is launched")
    rows = [("config", "us"), *((config, f"{us:.2f}") for config, us in ranked[:SHOWN])]
    return "\n".join([*lines, columns("<>", rows)])


def route_table(sm: int | None = None) -> str:
    """The table ROUTES, in which the first row that fits serves a product; with `sm` only its rows."""
    rows = [("kernel", "activation", "x", "M <=", "GPUs", "formats", "token tiles", "what it does")]
    for row in rows_of(sm):
        limit = "any" if row.max_rows == ANY else str(row.max_rows)
        tiles = ", ".join(map(str, row.tokens)) or "-"
        types = ", ".join(row.types)
        rows.append(
            (row.kernel.name, ", ".join(row.activations), types, limit, row.gpus, row.formats.label, tiles, row.note)
        )
    return columns("<<<><<<<", rows)


def rows_of(sm: int | None) -> list[Route]:
    """The rows for a compute capability; all rows without one."""
    rows = [row for row in ROUTES if sm is None or row.runs_on(sm)]
    if not rows:
        raise UsageError(f"--sm {sm}: no row serves it; the lowest served is {min(row.least for row in ROUTES)}")
    return rows


def format_table(sm: int | None = None) -> str:
    """A line for each format: its size, and the backends and kernels for each activation."""
    rows = [("format", "bpw", "cpu", *(f"cuda {activation}" for activation in ACTIVATIONS))]
    for fmt in FORMATS.values():
        kernels = (", ".join(served(fmt, activation, sm)) or "-" for activation in ACTIVATIONS)
        rows.append((str(fmt), f"{fmt.bpw:g}", str(on_cpu(fmt)), *kernels))
    return columns("<><<<", rows)


COMMAND = Command(
    "routes",
    "print the table of GPU kernels, and the formats they serve",
    "Print the GPU's dispatch table (the first row that fits serves a product), and the kernels of each format.",
    f'qgemm routes --problem "{EXAMPLE}"',
    add_arguments,
    run,
)

"""qgemm routes: the dispatch table of the GPU, and which kernels serve which format."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from qgemm.arguments import ACTIVATIONS, KINDS
from qgemm.backend import backends
from qgemm.codec.group_activations import multiplies
from qgemm.cuda import cards
from qgemm.cuda.cards import Card
from qgemm.cuda.driver.tuned import times_of
from qgemm.cuda.kernels.routes import ANY, ROUTES, Route, alternatives, route
from qgemm.cuda.problem import TUNED_SMS, TYPES, Gpu, Problem, gpu
from qgemm.errors import UnsupportedError
from qgemm.formats import FORMATS
from qgemm.text import columns, printable

from .abilities import on_cpu
from .common import Command, UsageError, count
from .gpu_abilities import served

EXAMPLE = "q4_0 a16 M=64 N=8192 K=8192"
PAPER_FORMAT, PAPER_SHAPE, PAPER_M = "q4_k", (4096, 4096), (1, 16, 64, 128, 512, 4096)  # problems of --gpu
SHOWN = 5  # configs that are printed
TUNED_SM = 90  # compute capability on which the configs were measured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """[--problem "FORMAT a16|a8 M=M N=N K=K [x=half|bf16|float]" [--sms COUNT]] [--sm SM | --gpu NAME]."""
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
    parser.add_argument(
        "--gpu", metavar="NAME", type=card_named,
        help='a card by its name, e.g. "RTX 4090", which need not be here: kernels, configs and predicted times',
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print both tables, or the kernel and config of one product; the predictions for a card."""
    if args.gpu is not None:
        if args.sm or args.sms:
            raise UsageError("--gpu names a card with its --sm and --sms: leave them out")
        print(on_paper(args.gpu, args.problem))
        return 0
    here = gpu_here()
    if args.problem is None:
        print(route_table(args.sm), format_table(args.sm), sep="\n\n")
        if args.sm is None:
            print(f"\n{machine(here)}")
    else:
        chosen = Gpu(0, TUNED_SM, TUNED_SMS) if here is None or args.sm else here
        times = times_of(chosen.device) if backends()["cuda"].available and chosen is here and not args.sms else None
        print(choice(args.problem._replace(sm=args.sm or chosen.sm, sms=args.sms or chosen.sms, times=times)))
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
    if timed := kernel.timed(p):
        return "\n".join([*lines, *by_times(p, kernel.name, timed)])
    if not ranked:
        return lines[0] + ", which has no configs"
    if ranked[0][1] is None:
        lines.append(f"{len(ranked)} of its configs can serve it; the first, by their table, is launched")
        return "\n".join([*lines, *(config for config, _ in ranked[:SHOWN])])
    lines.append(f"{len(ranked)} of its configs can serve it; the one of least predicted time is launched")
    rows = [("config", "us"), *((config, f"{us:.2f}") for config, us in ranked[:SHOWN])]
    return "\n".join([*lines, columns("<>", rows)])


def on_paper(card: Card, p: Problem | None) -> str:
    """Predictions for a card: the configs of a problem, or a line for each activation and number of rows."""
    lines = [
        f"{card}.",
        "Times are predicted from its data sheet" + ("." if card.measured else ", and were never measured."),
        "",
    ]
    if p is not None:
        ranked = cards.ranked(p, card)
        lines[2] = f"{cards.on_card(p, card)}, {card.sms} SMs: {ranked[0].kernel.name}, in the order of its choice"
        configs = [(_name(config), f"{us:.1f}", limit) for _, config, us, limit in ranked[:SHOWN]]
        return "\n".join([*lines, columns("<><", [("config", "us", "limited by"), *configs])])
    rows = [("activation", "M", "kernel", "config", "us", "limited by")]
    for activation, m in product(KINDS, PAPER_M):
        fmt = FORMATS[PAPER_FORMAT]
        p = Problem(fmt, activation, m, *PAPER_SHAPE, card.sm)
        if multiplies(activation, fmt) and (served := prediction(p, card)) is not None:
            kernel, config, us, limit = served
            rows.append((activation, str(m), kernel.name, _name(config), f"{us:.1f}", limit))
    lines[2] = "{} of {}x{}".format(PAPER_FORMAT, *PAPER_SHAPE)
    return "\n".join([*lines, columns("<><<><", rows)])


def prediction(p: Problem, card: Card) -> cards.Prediction | None:
    """The prediction for a card, None where no kernel serves it."""
    try:
        return cards.predicted(p, card)
    except UnsupportedError:
        return None


def _name(config: object) -> str:
    return "-" if config is None else str(config)


def card_named(text: str) -> Card:
    """An argument: the name of a card."""
    try:
        return cards.card(text)
    except UnsupportedError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def by_times(p: Problem, name: str, timed: Sequence[tuple[Any, float]]) -> Iterator[str]:
    """The lines of a choice by measured times: their source, and the fastest configs of the kernel, then of others."""
    row = p.timed()
    assert row is not None
    other = "" if row.m == p.m else f" with M={row.m}, whose times correct the predicted ones"
    yield f"chosen by {row.source}{other}; the fastest is launched"
    others = [(other.kernel.name, other.kernel.timed(p)) for other in alternatives(p) if other.kernel.name != name]
    rows = [(name, config, us) for config, us in timed[:SHOWN]]
    rows += [(other, *times[0]) for other, times in others if times]
    yield columns("<<>", [("kernel", "config", "us"), *((k, str(c or "-"), f"{us:.2f}") for k, c, us in rows)])


def route_table(sm: int | None) -> str:
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


def format_table(sm: int | None) -> str:
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

"""qgemm routes: the dispatch table of the GPU, and which kernels serve which format."""

from __future__ import annotations

import argparse

from qgemm.arguments import ACTIVATIONS
from qgemm.cuda.kernels.routes import ANY, ROUTES
from qgemm.formats import FORMATS
from qgemm.text import columns

from .abilities import on_cpu, served
from .common import Command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None."""


def run(args: argparse.Namespace) -> int:
    """Print both tables."""
    print(route_table(), format_table(), sep="\n\n")
    return 0


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
    "qgemm routes",
    add_arguments,
    run,
)

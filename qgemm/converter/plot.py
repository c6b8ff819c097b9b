"""Pictures: error and bits per weight of each tensor of a report, KL divergence over the size of files."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from os.path import basename
from pathlib import Path
from typing import Any

from qgemm.errors import QgemmError, UnsupportedError
from qgemm.files.paths import shown_path
from qgemm.version import pip_install

from .report import Line

TENSORS_AN_INCH = 12
MIB = 1 << 20


def figure_type() -> Any:
    """Matplotlib's Figure, which needs no display; UnsupportedError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UnsupportedError(f"--plot needs matplotlib: {pip_install('convert')}") from None
    return Figure


def check_plot(path: Path) -> None:
    """QgemmError, before any work, if no picture can be saved to a path; UnsupportedError without matplotlib."""
    kinds = figure_type()().canvas.get_supported_filetypes()
    if _kind(path) not in kinds:
        raise QgemmError(f"{shown_path(str(path))}: the name must end in {', '.join(f'.{kind}' for kind in kinds)}")


def plot(path: Path, lines: Sequence[Line]) -> bytes:
    """The picture as the bytes of a file, of the kind that the path's suffix names."""
    figure = figure_type()(figsize=(max(8, len(lines) / TENSORS_AN_INCH), 6), layout="constrained")
    errors, bits = figure.subplots(2, 1, sharex=True)
    for how in dict.fromkeys(line.how for line in lines):
        points = [(i, line) for i, line in enumerate(lines) if line.how == how]
        positions = [i for i, _ in points]
        errors.plot(positions, [line.error or 0.0 for _, line in points], ".", label=how)
        bits.plot(positions, [line.bpw for _, line in points], ".", label=how)
    errors.set_ylabel("relative RMS error")
    bits.set_ylabel("bits per weight")
    bits.set_xlabel("tensor, in the file's order")
    bits.set_ylim(bottom=0)
    errors.legend()
    return _saved(figure, path)


def plot_sizes(path: Path, points: Sequence[tuple[str, int, float]]) -> bytes:
    """KL divergence over size: points are (label, bytes, divergence)."""
    figure = figure_type()(figsize=(8, 6), layout="constrained")
    axes = figure.subplots()
    axes.plot([size / MIB for _, size, _ in points], [divergence for *_, divergence in points], "o")
    for label, size, divergence in points:
        axes.annotate(basename(label), (size / MIB, divergence), xytext=(5, 5), textcoords="offset points")
    axes.set_xlabel("size of the tensors in MiB")
    axes.set_ylabel("mean KL divergence in nats")
    if all(divergence > 0 for *_, divergence in points):
        axes.set_yscale("log")
    return _saved(figure, path)


def _saved(figure: Any, path: Path) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format=_kind(path))
    return buffer.getvalue()


def _kind(path: Path) -> str:
    return path.suffix.removeprefix(".").lower()

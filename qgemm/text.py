"""Plain text for people, strict JSON for programs; what comes from files may hold anything and does no harm."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np

MAX_HINTS = 5  # close names in a message
MAX_NAMES, MAX_NAME = 12, 80  # kinds of names in a message, and characters of a name
GAP = "  "  # between columns
DOTS = "..."
COMMAND = "  qgemm "  # how an example starts
NARROW = 72  # characters of a line that tables assume at least


def printable(text: str) -> str:
    """The text with escapes for all that a terminal would obey: controls, line ends, bidi marks, stray bytes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def close_to(name: object, names: Iterable[str]) -> str:
    """The end of "there is no ... 'name'": the names that are close, whatever their case; empty if none is.

    >>> close_to("Q4-0", ["q4_0", "q4_1", "f32"])
    '; close are q4_0'
    """
    by_lower = {candidate.lower(): candidate for candidate in names}
    matches = get_close_matches(str(name).lower(), by_lower, MAX_HINTS)
    return f"; close are {', '.join(printable(by_lower[match]) for match in matches)}" if matches else ""


def names_in_short(names: Iterable[str]) -> str:
    """Names of tensors for a message; those that differ in numbers alone are one, with their count.

    >>> names_in_short(["blk.0.attn_q.weight", "blk.1.attn_q.weight", "output.weight"])
    'blk.*.attn_q.weight (2), output.weight'
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub("[0-9]+", "*", name), []).append(name)
    texts = [printable(cut(group[0] if len(group) == 1 else pattern, MAX_NAME)) for pattern, group in groups.items()]
    counts = [f" ({len(group)})" * (len(group) > 1) for group in groups.values()]
    more = [f"{len(groups) - MAX_NAMES} more kinds"] * (len(groups) > MAX_NAMES)
    return ", ".join([*map(str.__add__, texts[:MAX_NAMES], counts), *more])


def columns(align: str, rows: Iterable[Sequence[str]]) -> str:
    """Rows of cells in aligned columns; `align` holds "<" or ">" for each column.

    >>> print(columns("<>", [("format", "bpw"), ("Q4_0", "4.5")]))
    format  bpw
    Q4_0    4.5
    """
    rows = list(rows)
    line = _line(align, [max(map(len, column)) for column in zip(*rows, strict=True)])
    return "\n".join(line.format(*row).rstrip() for row in rows)


def fitted(align: str, rows: Iterable[Sequence[str]], width: int) -> str:
    """`columns` in `width` characters: too long a first cell has a line of its own, a last one is wrapped.

    >>> print(fitted("<<", [("cpu", "more than fits here"), ("a very long word", "x")], 16))
    cpu  more than
         fits here
    a very long word
         x
    """
    rows, wraps = list(rows), align[-1] == "<"
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    gaps = len(GAP) * (len(align) - 1)
    if wraps:
        widths[-1] = min(widths[-1], width * 9 // 20)  # the first cell needs more
    space = width - sum(widths[1:]) - gaps
    widths[0] = max((len(row[0]) for row in rows if len(row[0]) <= space), default=0)
    if wraps:
        widths[-1] = max(1, width - sum(widths[:-1]) - gaps)
    line, blank = _line(align, widths), [""] * (len(align) - 1)
    lines = []
    for first, *middle, last in rows:
        pieces = textwrap.wrap(last, widths[-1], break_on_hyphens=False) if wraps else [last]
        if len(first) > space:
            lines.append(first)
            first = ""
        lines.append(line.format(first, *middle, *(pieces[:1] or [""])))
        lines += [line.format(*blank, piece) for piece in pieces[1:]]
    return "\n".join(text.rstrip() for text in lines)


def filled(paragraph: str, width: int) -> str:
    """A paragraph wrapped to a width: indented lines each for itself, commands not at all, so that they can be copied.

    >>> print(filled("one two\\nthree four\\n  SRC  five six seven", 16))
    one two three
    four
      SRC  five six
           seven
    """
    lines: list[str] = []  # with the lines of a paragraph joined
    for line in paragraph.split("\n"):
        if lines and not line.startswith(" ") and not lines[-1].startswith(" "):
            lines[-1] += f" {line}"
        else:
            lines.append(line)
    return "\n".join(text for line in lines for text in _wrapped(line, width))


def cut(text: str, width: int) -> str:
    """Text of at most `width` characters; dots stand for the rest."""
    return text if len(text) <= width else text[: max(0, width - len(DOTS))] + DOTS


def terminal_width() -> int:
    """Characters in a line of the terminal, 80 where stdout is none."""
    return max(NARROW, shutil.get_terminal_size((80, 24)).columns)


def binary_size(size: int) -> str:
    """1847296 -> 1.8 MiB."""
    number, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1000 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.3g} {unit}"


def json_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """A document of objects and lists as strict JSON, an item a line: fast, and greppable, for 50,000 tensors."""
    yield "{"
    for number, (key, value) in enumerate(document.items(), 1):
        comma = "," if number < len(document) else ""
        if isinstance(value, dict):
            yield f"  {_strict(key)}: {{"
            yield from _separated(f"{_strict(name)}: {_strict(item)}" for name, item in value.items())
            yield f"  }}{comma}"
        elif isinstance(value, list):
            yield f"  {_strict(key)}: ["
            yield from _separated(map(_strict, value))
            yield f"  ]{comma}"
        else:
            yield f"  {_strict(key)}: {_strict(value)}{comma}"
    yield "}"


def json_value(value: Any) -> Any:
    """A value, of metadata or a result, as what JSON has: NaN and +-Infinity as strings, bytes not UTF-8 as \\xff."""
    if isinstance(value, str):
        return json_text(value)
    if isinstance(value, (list, tuple, np.ndarray)):
        return [json_value(item) for item in value]
    if isinstance(value, (float, np.floating)):  # through its text: float32 1e-05 is not 9.999999747378752e-06
        return float(str(value)) if np.isfinite(value) else json.dumps(float(value))
    return value.item() if isinstance(value, np.generic) else value


def json_text(text: str) -> str:
    """Text that every JSON parser takes: lone surrogates, which not all do, become \\xff."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _wrapped(line: str, width: int) -> list[str]:
    """A line, continued below its second column if it has two."""
    if line.startswith(COMMAND):
        return [line]
    indent = re.match(r" +(?:\S+(?: \S+)*  +)?", line)
    hanging = " " * (indent.end() if indent else 0)
    return textwrap.wrap(line, width, subsequent_indent=hanging, break_on_hyphens=False)


def _line(align: str, widths: Sequence[int]) -> str:
    """A template of cells."""
    return GAP.join(f"{{:{side}{width}}}" for side, width in zip(align, widths, strict=False))


def _strict(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def _separated(items: Iterable[str]) -> Iterator[str]:
    """Each item as a line, with a comma after all but the last."""
    before = None
    for item in items:
        if before is not None:
            yield f"    {before},"
        before = item
    if before is not None:
        yield f"    {before}"

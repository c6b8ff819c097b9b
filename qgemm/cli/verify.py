"""qgemm verify: check that a .gguf file is sound and that this library computes correct products with it."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

from qgemm.converter.api import open_for_conversion
from qgemm.converter.report import Line as Conversion
from qgemm.converter.report import table
from qgemm.converter.weight import Source, Weight
from qgemm.files.gguf.parts import ARCHITECTURE, OURS
from qgemm.files.gguf.reader import open as open_gguf
from qgemm.formats import FORMATS
from qgemm.tensor import Tensor
from qgemm.text import columns, json_lines, json_text, printable

from .checks import CHECKS, NO_CODEC, Cell, Check, against, checks_of, look
from .common import Command, Progress, UsageError, add_file, add_json, add_pattern, limit, need_gguf, selected

OK, FAIL, LISTED = "ok", "FAIL", "-"  # verdicts; a tensor without a codec can only be listed
VERDICTS = {OK: "ok", FAIL: "failed", LISTED: "listed"}  # in JSON
TOLERANCE = 1.0
AGAINST = "against"  # key in JSON of the comparison with OTHER

DESCRIPTION = """\
Check that a .gguf file is sound and that this library computes correct products with it:

  NaN/Inf        blocks (numbers, for plain types) that hold NaN or infinity
  decode         decoded values, compared bit for bit with the gguf package
  a16 err/bound  error of products with random x, relative to the bound for sums in float32; above 1 it fails
  a8 err/bound   the same with x in Q8_1
  RMS to OTHER   relative RMS difference to the tensor of the same name in OTHER

OTHER may be the folder that FILE was converted from. With --against a second table shows how each tensor of OTHER was
converted, as `qgemm convert` does; `qgemm compare` shows how much the predictions of the model changed.
Rows of more than 32768 weights are multiplied in parts. The structure of the file is checked by opening it.
Exit code 1 if anything fails."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """FILE [--against OTHER] [--tolerance R] [--json] [--tensors REGEX]."""
    add_file(parser)
    parser.add_argument(
        "--against",
        metavar="OTHER",
        help="compare with the same tensors of another file, of any kind that `qgemm convert` reads",
    )
    parser.add_argument(
        "--tolerance", metavar="R", type=limit,
        help="relative RMS difference to OTHER that fails (default 1: as far off as zeros are; 0: any)",
    )  # fmt: skip
    add_json(parser, "the tables")
    add_pattern(parser)


def run(args: argparse.Namespace) -> int:
    """Check each tensor, print a line for it; 1 if a check failed."""
    if args.tolerance is not None and args.against is None:
        raise UsageError("--tolerance is for the difference to a file that --against names")
    tolerance = TOLERANCE if args.tolerance is None else args.tolerance
    need_gguf(args.file)
    with ExitStack() as stack:
        file = stack.enter_context(open_gguf(args.file, copy=True))
        others = None if args.against is None else stack.enter_context(source_of(args.against, file.metadata)).weights
        names = selected(dict.fromkeys([*file, *(others or ())]), args.tensors)
        progress = stack.enter_context(Progress("verify", sum(file[name].nbytes for name in names if name in file)))
        lines = [verify(name, file, others, tolerance, progress) for name in names]
    conversions = [line.conversion for line in lines if line.conversion is not None]
    if args.json:
        print(*json_lines(document(file.path, args.against, lines)), sep="\n")
    else:
        titles = [check.title for check in CHECKS] + ([] if others is None else ["RMS to OTHER"])
        print(report(titles, lines))
        if others is not None:
            print("", table(conversions), sep="\n")
    return 1 if any(line.verdict == FAIL for line in lines) else 0


def source_of(other: str, metadata: Mapping[str, Any]) -> Source:
    """OTHER with the names and the layout of FILE: a folder of Hugging Face is read as the model that it becomes.

    metadata: of FILE, which tells whether it is a model, a projector, or tensors under names of their own.
    """
    model = metadata.get(ARCHITECTURE, OURS) != OURS
    projector = metadata.get("general.type") == "mmproj" and os.path.isdir(other)
    return open_for_conversion(other, model=model, projector_type=FORMATS["f32"] if projector else None)


class Line(NamedTuple):
    """One tensor and the results of its checks."""

    name: str
    type: str
    cells: list[Cell]
    conversion: Conversion | None = None  # from OTHER

    @property
    def verdict(self) -> str:
        """OK, FAIL or LISTED."""
        if any(cell.failed for cell in self.cells):
            return FAIL
        return LISTED if self.cells[0].text == NO_CODEC else OK


def verify(
    name: str, file: Mapping[str, Tensor], others: Mapping[str, Weight] | None, tolerance: float, progress: Progress
) -> Line:
    """Check the tensor of this name in the file, in the others, or in both."""
    if name not in file:
        assert others is not None
        missing = Cell("only in OTHER", failed=True)
        return Line(name, others[name].type, [*[Cell("-")] * len(CHECKS), missing])
    tensor = file[name]
    checks = checks_of(tensor)
    look(tensor, [check for check in checks if isinstance(check, Check)], progress)
    cells = [check.cell() if isinstance(check, Check) else check for check in checks]
    if others is None:
        return Line(name, str(tensor.format), cells)
    cell, conversion = against(tensor, others.get(name), tolerance)
    return Line(name, str(tensor.format), [*cells, cell], conversion)


def report(titles: list[str], lines: list[Line]) -> str:
    """The table of all tensors, and a line that sums up the verdicts."""
    rows = [("tensor", "type", *titles, "verdict")]
    rows += [(printable(line.name), line.type, *(cell.text for cell in line.cells), line.verdict) for line in lines]
    count = Counter(line.verdict for line in lines)
    total = f"{len(lines)} tensors: {count[OK]} ok, {count[FAIL]} failed, {count[LISTED]} without a codec"
    return f"{columns('<' * len(rows[0]), rows)}\n\n{total}"


def document(path: str, other: str | None, lines: list[Line]) -> dict[str, Any]:
    """The table and its verdicts, for JSON."""
    keys, count = [*(check.key for check in CHECKS), AGAINST], Counter(line.verdict for line in lines)
    return {
        "path": json_text(path),
        "against": None if other is None else json_text(other),
        "verdicts": {name: count[verdict] for verdict, name in VERDICTS.items()},
        "tensors": [
            {
                "name": json_text(line.name),
                "type": line.type,
                "verdict": VERDICTS[line.verdict],
                "checks": {key: cell.document() for key, cell in zip(keys, line.cells, strict=False)},
                "conversion": None if line.conversion is None else line.conversion.how,
            }
            for line in lines
        ],
    }


COMMAND = Command(
    "verify",
    "check a file's tensors: NaN, decoded values, products",
    DESCRIPTION,
    "qgemm verify model-q4_0.gguf --against model-f16.gguf --tensors 'blk\\.0\\.'",
    add_arguments,
    run,
)

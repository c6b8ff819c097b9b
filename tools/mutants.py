"""Plant bugs, one at a time, into a copy of the sources, and check that tests catch each: `python tools/mutants.py`.

A row of tests/data/mutants.json is a realistic bug: a description, the file, the text to replace, the replacement, and
the tests of which at least one must fail (files, or tests as FILE::NAME). tests/test_mutants.py compares the rows with
the sources, so that a row is updated together with the code that it changes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "data" / "mutants.json"
WITH_TORCH = "tests/with_torch/"  # tests that need torch
TIMEOUT = 900  # seconds; tests that run longer hang, and the bug counts as caught


class Mutant(NamedTuple):
    """One bug: `old`, which occurs once in the file, becomes `new`. tests: those of which at least one must fail."""

    wrong: str
    file: str
    old: str
    new: str
    tests: list[str]


def mutants() -> list[Mutant]:
    """The rows of the table."""
    return [Mutant(**row) for row in json.loads(TABLE.read_text())]


def planted(mutant: Mutant, text: str) -> str:
    """The text of the mutant's file with the bug; ValueError unless `old` occurs exactly once."""
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file}: {mutant.old!r} occurs {text.count(mutant.old)} times, not once")
    return text.replace(mutant.old, mutant.new)


def copy(folder: Path) -> None:
    """Copy the files that git tracks, in their current state, into another folder."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)


def failure(folder: Path, tests: Collection[str]) -> str:
    """The first of the tests that fails in a folder, "" if none does."""
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{folder / 'tools'}"}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return "it hangs"
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", done.stdout, re.MULTILINE)
    return failed[1] if failed else "" if done.returncode == 0 else "nothing can be imported"


def caught(folder: Path, mutant: Mutant) -> str:
    """The first test that fails with the bug planted, "" if none does."""
    path = folder / mutant.file
    text = path.read_text()
    path.write_text(planted(mutant, text))
    try:
        return failure(folder, mutant.tests)
    finally:
        path.write_text(text)


def main() -> int:
    """Plant each selected bug; 1 if any is not caught."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pattern", nargs="?", default="", help="only bugs whose file or description contains this")
    pattern = parser.parse_args().pattern
    chosen = [mutant for mutant in mutants() if pattern in mutant.file or pattern in mutant.wrong]
    if find_spec("torch") is None and (without := [mutant for mutant in chosen if WITH_TORCH in mutant.tests[0]]):
        print(f"skipped, because torch is not installed: {len(without)} in qgemm/torch")
        chosen = [mutant for mutant in chosen if mutant not in without]
    survivors = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy(folder)
        tests = sorted({test for mutant in chosen for test in mutant.tests})
        if first := tests and failure(folder, tests):
            print(f"fails without any bug: {first}")
            return 1
        for mutant in chosen:
            by = caught(folder, mutant)
            survivors += [] if by else [mutant]
            print(f"{'caught' if by else 'MISSED'}  {mutant.file}: {mutant.wrong}{by and f' ({by})'}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The GPU ledger: proof that the GPU tests passed on exactly these sources, since CI has no GPU.

`make gpu` on a machine with a GPU writes tests/gpu_ledger.json after a run of all tests. This script fails if an entry
was edited, a test did not pass, the tests are others than those collected now, or the sources have changed since. A
"reason" in the ledger, one line that says why no GPU was available, excuses changed sources.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gpu_sources import Sources

ROOT = Path(__file__).parents[1]
LEDGER = ROOT / "tests" / "gpu_ledger.json"
OUTCOMES = ("passed", "skipped", "failed")
SEAL = "entry_sha256"  # the digest of all other fields, except the reason
OWN_HAND = ("reason", SEAL)  # fields that the seal does not cover

Counts = dict[str, int]


def collected() -> Counts:
    """The number of GPU tests by file, as pytest collects them here; a file without its package (torch) is absent."""
    command = [sys.executable, "-m", "pytest", "-qq", "--collect-only", "-p", "no:cacheprovider", "tests/gpu"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    pairs = (line.rsplit(": ", 1) for line in lines if line.startswith("tests/gpu/"))
    return {name: int(count) for name, count in pairs}


def outcomes(report: Path) -> dict[str, Counts]:
    """The outcomes of a JUnit report by file: numbers of tests for each of OUTCOMES."""
    counts: dict[str, Counts] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("classname", "").replace(".", "/") + ".py"
        if name.startswith("tests/gpu/"):
            by_outcome = counts.setdefault(name, dict.fromkeys(OUTCOMES, 0))
            skipped = case.find("skipped") is not None
            wrong = any(case.find(tag) is not None for tag in ("failure", "error"))
            by_outcome["failed" if wrong else "skipped" if skipped else "passed"] += 1
    return counts


def entry(facts: Mapping[str, Any], by_file: Counts, report: Path) -> dict[str, Any]:
    """The ledger of a run of all tests. facts: of the GPU; by_file: tests collected before the run."""
    results = outcomes(report)
    names = sorted({*by_file, *results})
    tests = {name: {"collected": by_file.get(name, 0), **results.get(name, {})} for name in names}
    totals = {name: sum(counts.get(name, 0) for counts in tests.values()) for name in ("collected", *OUTCOMES)}
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    return sealed({"sources_sha256": Sources().sha256(), **facts, "date": date, **totals, "tests": tests})


def sealed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with the digest of all that a run wrote."""
    content = {name: value for name, value in fields.items() if name not in OWN_HAND}
    return {**fields, SEAL: hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}


def problem(ledger: Mapping[str, Any], sources: str, by_file: Counts) -> str | None:
    """The defect of a ledger for sources of this digest and tests collected from them, or None."""
    if sealed(ledger)[SEAL] != ledger.get(SEAL):
        return f"{LEDGER.name} was edited, or written by another version of tools/ledger.py: run `make gpu` again"
    tests = ledger["tests"]
    failed = [name for name, counts in tests.items() if counts.get("failed")]
    lost = [
        name for name, counts in tests.items() if sum(counts.get(key, 0) for key in OUTCOMES) != counts["collected"]
    ]
    idle = [name for name, counts in tests.items() if not counts.get("passed")]
    if failed or lost or idle or not tests:
        return f"the last GPU run did not pass: {failed} failed, {lost} did not run whole, {idle} passed no test"
    if ledger["sources_sha256"] != sources:
        return None if ledger.get("reason") else "sources of the GPU tests changed since their last run: run `make gpu`"
    others = [name for name, count in by_file.items() if tests.get(name, {}).get("collected") != count]
    absent = [name for name in tests if not (ROOT / name).is_file()]
    return f"the GPU run had other tests in {others + absent}: run `make gpu`" if others or absent else None


def main() -> int:
    """Print the verdict; 1 if the ledger is stale."""
    if not LEDGER.exists():
        defect: str | None = f"{LEDGER.name} is missing: run `make gpu` on a machine with an NVIDIA GPU"
    else:
        defect = problem(ledger := json.loads(LEDGER.read_text()), Sources().sha256(), collected())
    if defect is None:
        summary = {name: value for name, value in ledger.items() if name != "tests"}
        print(f"GPU ledger is current: {json.dumps(summary)}")
    else:
        print(defect, file=sys.stderr)
    return 1 if defect else 0


if __name__ == "__main__":
    sys.exit(main())

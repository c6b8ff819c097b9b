"""Print which rows of tools/results/ were measured with other kernels than those of this checkout; never an error."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report.tables import RESULTS
from benchmarks.stale import table

if __name__ == "__main__":
    print(table(sorted(RESULTS.parent.glob("*.json"))))

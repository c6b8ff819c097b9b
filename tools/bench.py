"""Benchmarks of this checkout: `qgemm bench` with all its options, and --report.

tools/bench.py --out tools/results --merge    measure into the results file of this GPU
tools/bench.py --report                       targets beside measured numbers; tables of the documents and plots
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import readme
import report
import tables

from qgemm import QgemmError
from qgemm.cli import main as cli


def main(arguments: list[str]) -> int:
    """Measure, or report."""
    if arguments[:1] != ["--report"]:
        return cli.main(["bench", *arguments])
    path = Path(arguments[1]) if len(arguments) > 1 else tables.RESULTS
    try:
        status = report.main(path)
    except (OSError, QgemmError) as error:
        print(error, file=sys.stderr)
        return 1
    if path == tables.RESULTS:
        readme.write()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

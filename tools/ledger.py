"""The GPU ledger: proof that the GPU tests passed on exactly these sources, since CI has no GPU.

`pytest -m gpu` on a machine with a GPU writes tests/gpu_ledger.json; this script fails if the sources have changed
since, unless the ledger has a "reason": one line that says why no GPU was available.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.results import sources_sha256

ROOT = Path(__file__).parents[1]
LEDGER = ROOT / "tests" / "gpu_ledger.json"


def problem() -> str | None:
    """The defect of the ledger, or None."""
    if not LEDGER.exists():
        return f"{LEDGER.name} is missing: run `pytest -m gpu` on a machine with an NVIDIA GPU"
    ledger = json.loads(LEDGER.read_text())
    if ledger.get("failed") or ledger.get("error") or not ledger.get("passed"):
        return f"the last GPU run did not pass: {ledger}"
    if ledger.get("sources_sha256") != sources_sha256() and not ledger.get("reason"):
        return "kernels/ or their host modules changed since the last GPU run: run `pytest -m gpu` again"
    return None


def main() -> int:
    """Print the verdict; 1 if the ledger is stale."""
    defect = problem()
    print(defect or f"GPU ledger is current: {LEDGER.read_text()}", file=sys.stderr if defect else sys.stdout)
    return 1 if defect else 0


if __name__ == "__main__":
    sys.exit(main())

"""`qgemm convert` of this checkout: tools/convert.py SRC DST TYPE, with its options."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from qgemm.cli import main as cli

if __name__ == "__main__":
    sys.exit(cli.main(["convert", *sys.argv[1:]]))

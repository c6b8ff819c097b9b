"""Tests that CI runs by turns of weeks: after all turns every format of a family was tested."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from qgemm.formats.groups import members

ROOT = Path(__file__).parents[1]
COLLECT = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"]


@pytest.mark.slow
def test_each_format_of_the_family_has_its_week(pytestconfig):
    plugin = next(p for p in pytestconfig.pluginmanager.get_plugins() if hasattr(p, "share_of_week"))
    shares = [[fmt.name for fmt in plugin.share_of_week(week)] for week in range(48)]
    assert sorted(chain.from_iterable(shares[:24])) == sorted(fmt.name for fmt in members())
    assert shares[:24] == shares[24:]
    options = ["--family", "47", "tests/test_whole_family.py"]
    done = subprocess.run([*COLLECT, *options], cwd=ROOT, capture_output=True, text=True)
    assert re.findall(r"::test_lanes\[(\w+)\]", done.stdout) == shares[47]


def test_ci_names_the_week():
    assert '--family $(date +%-V)"' in (ROOT / ".ci" / "run").read_text()

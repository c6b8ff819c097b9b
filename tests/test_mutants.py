"""The table of planted bugs (tools/mutants.py) fits the sources: each bug has one place, and existing tests."""

from __future__ import annotations

import mutants
import pytest


@pytest.mark.parametrize("mutant", mutants.mutants(), ids=lambda mutant: mutant.wrong)
def test_a_bug_can_be_planted(mutant):
    text = (mutants.ROOT / mutant.file).read_text()
    assert mutants.planted(mutant, text) != text
    assert mutant.tests
    for test in mutant.tests:
        path, _, name = test.partition("::")
        assert f"def {name}" in (mutants.ROOT / path).read_text()


def test_bugs_are_many_and_everywhere():
    files = [mutant.file for mutant in mutants.mutants()]
    assert len(files) >= 48
    for room in ("qgemm/codec", "qgemm/files", "qgemm/cpu", "qgemm/cuda", "qgemm/converter", "qgemm/cli", "kernels"):
        assert any(file.startswith(room) for file in files), room

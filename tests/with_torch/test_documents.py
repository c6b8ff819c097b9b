"""What docs/torch.md shows runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

from torch_layers import torch

ROOT = Path(__file__).parents[2]


def test_the_programs_of_the_document(tmp_path, monkeypatch, capsys):
    """Each block; the comment after a print is its output."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    programs = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "torch.md").read_text(), re.DOTALL | re.MULTILINE)
    assert programs
    for program in programs:
        exec(program, {})
        promised = re.findall(r"^ *print\(.*?\)  # (.*)$", program, re.MULTILINE)
        assert capsys.readouterr().out.splitlines() == promised

"""README.md says what the code does."""

from __future__ import annotations

import re

import numpy as np
import readme

import qgemm


def test_generated_tables_are_current():
    text = readme.README.read_text()
    assert readme.generated(text) == text, "run tools/readme.py"


def test_the_example_runs(tmp_path, monkeypatch):
    """The first Python block, letter by letter, on a model that has its tensor."""
    example = re.search(r"```python\n(.*?)```", readme.README.read_text(), re.DOTALL).group(1)
    assert len(example.strip().splitlines()) <= 10
    monkeypatch.chdir(tmp_path)
    w = np.random.default_rng(1).standard_normal((64, 96)).astype(np.float32)
    metadata = {"general.architecture": "llama"}
    qgemm.write("model.gguf", {"blk.0.ffn_down.weight": qgemm.quantize(w, "q4_0")}, metadata)
    scope = {}
    exec(example, scope)
    assert scope["y"].shape == scope["y8"].shape == (8, 64)
    with qgemm.open("copy.gguf") as copy:
        assert str(copy["w"].format) == "Q8_0"
        assert copy.metadata["general.architecture"] == "llama"

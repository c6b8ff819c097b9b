"""Whole files of llama-quantize, where $QGEMM_GOLDEN has them: every tensor's type and bytes, and the metadata.

The folder has llama_quantize/llama_small.gguf (an F16 llama of three layers), its importance matrix, and for each of 51
file types in llama_small.json the types and SHA-256 of all tensors and the keys.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

import qgemm

FOLDER = Path(os.environ.get("QGEMM_GOLDEN", ""), "llama_quantize")
AVAILABLE = "QGEMM_GOLDEN" in os.environ and FOLDER.is_dir()
FILES = json.loads((FOLDER / "llama_small.json").read_text())["files"] if AVAILABLE else {}


@pytest.mark.skipif(not AVAILABLE, reason="QGEMM_GOLDEN names no folder of golden files")
@pytest.mark.compiles
@pytest.mark.parametrize("kind", FILES)
def test_every_tensor_of_a_file(kind, tmp_path, monkeypatch):
    monkeypatch.delenv("QGEMM_CPU")
    name, _, imatrix = kind.lower().partition("+")
    importances = FOLDER / "llama_small.imatrix.dat" if imatrix else None
    qgemm.convert(FOLDER / "llama_small.gguf", tmp_path / "y.gguf", name, imatrix=importances)
    with qgemm.open(tmp_path / "y.gguf") as file:
        tensors = {name: [w.format.name, hashlib.sha256(w.blocks.tobytes()).hexdigest()] for name, w in file.items()}
        keys = dict(file.metadata)
    assert tensors == FILES[kind]["tensors"]
    assert set(keys) == set(FILES[kind]["keys"])
    for key, value in FILES[kind]["keys"].items():
        if value is not None and key != "quantize.imatrix.file":  # a path
            assert keys[key] == value, key

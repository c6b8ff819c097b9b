"""Whole files of llama-quantize: every tensor's type and bytes, and the metadata.

tests/data/llama_quantize/ has an F16 llama of three layers, its importance matrix, and for each of 51 file types the
types and SHA-256 of all tensors and the keys. To be small, the model there has its norms, three matrices and the token
table, which between them get each type with and without importances; its other weights are zeros, without a SHA-256.
$QGEMM_GOLDEN names a folder that has llama_quantize/ with all weights.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
from pathlib import Path

import pytest
from helpers import DATA

import qgemm

FOLDER = Path(os.environ.get("QGEMM_GOLDEN", DATA), "llama_quantize")
FILES = json.loads((FOLDER / "llama_small.json").read_text())["files"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The path of the model."""
    packed = FOLDER / "llama_small.gguf.xz"
    if not packed.exists():
        return FOLDER / "llama_small.gguf"
    path = tmp_path_factory.mktemp("source") / "llama_small.gguf"
    path.write_bytes(lzma.decompress(packed.read_bytes()))
    return path


@pytest.mark.compiles
@pytest.mark.parametrize("kind", FILES)
def test_every_tensor_of_a_file(kind, source, tmp_path, monkeypatch):
    monkeypatch.delenv("QGEMM_CPU")
    name, _, imatrix = kind.lower().partition("+")
    importances = FOLDER / "llama_small.imatrix.dat" if imatrix else None
    qgemm.convert(source, tmp_path / "y.gguf", name, imatrix=importances)
    expected = FILES[kind]
    with qgemm.open(tmp_path / "y.gguf") as file:
        types = {name: w.format.name for name, w in file.items()}
        digests = {name: hashlib.sha256(w.blocks.tobytes()).hexdigest() for name, w in file.items()}
        keys = dict(file.metadata)
    assert types == {name: fmt for name, (fmt, _) in expected["tensors"].items()}
    for name, (_, digest) in expected["tensors"].items():
        assert digest in (None, digests[name]), name
    assert set(keys) == set(expected["keys"])
    for key, value in expected["keys"].items():
        if value is not None and key != "quantize.imatrix.file":  # a path
            assert keys[key] == value, key


def test_each_type_has_bytes_to_compare():
    """With and without importances."""

    def kinds(with_bytes: bool) -> set[tuple[str, bool]]:
        files = ((kind, fmt, digest) for kind in FILES for fmt, digest in FILES[kind]["tensors"].values())
        return {(fmt, "+" in kind) for kind, fmt, digest in files if digest or not with_bytes}

    assert len(FILES) == 51
    assert kinds(with_bytes=True) == kinds(with_bytes=False)

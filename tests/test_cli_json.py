"""`--json` of the commands: strict JSON on stdout with the content of the tables, unrounded."""

from __future__ import annotations

import json

import helpers
import numpy as np
import pytest
from files import spoiled
from helpers import WEIGHT, lines_of

import qgemm

EXCERPT = str(helpers.EXCERPT)
HOSTILE = "\x1b[2Jgone\n\u202e"


def strict(run, *words, status=0):
    """Parses the output of a command as JSON, which must have no NaN."""
    got, out, err = run(*words, "--json")
    assert (got, err) == (status, "")
    assert out.isascii()
    return json.loads(out, parse_constant=pytest.fail)


def weights(shape, fmt="q4_0", seed=0):
    return qgemm.quantize(np.random.default_rng(seed).standard_normal(shape), fmt)


def test_verify(run, tmp_path):
    """A failed check has its blocks, a product its worst error; both tables of --against are included."""
    good = weights((4, 128))
    tensors = {"good": good, "scale": spoiled(good, "d", np.nan), HOSTILE: np.ones(3, np.int32)}
    qgemm.write(tmp_path / "x.gguf", tensors)
    qgemm.write(tmp_path / "y.gguf", {**tensors, "good": weights((4, 128), "q8_0"), "other": good})
    document = strict(run, "verify", tmp_path / "x.gguf", "--against", tmp_path / "y.gguf", status=1)
    assert (document["path"], document["against"]) == (str(tmp_path / "x.gguf"), str(tmp_path / "y.gguf"))
    assert document["verdicts"] == {"ok": 2, "failed": 2, "listed": 0}
    tensors = {tensor["name"]: tensor for tensor in document["tensors"]}
    assert {name: tensor["verdict"] for name, tensor in tensors.items()} == {
        "good": "ok",
        "scale": "failed",
        HOSTILE: "ok",
        "other": "failed",
    }
    assert tensors["scale"]["checks"]["finite"] == {"failed": True, "found": {"blocks": 1, "first": [1, 2]}}
    checks = tensors["good"]["checks"]
    assert checks["finite"] == checks["decode"] == {"failed": False, "found": "ok"}
    assert 0 < checks["a16"]["found"] < 1
    assert 0 < checks["a8"]["found"] < 1
    assert 0 < checks["against"]["found"] < 0.2
    assert tensors["good"]["conversion"] == "requantized"
    assert tensors["other"]["checks"]["against"] == {"failed": True, "found": "only in OTHER"}


def test_matmul(run, tmp_path):
    """The numbers of the table, the source of x, and NaN of a product as a string."""
    document = strict(run, "matmul", EXCERPT, WEIGHT, "--m", "2,5", "--seed", 3, "--activation", "a8")
    assert document["w"] == {"name": WEIGHT, "type": "Q4_0", "shape": [96, 384]}
    assert (document["x"], document["activation"]) == ({"distribution": "standard normal", "seed": 3}, "a8")
    assert document["backend"]["name"] == "cpu"
    assert [(line["m"], line["kernel"]) for line in document["products"]] == [(2, "numpy"), (5, "numpy")]
    shown = lines_of(run("matmul", EXCERPT, WEIGHT, "--m", "2,5", "--seed", 3, "--activation", "a8")[1] + "\n", "M")
    for line in document["products"]:
        assert float(shown[str(line["m"])][1]) == pytest.approx(line["relative_rms"], rel=1e-2)
        assert line["ms"] > 0
    np.save(tmp_path / "x.npy", np.full((1, 128), 2, np.float16))
    qgemm.write(tmp_path / "x.gguf", {HOSTILE: spoiled(weights((4, 128)), "d", np.nan)})
    document = strict(run, "matmul", tmp_path / "x.gguf", HOSTILE, "--x", tmp_path / "x.npy")
    assert document["w"]["name"] == HOSTILE
    assert document["x"] == {"path": str(tmp_path / "x.npy"), "dtype": "float16", "shape": [1, 128]}
    assert document["products"][0]["relative_rms"] == document["products"][0]["max_abs"] == "NaN"


def test_convert(run, tmp_path):
    """The output equals the file of --report."""
    qgemm.write(tmp_path / "x.gguf", {"w.weight": np.eye(64, dtype=np.float32), HOSTILE: np.ones(3, np.float32)})
    words = "convert", tmp_path / "x.gguf", tmp_path / "y.gguf", "q8_0", "--report", tmp_path / "report.json"
    document = strict(run, *words)
    assert document == json.loads((tmp_path / "report.json").read_text())
    assert {tensor["name"]: tensor["to"] for tensor in document["tensors"]} == {"w.weight": "Q8_0", HOSTILE: "F32"}

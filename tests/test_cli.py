"""The command line: every command on real files, what goes to stdout and stderr, exit codes, hostile names."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import BLOCK_FORMATS, each, problems

import qgemm
from qgemm import bounds, cli
from qgemm.commands import checks, text
from qgemm.gguf import open as open_gguf
from qgemm.routes import ROUTES
from qgemm.write import write

DATA = Path(__file__).parent / "data"
EXCERPT = str(DATA / "minilm_excerpt.gguf")
WEIGHT = "blk.2.attn_q.q4_0"  # (96, 384)
MALFORMED = {case["id"]: case for case in json.loads((DATA / "malformed" / "cases.json").read_text())["cases"]}
HOSTILE = "\x1b[2Jgone\n\u202e"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.fixture
def run(capsys):
    """Runs one command in this process -> (exit code, stdout, stderr)."""

    def run(*words: object) -> tuple[int, str, str]:
        try:
            status = cli.main([str(word) for word in words])
        except SystemExit as stop:  # --help, --version
            status = int(stop.code or 0)
        out, err = capsys.readouterr()
        assert all(line.isprintable() for line in (out + err).replace("\t", "\n").split("\n"))
        return status, out, err

    return run


@pytest.fixture
def refused(run):
    """Runs a command that fails -> its one line on stderr."""

    def refused(*words: object, status: int = 1) -> str:
        got, out, err = run(*words)
        assert (got, out) == (status, "")
        assert re.fullmatch(r"qgemm: error: [^\n]+\n", err)
        return err

    return refused


def python_m(*words, **options):
    """`python -m qgemm` as a process of its own."""
    command = [sys.executable, "-m", "qgemm", *words]
    return subprocess.run(command, capture_output=True, check=False, **{"env": ENVIRONMENT, **options})


def lines_of(out: str, start: str) -> dict[str, list[str]]:
    """The table under the header that begins with `start`: first cell -> cells, cut where two blanks are."""
    lines = out.split("\n")
    begin = next(i for i, line in enumerate(lines) if line.split()[:1] == [start])
    table = lines[begin + 1 : lines.index("", begin)]
    return {cells[0]: cells for cells in (re.split(r"  +", line.strip()) for line in table)}


def weights(shape, fmt="q4_0", seed=0):
    return qgemm.quantize(np.random.default_rng(seed).standard_normal(shape), fmt)


def spoiled(tensor, field, value):
    """The tensor with one field of its block [1, 2] set to a value."""
    blocks = tensor.blocks.copy()
    blocks[field][1, 2] = value
    return qgemm.Tensor(tensor.format, tensor.shape, blocks)


# ---------------------------------------------------------------- info


def test_info(run):
    status, out, err = run("info", EXCERPT)
    assert (status, err) == (0, "")
    assert re.search(r"^general.architecture +bert$", out, re.MULTILINE)
    assert "version 3, alignment 32" in out
    assert lines_of(out, "type")["Q4_0"] == ["Q4_0", "2", "135168", "76032", "4.5"]
    tensors = lines_of(out, "tensor")
    with open_gguf(EXCERPT) as file:
        assert list(tensors) == list(file)
    assert tensors[WEIGHT][1:6] == ["Q4_0", "[384, 96]", "(96, 384)", "20736", "a16, a8, dequantize"]
    assert tensors[WEIGHT][6] == "a16: fused, unpack; a8: fused_a8, unpack"
    assert tensors["blk.2.attn_q.f32"][5:] == ["a16, dequantize", "a16: cublas"]
    assert tensors["blk.2.attn_q.iq4_nl"][5:] == ["no codec", "no codec"]
    assert qgemm.backends()["cuda"].detail in out


def test_info_of_some_tensors(run, refused):
    _, out, _ = run("info", EXCERPT, "--tensors", r"attn_q\.q[45]")
    assert list(lines_of(out, "tensor")) == [f"blk.2.attn_q.{fmt}" for fmt in ("q4_0", "q4_1", "q5_0", "q5_1")]
    assert list(lines_of(out, "type")) == ["Q5_1", "Q5_0", "Q4_1", "Q4_0"]
    assert "no tensor's name has 'attn_k'" in refused("info", EXCERPT, "--tensors", "attn_k")
    assert "is not a regular expression" in refused("info", EXCERPT, "--tensors", "(", status=2)


def test_what_backends_can_do_depends_on_the_axes(run, tmp_path):
    shapes = {"vector": (64,), "matrix": (3, 64), "stack": (2, 3, 64)}
    write(tmp_path / "x.gguf", {name: weights(shape) for name, shape in shapes.items()})
    tensors = lines_of(run("info", tmp_path / "x.gguf")[1], "tensor")
    assert tensors["vector"][5:] == ["dequantize", "no matrix"]
    assert tensors["matrix"][5] == "a16, a8, dequantize"
    assert tensors["stack"][5] == "a16, a8, dequantize (of each [i])"


def test_info_as_json(run):
    status, out, err = run("info", EXCERPT, "--json", "--tensors", "attn_q")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert (found["version"], found["alignment"], found["bytes"]) == (3, 32, os.path.getsize(EXCERPT))
    assert found["metadata"]["general.architecture"] == "bert"
    assert {name: found["backends"][name]["available"] for name in ("cpu", "cuda")}["cpu"]
    tensor = next(tensor for tensor in found["tensors"] if tensor["name"] == WEIGHT)
    assert (tensor["ne"], tensor["shape"], tensor["bytes"]) == ([384, 96], [96, 384], 20736)
    assert tensor["cpu"] == {"dequantize": True, "products": {"a16": ["numpy"], "a8": ["numpy"]}, "note": ""}
    assert tensor["cuda"]["products"] == {"a16": ["fused", "unpack"], "a8": ["fused_a8", "unpack"]}


def test_json_is_strict(run, tmp_path):
    """NaN, infinities, bytes that are not UTF-8, control characters, long arrays, numbers of every type."""
    metadata = {
        "nan": float("nan"),
        "infinities": np.array([np.inf, -np.inf, 1e-5], np.float32),
        "stray": "a\udcff\ud83d" if False else "a\udcffb",
        "control": HOSTILE,
        "yes": True,
        "most": np.uint64(2**64 - 1),
        "half": np.float64(0.1),
        "vocabulary": [f"token {i}" for i in range(1000)],
        "merges": np.arange(1000, dtype=np.int16),
        "none": [],
    }
    write(tmp_path / "x.gguf", {"w\udcfe": weights((2, 32)), HOSTILE: weights((2, 32))}, metadata)
    status, out, _ = run("info", tmp_path / "x.gguf", "--json")
    assert status == 0
    assert out.isascii()
    found = json.loads(out, parse_constant=pytest.fail)
    assert found["metadata"] == {
        "nan": "NaN",
        "infinities": ["Infinity", "-Infinity", 1e-5],
        "stray": "a\\xffb",
        "control": HOSTILE,
        "yes": True,
        "most": 2**64 - 1,
        "half": 0.1,
        "vocabulary": {"type": "string", "length": 1000, "first": [f"token {i}" for i in range(text.FIRST)]},
        "merges": {"type": "int16", "length": 1000, "first": list(range(text.FIRST))},
        "none": [],
    }
    assert [tensor["name"] for tensor in found["tensors"]] == ["w\\xfe", HOSTILE]


@given(st.lists(st.tuples(st.text(), st.text())))
def test_columns_line_up(cells):
    rows = [("a", "b"), *((printable(a), printable(b)) for a, b in cells)]
    got = text.columns("<>", rows).split("\n")
    width, last = (max(len(row[i]) for row in rows) for i in range(2))
    assert got == [f"{a:{width}}  {b:>{last}}".rstrip() for a, b in rows]


def printable(characters: str) -> str:
    shown = text.printable(characters)
    assert shown.isprintable()
    return shown


# ---------------------------------------------------------------- verify


def test_verify_a_real_file(run):
    status, out, err = run("verify", EXCERPT)
    assert (status, err) == (0, "")
    found = lines_of(out, "tensor")
    for cells in found.values():
        assert cells[1] in cells[0].upper()
        if cells[1].lower() in qgemm.FORMATS:
            assert cells[2:4] + cells[-1:] == ["ok", "ok", "ok"]
            assert 0 < float(cells[4]) < 1
            assert cells[5] == "no codes" if cells[1] == "F32" else 0 < float(cells[5]) < 1
        else:
            assert cells[2:] == ["no codec"] * 4 + ["-"]
    assert out.endswith("33 tensors: 12 ok, 0 failed, 21 without a codec\n")


def test_verify_counts_nan_and_names_the_first(run, tmp_path):
    tensors = {
        "good": weights((4, 128)),
        "scale": spoiled(weights((4, 128)), "d", np.nan),
        "minimum": spoiled(weights((4, 128), "q5_1"), "m", np.inf),
        "plain": np.where(np.arange(12).reshape(3, 4) < 5, np.float32(1), np.float32(np.nan)),
        "vector": np.array([1, 2, -np.inf], np.float16),
        "stack": qgemm.Tensor("q8_0", (2, 2, 64), np.full((2, 2, 2), np.nan, "f2").view("V2").astype("V34").view(
            qgemm.FORMATS["q8_0"].dtype).reshape(2, 2, 2)) if False else weights((2, 2, 64), "q8_0"),
    }
    write(tmp_path / "x.gguf", tensors)
    status, out, err = run("verify", tmp_path / "x.gguf")
    assert (status, err) == (1, "")
    found = {name: (cells[2], cells[-1]) for name, cells in lines_of(out, "tensor").items()}
    assert found == {
        "good": ("ok", "ok"),
        "scale": ("1, first [1, 2]", "FAIL"),
        "minimum": ("1, first [1, 2]", "FAIL"),
        "plain": ("7, first [1, 1]", "FAIL"),
        "vector": ("1, first [2]", "FAIL"),
        "stack": ("ok", "ok"),
    }
    assert "6 tensors: 2 ok, 4 failed, 0 without a codec" in out

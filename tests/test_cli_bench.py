"""`qgemm bench`: the matrices of a file or random ones, a table or JSON. Times are not checked."""

from __future__ import annotations

import json
from importlib.util import find_spec

import numpy as np
import pytest

import qgemm
from qgemm.cli import bench

SMALL = ["bench", "--cpu", "--m", "1,2", "--repeats", "1"]


def cells_of(out):
    """The machine, and the cells of each row below the head of the table."""
    machine, _, head, *lines = out.splitlines()
    assert head.split() == ["tensor", "format", "N", "x", "K", "M", "x", "us", "GB/s", "NumPy", "us", "ratio"]
    return machine, [line.split() for line in lines]


def test_random_weights_give_a_row_for_each_format_m_and_activation(run):
    status, out, err = run(*SMALL, "--formats", "q4_0,kbit4", "--shapes", "64x256")
    assert (status, err) == (0, "")
    machine, rows = cells_of(out)
    assert machine == qgemm.backends()["cpu"].detail
    assert [row[:5] for row in rows] == [
        ["random", fmt, "64x256", m, activation]
        for fmt, activations in (("q4_0", ["a16", "a8"]), ("kbit4", ["a16"]))
        for m in "12"
        for activation in activations
    ]
    assert all(float(cell) >= 0 for row in rows for cell in row[5:])


def test_a_file_gives_each_format_and_shape_once(run, tmp_path):
    """Alike matrices are counted, not measured; vectors, experts and types without a codec are left out."""
    w = np.random.default_rng(0).standard_normal((64, 256), np.float32)
    tensors = {f"blk.{i}.ffn_up.weight": qgemm.quantize(w, "q4_0") for i in range(3)}
    tensors["output.weight"] = qgemm.quantize(w, "q8_0")
    tensors |= {"norm.weight": w[0], "experts.weight": w.reshape(2, 32, 256)}
    qgemm.write(tmp_path / "x.gguf", tensors)
    status, out, _ = run(*SMALL, tmp_path / "x.gguf", "--json", "--activations", "a8")
    document = json.loads(out)
    assert (status, document["backend"]["name"], document["dense"]) == (0, "cpu", "NumPy float32")
    names = "tensor", "format", "n", "k", "m", "activation"
    assert [tuple(row[name] for name in names) for row in document["rows"]] == [
        (name, fmt, 64, 256, m, "a8")
        for name, fmt in (("blk.0.ffn_up.weight (+2)", "q4_0"), ("output.weight", "q8_0"))
        for m in (1, 2)
    ]
    for row in document["rows"]:
        assert row["ratio"] == pytest.approx(row["dense_us"] / row["us"])
        assert row["gbs"] == pytest.approx(64 * 256 * {"q4_0": 18, "q8_0": 34}[row["format"]] / 32 / row["us"] / 1e3)
    _, out, _ = run(*SMALL, tmp_path / "x.gguf", "--tensors", "^output")
    assert {row[0] for row in cells_of(out)[1]} == {"output.weight"}


def test_a_file_without_a_matrix_is_refused(refused, tmp_path):
    qgemm.write(tmp_path / "x.gguf", {"norm.weight": np.ones(32, np.float32)})
    assert "holds no matrix" in refused(*SMALL, tmp_path / "x.gguf")


def test_activations_that_fit_no_format_are_refused(refused):
    assert "no matrix can be multiplied" in refused(*SMALL, "--formats", "kbit4", "--activations", "a8")


def test_a_failed_matrix_is_named_and_the_others_are_measured(run, monkeypatch):
    def cpu_rows(case, *rest):
        if case.w.format.name == "q8_0":
            raise qgemm.UnsupportedError("too large")
        return iter([bench.row(case, 1, "a16", 2.0, None)])

    monkeypatch.setattr(bench, "cpu_rows", cpu_rows)
    status, out, err = run(*SMALL, "--formats", "q4_0,q8_0", "--shapes", "64x256")
    assert (status, err) == (1, "qgemm: random Q8_0 (64, 256): too large\n")
    assert cells_of(out)[1] == [["random", "q4_0", "64x256", "1", "a16", "2.0", "4.608", "-", "-"]]


@pytest.mark.parametrize(
    "words",
    ["--formats q4_9", "--activations a4", "--shapes 4096", "--shapes 1x2x3", "--m 0", "--m 1,,2", "--repeats x",
     "--cpu --gpu", "--tensors x", "x.gguf --formats q4_0", "x.gguf --shapes 1x32"],
)  # fmt: skip
def test_bad_options_are_refused(words, refused):
    refused("bench", *words.split(), status=2)


@pytest.mark.skipif(qgemm.backends()["cuda"].available, reason="there is a GPU")
def test_without_a_gpu_it_says_why(refused):
    assert qgemm.backends()["cuda"].detail in refused("bench", "--gpu")


@pytest.mark.parametrize(
    "words",
    ["--minutes 2", "--variants eager", "--types q4_0", "--layers 2", "--model llama-3-9b",
     "--model llama-3-8b --types q4_9", "--model llama-3-8b --minutes 0", "--model llama-3-8b --minutes nan",
     "--model llama-3-8b --variants fast",
     "--model llama-3-8b --formats q4_0", "--model llama-3-8b --batches 0", "x.gguf --model llama-3-8b"],
)  # fmt: skip
def test_bad_options_of_whole_models_are_refused(words, refused):
    refused("bench", "--cpu", *words.split(), status=2)


@pytest.mark.skipif(find_spec("transformers") is not None, reason="transformers is installed")
def test_whole_models_need_transformers(refused):
    assert "pip install" in refused("bench", "--cpu", "--model", "llama-3-8b")

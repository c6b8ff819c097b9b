"""Files of sums: read back, merged, shown, and the refusals of commands that run models without torch."""

from __future__ import annotations

import json
import struct
import sys

import numpy as np
import pytest

import qgemm
from qgemm.cli.imatrix import say_loading
from qgemm.files.imatrix import read_imatrix
from qgemm.files.imatrix_statistics import statistics
from qgemm.files.imatrix_sums import Sums, SumsFile, read_sensitivities, read_sums

NAMES = ("blk.0.attn_q.weight", "blk.1.attn_q.weight", "blk.1.ffn_up_exps.weight")


def sums_of(name, seed, fisher=True):
    rng = np.random.default_rng(seed)
    experts = 4 if "exps" in name else 1
    tokens = rng.integers(1, 100, experts).astype(np.float64)
    squares = rng.random((experts, 64)) * tokens[:, None]
    return Sums(squares, tokens, rng.random((experts, 64)) if fisher else None)


def file_of(seed, **options):
    return SumsFile({name: sums_of(name, seed, **options) for name in NAMES}, [f"text {seed}"], seed + 1)


def assert_equal_sums(sums, expected):
    assert sums.keys() == expected.keys()
    for name in sums:
        for values, others in zip(vars(sums[name]).values(), vars(expected[name]).values(), strict=True):
            assert (values is None) == (others is None)
            if values is not None:
                np.testing.assert_allclose(values, others, 1e-6)


@pytest.mark.parametrize("fisher", [False, True])
def test_a_file_is_read_back_as_llama_cpp_lays_it_out(tmp_path, fisher):
    """Names, shapes and keys are those of llama-imatrix; the converter reads the means."""
    file = file_of(1, fisher=fisher)
    file.write(tmp_path / "x.gguf")
    assert_equal_sums(read_sums(tmp_path / "x.gguf").sums, file.sums)
    with qgemm.open(tmp_path / "x.gguf") as stored:
        assert stored.metadata["general.type"] == "imatrix"
        assert stored.metadata["imatrix.datasets"] == ["text 1"]
        assert [stored.metadata[f"imatrix.{key}"] for key in ("chunk_count", "chunk_size")] == [2, 512]
        assert {stored[f"{NAMES[2]}.{part}"].shape for part in ("in_sum2", "counts")} == {(4, 64), (4, 1)}
    means = read_imatrix(tmp_path / "x.gguf")
    for name, sums in file.sums.items():
        np.testing.assert_allclose(means[name], sums.squares / sums.tokens[:, None], 1e-6)


def test_merging_adds_sums(run, tmp_path):
    """As one run over both texts; a sensitivity that only one file has is dropped."""
    for seed, fisher in ((0, True), (1, True), (2, False)):
        file_of(seed, fisher=fisher).write(tmp_path / f"{seed}.gguf")
    words = [word for seed in (0, 1) for word in ("--in-file", tmp_path / f"{seed}.gguf")]
    assert run("imatrix", *words, "-o", tmp_path / "out.gguf")[0] == 0
    merged, expected = read_sums(tmp_path / "out.gguf"), file_of(0)
    for name, sums in file_of(1).sums.items():
        own = expected.sums[name]
        expected.sums[name] = Sums(*(vars(own)[part] + vars(sums)[part] for part in vars(own)))
    assert_equal_sums(merged.sums, expected.sums)
    assert (merged.datasets, merged.chunks) == (["text 0", "text 1"], 3)
    run("imatrix", *words, "--in-file", tmp_path / "2.gguf", "-o", tmp_path / "out.gguf", "--force")
    assert all(sums.fisher is None for sums in read_sums(tmp_path / "out.gguf").sums.values())
    run("imatrix", *words, *words, "-o", tmp_path / "out.gguf", "--force")
    assert read_sums(tmp_path / "out.gguf").datasets == ["text 0", "text 1"]


def test_an_expert_without_a_token_keeps_its_place(tmp_path):
    """A tensor is left out only if no expert had a token. An interrupted run records where it stopped."""
    used, idle = Sums(np.ones((2, 64)), np.array([3.0, 0])), Sums(np.zeros((2, 64)), np.zeros(2))
    file = SumsFile({NAMES[2]: used, NAMES[0]: idle}, ["text"], chunks=9, run="digest", position=4)
    file.write(tmp_path / "x.gguf")
    stored = read_sums(tmp_path / "x.gguf")
    assert list(stored.sums) == [NAMES[2]]
    assert stored.sums[NAMES[2]].tokens.tolist() == [3, 0]
    assert (stored.run, stored.position, stored.chunks) == ("digest", 4, 9)


def test_sensitivities_are_those_of_a_token_of_the_text(tmp_path):
    """Sums are divided by all tokens, so that a rare expert's matrix counts less."""
    common, rare = (Sums(np.ones((1, 64)), np.array([tokens]), np.full((1, 64), 8.0)) for tokens in (16.0, 2.0))
    SumsFile({NAMES[0]: common, NAMES[1]: rare}, ["text"], 1, lookups=4.0).write(tmp_path / "x.gguf")
    sensitivities = read_sensitivities(tmp_path / "x.gguf")
    assert {name: set(fisher[0]) for name, fisher in sensitivities.fisher.items()} == {NAMES[0]: {0.5}, NAMES[1]: {0.5}}
    assert sensitivities.lookups == 0.25


def test_a_file_of_the_old_kind_is_merged(tmp_path):
    """Its values are means times calls; a chunk of it has 512 tokens."""
    name, values = b"blk.0.attn_q.weight", np.arange(64, dtype="<f4")
    entry = struct.pack("<i", len(name)) + name + struct.pack("<ii", 3, 64) + (3 * values).tobytes()
    (tmp_path / "old.dat").write_bytes(struct.pack("<i", 1) + entry + struct.pack("<ii", 7, 4) + b"text")
    file = read_sums(tmp_path / "old.dat")
    (sums,) = file.sums.values()
    np.testing.assert_allclose(sums.squares[0], values * 7 * 512)
    assert (sums.tokens.tolist(), file.chunks, file.datasets) == ([7 * 512], 7, ["text"])


@pytest.mark.parametrize("first", ["old", "new"])
def test_experts_of_the_old_kind_are_merged(first):
    """The old kind has the means of all experts in one row, and one number of tokens."""
    old = SumsFile({NAMES[2]: Sums(np.arange(256.0)[None], np.full(1, 512.0))})
    new = SumsFile({NAMES[2]: Sums(np.ones((4, 64)), np.array([1.0, 2, 3, 0]), np.ones((4, 64)))})
    file, other = (old, new) if first == "old" else (new, old)
    file.merge(other, "x")
    sums = file.sums[NAMES[2]]
    np.testing.assert_array_equal(sums.squares, np.arange(256.0).reshape(4, 64) + 1)
    assert (sums.tokens.tolist(), sums.fisher) == ([513, 514, 515, 512], None)


def test_sums_of_another_shape_are_refused(refused, tmp_path):
    file_of(0).write(tmp_path / "a.gguf")
    SumsFile({NAMES[0]: Sums(np.ones((1, 32)), np.ones(1))}).write(tmp_path / "b.gguf")
    words = ["--in-file", tmp_path / "a.gguf", "--in-file", tmp_path / "b.gguf"]
    message = refused("imatrix", *words, "-o", tmp_path / "out.gguf")
    assert f"{NAMES[0]!r}: has sums of shape (1, 32), elsewhere (1, 64)" in message


def test_statistics(run, tmp_path):
    """A column alone has all of the sum: no entropy. Equal columns have all of it."""
    alone, equal = np.zeros((1, 64)), np.ones((1, 64))
    alone[0, 3] = 128
    file = SumsFile({NAMES[0]: Sums(alone, np.full(1, 2.0)), NAMES[1]: Sums(equal, np.full(1, 2.0), equal / 2)})
    file.write(tmp_path / "x.gguf")
    first, second = json.loads(run("imatrix", "--in-file", tmp_path / "x.gguf", "--show", "--json")[1])["tensors"]
    assert (first["name"], first["total"], first["active"], first["entropy"]) == (NAMES[0], 64, 1 / 64, 0)
    assert (first["cosine"], first["sensitivity"], first["outliers"]) == (None, None, 1 / 64)
    assert (second["total"], second["entropy"], second["sensitivity"]) == (32, 1, 0.5)
    assert second["cosine"] == pytest.approx(1 / 8)
    out = run("imatrix", "--in-file", tmp_path / "x.gguf", "--show")[1]
    assert out.splitlines()[1].split()[:3] == [NAMES[0], "2", "64.00"]


def test_outliers_are_a_deviation_above_the_mean():
    """One of 1, 2, 3, 10 is above 4 + 3.5; two of 3, 3, 4.5, 5.5 are above 4, and one is above 4 + 1.06."""
    columns = {"a": [1.0, 2, 3, 10], "b": [3.0, 3, 4.5, 5.5], "c": [2.0] * 4}
    lines = statistics({name: Sums(np.array([squares]), np.ones(1)) for name, squares in columns.items()})
    assert {line.name: line.outliers for line in lines} == {"a": 0.25, "b": 0.25, "c": 0}


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ([], "name a MODEL with --text"),
        (["model"], "MODEL and --text belong together"),
        (["model", "--text", "t"], "-o names the file to write"),
        (["--in-file", "x"], "-o names the file to write"),
        (["--in-file", "x", "-o", "y", "--resume"], "--resume continues the run of a MODEL"),
    ],
)
def test_usage_errors(refused, words, rule):
    assert rule in refused("imatrix", *words, status=2)


@pytest.mark.parametrize("command", ["imatrix", "compare"])
def test_packages_that_are_missing_are_named(refused, tmp_path, monkeypatch, command):
    (tmp_path / "text.txt").write_text("text")
    monkeypatch.setitem(sys.modules, "qgemm.evaluation.models", None)
    model = tmp_path / "model.gguf"
    words = {"imatrix": [model, "-o", tmp_path / "out.gguf"], "compare": [model, model]}[command]
    missing = refused(command, *words, "--text", tmp_path / "text.txt")  # before packages that take seconds
    assert "model.gguf: cannot be read: No such file" in missing
    qgemm.write(model, {"w": np.ones((2, 32), np.float32)})
    message = refused(command, *words, "--text", tmp_path / "text.txt")
    assert f"qgemm {command} runs models by transformers, which cannot be imported" in message
    assert "pip install 'gguf-matmul[transformers]'" in message


def test_a_terminal_is_told_what_is_loaded(capsys, monkeypatch):
    say_loading("compare", ["a.gguf", "b.gguf"])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    say_loading("imatrix", ["c.gguf"])
    assert capsys.readouterr().err == "qgemm imatrix: loading c.gguf\n"


def test_an_output_that_exists_is_kept(refused, tmp_path):
    (tmp_path / "out.gguf").write_bytes(b"")
    assert "exists; --force replaces it" in refused("imatrix", "--in-file", "x", "-o", tmp_path / "out.gguf")

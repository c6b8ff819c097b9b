"""Options without an effect, and importances that meet no tensor: all of it is noted or refused."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from files import imatrix, model
from helpers import normal

import qgemm
from qgemm.converter import job
from qgemm.converter.keywords import RULES
from qgemm.errors import UnsupportedError

Q, K, DOWN = "blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.ffn_down_exps.weight"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model whose experts are a tensor each, with a norm and an output matrix."""
    names = [Q, K, "token_embd.weight", "output.weight", *(f"blk.0.ffn_down.{i}.weight" for i in range(2))]
    tensors = {name: normal(4, 256) for name in names}
    return model(tmp_path / "source.gguf", {**tensors, "blk.0.attn_norm.weight": normal(256)})


def notes(source: Path, kind: str = "q4_k", **options: object) -> str:
    return "\n".join(qgemm.convert(source, source.with_name("y.gguf"), kind, dry_run=True, **options).notes)


def test_tensors_without_importances_are_named(source, tmp_path):
    matrix = imatrix(tmp_path / "x.dat", [Q, DOWN])
    sentences = notes(source, "iq4_nl", imatrix=matrix)
    assert "1 of 6 quantized tensors took importances, not " in sentences
    assert "blk.*.ffn_down.*.weight (2)" in sentences
    assert "token_embd.weight" in sentences
    assert "1 of the importance matrix's 2 entries are of no tensor here: blk.0.ffn_down_exps.weight" in sentences
    assert Q not in sentences


def test_a_matrix_of_all_tensors_is_noted_as_used(source, tmp_path):
    tensors = [Q, K, "token_embd.weight", "output.weight", *(f"blk.0.ffn_down.{i}.weight" for i in range(2))]
    sentences = notes(source, "iq4_nl", imatrix=imatrix(tmp_path / "x.dat", tensors))
    assert sentences == "6 of 6 quantized tensors took importances"


@pytest.mark.parametrize("names", [[DOWN], ["model.layers.0.self_attn.q_proj.weight"], [f"{Q} "]])
def test_a_matrix_of_other_tensors_is_refused(names, source, tmp_path):
    with pytest.raises(
        qgemm.QgemmError, match=r"--imatrix: the importance matrix is of other tensors: it has .*weight"
    ):
        qgemm.convert(source, tmp_path / "y.gguf", "q4_k", imatrix=imatrix(tmp_path / "x.dat", names))
    assert not (tmp_path / "y.gguf").exists()


@pytest.mark.parametrize("kind", ["q8_0", "f16"])
def test_a_type_that_takes_no_importances(kind, source, tmp_path):
    assert notes(source, kind, imatrix=imatrix(tmp_path / "x.dat", [Q])).startswith("0 of ")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tensor_types": {"norm": "q4_0"}}, "'norm=Q4_0' changes no tensor: 'blk.0.attn_norm.weight' keeps its type"),
        ({"tensor_types": {"attn": "q4_0", "attn_q": "q8_0"}}, "'attn_q=Q8_0' changes no tensor: "),
        ({"tensor_types": {"attn_q": "q4_0"}, "keep": ["attn"]}, "'blk.0.attn_q.weight' keeps its type (--keep)"),
        ({"token_embedding_type": "q8_0", "keep": ["embd"]}, "--token-embedding-type changes no tensor"),
        ({"output_tensor_type": "q8_0", "leave_output_tensor": True}, "--output-tensor-type changes no tensor"),
        ({"kind": "f16", "search": True}, "--search changes nothing"),
        ({"kind": "q8_0", "search": True}, "--search changes nothing"),
    ],
)  # fmt: skip
def test_options_without_an_effect(options, text, source):
    assert text in notes(source, **options)


def test_options_with_an_effect_say_nothing(source):
    assert notes(source) == ""
    assert notes(source, "q4_0", search=True, leave_output_tensor=True, tensor_types={"attn": "q8_0"}) == ""
    assert notes(source, token_embedding_type="q8_0", output_tensor_type="q8_0", keep=["norm"]) == ""


def test_an_output_matrix_that_is_not_there(tmp_path):
    source = model(tmp_path / "tied.gguf", {"token_embd.weight": normal(4, 256)})
    assert "--leave-output-tensor changes nothing" in notes(source, leave_output_tensor=True)


def test_a_dry_run_has_no_errors_to_be_above(source, run, tmp_path):
    with pytest.raises(UnsupportedError, match="a dry run computes no errors"):
        notes(source, max_rel_error=0.1)
    status, _, err = run("convert", source, tmp_path / "y.gguf", "q4_0", "--dry-run", "--max-rel-error", "1")
    assert (status, "a dry run computes no errors" in err) == (1, True)


@pytest.mark.parametrize("largest", [-0.1, float("nan")])
def test_errors_that_none_can_be_below(largest, source, tmp_path):
    with pytest.raises(UnsupportedError, match=f"is a number from 0 on, got {largest}"):
        qgemm.convert(source, tmp_path / "y.gguf", "q4_0", max_rel_error=largest)


@pytest.mark.parametrize("threads", [0, -1])
def test_a_conversion_without_threads(threads, source):
    with pytest.raises(UnsupportedError, match=f"needs a thread at least, got {threads}"):
        notes(source, threads=threads)


def test_a_rename_that_changes_no_name(source):
    with pytest.raises(qgemm.QgemmError, match="--rename 'attn=attn' changes no tensor's name"):
        notes(source, rename={"attn": "attn"})


def test_a_gpu_that_encodes_nothing(source, monkeypatch):
    monkeypatch.setattr(job, "_device", lambda: SimpleNamespace(supports=lambda step, encoder: False))
    assert "--backend cuda encodes no tensor" in notes(source, "f16", backend="cuda")
    monkeypatch.setattr(job, "_device", lambda: SimpleNamespace(supports=lambda step, encoder: True))
    assert notes(source, backend="cuda") == ""


@pytest.mark.parametrize("suffix", ["gguf", "npz", "safetensors"])
def test_a_part_of_an_unsplit_model(suffix, source, tmp_path):
    qgemm.convert(source, path := tmp_path / f"x.{suffix}", "f16")
    with pytest.raises(qgemm.QgemmError, match=r"is no shard: part \(--part\) reads one file of several"):
        qgemm.convert(path, tmp_path / "y.gguf", "f16", part=True)
    qgemm.load(path, part=True).close()  # harmless where nothing is written


def test_the_command_prints_notes(source, run, tmp_path):
    words = ("convert", source, tmp_path / "y.gguf", "q4_k", "--tensor-type", "norm=q4_0", "--dry-run")
    status, out, _ = run(*words)
    assert status == 0
    assert out.splitlines()[-1].startswith("note: --tensor-type 'norm=Q4_0' changes no tensor")
    _, out, _ = run(*words, "--json")
    assert len(json.loads(out)["notes"]) == 1


def test_a_stacked_matrix_is_used_whole(tmp_path):
    """The neighbour of the test above: names that meet."""
    source = model(tmp_path / "x.gguf", {DOWN: normal(2, 4, 256)})
    matrix = tmp_path / "x.gguf.imatrix"
    qgemm.write(
        matrix, {f"{DOWN}.in_sum2": np.ones((2, 256), np.float32), f"{DOWN}.counts": np.ones((2, 1), np.float32)}
    )
    assert notes(source, "iq4_nl", imatrix=matrix) == "1 of 1 quantized tensors took importances"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("keep", "output", "a list of regular expressions, got 'output'"),  # by letters it would keep all
        ("drop", "attn", "a list of regular expressions, got 'attn'"),
        ("drop", [b"attn"], "a list of regular expressions, got list"),
        ("types", "q4_k", "a list of formats or their names, got 'q4_k'"),
        ("remove_metadata", b"ab", "a list of keys, got b'ab'"),
        ("prune_layers", "3", "a list of numbers of layers, got '3'"),
        ("prune_layers", [True], "a list of numbers of layers, got list"),
        ("tensor_types", [("attn", "q4_k")], "a mapping of regular expressions to formats or None, got list"),
        ("tensor_types", {"attn": 12}, "a mapping of regular expressions to formats or None, got dict"),
        ("rename", {"attn": 1}, "a mapping of regular expressions to text or None, got dict"),
        ("threads", float("nan"), "a whole number or None, got float"),  # tasks without end
        ("threads", True, "a whole number or None, got bool"),
        ("max_rel_error", "0.1", "a number or None, got '0.1'"),
        ("pure", "false", "True or False, got 'false'"),
        ("architecture", 1, "text, got int"),
        ("like", 3, "a path or None, got int"),
        ("progress", None, "a function of two numbers, got NoneType"),
    ],
)
def test_arguments_of_other_types(source, name, value, words):
    """Text is no list of letters, and no value counts for its truth alone."""
    with pytest.raises(TypeError, match=f"^{re.escape(f'{name} must be {words}')}$"):
        notes(source, **{name: value})


def test_iterators_are_lists(source):
    drop = (re.compile(pattern) for pattern in [K])
    assert notes(source, keep=iter([Q]), drop=drop, prune_layers=range(0)) == f"left out by --drop: {K}"


def test_each_argument_has_a_rule():
    assert list(RULES) == list(inspect.signature(qgemm.convert).parameters)

"""`qgemm info`: its report on a file and this machine, tables that fit the terminal, JSON."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress

import helpers
import numpy as np
import pytest
from files import safetensors
from helpers import WEIGHT, lines_of
from hypothesis import given
from hypothesis import strategies as st

import qgemm
from qgemm import text
from qgemm.arguments import KINDS
from qgemm.cli import groups
from qgemm.cli.abilities import Ability, on_cpu, row_of
from qgemm.cli.groups import Entry
from qgemm.codec.group_activations import E4M3
from qgemm.cpu.native import libraries
from qgemm.cuda.kernels.routes import route
from qgemm.cuda.problem import Problem
from qgemm.errors import UnsupportedError
from qgemm.once import Once

EXCERPT = str(helpers.EXCERPT)
HOSTILE = "\x1b[2Jgone\n\u202e"


@pytest.fixture
def gpu(monkeypatch):
    """Makes info see a machine with a GPU of this architecture, or with None a machine without."""

    def machine(arch):
        facts = {"arch": arch} if arch else {}
        states = {**qgemm.backends(), "cuda": qgemm.Status(arch is not None, f"a GPU: {arch}", facts)}
        monkeypatch.setattr("qgemm.cli.info.backends", lambda: states)

    return machine


def kernels(activation, sm):
    """The kernels that the table picks for q4_0 as M grows."""
    picked = (route(Problem(qgemm.FORMATS["q4_0"], activation, m, 96, 384, sm)) for m in range(1, 5000))
    return list(dict.fromkeys(row.kernel.name for row in picked))


def weights(shape, fmt="q4_0", seed=0):
    return qgemm.quantize(np.random.default_rng(seed).standard_normal(shape), fmt)


# ---------------------------------------------------------------- of a .gguf file


def test_info(run):
    status, out, err = run("info", EXCERPT)
    assert (status, err) == (0, "")
    assert re.search(r"^general.architecture +bert$", out, re.MULTILINE)
    assert "version 3, alignment 32" in out
    types = lines_of(out, "type")
    assert types["Q4_0"] == ["Q4_0", "2", "135168", "76032", "4.5", "a16, a8, a8_g256, dequantize"]
    assert types["F32"][5] == "a16, dequantize"
    assert types["IQ1_S"][5] == "a16, a8, a8_g256, dequantize"
    assert types["MXFP4"][5] == "a16, a8, a8_g256, e4m3_g256,"  # the last column is wrapped
    tensors = lines_of(out + "\n", "tensor")
    with qgemm.open(EXCERPT) as file:
        assert list(tensors) == list(file)
    assert tensors[WEIGHT][1:] == ["Q4_0", "(96, 384)", "1", "20736"]
    assert " ".join(qgemm.backends()["cuda"].detail.split()) in " ".join(out.split())


def test_of_some_tensors(run, refused):
    _, out, _ = run("info", EXCERPT, "--tensors", r"attn_q\.q[45]")
    assert list(lines_of(out + "\n", "tensor")) == [f"blk.2.attn_q.{fmt}" for fmt in ("q4_0", "q4_1", "q5_0", "q5_1")]
    assert list(lines_of(out, "type")) == ["Q5_1", "Q5_0", "Q4_1", "Q4_0"]
    assert "no tensor's name has 'attn_k'" in refused("info", EXCERPT, "--tensors", "attn_k")
    assert "is not a regular expression" in refused("info", EXCERPT, "--tensors", "(", status=2)


def test_without_tensors(run):
    _, out, _ = run("info", EXCERPT, "--no-tensors")
    assert "Q4_0" in lines_of(out + "\n", "type")
    assert WEIGHT not in out
    assert "tensors" not in json.loads(run("info", EXCERPT, "--no-tensors", "--json")[1])


def test_kernels_are_of_the_gpu_at_hand(run, gpu):
    """Without a GPU no kernels are listed, because readers would take them for those of this machine."""
    gpu("sm_90a")
    out = run("info", EXCERPT)[1]
    table = lines_of(out.partition("kernels of sm_90, from small to large M\n")[2], "type")
    assert table["Q4_0"][1:] == [", ".join(kernels(activation, 90)) for activation in ("a16", "a8")]
    assert table["F32"][1:] == ["gemv_floats, cublas", "-"]
    document = json.loads(run("info", EXCERPT, "--json")[1])
    assert document["cuda_sm"] == 90
    tensor = next(tensor for tensor in document["tensors"] if tensor["name"] == WEIGHT)
    assert tensor["cuda"]["products"] == {activation: kernels(activation, 90) for activation in ("a16", "a8")}
    gpu(None)
    out = run("info", EXCERPT)[1]
    assert "kernels" not in out
    assert "prefill" not in out
    assert "gemv" not in out
    document = json.loads(run("info", EXCERPT, "--json")[1])
    assert document["cuda_sm"] is None
    assert {tensor["cuda"] for tensor in document["tensors"]} == {None}


def test_what_backends_can_do_depends_on_the_axes(run, tmp_path):
    tensors = {"vector": weights((64,)), "stack": weights((2, 3, 64), "q8_0"), "matrix": weights((3, 64), "q5_0")}
    qgemm.write(tmp_path / "x.gguf", {**tensors, "bias": weights((64,), "q5_0")})
    types = lines_of(run("info", tmp_path / "x.gguf")[1], "type")
    assert types["Q4_0"][5] == "dequantize"
    assert types["Q8_0"][5] == "a16, a8, a8_g256, dequantize (of each [i])"
    assert types["Q5_0"][5] == "a16, a8, a8_g256, dequantize"


@pytest.mark.parametrize("fmt", qgemm.FORMATS.values(), ids=str)
def test_the_activations_of_a_format_are_those_that_multiply_it(fmt):
    if fmt.levels is None:
        assert on_cpu(fmt) == Ability(note="no codec")
        return
    k = row_of(fmt)
    w = qgemm.Tensor(fmt, (1, k), np.zeros((1, k // fmt.weights), fmt.dtype))

    def multiplied(kind):
        with suppress(UnsupportedError):
            return qgemm.matmul(np.zeros((1, k), np.float32), w, kind) is not None

    assert list(on_cpu(fmt).products) == [kind for kind in KINDS if multiplied(kind)]


@pytest.mark.parametrize("command", [("info", EXCERPT, "--json"), ("routes",)], ids=lambda words: words[0])
def test_no_library_is_compiled_or_loaded_to_show_abilities(command, run, monkeypatch):
    """With an empty cache that would need seconds of each format in the file."""
    monkeypatch.delenv("QGEMM_CPU", raising=False)
    monkeypatch.setattr("qgemm.cpu.native.library._library", lambda source: pytest.fail(f"loads {source.name}"))
    monkeypatch.setattr("qgemm.cpu.native.library._loaded", Once())
    libraries.loaded.cache_clear()
    assert run(*command)[0] == 0


# ---------------------------------------------------------------- as many columns as there are


@pytest.mark.slow
@pytest.mark.parametrize("columns", [72, 80, 132])
def test_lines_fit(run, gpu, monkeypatch, tmp_path, columns):
    """Long keys, values, arrays and names are cut to the line; only the path is printed in full."""
    monkeypatch.setenv("COLUMNS", str(columns))
    gpu("sm_90a")
    monkeypatch.chdir(tmp_path)
    metadata = {
        "general.description": "many words " * 100,
        "tokenizer.chat_template": "x" * 5000,
        "tokenizer.ggml.tokens": [f"token {i}" for i in range(1000)],
        "tokenizer.ggml.scores": np.arange(1000, dtype=np.float32),
        "a.key.that.alone.takes.more.than.most.keys": True,
    }
    named = {f"blk.{i}.{'n' * length}.weight": weights((320, 3200)) for i in range(40) for length in (8, 24)}
    qgemm.write("x.gguf", named | {"kbit": weights((64, 64), "kbit4_f16")}, metadata)
    for options in ([], ["--all"], ["--tensors", "kbit"]):
        out = run("info", "x.gguf", *options)[1]
        assert [line for line in out.splitlines() if len(line) > columns] == []
    out = run("info", "x.gguf")[1]
    assert "tokenizer.ggml.tokens" in out
    assert re.search(r"1000 strings: tok", out)
    assert f"blk.{{0-39}}.{'n' * 8}.weight" in out


def test_no_terminal_has_80_columns(run, monkeypatch, tmp_path):
    monkeypatch.delenv("COLUMNS", raising=False)
    qgemm.write(tmp_path / "x.gguf", {"w": np.ones(3, np.float32)}, {"general.description": "x" * 500})
    (line,) = (line for line in run("info", tmp_path / "x.gguf")[1].splitlines() if "general.desc" in line)
    assert len(line) == 80
    assert line.endswith("x...")


@given(st.lists(st.tuples(st.text("ab ", max_size=30), st.text("cd ", max_size=90)), min_size=1), st.integers(20, 90))
def test_fitted_loses_nothing(cells, width):
    rows = [(first.replace(" ", "_") or "-", last) for first, last in cells]
    got = text.fitted("<<", rows, width)
    assert all(len(line) <= max(width, 30) for line in got.splitlines())
    assert "".join(got.split()) == "".join("".join(row) for row in rows).replace(" ", "")


# ---------------------------------------------------------------- layers in one line


def entries(*names, shape=(2, 32)):
    return [Entry(name, "Q4_0", shape, 36) for name in names]


def names_of(grouped):
    return [(group.name, group.tensors) for group in grouped]


def test_layers_share_a_line():
    layers = [f"blk.{i}.{part}.weight" for i in range(12) for part in ("attn_q", "ffn_up")]
    keys = [f"blk.{i}.attn_k.weight" for i in (0, 1, 2, 5, 7)]
    grouped = groups.grouped(entries("token_embd.weight", *layers, *keys, "output.weight"))
    assert names_of(grouped) == [
        ("token_embd.weight", 1),
        ("blk.{0-11}.attn_q.weight", 12),
        ("blk.{0-11}.ffn_up.weight", 12),
        ("blk.{0-2,5,7}.attn_k.weight", 5),
        ("output.weight", 1),
    ]
    assert grouped[1].first.name == "blk.0.attn_q.weight"


def test_other_types_and_shapes_are_other_lines():
    grouped = groups.grouped(
        [*entries("a.0.w", "a.1.w"), Entry("a.2.w", "Q8_0", (2, 32), 68), *entries("a.3.w", shape=(4, 32))]
    )
    assert names_of(grouped) == [("a.{0-1}.w", 2), ("a.2.w", 1), ("a.3.w", 1)]


def test_layers_and_experts():
    """If not every layer has every expert, layers with the same experts share a line."""
    experts = [f"layers.{i}.experts.{j}.up" for i in range(4) for j in range(8) if (i, j) != (2, 7)]
    grouped = groups.grouped(entries(*experts))
    assert names_of(grouped) == [("layers.{0-1,3}.experts.{0-7}.up", 24), ("layers.2.experts.{0-6}.up", 7)]


def test_digits_that_are_no_count_stay():
    """Leading zeros, digits inside a word, more numbers than are compared."""
    names = ["a.01.w", "a.1.w", "a.w2", "a.w3", "a.1.2.3.4", "a.1.2.3.5", "a.-1.w", "a.1.w\n"]
    assert sorted(names_of(groups.grouped(entries(*names)))) == sorted((text.printable(name), 1) for name in names)


@given(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 2)), min_size=1))
def test_boxes_hold_all_and_each_once(members):
    boxes = groups.boxes(sorted(members))
    held = [(a, b, c) for layers, experts, parts in boxes for a in layers for b in experts for c in parts]
    assert sorted(held) == sorted(members)


def test_names_of_any_depth(run, tmp_path):
    """A name may have thousands of numbers."""
    safetensors(
        tmp_path / "x.safetensors", {".".join("1" * 3000) + f".{i}": np.ones((2, 4), np.float32) for i in (1, 2)}
    )
    status, out, _ = run("info", tmp_path / "x.safetensors")
    assert status == 0
    assert ".".join("1" * 3000) in out


def test_all_lists_each(run, tmp_path):
    qgemm.write(tmp_path / "x.gguf", {f"blk.{i}.w": weights((2, 32)) for i in range(3)})
    out = run("info", tmp_path / "x.gguf")[1]
    assert lines_of(out, "tensor")["blk.{0-2}.w"] == ["blk.{0-2}.w", "Q4_0", "(2, 32)", "3", "108"]
    assert out.endswith("--all has a line for each tensor\n")
    out = run("info", tmp_path / "x.gguf", "--all")[1]
    assert list(lines_of(out + "\n", "tensor")) == ["blk.0.w", "blk.1.w", "blk.2.w"]
    assert "--all" not in out


# ---------------------------------------------------------------- other files


def test_safetensors_and_folders(run, tmp_path):
    tensors = {f"model.layers.{i}.q_proj.weight": np.ones((4, 32), np.float16) for i in range(3)}
    safetensors(tmp_path / "model.safetensors", {**tensors, "norm": np.ones(32, np.float32)}, {"format": "pt"})
    for path in (tmp_path, tmp_path / "model.safetensors"):
        status, out, err = run("info", path)
        assert (status, err) == (0, "")
        assert "`qgemm convert` makes a .gguf file of it" in " ".join(out.split())
        assert re.search(r"^safetensors.format +pt$", out, re.MULTILINE)
        assert lines_of(out, "type")["F16"] == ["F16", "3", "384", "768", "16"]
        assert lines_of(out, "tensor")["model.layers.{0-2}.q_proj.weight"][1:] == ["F16", "(4, 32)", "3", "768"]
    document = json.loads(run("info", tmp_path, "--json")[1])
    assert (document["version"], document["bytes"], len(document["tensors"])) == (None, 768 + 128, 4)
    assert {tensor["cpu"] for tensor in document["tensors"]} == {None}


def test_a_folder_of_gguf_files(run, refused, tmp_path):
    """A downloaded folder stands for its only .gguf file; of several files one must be named."""
    for name in ("a.gguf", "b.gguf"):
        qgemm.write(tmp_path / name, {"w": weights((2, 32))})
        if name == "a.gguf":
            assert str(tmp_path / "a.gguf") in "".join(run("info", tmp_path)[1].split())  # wrapped
    assert "holds 2 .gguf files: name one, as 'a.gguf', 'b.gguf'" in refused("info", tmp_path)


def test_numpy_files(run, tmp_path):
    np.save(tmp_path / "x.npy", np.ones((3, 4)))
    np.savez(tmp_path / "x.npz", a=np.ones((3, 4), np.float32), b=np.arange(3))
    assert lines_of(run("info", tmp_path / "x.npy")[1] + "\n", "tensor")["x"][1:3] == ["F64", "(3, 4)"]
    assert list(lines_of(run("info", tmp_path / "x.npz")[1] + "\n", "tensor")) == ["a", "b"]


# ---------------------------------------------------------------- JSON


def test_as_json(run):
    status, out, err = run("info", EXCERPT, "--json", "--tensors", "attn_q")
    assert (status, err) == (0, "")
    document = json.loads(out)
    assert (document["version"], document["alignment"], document["bytes"]) == (3, 32, os.path.getsize(EXCERPT))
    assert document["metadata"]["general.architecture"] == "bert"
    assert document["backends"]["cpu"]["available"] is True
    assert document["backends"]["cuda"]["detail"] == qgemm.backends()["cuda"].detail
    assert {kind["type"]: kind["bpw"] for kind in document["types"]}["Q4_0"] == 4.5
    tensor = next(tensor for tensor in document["tensors"] if tensor["name"] == WEIGHT)
    assert (tensor["ne"], tensor["shape"], tensor["bytes"]) == ([384, 96], [96, 384], 20736)
    assert tensor["cpu"] == {
        "dequantize": True,
        "products": {kind: ["numpy"] for kind in KINDS if kind != E4M3},
        "note": "",
    }


def test_json_is_strict(run, tmp_path):
    """NaN, infinities, bytes that are not UTF-8, control characters, long arrays, numbers of every type."""
    metadata = {
        "nan": float("nan"),
        "infinities": np.array([np.inf, -np.inf, 1e-5], np.float32),
        "stray": "a\udcffb",
        "control": HOSTILE,
        "yes": True,
        "most": np.uint64(2**64 - 1),
        "half": np.float64(0.1),
        "vocabulary": [f"token {i}" for i in range(1000)],
        "merges": np.arange(1000, dtype=np.int16),
        "none": [],
    }
    qgemm.write(tmp_path / "x.gguf", {"größe": weights((2, 32)), HOSTILE: weights((2, 32))}, metadata)
    status, out, _ = run("info", tmp_path / "x.gguf", "--json")
    assert status == 0
    assert out.isascii()
    document = json.loads(out, parse_constant=pytest.fail)
    assert document["metadata"] == {
        "nan": "NaN",
        "infinities": ["Infinity", "-Infinity", 1e-5],
        "stray": "a\\xffb",
        "control": HOSTILE,
        "yes": True,
        "most": 2**64 - 1,
        "half": 0.1,
        "vocabulary": [f"token {i}" for i in range(1000)],
        "merges": list(range(1000)),
        "none": [],
    }
    assert [tensor["name"] for tensor in document["tensors"]] == ["größe", HOSTILE]

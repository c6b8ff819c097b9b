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

import helpers
import numpy as np
import pytest
from helpers import DATA, WEIGHT, lines_of
from hypothesis import given
from hypothesis import strategies as st
from strategies import INTEGER, each, problems

import qgemm
from qgemm import text
from qgemm.cli import abilities, checks
from qgemm.cli import main as cli
from qgemm.codec import error_bound as bounds
from qgemm.cuda.kernels.routes import ROUTES, route
from qgemm.cuda.problem import Problem

EXCERPT = str(helpers.EXCERPT)
MALFORMED = DATA / "malformed"
HOSTILE = "\x1b[2Jgone\n\u202e"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


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


def kernels(activation):
    """What the table picks for q4_0 as M grows, on this machine's GPU or the least that is supported."""
    sm = abilities.cuda_sm(qgemm.backends()["cuda"])
    picked = (route(Problem(qgemm.FORMATS["q4_0"], activation, m, 96, 384, sm)) for m in range(1, 5000))
    return list(dict.fromkeys(row.kernel.name for row in picked))


def weights(shape, fmt="q4_0", seed=0):
    return qgemm.quantize(np.random.default_rng(seed).standard_normal(shape), fmt)


def spoiled(tensor, field, value):
    """The tensor with a field of its blocks [1, ..., 2] set to a value."""
    blocks = tensor.blocks.copy()
    blocks[field][1, ..., 2] = value
    return qgemm.Tensor(tensor.format, tensor.shape, blocks)


# ---------------------------------------------------------------- info


def test_info(run):
    status, out, err = run("info", EXCERPT)
    assert (status, err) == (0, "")
    assert re.search(r"^general.architecture +bert$", out, re.MULTILINE)
    assert "version 3, alignment 32" in out
    assert lines_of(out, "type")["Q4_0"] == ["Q4_0", "2", "135168", "76032", "4.5"]
    tensors = lines_of(out, "tensor")
    with qgemm.open(EXCERPT) as file:
        assert list(tensors) == list(file)
    assert tensors[WEIGHT][1:6] == ["Q4_0", "[384, 96]", "(96, 384)", "20736", "a16, a8, dequantize"]
    assert tensors[WEIGHT][6] == f"a16: {', '.join(kernels('a16'))}; a8: {', '.join(kernels('a8'))}"
    assert tensors["blk.2.attn_q.f32"][5:] == ["a16, dequantize", "a16: cublas"]
    assert tensors["blk.2.attn_q.nvfp4"][5:] == ["no codec", "no codec"]
    assert qgemm.backends()["cuda"].detail in out


def test_info_of_some_tensors(run, refused):
    _, out, _ = run("info", EXCERPT, "--tensors", r"attn_q\.q[45]")
    assert list(lines_of(out, "tensor")) == [f"blk.2.attn_q.{fmt}" for fmt in ("q4_0", "q4_1", "q5_0", "q5_1")]
    assert list(lines_of(out, "type")) == ["Q5_1", "Q5_0", "Q4_1", "Q4_0"]
    assert "no tensor's name has 'attn_k'" in refused("info", EXCERPT, "--tensors", "attn_k")
    assert "is not a regular expression" in refused("info", EXCERPT, "--tensors", "(", status=2)


def test_what_backends_can_do_depends_on_the_axes(run, tmp_path):
    shapes = {"vector": (64,), "matrix": (3, 64), "stack": (2, 3, 64)}
    qgemm.write(tmp_path / "x.gguf", {name: weights(shape) for name, shape in shapes.items()})
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
    assert found["backends"]["cpu"]["available"] is True
    assert found["backends"]["cuda"]["detail"] == qgemm.backends()["cuda"].detail
    tensor = next(tensor for tensor in found["tensors"] if tensor["name"] == WEIGHT)
    assert (tensor["ne"], tensor["shape"], tensor["bytes"]) == ([384, 96], [96, 384], 20736)
    assert tensor["cpu"] == {"dequantize": True, "products": {"a16": ["numpy"], "a8": ["numpy"]}, "note": ""}
    assert tensor["cuda"]["products"] == {"a16": kernels("a16"), "a8": kernels("a8")}


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
    qgemm.write(tmp_path / "x.gguf", {"w\udcfe": weights((2, 32)), HOSTILE: weights((2, 32))}, metadata)
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
    assert out.endswith("33 tensors: 19 ok, 0 failed, 14 without a codec\n")


def test_verify_counts_nan_and_names_the_first(run, tmp_path):
    """A NaN fails its own check only: the products of the other rows are still held against their bounds."""
    stack = spoiled(weights((3, 2, 96), "q8_0"), "d", -np.inf)
    tensors = {
        "good": weights((4, 128)),
        "scale": spoiled(weights((4, 128)), "d", np.nan),
        "minimum": spoiled(weights((4, 128), "q5_1"), "m", np.inf),
        "plain": np.where(np.arange(12).reshape(3, 4) < 5, np.float32(1), np.float32(np.nan)),
        "vector": np.array([1, 2, -np.inf], np.float16),
        "stack": stack,
    }
    qgemm.write(tmp_path / "x.gguf", tensors)
    status, out, err = run("verify", tmp_path / "x.gguf")
    assert (status, err) == (1, "")
    found = {name: (cells[2], cells[-1]) for name, cells in lines_of(out, "tensor").items()}
    assert found == {
        "good": ("ok", "ok"),
        "scale": ("1, first [1, 2]", "FAIL"),
        "minimum": ("1, first [1, 2]", "FAIL"),
        "plain": ("7, first [1, 1]", "FAIL"),
        "vector": ("1, first [2]", "FAIL"),
        "stack": ("2, first [1, 0, 2]", "FAIL"),
    }
    assert "6 tensors: 1 ok, 5 failed, 0 without a codec" in out
    assert {cells[3] for cells in lines_of(out, "tensor").values()} == {"ok"}


def test_verify_says_what_it_cannot_check(run, tmp_path):
    tensors = {"sums": weights((4, 64), "q8_1"), "numbers": np.arange(6, dtype=np.int32).reshape(2, 3)}
    tensors |= {"double": np.ones((2, 3)), "bias": np.ones(3, np.float32)}
    qgemm.write(tmp_path / "x.gguf", tensors)
    status, out, _ = run("verify", tmp_path / "x.gguf")
    found = lines_of(out, "tensor")
    assert status == 0
    assert found["sums"][3] == "no oracle"
    assert float(found["sums"][5]) < 1
    assert found["numbers"][2:] == found["double"][2:] == ["ok", *["no codec"] * 3, "ok"]
    assert found["bias"][2:] == ["ok", "ok", "no matrix", "no matrix", "ok"]


def test_verify_finds_a_wrong_decoder(run, monkeypatch):
    monkeypatch.setattr(checks, "oracle", lambda fmt, blocks: np.zeros(blocks.size * fmt.weights, np.float32))
    status, out, _ = run("verify", EXCERPT, "--tensors", WEIGHT)
    cells = lines_of(out, "tensor")[WEIGHT]
    assert status == 1
    assert re.fullmatch(r"1152, first \[0, 0\]", cells[3])
    assert cells[-1] == "FAIL"


@pytest.mark.parametrize(("broken", "column"), [("a16", 4), ("a8", 5)])
def test_verify_finds_a_wrong_product(run, monkeypatch, broken, column):
    """One output of 384 off by less than a thousandth is beyond the bound."""

    def matmul(x, w, activation=None):
        y = qgemm.matmul(x, w)
        if broken == ("a8" if isinstance(x, qgemm.Tensor) else "a16"):
            y[2, 50] += np.abs(y).max() / 1000
        return y

    monkeypatch.setattr(checks, "matmul", matmul)
    status, out, _ = run("verify", EXCERPT, "--tensors", WEIGHT)
    cells = lines_of(out, "tensor")[WEIGHT]
    assert status == 1
    assert float(cells[column]) > 1 > float(cells[9 - column])


@each(INTEGER)
@given(data=st.data())
def test_products_lie_within_their_bounds(fmt, data):
    x, w = data.draw(problems(fmt))
    x64, w64 = x.astype(np.float64), w.dequantize(np.float64)
    assert bounds.excess(qgemm.matmul(x, w), x64 @ w64.T, bounds.a16_bound(x64, bounds.magnitudes(fmt, w.blocks))) <= 1
    prepared = qgemm.quantize_activations(x)
    exact, bound = bounds.a8_exact(prepared.blocks, fmt, w.blocks)
    assert bounds.excess(qgemm.matmul(prepared, w), exact, bound) <= 1
    # What a8 multiplies is d * q, but for the sum s of each block: both d and s are rounded to float16.
    da, sa = (prepared.blocks[name].astype(np.float64) for name in ("d", "s"))
    values = (da[..., None] * prepared.blocks["qs"]).reshape(x.shape)
    levels = fmt.decode_levels(w.blocks.reshape(-1))
    shift = np.zeros((w.shape[0], sa.shape[1]))
    if levels.minimum is not None:
        shift += np.abs(levels.minimum.reshape(shift.shape))
    if levels.zero and fmt.group == 32:  # else the zero is taken from the codes
        shift += levels.zero * np.abs(levels.scale.reshape(shift.shape))
    rounding = 1e-12 if levels.minimum is None else 2**-23.9  # of a decoded weight: adding a minimum rounds
    slack = (2**-9.9 * np.abs(sa) + 2**-23) @ shift.T + rounding * np.abs(values) @ np.abs(w64).T
    assert (np.abs(exact - values @ w64.T) <= slack).all()


def test_a_bound_has_no_opinion_where_float32_overflows():
    x, w = np.full((1, 4), 1e30), np.array([[1e30] * 4, [np.nan, 0, 0, 0], [1, 1, 1, 1]])
    bound = bounds.a16_bound(x, w)
    assert np.isinf(bound).tolist() == [[True, True, False]]
    assert bounds.excess(np.full((1, 3), 4e30, np.float32), x @ w.T, bound) < 1
    assert bounds.excess(np.full((1, 3), np.nan, np.float32), x @ w.T, bound) == np.inf


def test_against_the_same_file(run):
    status, out, _ = run("verify", EXCERPT, "--against", EXCERPT, "--tensors", "attn_q")
    assert status == 0
    assert {cells[6] for cells in lines_of(out, "tensor").values()} == {"identical"}


def test_against_another_file(run, tmp_path):
    """Errors are those of the formats; other shapes, and tensors that only one file has, fail."""
    source = np.random.default_rng(3).standard_normal((6, 5, 64)).astype(np.float32)
    same = {"same": source[0], "error": source, "vector": source[0, 0], "zeros": 0 * source[0]}
    one = same | {"here": source[0], "shape": source[0]}
    other = same | {"there": source[0], "shape": source[0, :4], "zeros": source[0]}
    qgemm.write(tmp_path / "one.gguf", one | {name: qgemm.quantize(one[name], "q8_0") for name in ("error", "vector")})
    qgemm.write(tmp_path / "other.gguf", other)
    command = "verify", tmp_path / "one.gguf", "--against", tmp_path / "other.gguf"
    status, out, _ = run(*command)
    found = {name: (cells[6], cells[-1]) for name, cells in lines_of(out, "tensor").items()}
    assert status == 1
    assert found["same"] == ("identical", "ok")
    assert found["here"] == ("missing", "FAIL")
    assert found["there"] == ("only in OTHER", "FAIL")
    assert found["shape"] == ("shape (4, 64)", "FAIL")
    assert found["zeros"] == ("1.00e+00 (F32)", "FAIL")
    decoded = qgemm.quantize(source, "q8_0").dequantize(np.float64)
    want = np.linalg.norm(decoded - source) / np.linalg.norm(source.astype(np.float64))
    assert found["error"] == (f"{want:.2e} (F32)", "ok")
    assert run(*command, "--tensors", "^(error|vector)$")[0] == 0
    assert run(*command, "--tensors", "^error$", "--tolerance", "0.001")[0] == 1


def test_against_a_damaged_copy(run, tmp_path):
    with qgemm.open(EXCERPT) as file:
        _, offset = file.place(WEIGHT)
    data = bytearray(Path(EXCERPT).read_bytes())
    data[offset + 7] ^= 0x10
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(data)
    command = "verify", EXCERPT, "--against", copy, "--tensors", r"attn_q\.q4"
    status, out, _ = run(*command, "--tolerance", 0)
    assert status == 1
    assert {name: cells[-1] for name, cells in lines_of(out, "tensor").items()} == {
        WEIGHT: "FAIL",
        "blk.2.attn_q.q4_1": "ok",
    }
    data[offset : offset + 2] = b"\0\x7e"  # NaN
    copy.write_bytes(data)
    assert run(*command)[0] == 1
    data[offset - 1] ^= 1  # in the tensor before, which is not looked at
    copy.write_bytes(data)
    assert run("verify", EXCERPT, "--tensors", "q4_1", "--against", copy)[0] == 0


def test_against_tensors_without_a_codec(run, tmp_path):
    with qgemm.open(EXCERPT) as file:
        q4, nvfp4 = file["blk.2.attn_q.q4_0"], file["blk.2.attn_q.nvfp4"]
        damaged = nvfp4.blocks.copy()
        damaged.view(np.uint8)[3, 3] ^= 1
        qgemm.write(tmp_path / "one.gguf", {"same": nvfp4, "bytes": nvfp4, "format": nvfp4})
        damaged_tensor = qgemm.Tensor(nvfp4.format, nvfp4.shape, damaged)
        qgemm.write(tmp_path / "other.gguf", {"same": nvfp4, "bytes": damaged_tensor, "format": q4})
    status, out, _ = run("verify", tmp_path / "one.gguf", "--against", tmp_path / "other.gguf")
    assert status == 0
    cells = [cells[6] for cells in lines_of(out, "tensor").values()]
    assert cells == ["identical", "no codec", "no codec"]


def test_verify_in_bounded_memory(run, tmp_path):
    """64 MiB of weights in float32 alone would be 256 MiB."""
    blocks = np.zeros((8192, 256), qgemm.FORMATS["q4_0"].dtype)
    blocks["d"] = 1
    qgemm.write(
        tmp_path / "x.gguf", {"w": qgemm.Tensor("q4_0", (8192, 8192), blocks), "v": np.zeros(1 << 22, np.float32)}
    )
    tracemalloc.start()
    status = run("verify", tmp_path / "x.gguf", "--against", tmp_path / "x.gguf")[0]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert status == 0
    assert peak < 64 << 20


def test_kbit_tensors_are_tensors_like_others(run, tmp_path):
    """One type, whatever their codebooks; products are checked, but there is no other decoder to compare with."""
    own = qgemm.quantize(np.random.default_rng(0).standard_normal((4, 64)), "kbit2", codebook=[0.5, -1, 0, 1])
    qgemm.write(tmp_path / "x.gguf", {"own": own, "default": weights((4, 64), "kbit2")}, {"general.architecture": "x"})
    _, out, _ = run("info", tmp_path / "x.gguf")
    assert lines_of(out, "type") == {"KBIT2": ["KBIT2", "2", "512", "144", "2.25"]}
    cpu, cuda = lines_of(out, "tensor")["own"][5:]
    assert cpu == "a16, dequantize"
    assert cuda.startswith("a16: ")
    assert "a8" not in cuda
    assert re.search(r"^general.architecture +x$", out, re.MULTILINE)
    qgemm.write(tmp_path / "y.gguf", {"own": qgemm.Tensor("kbit2", own.shape, own.blocks), "default": own})
    status, out, _ = run("verify", tmp_path / "x.gguf", "--against", tmp_path / "y.gguf", "--tolerance", 0.9)
    found = lines_of(out, "tensor")
    assert status == 1  # blocks of "own" are the same there, its codebook is not
    assert found["own"][2:4] + found["own"][5:6] == ["ok", "no oracle", "no codes"]
    assert 0 < float(found["own"][4]) < 1
    assert re.fullmatch(r"\d\.\d\de[+-]\d\d \(KBIT2\)", found["own"][6])
    assert float(found["own"][6].split()[0]) > 0.9


# ---------------------------------------------------------------- matmul


def test_matmul_random(run):
    status, out, err = run("matmul", EXCERPT, WEIGHT)
    assert (status, err) == (0, "")
    assert "x   standard normal, seed 0, as a16" in out
    found = lines_of(out + "\n", "M")
    assert list(found) == ["1", "16", "512"]
    assert all(0 < float(cells[1]) < 1e-6 and cells[4] == "numpy" for cells in found.values())


def test_matmul_a8_says_its_rounding(run):
    _, out, _ = run("matmul", EXCERPT, WEIGHT, "--m", "7", "--activation", "a8", "--seed", 5)
    ((_, relative, *_),) = lines_of(out + "\n", "M").values()
    assert "seed 5, as a8" in out
    assert 1e-4 < float(relative) < 2e-2


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_matmul_given_x(run, tmp_path, dtype):
    x = np.random.default_rng(1).standard_normal((2, 3, 384)).astype(dtype)
    np.save(tmp_path / "x.npy", x)
    out = tmp_path / "y.npy"
    out.write_bytes(b"old")
    status, shown, err = run("matmul", EXCERPT, WEIGHT, "--x", tmp_path / "x.npy", "--out", out)
    assert (status, err) == (0, "")
    assert str(x.dtype) in shown
    assert "(2, 3, 384)" in shown
    y = np.load(out)
    with qgemm.open(EXCERPT) as file:
        np.testing.assert_array_equal(y, qgemm.matmul(x, file[WEIGHT]))
    assert y.dtype == np.float32
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.npy", "y.npy"]


def test_matmul_error_is_that_of_float64(run, tmp_path, monkeypatch):
    """A product that is off by 1 everywhere has an RMS error of 1."""
    monkeypatch.setattr("qgemm.cli.matmul.matmul", lambda *problem, **how: qgemm.matmul(*problem, **how) + 1)
    np.save(tmp_path / "x.npy", np.eye(384, dtype=np.float32))
    _, out, _ = run("matmul", EXCERPT, WEIGHT, "--x", tmp_path / "x.npy")
    ((m, relative, largest, *_),) = lines_of(out + "\n", "M").values()
    with qgemm.open(EXCERPT) as file:
        rms = np.sqrt((file[WEIGHT].dequantize(np.float64) ** 2).mean())
    assert m == "384"
    assert float(relative) == pytest.approx(1 / rms, rel=1e-2)
    assert float(largest) == pytest.approx(1, rel=1e-2)


def test_matmul_shows_nan_and_goes_on(run, tmp_path):
    qgemm.write(tmp_path / "x.gguf", {"w": spoiled(weights((4, 128)), "d", np.nan)})
    status, out, err = run("matmul", tmp_path / "x.gguf", "w", "--m", 2)
    assert (status, err) == (0, "")
    assert lines_of(out + "\n", "M")["2"][1:3] == ["nan", "nan"]


def test_matmul_refuses(refused, tmp_path):
    np.save(tmp_path / "narrow.npy", np.ones((2, 383)))
    np.save(tmp_path / "whole.npy", np.ones((2, 384), int))
    np.save(tmp_path / "object.npy", np.array([{}]), allow_pickle=True)
    np.savez(tmp_path / "many.npz", np.ones(384))
    (tmp_path / "text.npy").write_text("hello")
    (tmp_path / "empty.npy").write_bytes(b"")

    def given(name):
        return refused("matmul", EXCERPT, WEIGHT, "--x", tmp_path / name)

    assert "rows of 383" in given("narrow.npy")
    for name in ("whole.npy", "object.npy", "many.npz", "text.npy", "empty.npy"):
        assert f"{name}: is not a .npy file of floats" in given(name)
    assert f"{tmp_path / 'absent.npy'}: No such file" in given("absent.npy")

    near = refused("matmul", EXCERPT, "blk.2.atn_q.q4_0")
    assert "there is no tensor 'blk.2.atn_q.q4_0'; close are blk.2.attn_q.q4_0" in near
    assert "`qgemm info` lists" in refused("matmul", EXCERPT, "?")
    assert "no decoder" in refused("matmul", EXCERPT, "blk.2.attn_q.nvfp4")
    assert "'a16'" in refused("matmul", EXCERPT, "blk.2.attn_q.f32", "--activation", "a8")
    qgemm.write(tmp_path / "vector.gguf", {"v": np.ones(32, np.float32)})
    assert "w must be a matrix" in refused("matmul", tmp_path / "vector.gguf", "v")
    folder = refused("matmul", EXCERPT, WEIGHT, "--m", 1, "--out", tmp_path / "none" / "y.npy")
    assert "y.npy: cannot be written: No such file" in folder


def test_matmul_usage(refused):
    command = "matmul", EXCERPT, WEIGHT
    assert "a single number" in refused(*command, "--m", "1,2", "--out", "y.npy", status=2)
    assert "not allowed with" in refused(*command, "--m", "1", "--x", "x.npy", status=2)
    assert "whole number" in refused(*command, "--m", "1,two", status=2)
    assert "positive" in refused(*command, "--m", "0", status=2)
    assert "invalid choice: 'a4'" in refused(*command, "--activation", "a4", status=2)


def test_matmul_without_a_gpu(refused, monkeypatch):
    states = {"cuda": qgemm.Backend(False, "there is none", {})}
    monkeypatch.setattr("qgemm.cli.matmul.backends", lambda: states)
    assert "cuda is not available: there is none" in refused("matmul", EXCERPT, WEIGHT, "--backend", "cuda")


# ---------------------------------------------------------------- routes, version, help


def test_routes(run):
    status, out, err = run("routes")
    assert (status, err) == (0, "")
    table = out.split("\n")[1 : out.split("\n").index("")]
    assert [line.split()[0] for line in table] == [row.kernel.name for row in ROUTES]
    assert [re.split(r"  +", line)[-1] for line in table] == [row.what for row in ROUTES]
    formats = lines_of(out + "\n", "format")
    assert list(formats) == [str(fmt) for fmt in qgemm.FORMATS.values()]
    assert formats["Q4_0"][1] == "4.5"
    assert set(kernels("a16")) <= set(formats["Q4_0"][3].split(", "))
    assert formats["F32"][3:] == ["cublas", "-"]


def test_version(run):
    status, out, err = run("--version")
    assert (status, err) == (0, "")
    version, cpu, cuda = out.splitlines()
    assert version == f"qgemm {qgemm.__version__}"
    assert cpu.split()[:2] == ["cpu", "available"]
    assert cuda.endswith(qgemm.backends()["cuda"].detail)


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)
def test_help_has_an_example_that_parses(run, command):
    status, out, err = run(command.name, "--help")
    assert (status, err) == (0, "")
    example = out.partition("example:\n")[2]
    words = example.splitlines()[0].replace("'", "").split()
    assert words[:2] == ["qgemm", command.name]
    assert cli.parser().parse_args(words[1:]).run is command.run


def test_help_imports_no_cupy():
    code = (
        "import sys\nfrom qgemm.cli.main import main\ntry: main(['--help'])\nfinally: assert 'cupy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=ENVIRONMENT, stdout=subprocess.DEVNULL)


# ---------------------------------------------------------------- errors, streams, names


@pytest.mark.parametrize("words", ["", "frobnicate", "info", "--frob info x.gguf", "info x.gguf --js", "routes x"])
def test_usage_errors(refused, words):
    assert "--help` has more)" in refused(*words.split(), status=2)


@pytest.mark.parametrize("command", ["info", "verify"])
def test_missing_files(refused, tmp_path, command):
    assert "absent.gguf" in refused(command, tmp_path / "absent.gguf")
    assert str(tmp_path) in refused(command, tmp_path)


@pytest.mark.parametrize("name", sorted(path.name for path in MALFORMED.glob("*.gguf")))
def test_malformed_files(run, refused, name):
    """What `open` refuses is refused in one line; what it takes can be listed."""
    path = MALFORMED / name
    try:
        qgemm.open(path).close()
    except qgemm.GGUFError as error:
        message = text.printable(str(error))
    else:
        assert run("info", path)[0] == 0
        json.loads(run("info", path, "--json")[1], parse_constant=pytest.fail)
        assert run("verify", path)[0] in (0, 1)
        return
    assert message in refused("info", path)
    assert message in refused("verify", path)


def test_debug_shows_the_traceback(run):
    for words in (("--debug", "info", "absent"), ("info", "absent", "--debug")):
        status, out, err = run(*words)
        assert (status, out) == (1, "")
        assert "Traceback (most recent call last)" in err
        assert err.splitlines()[-1].startswith("qgemm: error: absent")


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "qgemm: interrupted\n"),
        (MemoryError(), 1, "qgemm: error: out of memory\n"),
        (RuntimeError("cudaError\nIllegal"), 1, "qgemm: error: cudaError\\nIllegal\n"),
        (OSError(28, "No space left on device", "a\udcff"), 1, "qgemm: error: a\\udcff: No space left on device\n"),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_what_goes_wrong_is_told_in_one_line(run, monkeypatch, error, status, message):
    def fail(path):
        raise error

    monkeypatch.setattr("qgemm.cli.info.open_gguf", fail)
    assert run("info", EXCERPT) == (status, "", message)


def test_a_bug_is_not_dressed_up(monkeypatch):
    def fail(path):
        raise KeyError("a bug")

    monkeypatch.setattr("qgemm.cli.info.open_gguf", fail)
    with pytest.raises(KeyError):
        cli.main(["info", EXCERPT])


def test_hostile_names_are_escaped(run, refused, tmp_path):
    """The fixtures hold every line against isprintable()."""
    path = tmp_path / "x\x1b[31m.gguf"
    names = [HOSTILE, "b\udcff", "\x9b31m"]
    qgemm.write(path, {name: weights((2, 32)) for name in names}, {"general.name": HOSTILE})
    shown = text.printable(HOSTILE)
    assert shown == r"\x1b[2Jgone\n\u202e"
    for command in (["info", path], ["verify", path], ["matmul", path, HOSTILE], ["matmul", path, "b\udcff"]):
        status, out, _ = run(*command)
        assert status == 0
        assert shown in out or r"b\udcff" in out
    for command in (["matmul", path, HOSTILE + "!"], ["info", path, "--tensors", "gone!\x1b"]):
        assert "gone" in refused(*command)
    qgemm.write(path, {HOSTILE: np.ones((2, 32), np.float32)})
    assert "gone" in refused("matmul", path, HOSTILE, "--activation", "a8")
    assert "gone" in refused("matmul", path, HOSTILE, "--activation", HOSTILE, status=2)


def test_paths_that_are_not_utf8(tmp_path):
    path = os.fsencode(tmp_path) + b"/a\xff\x1b.gguf"
    Path(os.fsdecode(path)).write_bytes(Path(EXCERPT).read_bytes())
    for command in (b"info", b"verify"):
        done = python_m(command, path, b"--tensors", b"attn_q")
        assert (done.returncode, done.stderr) == (0, b"")
    done = python_m(b"info", path + b"?")
    assert done.returncode == 1
    assert done.stderr.isascii()


def test_ascii_stdout(tmp_path):
    qgemm.write(tmp_path / "x.gguf", {"größe": weights((2, 32))}, {"general.name": "模型"})
    done = python_m("info", tmp_path / "x.gguf", env=ENVIRONMENT | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"gr\xf6\xdfe" in done.stdout
    done = python_m("info", tmp_path / "x.gguf", env=ENVIRONMENT | {"PYTHONIOENCODING": "utf-8"})
    assert "größe" in done.stdout.decode()
    assert "模型" in done.stdout.decode()


@pytest.mark.parametrize("words", [["info", EXCERPT], ["routes"], ["--version"]])
def test_a_closed_pipe_ends_quietly(words):
    read, end = os.pipe()
    os.close(read)
    with open(end, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "qgemm", *words], stdout=closed, stderr=subprocess.PIPE, env=ENVIRONMENT, check=False
        )
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_an_error():
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "qgemm", "routes"], stdout=full, stderr=subprocess.PIPE, env=ENVIRONMENT, check=False
        )
    assert done.returncode == 1
    assert done.stderr == b"qgemm: error: [Errno 28] No space left on device\n"


def test_without_any_stdout(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["routes"]) == 0


def test_stdout_of_any_kind(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert cli.main(["routes"]) == 0
    assert "cublas" in sys.stdout.getvalue()

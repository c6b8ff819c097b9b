"""The command line: every command on real files, what goes to stdout and stderr, exit codes, hostile names."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys

import helpers
import numpy as np
import pytest
from files import spoiled
from helpers import WEIGHT, lines_of
from hypothesis import given
from hypothesis import strategies as st

import qgemm
from qgemm import text
from qgemm.cli import main as cli
from qgemm.cpu.native import library
from qgemm.cuda.kernels.routes import ROUTES
from qgemm.cuda.problem import Gpu

EXCERPT = str(helpers.EXCERPT)
HOSTILE = "\x1b[2Jgone\n\u202e"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def weights(shape, fmt="q4_0", seed=0):
    return qgemm.quantize(np.random.default_rng(seed).standard_normal(shape), fmt)


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


# ---------------------------------------------------------------- matmul


def test_matmul_random(run):
    status, out, err = run("matmul", EXCERPT, WEIGHT)
    assert (status, err) == (0, "")
    assert "x   standard normal, seed 0, as a16" in out
    lines = lines_of(out + "\n", "M")
    assert list(lines) == ["1", "16", "512"]
    assert all(0 < float(cells[1]) < 1e-6 and cells[4] == "numpy" for cells in lines.values())


@pytest.mark.compiles
@pytest.mark.skipif(bool(library.reason()), reason=library.reason())
def test_the_kernel_is_the_one_that_ran(run, monkeypatch):
    """Compiled code or NumPy, which both commands name."""
    for environment, kernel in (("numpy", "numpy"), ("", "c")):
        monkeypatch.setenv("QGEMM_CPU", environment)
        for activation in ("a16", "a8"):
            _, out, _ = run("matmul", EXCERPT, WEIGHT, "--m", "3", "--activation", activation, "--json")
            assert [product["kernel"] for product in json.loads(out)["products"]] == [kernel]
        _, out, _ = run("info", EXCERPT, "--json", "--tensors", re.escape(WEIGHT))
        assert {name for (name,) in json.loads(out)["tensors"][0]["cpu"]["products"].values()} == {kernel}


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
    """A product with an error of 1 everywhere has an RMS error of 1."""
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

    def refused_with(name):
        return refused("matmul", EXCERPT, WEIGHT, "--x", tmp_path / name)

    assert "rows of 383" in refused_with("narrow.npy")
    for name in ("whole.npy", "object.npy", "many.npz", "text.npy", "empty.npy"):
        error = refused_with(name)
        assert f"{name}: is not a .npy file of floats" in error
        assert "allow_pickle=" not in error or name == "object.npy"
    assert f"{tmp_path / 'absent.npy'}: No such file" in refused_with("absent.npy")

    near = refused("matmul", EXCERPT, "blk.2.atn_q.q4_0")
    assert "there is no tensor 'blk.2.atn_q.q4_0'; close are blk.2.attn_q.q4_0" in near
    assert "`qgemm info` lists" in refused("matmul", EXCERPT, "?")
    assert "no integer codes" in refused("matmul", EXCERPT, "blk.2.attn_q.f32", "--activation", "a8")
    assert "'a16'" in refused("matmul", EXCERPT, "blk.2.attn_q.f32", "--activation", "a8")
    qgemm.write(tmp_path / "vector.gguf", {"v": np.ones(32, np.float32)})
    vector = refused("matmul", tmp_path / "vector.gguf", "v")
    assert "w must be a matrix" in vector
    assert "index" not in vector
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
    states = {"cuda": qgemm.Status(False, "there is none", {})}
    monkeypatch.setattr("qgemm.cli.matmul.backends", lambda: states)
    assert "cuda is not available: there is none" in refused("matmul", EXCERPT, WEIGHT, "--backend", "cuda")


# ---------------------------------------------------------------- routes, version, help


def test_routes(run):
    status, out, err = run("routes")
    assert (status, err) == (0, "")
    table = out.split("\n")[1 : out.split("\n").index("")]
    assert [line.split()[0] for line in table] == [row.kernel.name for row in ROUTES]
    assert [re.split(r"  +", line)[-1] for line in table] == [row.note for row in ROUTES]
    formats = lines_of(out + "\n", "format")
    assert list(formats) == [str(fmt) for fmt in qgemm.FORMATS.values()]
    assert formats["Q4_0"][1] == "4.5"
    serve_q4_0 = [row for row in ROUTES if row.formats.holds(qgemm.FORMATS["q4_0"])]
    for column, activation in enumerate(("a16", "a8"), 3):
        kernels = formats["Q4_0"][column].split(", ")
        assert len(set(kernels)) == len(kernels) > 4
        assert kernels == list(dict.fromkeys(row.kernel.name for row in serve_q4_0 if activation in row.activations))
    assert formats["F32"][3:] == ["gemv_floats, cublas, moe_floats", "-"]


def test_routes_say_which_are_for_this_machine(run, monkeypatch):
    """Without a usable GPU no row applies; the rows of a compute capability can be listed on any machine."""
    cuda = qgemm.Status(False, "no usable NVIDIA GPU", {})
    monkeypatch.setattr("qgemm.cli.routes.backends", lambda: {"cuda": cuda})
    assert run("routes")[1].endswith("\nNone of these serves this machine: no usable NVIDIA GPU\n")
    assert " 132 SMs: prefill_sm90\n" in run("routes", "--problem", "q4_0 a16 M=64 N=8192 K=8192")[1]
    monkeypatch.setattr("qgemm.cli.routes.gpu_here", lambda: Gpu(0, 89, 128))
    assert "This machine's GPU is sm_89: --sm 89" in run("routes")[1]
    assert " sm_89, 128 SMs: prefill_sm80\n" in run("routes", "--problem", "q4_0 a16 M=64 N=8192 K=8192")[1]
    out = run("routes", "--sm", "75")[1]
    assert set(lines_of(out, "kernel")) == {
        "gemv_simt", "gemv_dp4a", "dequantize", "gemv_floats", "cublas", "moe_floats",
    }  # fmt: skip
    assert lines_of(out + "\n", "format")["Q4_0"][3:] == ["gemv_simt, dequantize", "gemv_dp4a, dequantize"]
    assert "this machine" not in out.lower()
    assert run("routes", "--sm", "70")[0] == 2


def test_routes_of_a_problem(run):
    """The kernel and its configs, ordered by predicted time or by a table; kernels without configs list none."""
    status, out, err = run("routes", "--problem", "q4_0 a16 M=64 N=8192 K=8192", "--sm", "90")
    head, _, columns, *rows = out.splitlines()
    assert (status, err, head) == (0, "", "Q4_0 a16 of half M=64 N=8192 K=8192 on sm_90, 132 SMs: prefill_sm90")
    assert columns.split() == ["config", "us"]
    us = [float(row.split()[-1]) for row in rows]
    assert us == sorted(us)
    assert len(us) == 5
    _, out, _ = run("routes", "--problem", "K=4096 N=4096 M=64 a8 q4_0 x=bf16", "--sm", "89", "--sms", "128")
    assert out.startswith("Q4_0 a8 of bf16 M=64 N=4096 K=4096 on sm_89, 128 SMs: prefill_sm80_a8\n")
    _, out, _ = run("routes", "--problem", "kbit4 a16 M=1 N=4096 K=4096", "--sm", 90)
    assert "the first, by their table, is launched\n2 m16_tiles, warp_split_k 16, " in out
    _, out, _ = run("routes", "--problem", "q4_0 a16 M=64 N=8192 K=8192", "--sm", "75")
    assert out.endswith("dequantize, which has no configs\n")


@pytest.mark.parametrize(
    "problem",
    [
        "q4_0 a16 M=64 N=8192",
        "q4_0 M=1 N=1 K=1",
        "q9_9 a16 M=1 N=1 K=1",
        "q4_0 a16 M=0 N=1 K=1",
        "q4_0 a16 x=u8 M=1 N=1 K=1",
    ],
)
def test_what_is_no_problem_is_refused(problem):
    with pytest.raises(cli.UsageError, match="--problem"):
        cli.parser().parse_args(["routes", "--problem", problem])


def test_version(run):
    status, out, err = run("--version")
    assert (status, err) == (0, "")
    version, cpu, *cuda = out.splitlines()
    assert version == f"qgemm {qgemm.__version__}"
    assert cpu.split()[:2] == ["cpu", "available"]
    assert " ".join(" ".join(cuda).split()).endswith(qgemm.backends()["cuda"].detail)


@pytest.mark.parametrize(
    "command", [cli.command_named(name) for name in cli.COMMANDS], ids=lambda command: command.name
)
def test_help_has_an_example_that_parses(run, command):
    status, out, err = run(command.name, "--help")
    assert (status, err) == (0, "")
    example = out.partition("example:\n")[2]
    words = shlex.split(example.splitlines()[0])
    assert words[:2] == ["qgemm", command.name]
    assert cli.parser().parse_args(words[1:]).run is command.run


def test_help_imports_no_cupy():
    code = (
        "import sys\nfrom qgemm.cli.main import main\ntry: main(['--help'])\nfinally: assert 'cupy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=ENVIRONMENT, stdout=subprocess.DEVNULL)

"""The command line when something is wrong: exit codes, one line to stderr, hostile names, closed pipes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import helpers
import numpy as np
import pytest
from files import safetensors
from helpers import DATA, WEIGHT

import qgemm
from qgemm import text
from qgemm.cli import main as cli

EXCERPT = str(helpers.EXCERPT)

HOSTILE = "\x1b[2Jgone\n\u202e"

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "QGEMM_CPU": "numpy"}


def weights(shape, fmt="q4_0", seed=0):
    return qgemm.quantize(np.random.default_rng(seed).standard_normal(shape), fmt)


MALFORMED = DATA / "malformed"


def python_m(*words, **options):
    """`python -m qgemm` in a new process."""
    command = [sys.executable, "-m", "qgemm", *words]
    return subprocess.run(command, capture_output=True, check=False, **{"env": ENVIRONMENT, **options})


# ---------------------------------------------------------------- errors, streams, names


@pytest.mark.parametrize("words", ["", "frobnicate", "info", "--frob info x.gguf", "info x.gguf --js", "routes x"])
def test_usage_errors(refused, words):
    assert "--help` has more)" in refused(*words.split(), status=2)


@pytest.mark.parametrize(
    "words",
    ["convert SRC DST --force TYPE", "convert SRC --force DST TYPE", "convert --dry-run SRC DST --pure TYPE"],
)
def test_options_may_stand_between_arguments(words):
    args = cli.parser(["convert"]).parse_args(words.split())
    assert (args.source, args.target, args.type) == ("SRC", "DST", "TYPE")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["convert", "SRC", "DST", ""], "the argument after 'DST' is empty: ''"),
        (["convert", "", "DST", "q8_0"], "an argument is empty"),
        (["convert", "SRC", "DST", "q8_0", "--prune-layers", ""], "the argument after '--prune-layers' is empty: ''"),
        (["convert", "SRC", "DST", "q8_0", "--architecture="], "the argument after 'q8_0' is empty: '--architecture='"),
        (["info", ""], "an argument is empty"),
    ],
)
def test_empty_arguments(refused, words, message):
    """As of variables of a shell that are not set: an empty TYPE would be f16."""
    assert message in refused(*words, status=2)


def test_an_unknown_argument_leads_to_the_help_of_its_command(refused):
    assert "unrecognized arguments: --frob z (`qgemm info --help`" in refused(*["info", "x", "--frob", "z"], status=2)


def test_no_command_names_them(refused):
    commands = "info, convert, metadata, imatrix, verify, compare, matmul, prepare, tune, routes, bench"
    assert f"name a command: {commands} (" in refused(status=2)


@pytest.mark.parametrize("command", [["verify"], ["matmul"]])
def test_what_is_no_gguf_file_is_to_be_converted(refused, tmp_path, command):
    safetensors(tmp_path / "x.safetensors", {"w": np.ones((2, 4), np.float32)})
    for path in (tmp_path, tmp_path / "x.safetensors"):
        words = [*command, path, *["w"] * (command == ["matmul"])]
        assert f"{path}: is no .gguf file; `qgemm convert` makes one of it" in refused(*words)


@pytest.mark.parametrize("command", [[], *([name] for name in cli.COMMANDS)])
def test_help_fits_80_columns(run, monkeypatch, command):
    """Only commands that users copy are longer."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = run(*command, "--help")[1].splitlines()
    assert not [line for line in lines if len(line) > 80 and not line.startswith("  qgemm ")]


@pytest.mark.parametrize("command", ["info", "verify"])
def test_missing_files(refused, tmp_path, command):
    assert "absent.gguf" in refused(command, tmp_path / "absent.gguf")
    assert str(tmp_path) in refused(command, tmp_path)


@pytest.mark.parametrize("name", sorted(path.name for path in MALFORMED.glob("*.gguf")))
def test_malformed_files(run, refused, name):
    """Files that `open` refuses are refused in one line; files that it accepts can be listed."""
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
    def fail(path, copy):
        raise error

    monkeypatch.setattr("qgemm.cli.info.open_gguf", fail)
    assert run("info", EXCERPT) == (status, "", message)


def test_a_bug_is_not_dressed_up(monkeypatch):
    def fail(path, copy):
        raise KeyError("a bug")

    monkeypatch.setattr("qgemm.cli.info.open_gguf", fail)
    with pytest.raises(KeyError):
        cli.main(["info", EXCERPT])


def test_hostile_names_are_escaped(run, refused, tmp_path):
    """The fixtures check every line with isprintable()."""
    path = tmp_path / "x\x1b[31m.gguf"
    names = [HOSTILE, "\x9b31m"]
    qgemm.write(path, {name: weights((2, 32)) for name in names}, {"general.name": HOSTILE})
    shown = text.printable(HOSTILE)
    assert shown == r"\x1b[2Jgone\n\u202e"
    for command in (["info", path], ["verify", path], ["matmul", path, HOSTILE]):
        status, out, _ = run(*command)
        assert status == 0
        assert shown in out
    assert r"b\udcff" in refused("matmul", path, "b\udcff")
    for command in (["matmul", path, HOSTILE + "!"], ["info", path, "--tensors", "gone!\x1b"]):
        assert "gone" in refused(*command)
    qgemm.write(path, {HOSTILE: np.ones((2, 32), np.float32)})
    assert "gone" in refused("matmul", path, HOSTILE, "--activation", "a8")
    assert "gone" in refused("matmul", path, HOSTILE, "--activation", HOSTILE, status=2)


@pytest.mark.slow
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


# ---------------------------------------------------------------- convert: the order of its arguments


@pytest.mark.parametrize("words", [("in 1.gguf", "q4_0", "out.gguf"), ("Q4_0", "in 1.gguf", "out.gguf")])
def test_convert_with_the_type_elsewhere_prints_the_right_command(refused, words):
    """`qgemm convert SRC TYPE DST` would write to a file named like the type, q4_0."""
    (fmt,) = (word for word in words if word.lower() == "q4_0")
    assert refused("convert", *words, status=2).endswith(f": qgemm convert 'in 1.gguf' out.gguf {fmt}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["f16", "--like", "base.gguf"], "--mmproj: a projector has its own names and metadata, not those of --like"),
        (["--size", "8bpw"], "--pure, --layout and --mmproj do not fit"),
    ],
)
def test_convert_to_a_projector_with_other_options(refused, words, message):
    assert message in refused("convert", "in", "out.gguf", *words, "--mmproj", status=2)


def test_convert_to_no_type_lists_what_can_be_written(refused):
    for words in (["q4_9"], ["q4_0", "--tensor-type", "x=q4_9"]):
        message = refused("convert", "in.gguf", "out.gguf", *words, status=2)
        assert "no format 'q4_9'; those that can be written: BF16, " in message
        assert all((str(fmt) in message) == (fmt.encode is not None) for fmt in qgemm.FORMATS.values())


# ---------------------------------------------------------------- errors that are held against a limit


@pytest.mark.parametrize("value", ["nan", "-1", "-nan", "few"])
def test_a_limit_that_nothing_exceeds_is_refused(refused, value, tmp_path):
    """No error is larger than NaN, so every tensor would pass."""
    message = f"'{value}': expected a number from 0 on"
    assert message in refused("convert", EXCERPT, tmp_path / "x.gguf", "f16", f"--max-rel-error={value}", status=2)
    assert message in refused("verify", EXCERPT, "--against", EXCERPT, f"--tolerance={value}", status=2)
    if value != "few":
        with pytest.raises(qgemm.QgemmError, match="is a number from 0 on, got"):
            qgemm.convert(EXCERPT, tmp_path / "x.gguf", "f16", max_rel_error=float(value))
    assert not list(tmp_path.iterdir())


def test_options_that_the_other_options_make_useless(refused):
    """Neither a tolerance without a file to differ from, nor a seed beside activations that are given."""
    assert "--tolerance is for the difference" in refused("verify", EXCERPT, "--tolerance", "0.1", status=2)
    message = refused("matmul", EXCERPT, WEIGHT, "--x", "x.npy", "--seed", "1", status=2)
    assert "--seed is for random activations" in message

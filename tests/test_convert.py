"""The converter: bytes, errors and rules of its files, and old files that survive every failure."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from files import METADATA, model
from helpers import EXCERPT, converted, left_over, normal
from numpy.testing import assert_array_equal
from strategies import ENCODED, over_formats

import qgemm
from qgemm.codec.packing import from_float16
from qgemm.converter import Options, open_source
from qgemm.converter.job import convert
from qgemm.converter.mixture import NEED_IMPORTANCE
from qgemm.formats import format_named

IN_FILES = [fmt for fmt in ENCODED if fmt.ggml_type is not None or fmt.stored_in_parts]  # formats of .gguf files


@pytest.fixture
def source(tmp_path) -> Path:
    return model(tmp_path / "source.gguf")


def real_error(result: np.ndarray, x: np.ndarray) -> float:
    x = x.astype(np.float64)
    return float(np.linalg.norm(result.astype(np.float64) - x) / np.linalg.norm(x))


# ---------------------------------------------------------------- files that are written


@pytest.mark.slow
@over_formats([fmt for fmt in IN_FILES if fmt.name not in NEED_IMPORTANCE])
def test_to_every_format(fmt, tmp_path):
    """The bytes are the encoder's, the reported errors are the real ones."""
    # a has several ranges
    x = {"a.weight": normal(70, 5120), "b.weight": normal(3, 8, 3 * max(32, fmt.weights)).astype(np.float16)}
    lines = converted(model(tmp_path / "x.gguf", x), tmp_path / "y.gguf", fmt.name, threads=8)
    with qgemm.open(tmp_path / "y.gguf") as file:
        for name, values in x.items():
            assert file[name].blocks.tobytes() == fmt.quantize(values).tobytes()
            assert lines[name].error == pytest.approx(real_error(file[name].dequantize(), values), rel=1e-3)
            assert (lines[name].how == "exact") == (lines[name].error == 0)


@pytest.mark.parametrize("fmt", ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
def test_errors_of_trained_weights(fmt, tmp_path):
    """Rows of all-MiniLM-L6-v2's blk.2.ffn_down, with the errors that the gguf package makes."""
    line = converted(EXCERPT, tmp_path / "x.gguf", fmt, allow_requantize=True)["blk.2.ffn_down.f32"]
    with qgemm.open(EXCERPT) as file:
        x = file["blk.2.ffn_down.f32"].dequantize()
    kind = gguf.GGMLQuantizationType[fmt.upper()]
    assert line.error == pytest.approx(real_error(gguf.dequantize(gguf.quantize(x, kind), kind), x), rel=1e-4)


def test_the_gguf_package_reads_the_same_bytes(source, tmp_path):
    converted(source, tmp_path / "y.gguf", "q5_1")
    with qgemm.open(tmp_path / "y.gguf") as file:
        for tensor in gguf.GGUFReader(tmp_path / "y.gguf").tensors:
            assert tensor.data.tobytes() == file[tensor.name].blocks.tobytes()


def test_the_same_types_are_the_same_file(tmp_path):
    """A file that is kept whole is copied byte for byte, opaque types and all."""
    lines = converted(EXCERPT, tmp_path / "y.gguf", "q4_0", keep=[re.compile("")])
    assert (tmp_path / "y.gguf").read_bytes() == EXCERPT.read_bytes()
    assert {(line.how, line.error, line.rule) for line in lines.values()} == {("exact", 0.0, "--keep")}


def test_metadata_is_lossless(source, tmp_path):
    converted(source, tmp_path / "y.gguf", "q5_0")
    with qgemm.open(tmp_path / "y.gguf") as file:
        metadata = dict(file.metadata)
        assert (metadata.pop("general.file_type"), metadata.pop("general.quantization_version")) == (8, 2)
        assert list(metadata) == [key for key in METADATA if key != "general.file_type"]
        for key, value in metadata.items():
            assert_array_equal(value, METADATA[key])
            assert type(value) is type(METADATA[key])


def test_bytes_do_not_depend_on_threads(tmp_path):
    source = model(tmp_path / "x.gguf", {f"{i}.weight": normal(64, 8192, seed=i) for i in range(3)})
    for threads in (1, 5):
        converted(source, tmp_path / f"{threads}.gguf", "q4_1", threads=threads)
    assert (tmp_path / "1.gguf").read_bytes() == (tmp_path / "5.gguf").read_bytes()


WIDER = [
    # from, to, what happens: (scales and zeros of float16 make minimums of float16 only if they are short)
    ("q4_0", "q4_1", "exact"),
    ("q4_0", "q5_0", "exact"),
    ("q4_0", "q5_1", "exact"),
    ("q4_0", "q8_0", "exact"),
    ("q4_1", "q5_1", "exact"),
    ("q5_0", "q5_1", "exact"),
    ("q5_0", "q8_0", "exact"),
    ("q8_1", "q8_0", "exact"),
    ("q4_0", "f32", "exact"),
    ("q4_0", "f16", "rounded"),
    ("q8_0", "bf16", "rounded"),
    ("q5_1", "q5_0", "requantized"),
    ("q4_0", "kbit4", "requantized"),
]


@pytest.mark.parametrize(("old", "new", "how"), WIDER)
def test_from_quantized(old, new, how, tmp_path):
    """Codes go where there are as many; everything else is quantized again, and only if asked for."""
    x = qgemm.quantize(normal(64, 128), old)
    source = model(tmp_path / "x.gguf", {"x.weight": x})
    if how == "requantized":
        with pytest.raises(qgemm.QgemmError, match=f"'x.weight': is {old.upper()}: .* --allow-requantize"):
            converted(source, tmp_path / "y.gguf", new)
        assert not (tmp_path / "y.gguf").exists()
    line = converted(source, tmp_path / "y.gguf", new, allow_requantize=how == "requantized")["x.weight"]
    with qgemm.open(tmp_path / "y.gguf") as file:
        assert line.how == how
        assert line.error == pytest.approx(real_error(file["x.weight"].dequantize(), x.dequantize()), rel=1e-3)
        if how == "exact":
            assert_array_equal(file["x.weight"].dequantize(), x.dequantize())


def test_kbit_there_and_back(tmp_path):
    """Blocks in parts are read and written in ranges; a codebook of one's own is not lost."""
    own = qgemm.quantize(normal(96, 4096), "kbit3", codebook=np.linspace(-1, 1, 8))
    source = model(tmp_path / "x.gguf", {"a.weight": own, "b.weight": normal(96, 4096)})
    converted(source, tmp_path / "y.gguf", "kbit3", keep=[re.compile("^a")])
    with qgemm.open(tmp_path / "y.gguf") as file:
        assert file["a.weight"].blocks.tobytes() == own.blocks.tobytes()
        assert_array_equal(file["a.weight"].codebook, own.codebook)
        assert file["b.weight"].blocks.tobytes() == qgemm.quantize(normal(96, 4096), "kbit3").blocks.tobytes()
        assert file.metadata["general.architecture"] == "llama"
    converted(tmp_path / "y.gguf", tmp_path / "z.safetensors", "f32")
    with open_source(tmp_path / "z.safetensors") as z:
        assert_array_equal(z.weights["a.weight"].values(0, own.blocks.size * 32), own.dequantize().ravel())


@pytest.mark.parametrize("suffix", ["gguf", "npz", "safetensors"])
def test_empty_arrays(suffix, tmp_path):
    np.savez(tmp_path / "x.npz", w=np.zeros((0, 32), np.float32))
    with pytest.raises(qgemm.QgemmError, match=r"tensor 'w': is empty: shape \(0, 32\)"):
        converted(tmp_path / "x.npz", tmp_path / f"y.{suffix}", "f32")


def test_dry_run_writes_nothing(source, tmp_path):
    before = sorted(os.listdir(tmp_path))
    plan = converted(source, tmp_path / "y.gguf", "q4_0", dry_run=True)
    assert sorted(os.listdir(tmp_path)) == before
    done = converted(source, tmp_path / "y.gguf", "q4_0")
    assert {name: line._replace(error=None, how="") for name, line in done.items()} == {
        name: line._replace(error=None, how="") for name, line in plan.items()
    }


# ---------------------------------------------------------------- refusals


def test_too_large_an_error(source, tmp_path):
    old = model(tmp_path / "y.gguf", {"x": normal(1, 32)}).read_bytes()
    with pytest.raises(qgemm.QuantizeError, match=r"tensor 'token_embd\.weight': relative RMS error 0\.\d+ in Q4_0"):
        converted(source, tmp_path / "y.gguf", "q4_0", max_error=0.01)
    assert (tmp_path / "y.gguf").read_bytes() == old
    assert converted(source, tmp_path / "y.gguf", "q8_0", max_error=0.01)
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("fmt", ["q4_0", "q8_0", "f16", "f32", "kbit4", "mxfp4"])
def test_weights_that_are_not_finite(fmt, tmp_path):
    x = normal(3000, 128)
    x[2, 40], x[2999, 3], x[2, 7] = np.nan, np.inf, -np.inf
    source = model(tmp_path / "x.gguf", {"good.weight": normal(4, 64), "bad.weight": x.astype(np.float64)})
    with pytest.raises(qgemm.QuantizeError) as caught:
        converted(source, tmp_path / "y.gguf", fmt)
    who = f"{source}: tensor 'bad.weight'"
    assert str(caught.value) == f"{who}: 3 weights are NaN or infinite, the first at [2, 7]"
    assert sorted(os.listdir(tmp_path)) == ["x.gguf"]


@pytest.mark.parametrize(
    ("fmt", "message"),
    [
        ("q4_0", "2 blocks are in need of a scale beyond float16, the first at [1, 32]"),
        ("kbit2", "2 blocks are in need of a scale beyond 31.5, where its own end, the first at [1, 32]"),
        ("f16", "2 weights are beyond the largest F16, the first at [1, 40]"),
    ],
)
def test_scales_that_overflow(fmt, message, tmp_path):
    x = normal(9, 64)
    x[1, 40] = x[8, 0] = 1e9
    source = model(tmp_path / "x.gguf", {"x.weight": x})
    with pytest.raises(qgemm.QuantizeError) as caught:
        converted(source, tmp_path / "y.gguf", fmt)
    assert str(caught.value) == f"{source}: tensor 'x.weight': {message}"


def test_damaged_blocks_are_not_copied(tmp_path):
    """Codes and plain numbers may be anything, a scale that is no number stops the conversion."""
    w = qgemm.quantize(normal(9, 64), "q5_1")
    blocks = w.blocks.copy()
    blocks["m"][3, 1], blocks["d"][8, 0] = np.nan, -np.inf
    plain = np.full((2, 64), -np.inf, np.float32)
    source = model(tmp_path / "x.gguf", {"x.weight": qgemm.Tensor("q5_1", w.shape, blocks), "mask.weight": plain})
    for options in ({}, {"keep": [re.compile("")]}):
        with pytest.raises(qgemm.QuantizeError) as caught:
            converted(source, tmp_path / "y.gguf", "q5_1", **options)
        message = "2 blocks are damaged: a scale is not finite, the first at [3, 32]"
        assert str(caught.value) == f"{source}: tensor 'x.weight': {message}"
    model(source, {"mask.weight": plain})
    converted(source, tmp_path / "y.gguf", "f32")
    assert (tmp_path / "y.gguf").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("name", ["x.bin", "x", "x.npy"])
def test_targets_of_no_kind(name, source, tmp_path):
    with pytest.raises(qgemm.QgemmError, match=r"must end in \.gguf, \.safetensors, \.npz"):
        converted(source, tmp_path / name, "f32")


def test_blocks_need_a_file_that_has_them(source, tmp_path):
    for name in ("x.safetensors", "x.npz"):
        with pytest.raises(qgemm.QgemmError, match="no type for Q4_0"):
            converted(source, tmp_path / name, "q4_0")
    with pytest.raises(qgemm.QgemmError, match="no type for BF16"):
        converted(source, tmp_path / "x.npz", "bf16")


def test_a_source_that_changes_meanwhile(source, tmp_path):
    with open_source(source) as opened:
        os.truncate(source, 3000)
        with pytest.raises(qgemm.GGUFError, match="changed since it was opened"):
            convert(opened, tmp_path / "y.gguf", Options(format_named("q4_0")))
    assert sorted(os.listdir(tmp_path)) == ["source.gguf"]


# ---------------------------------------------------------------- the command


def test_the_command(run, source, tmp_path):
    target, report = tmp_path / "y.gguf", tmp_path / "report.json"
    status, out, err = run(
        "convert", source, target, "q4_0", "--tensor-type", "ffn=q5_1", "--threads", 1, "--report", report
    )
    assert (status, err) == (0, "")
    table, sums = out.split("\n\n")
    assert "2 of 5 tensors kept or fell back" in sums
    assert re.search(r"1  1-D\n +1  output matrix: Q8_0|1  output matrix: Q8_0\n +1  1-D|1  norm", sums)
    document = json.loads(report.read_text())
    assert [tensor["to"] for tensor in document["tensors"]] == ["Q4_0", "Q4_0", "F32", "Q5_1", "Q8_0"]
    assert document["kept_or_fell_back"] == 2
    assert document["bytes_after"] == sum(tensor["bytes"] for tensor in document["tensors"])
    status, verified, _ = run("verify", target, "--against", source)
    assert status == 0
    assert table in verified


def test_the_commands_refusals(run, source, tmp_path):
    for words in (
        ("convert", source, tmp_path / "y.gguf", "q9"),
        ("convert", source, tmp_path / "y.gguf", "q4_0", "--keep", "("),
        ("convert", source, tmp_path / "y.gguf", "q4_0", "--tensor-type", "x"),
        ("convert", source, tmp_path / "y.gguf", "q4_0", "--threads", "0"),
    ):
        assert run(*words)[0] == 2
    assert run("convert", tmp_path / "none.gguf", tmp_path / "y.gguf", "q4_0")[0] == 1
    assert run("convert", source, tmp_path / "y.gguf", "q4_0", "--dry-run")[1].count("Q4_0") == 3
    assert not (tmp_path / "y.gguf").exists()


@pytest.mark.slow
def test_the_door_in_tools(source, tmp_path):
    command = [
        sys.executable,
        str(Path(__file__).parents[1] / "tools" / "convert.py"),
        source,
        tmp_path / "y.gguf",
        "q4_0",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "2 of 5 tensors kept or fell back" in done.stdout


def test_hostile_names(run, tmp_path):
    name = "\x1b[2J\x7f.weight"
    source = model(tmp_path / "x.gguf", {name: normal(2, 32)})
    status, out, _ = run("convert", source, tmp_path / "y.gguf", "q4_0", "--report", tmp_path / "r.json")
    assert status == 0
    assert out.replace("\n", "").isprintable()
    assert json.loads((tmp_path / "r.json").read_text())["tensors"][0]["name"] == name


# ---------------------------------------------------------------- plain files


def test_npz_and_safetensors_there_and_back(source, tmp_path):
    for name in ("x.npz", "x.safetensors"):
        converted(source, tmp_path / name, "f32")
        converted(tmp_path / name, tmp_path / "back.gguf", "f32")
        with qgemm.open(source) as want, qgemm.open(tmp_path / "back.gguf") as got:
            for tensor in want.values():
                assert_array_equal(got[tensor.name].dequantize(), tensor.dequantize())
    with np.load(tmp_path / "x.npz") as arrays, qgemm.open(source) as want:
        assert set(arrays) == set(want)
        for name, tensor in want.items():
            assert_array_equal(arrays[name], tensor.dequantize())
    first = (tmp_path / "x.npz").read_bytes()
    converted(source, tmp_path / "x.npz", "f32")
    assert (tmp_path / "x.npz").read_bytes() == first


def test_every_half_is_read_exactly():
    """From float16 by bits: all numbers, and all there are with NaN and infinity among them."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    finite = halves[np.isfinite(halves)]
    assert_array_equal(from_float16(finite).view(np.uint32), finite.astype(np.float32).view(np.uint32))
    assert_array_equal(from_float16(halves), halves.astype(np.float32))


def test_plot(run, source, tmp_path):
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        status, _, err = run("convert", source, tmp_path / "y.gguf", "q4_0", "--plot", tmp_path / "y.png")
        assert (status, "--plot needs matplotlib" in err) == (1, True)
        assert not (tmp_path / "y.gguf").exists()
    else:
        assert run("convert", source, tmp_path / "y.gguf", "q4_0", "--plot", tmp_path / "y.png")[0] == 0
        assert (tmp_path / "y.png").read_bytes()[1:4] == b"PNG"

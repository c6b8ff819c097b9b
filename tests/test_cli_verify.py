"""`qgemm verify` on real files: its checks, failures, and tensors that it cannot check."""

from __future__ import annotations

import os
import re
import tracemalloc
from pathlib import Path

import helpers
import hf_folders
import numpy as np
import pytest
import vision_folders
from files import spoiled
from gguf.constants import GGMLQuantizationType
from helpers import WEIGHT, lines_of, normal, random_tensor
from hypothesis import given
from hypothesis import strategies as st
from strategies import CODES, over_formats, problems

import qgemm
from qgemm.cli import checks
from qgemm.codec import error_bound as bounds
from qgemm.codec.q8_1_f32 import scale_and_sum
from qgemm.converter import comparison
from qgemm.converter.weight import pack_groups, weight_from_tensor
from qgemm.formats import FORMATS, GGML_TYPES, format_of

EXCERPT = str(helpers.EXCERPT)


def weights(shape, fmt="q4_0", seed=0):
    return qgemm.quantize(np.random.default_rng(seed).standard_normal(shape), fmt)


# ---------------------------------------------------------------- verify


@pytest.mark.slow
def test_verify_a_real_file(run):
    status, out, err = run("verify", EXCERPT)
    assert (status, err) == (0, "")
    lines = lines_of(out, "tensor")
    for cells in lines.values():
        assert cells[1] in cells[0].upper()
        fmt = qgemm.FORMATS[cells[1]]
        assert cells[2:4] + cells[-1:] == ["ok", "ok", "ok"]
        assert 0 < float(cells[4]) < 1
        assert 0 < float(cells[5]) < 1 if fmt.integer else cells[5] == "no codes"
    assert out.endswith("33 tensors: 33 ok, 0 failed, 0 without a codec\n")


def test_verify_counts_nan_and_names_the_first(run, tmp_path):
    """A NaN fails only its own check; products of the other rows are still compared with their bounds."""
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
    lines = {name: (cells[2], cells[-1]) for name, cells in lines_of(out, "tensor").items()}
    assert lines == {
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
    lines = lines_of(out, "tensor")
    assert status == 0
    assert lines["sums"][3] == "no oracle"
    assert float(lines["sums"][5]) < 1
    assert lines["numbers"][2:] == lines["double"][2:] == ["ok", *["no codec"] * 3, "ok"]
    assert lines["bias"][2:] == ["ok", "ok", "no matrix", "no matrix", "ok"]


def test_verify_finds_a_wrong_decoder(run, monkeypatch):
    monkeypatch.setattr(checks, "oracle", lambda fmt, blocks: np.zeros(blocks.size * fmt.weights, np.float32))
    status, out, _ = run("verify", EXCERPT, "--tensors", WEIGHT)
    cells = lines_of(out, "tensor")[WEIGHT]
    assert status == 1
    assert re.fullmatch(r"1152, first \[0, 0\]", cells[3])
    assert cells[-1] == "FAIL"


def test_verify_forgives_a_nan_only_for_a_nan(run, monkeypatch, tmp_path):
    qgemm.write(tmp_path / "x.gguf", {"w": spoiled(weights((4, 128)), "d", np.inf)})
    oracle = checks.oracle
    monkeypatch.setattr(checks, "oracle", lambda fmt, blocks: np.nan_to_num(oracle(fmt, blocks), nan=1, posinf=1))
    cells = lines_of(run("verify", tmp_path / "x.gguf")[1], "tensor")["w"]
    assert re.fullmatch(r"1, first \[\d, \d\]", cells[3])


@pytest.mark.parametrize(("broken", "column"), [("a16", 4), ("a8", 5)])
def test_verify_finds_a_wrong_product(run, monkeypatch, broken, column):
    """One output of 384 with a relative error below 0.001 exceeds the bound."""

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


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("name", ["u1_g32", "u1z_g32", "q1_0"])
def test_verify_passes_products_whose_sums_cancel(run, tmp_path, name):
    """Compiled code adds parts of a group in float32, whose sum is not exact where they cancel."""
    qgemm.write(tmp_path / "x.gguf", {"w": random_tensor(format_of(name), 200, 128, np.random.default_rng(0))})
    status, out, _ = run("verify", tmp_path / "x.gguf")
    assert (status, lines_of(out, "tensor")["w"][-1]) == (0, "ok")


@over_formats(CODES)
@given(data=st.data())
def test_products_lie_within_their_bounds(fmt, data):
    x, w = data.draw(problems(fmt))
    x64, w64 = x.astype(np.float64), w.dequantize(np.float64)
    assert bounds.excess(qgemm.matmul(x, w), x64 @ w64.T, bounds.a16_bound(x64, bounds.magnitudes(fmt, w.blocks))) <= 1
    prepared = qgemm.quantize_activations(x)
    exact, bound = bounds.a8_exact(prepared.blocks, fmt, w.blocks)
    assert bounds.excess(qgemm.matmul(prepared, w), exact, bound) <= 1
    # What a8 multiplies is d * q, but for the sum s of each block: both d and s are rounded to float16.
    da, sa = scale_and_sum(prepared.blocks)
    values = (da[..., None] * prepared.blocks["qs"]).reshape(x.shape)
    levels = fmt.decode_levels(w.blocks.reshape(-1))
    shift = np.zeros((w.shape[0], sa.shape[1]))
    if levels.minimum is not None and fmt.group % 32 == 0:  # other groups multiply the minimum by the sum of the codes
        shift += np.abs(levels.minimum.reshape(shift.shape))
    if levels.zero and fmt.group % 32 == 0:  # other groups subtract the zero from the codes
        scale = np.abs(levels.scale.reshape(w.shape[0], -1))
        shift += levels.zero * scale.repeat(fmt.group // 32, axis=1)
    rounding = 1e-12 if levels.minimum is None else 2**-23.9  # for decoded weights: adding a minimum rounds
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
    """Errors equal those of the formats; other shapes, and tensors that only one file has, fail."""
    source = np.random.default_rng(3).standard_normal((6, 5, 64)).astype(np.float32)
    same = {"same": source[0], "error": source, "vector": source[0, 0], "zeros": 0 * source[0]}
    first = same | {"here": source[0], "shape": source[0]}
    other = same | {"there": source[0], "shape": source[0, :4], "zeros": source[0]}
    qgemm.write(
        tmp_path / "one.gguf", first | {name: qgemm.quantize(first[name], "q8_0") for name in ("error", "vector")}
    )
    qgemm.write(tmp_path / "other.gguf", other)
    command = "verify", tmp_path / "one.gguf", "--against", tmp_path / "other.gguf"
    status, out, _ = run(*command)
    lines = {name: (cells[6], cells[-1]) for name, cells in lines_of(out, "tensor").items()}
    assert status == 1
    assert lines["same"] == ("identical", "ok")
    assert lines["here"] == ("missing", "FAIL")
    assert lines["there"] == ("only in OTHER", "FAIL")
    assert lines["shape"] == ("shape (4, 64)", "FAIL")
    assert lines["zeros"] == ("1.00e+00 (F32)", "FAIL")
    decoded = qgemm.quantize(source, "q8_0").dequantize(np.float64)
    want = np.linalg.norm(decoded - source) / np.linalg.norm(source.astype(np.float64))
    assert lines["error"] == (f"{want:.2e} (F32)", "ok")
    assert run(*command, "--tensors", "^(error|vector)$")[0] == 0
    assert run(*command, "--tensors", "^error$", "--tolerance", "0.001")[0] == 1


def test_against_the_folder_of_a_model(run, tmp_path):
    """Experts are stacked and rows are reordered before they are compared."""
    for architecture in ("LlamaForCausalLM", "Qwen3MoeForCausalLM"):
        source = hf_folders.folder(tmp_path / "m", architecture)
        qgemm.convert(source, tmp_path / "y.gguf", "f16", force=True)
        status, out, _ = run("verify", tmp_path / "y.gguf", "--against", source)
        assert (status, "only in" in out) == (0, False)
    qgemm.convert(source / "model.safetensors", tmp_path / "y.gguf", "f16", force=True)  # under its own names
    assert run("verify", tmp_path / "y.gguf", "--against", source)[0] == 0


def test_against_the_folder_of_a_projector(run, tmp_path):
    source = vision_folders.folder(tmp_path / "v", "Qwen2VLForConditionalGeneration")
    qgemm.convert(source, tmp_path / "y.gguf", "f16", mmproj=True)
    assert run("verify", tmp_path / "y.gguf", "--against", source)[0] == 0


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
    fmt = GGML_TYPES[GGMLQuantizationType.Q8_K]
    blocks = np.frombuffer(np.random.default_rng(0).bytes(4 * fmt.block_bytes), fmt.dtype).reshape(4, 1)
    q8_k, damaged = (qgemm.Tensor(fmt, (4, 256), raw) for raw in (blocks, blocks[::-1].copy()))
    qgemm.write(tmp_path / "one.gguf", {"same": q8_k, "bytes": q8_k, "format": q8_k})
    qgemm.write(tmp_path / "other.gguf", {"same": q8_k, "bytes": damaged, "format": weights((4, 256))})
    status, out, _ = run("verify", tmp_path / "one.gguf", "--against", tmp_path / "other.gguf")
    assert status == 0
    cells = [cells[6] for cells in lines_of(out, "tensor").values()]
    assert cells == ["identical", "no codec", "no codec"]


@pytest.mark.slow
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


@pytest.mark.slow
def test_verify_long_rows_in_bounded_memory(run, tmp_path):
    """x of a row of 2^23 weights would be 128 MiB, the row in float64 64 MiB; the third row ends in a NaN."""
    blocks = np.zeros((3, 1 << 18), qgemm.FORMATS["q4_0"].dtype)
    blocks["d"] = 1
    blocks["qs"] = 0x79
    blocks["d"][2, -1] = np.nan
    qgemm.write(tmp_path / "x.gguf", {"w": qgemm.Tensor("q4_0", (3, 1 << 23), blocks), "f": normal(2, 65536 + 96)})
    tracemalloc.start()
    status, out, _ = run("verify", tmp_path / "x.gguf")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    lines = lines_of(out, "tensor")
    assert status == 1
    assert (lines["w"][2], lines["f"][-1]) == (f"1, first [2, {(1 << 18) - 1}]", "ok")
    assert 0 < float(lines["f"][4]) < 1
    assert peak < 48 << 20


def test_verify_notices_a_file_that_is_cut(refused, tmp_path, monkeypatch):
    """Reading through a descriptor gives an error; a mapping would end the process by SIGBUS."""
    path = tmp_path / "x.gguf"
    qgemm.write(path, {"w": weights((64, 1024))})
    monkeypatch.setattr(checks, "PIECE", 4096)
    monkeypatch.setattr(checks.Progress, "advance", lambda self, nbytes: os.truncate(path, 8192))
    assert "x.gguf: changed since it was opened" in refused("verify", path)


def test_kbit_tensors_are_tensors_like_others(run, tmp_path):
    """They are one type with any codebook; products are checked, but there is no other decoder to compare with."""
    own = qgemm.quantize(np.random.default_rng(0).standard_normal((4, 64)), "kbit2", codebook=[0.5, -1, 0, 1])
    qgemm.write(tmp_path / "x.gguf", {"own": own, "default": weights((4, 64), "kbit2")}, {"general.architecture": "x"})
    _, out, _ = run("info", tmp_path / "x.gguf")
    assert lines_of(out, "type") == {"KBIT2": ["KBIT2", "2", "512", "144", "2.25", "a16, dequantize"]}
    assert re.search(r"^general.architecture +x$", out, re.MULTILINE)
    qgemm.write(tmp_path / "y.gguf", {"own": qgemm.Tensor("kbit2", own.shape, own.blocks), "default": own})
    status, out, _ = run("verify", tmp_path / "x.gguf", "--against", tmp_path / "y.gguf", "--tolerance", 0.9)
    lines = lines_of(out, "tensor")
    assert status == 1  # blocks of "own" are the same there, its codebook is not
    assert lines["own"][2:4] + lines["own"][5:6] == ["ok", "no oracle", "no codes"]
    assert 0 < float(lines["own"][4]) < 1
    assert re.fullmatch(r"\d\.\d\de[+-]\d\d \(KBIT2\)", lines["own"][6])
    assert float(lines["own"][6].split()[0]) > 0.9


@pytest.mark.parametrize("damaged", [None, 0, 5, 11])
def test_each_range_of_a_comparison_counts(monkeypatch, damaged):
    """One block that differs, in the first range, in another or in the last: neither copied bytes nor codes."""
    monkeypatch.setattr(comparison, "range_size", lambda threads: 32)
    w = qgemm.quantize(normal(6, 64), "q4_0")
    for fmt in ("q4_0", "q4_1"):
        source = weight_from_tensor(w)
        blocks = w.blocks.copy() if fmt == "q4_0" else pack_groups(FORMATS[fmt], source.codes.read(0, 6 * 64))
        blocks = blocks.reshape(6, 2)
        if damaged is not None:
            blocks.reshape(-1)["qs"][damaged, 3] ^= 1
        result = comparison.compare(source, qgemm.Tensor(FORMATS[fmt], w.shape, blocks))
        assert result.identical == (fmt == "q4_0" and damaged is None)
        assert result.line.how == ("exact" if damaged is None else "different")

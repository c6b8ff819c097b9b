"""Checkpoints that are written for other libraries: they read back as the values of the format."""

from __future__ import annotations

import json
import os
from pathlib import Path

import foreign
import numpy as np
import pytest
from files import model, safetensors
from foreign import MODULE
from helpers import left_over, normal
from numpy.testing import assert_array_equal

import qgemm
from qgemm.converter import checkpoint_target
from qgemm.errors import QgemmError

NAME = f"{MODULE}.weight"
LAYOUTS = {
    # the layout, and formats that it holds
    "awq": ("u4z_g128", "u4z_g32", "u4_g64", "u4z_row", "u4z_g32_bf16"),
    "gptq": ("u4_g128", "u4z_g128", "u2z_g64", "u3z_g32", "u8_row", "u8z_g32"),
    "compressed-tensors": ("u4_g128_bf16", "u4z_g128", "u8_row", "u3z_g64_bf16", "u5_g32", "u7z_row"),
}
CASES = [(layout, fmt) for layout, formats in LAYOUTS.items() for fmt in formats]


def source(folder: Path, n: int = 96, k: int = 256) -> dict[str, np.ndarray]:
    """A folder of Hugging Face: a matrix, a norm, an output matrix, a config and a tokenizer."""
    folder.mkdir()
    tensors = {
        NAME: normal(n, k, seed=1).astype(np.float16),
        "model.norm.weight": normal(k, seed=2),
        "lm_head.weight": normal(40, k, seed=3).astype(np.float16),
    }
    safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "strange", "hidden_size": k}))
    (folder / "tokenizer.json").write_text("{}")
    return tensors


@pytest.mark.parametrize(("layout", "fmt"), CASES, ids=lambda value: str(value))
def test_quantized_into_a_checkpoint(layout, fmt, tmp_path, monkeypatch):
    """The matrix has the codes that `quantize` gives; the rest stays; the folder is read as any other is."""
    monkeypatch.setattr(checkpoint_target, "BUFFER", 1 << 12)  # rows are written a few at a time
    tensors = source(tmp_path / "m")
    done = qgemm.convert(tmp_path / "m", tmp_path / "out", fmt, layout=layout)
    assert {line.name: line.new for line in done.lines} == {
        NAME: fmt.upper(), "model.norm.weight": "F32", "lm_head.weight": "F16",
    }  # fmt: skip
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors", "tokenizer.json"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["quantization_config"]["quant_method"]) == ("strange", layout)
    want = qgemm.quantize(tensors[NAME].astype(np.float32), fmt)
    with qgemm.load(tmp_path / "out") as written:
        assert set(written) == set(tensors)
        w = written[NAME]
        assert_array_equal(w.dequantize(), want.dequantize())
        assert w.format == want.format or fmt.startswith("u4z")  # unless every zero is the middle code
        assert_array_equal(written["lm_head.weight"].dequantize("float16"), tensors["lm_head.weight"])
        assert_array_equal(written["model.norm.weight"].dequantize(), tensors["model.norm.weight"])
    assert left_over(tmp_path / "out") == []


EXACT = {
    # source, how it was made, and where its codes fit: layout and format
    "awq to gptq": (foreign.awq, {"group": 128, "k": 256}, "gptq", "u4z_g128"),
    "awq to compressed": (foreign.awq, {"group": 128, "k": 256}, "compressed-tensors", "u4z_g64"),
    "awq of bfloat16": (foreign.awq, {"scales": foreign.ml_dtypes.bfloat16}, "awq", "u4z_g32_bf16"),
    "gptq to awq": (foreign.gptq, {"zero": 8}, "awq", "u4_g32"),
    "gptq to more bits": (foreign.gptq, {"zero": 8}, "compressed-tensors", "u5_g32"),
    "gptq of 3 bits": (foreign.gptq, {"bits": 3, "k": 96}, "compressed-tensors", "u3z_g32"),
    "compressed to gptq": (foreign.compressed, {"bits": 8, "group": -1, "k": 256}, "gptq", "u8_row_bf16"),
    "hqq of whole zeros": (foreign.hqq, {"whole": True, "n": 16}, "awq", "u4z_g64"),
}


@pytest.mark.parametrize("name", EXACT)
def test_codes_move_from_one_method_to_another(name, tmp_path):
    write, options, layout, fmt = EXACT[name]
    want = write(tmp_path / "m", **options)
    done = qgemm.convert(tmp_path / "m", tmp_path / "out", fmt, layout=layout)
    assert {line.name: line.how for line in done.lines}[NAME] == "exact"
    with qgemm.load(tmp_path / "out") as written:
        assert_array_equal(written[NAME].dequantize(), want)


@pytest.mark.parametrize(("old", "fmt"), [("q4_0", "u4_g32"), ("q5_0", "u5_g32"), ("q8_0", "u8_g32")])
def test_blocks_of_ggml_are_groups_of_32(old, fmt, tmp_path):
    w = qgemm.quantize(normal(64, 96), old)
    qgemm.write(tmp_path / "m.gguf", {"a.weight": w})
    done = qgemm.convert(tmp_path / "m.gguf", tmp_path / "out", fmt, layout="compressed-tensors")
    assert done.lines[0].how == "exact"
    with qgemm.load(tmp_path / "out") as written:
        assert_array_equal(written["a.weight"].dequantize(), w.dequantize())


def test_searched_and_weighed(tmp_path):
    """A search is no worse, and rows of a row format are searched whole."""
    source(tmp_path / "m")
    for fmt in ("u3z_g64", "u3_row"):
        errors = []
        for search in (False, True):
            out = tmp_path / f"{fmt}{search}"
            done = qgemm.convert(tmp_path / "m", out, fmt, layout="compressed-tensors", search=search)
            errors.append({line.name: line.error for line in done.lines}[NAME])
        assert errors[1] < errors[0]


def test_several_formats(tmp_path):
    """compressed-tensors has a group of settings for each, the others one for all."""
    source(tmp_path / "m")
    options = {"tensor_types": {"lm_head": "u8_row"}, "force": True}
    qgemm.convert(tmp_path / "m", tmp_path / "out", "u4_g128", layout="compressed-tensors", **options)
    with qgemm.load(tmp_path / "out") as written:
        assert [written[name].format.name for name in (NAME, "lm_head.weight")] == ["u4_g128", "u8_row"]
    with pytest.raises(QgemmError, match="gptq has matrices of one format, here are U4_G128, U8_ROW"):
        qgemm.convert(tmp_path / "m", tmp_path / "out", "u4_g128", layout="gptq", **options)


REFUSED = {
    "another format": ("q4_0", "awq", {}, "awq does not hold Q4_0; it holds u4_g128, u4z_g128"),
    "other bits": ("u3_g128", "awq", {}, "awq does not hold U3_G128"),
    "zeros of floats": ("u4f_g64", "compressed-tensors", {}, "does not hold U4F_G64"),
    "a layout": ("u4_g64", "marlin", {}, "there is no layout 'marlin', only awq, gptq, compressed-tensors"),
    "shards": ("u4_g64", "gptq", {"keep_split": True}, "--keep-split is for .gguf files"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_written(name, tmp_path):
    fmt, layout, options, message = REFUSED[name]
    source(tmp_path / "m")
    with pytest.raises(QgemmError, match=message):
        qgemm.convert(tmp_path / "m", tmp_path / "out", fmt, layout=layout, **options)
    assert not (tmp_path / "out").exists()


def test_matrices_that_fill_no_words_stay_plain(tmp_path):
    source(tmp_path / "m", n=100)  # 100 rows are no words of eight codes
    with pytest.raises(QgemmError, match="here are no quantized matrix"):
        qgemm.convert(tmp_path / "m", tmp_path / "out", "u4_g64", layout="awq")
    qgemm.convert(tmp_path / "m", tmp_path / "out", "u4_g64", layout="compressed-tensors")
    assert qgemm.load(tmp_path / "out")[NAME].format.name == "u4_g64"


def test_an_old_checkpoint_needs_force(tmp_path, run):
    source(tmp_path / "m")
    words = ("convert", tmp_path / "m", tmp_path / "out", "u4z_g64", "--layout", "awq")
    assert run(*words, "--dry-run")[0] == 0
    assert not (tmp_path / "out").exists()
    assert run(*words)[0] == 0
    status, _, err = run(*words)
    assert (status, "exists" in err) == (1, True)
    assert run(*words, "--force")[0] == 0
    status, _, err = run("convert", tmp_path / "m", tmp_path / "m", "u4z_g64", "--layout", "awq", "--force")
    assert status == 1  # onto the source itself
    assert "safetensors" in err


def test_of_a_gguf_model(tmp_path):
    """Experts and vectors stay plain, under their names in the .gguf file."""
    model(tmp_path / "m.gguf")
    done = qgemm.convert(tmp_path / "m.gguf", tmp_path / "out", "u4_g32", layout="gptq")
    news = {line.name: (line.new, line.rule) for line in done.lines}
    assert news["blk.0.attn_q.weight"] == ("U4_G32", "")
    assert news["blk.0.ffn_down.weight"] == ("F16", "gptq has matrices alone: F16")
    assert news["output.weight"][1] == "output matrix"
    with qgemm.load(tmp_path / "out") as written:
        assert written["blk.0.ffn_down.weight"].shape == (3, 8, 96)

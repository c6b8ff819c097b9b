"""Names and shapes that .gguf files do not hold: renamed, joined, and given back."""

from __future__ import annotations

import re

import numpy as np
import pytest
from files import model, safetensors, written
from gguf_bytes import file_of, saved, tensor
from helpers import converted, normal
from numpy.testing import assert_array_equal

import qgemm
from qgemm.converter import open_source
from qgemm.converter.tensor_names import ORIGINAL_SHAPE, apply_renames, parse_rename

LONG = "diffusion." + "block." * 9 + "weight"  # 70 bytes


def test_long_names_are_read_and_renamed(run, tmp_path):
    """Files made with GGML_MAX_NAME=128 open; a name that every ggml reads must be given to be written."""
    source = saved(tmp_path / "x.gguf", file_of((), [tensor(LONG.encode(), (32,))], bytes(128)))
    with qgemm.open(source) as file:
        assert list(file) == [LONG]
    target = tmp_path / "y.gguf"
    for where in (source, safetensors(tmp_path / "x.safetensors", {LONG: normal(2, 32)})):
        status, _, err = run("convert", where, target, "f16")
        assert (status, "its name has 70 bytes, a .gguf file holds 63: --rename REGEX=NEW" in err) == (1, True)
        assert run("convert", where, tmp_path / "y.npz", "f32", "--force")[0] == 0
        assert run("convert", where, target, "f16", "--force", "--rename", r"(block\.)+(.*)=b.\2")[0] == 0
        with qgemm.open(target) as file:
            assert list(file) == ["diffusion.b.weight"]
    status, _, err = run("convert", source, tmp_path / "z.gguf", "kbit4", "--rename", f"{LONG}={'n' * 50}", "--dry-run")
    assert (status, err) == (0, "")  # a vector is kept in its type
    safetensors(tmp_path / "x.safetensors", {"n" * 50: normal(2, 32)})
    status, _, err = run("convert", tmp_path / "x.safetensors", tmp_path / "z.gguf", "kbit4")
    assert (status, "its name has 50 bytes, a .gguf file holds 49" in err) == (1, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x=y", "--rename 'x=y' fits no tensor's name"),
        (".*attn.*=a", "--rename makes it 'a', as it makes another"),
        (r"attn=\3", "invalid group reference"),
    ],
)
def test_renames_that_are_refused(text, message, tmp_path):
    with open_source(model(tmp_path / "x.gguf")) as source, pytest.raises(qgemm.QgemmError, match=re.escape(message)):
        apply_renames(source, [parse_rename(text)])


@pytest.mark.parametrize("text", ["x", "(=y"])
def test_renames_that_make_no_sense(text, run, tmp_path):
    with pytest.raises(qgemm.QgemmError):
        parse_rename(text)
    assert run("convert", model(tmp_path / "x.gguf"), tmp_path / "y.gguf", "f16", "--rename", text)[0] == 2


def test_rules_see_new_names(tmp_path):
    """Renaming comes first: rules, overrides and importances match the new names."""
    source = model(tmp_path / "x.gguf", {"a.weight": normal(4, 64), "b.weight": normal(4, 64)})
    names = {r"^a\.": "blk.0.attn_norm.", r"^b\.": "blk.0.attn_q."}
    done = qgemm.convert(source, tmp_path / "y.gguf", "q4_0", rename=names, tensor_types={"attn_q": "q8_0"})
    assert [(line.name, line.new) for line in done.lines] == [
        ("blk.0.attn_norm.weight", "F32"), ("blk.0.attn_q.weight", "Q8_0")
    ]  # fmt: skip


def test_five_dimensions(tmp_path):
    """The leading ones are joined in the file; a key stores the shape, which restores them."""
    shape = (4, 3, 2, 2, 32)
    x = normal(*shape)
    safetensors(tmp_path / "x.safetensors", {"conv.weight": x, "w.weight": normal(4, 32)})
    np.savez(tmp_path / "x.npz", **{"conv.weight": x})
    for source in ("x.safetensors", "x.npz"):
        converted(tmp_path / source, tmp_path / "y.gguf", "q8_0", force=True)
        with qgemm.open(tmp_path / "y.gguf") as file:
            key = file.metadata[ORIGINAL_SHAPE + "conv.weight"]
            assert (key.dtype, key.tolist()) == (np.int32, list(shape))
            assert [name for name in file.metadata if name.startswith(ORIGINAL_SHAPE)] == [key_of("conv.weight")]
            assert file["conv.weight"].shape == (12, 2, 2, 32)
            want = file["conv.weight"].dequantize().reshape(shape)
    qgemm.convert(tmp_path / "y.gguf", tmp_path / "renamed.gguf", "q8_0", rename={"conv": "c"})
    qgemm.convert(tmp_path / "renamed.gguf", tmp_path / "back.npz", "f32")
    with np.load(tmp_path / "back.npz") as back:
        assert_array_equal(back["c.weight"], want)


def test_five_dimensions_of_a_gguf_file_stay(run, tmp_path):
    """They open, verify and convert as they are, and come back in other files; no key repeats the shape."""
    x = normal(4, 3, 2, 2, 64)
    source = tmp_path / "x.gguf"
    qgemm.write(source, {"conv.weight": x, "w.weight": normal(4, 64)})
    with qgemm.open(source) as file:
        assert file["conv.weight"].shape == x.shape
        assert_array_equal(file["conv.weight"].dequantize(), x)
    converted(source, tmp_path / "y.gguf", "q8_0")
    with qgemm.open(tmp_path / "y.gguf") as file:
        assert file["conv.weight"].shape == x.shape
        assert not [name for name in file.metadata if name.startswith(ORIGINAL_SHAPE)]
        values = file["conv.weight"].dequantize()
    assert run("verify", tmp_path / "y.gguf")[0] == 0
    assert "(4, 3, 2, 2, 64)" in run("info", tmp_path / "y.gguf")[1]
    converted(tmp_path / "y.gguf", tmp_path / "z.npz", "f32")
    with np.load(tmp_path / "z.npz") as arrays:
        assert_array_equal(arrays["conv.weight"], values)


def key_of(name: str) -> str:
    return ORIGINAL_SHAPE + name


def test_a_rearranged_matrix_comes_back(tmp_path):
    """ComfyUI rearranges small rows to rows of 256 that blocks fit."""
    x = normal(320, 4, 3, 3)
    blocks = qgemm.quantize(x.reshape(-1, 256), "q4_0")
    source = written(tmp_path / "x.gguf", {"conv.weight": blocks}, {key_of("conv.weight"): np.int32([320, 4, 3, 3])})
    converted(source, tmp_path / "y.npz", "f32")
    with np.load(tmp_path / "y.npz") as arrays:
        assert_array_equal(arrays["conv.weight"], blocks.dequantize().reshape(x.shape))
    converted(source, tmp_path / "y.gguf", "q8_0")
    with qgemm.open(tmp_path / "y.gguf") as file:
        assert file["conv.weight"].shape == (45, 256)
        assert file.metadata[key_of("conv.weight")].tolist() == [320, 4, 3, 3]


@pytest.mark.parametrize("shape", [np.int32([2, 31]), np.int32([-2, -32]), np.float32([2, 32]), "2x32", np.int32([])])
def test_shapes_that_are_not_those_of_the_tensor(shape, tmp_path):
    source = written(tmp_path / "x.gguf", {"w": normal(2, 32)}, {key_of("w"): shape})
    with pytest.raises(qgemm.GGUFError, match=r"comfy\.gguf\.orig_shape\.w': is no shape of 64 weights"):
        open_source(source)

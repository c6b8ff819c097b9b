"""Tensors that a conversion leaves out, each said: scales of a KV cache, --drop; output matrices that are missing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from files import model, safetensors
from gguf_bytes import ONE, file_of, tensor
from helpers import normal
from hf_folders import folder, tensors_of

import qgemm

LLAMA = "LlamaForCausalLM"
HEAD = "lm_head.weight"


def converted(path: Path, **options: object) -> tuple[set[str], str]:
    """The names of the new file, and all notes."""
    target = path.parent / "y.gguf"
    done = qgemm.convert(path, target, "f16", force=True, **options)
    with qgemm.open(target) as file:
        return set(file), "\n".join(done.notes)


SCALES = [
    "self_attn.k_scale", "self_attn.v_scale", "self_attn.kv_scale", "self_attn.q_scale", "self_attn.prob_scale",
    "self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale", "self_attn.k_proj.output_scale", "self_attn.attn.kv_scale",
    "self_attn.qkv_proj.kv_scale", "self_attn.k_zero_point", "self_attn.k_cache_scale", "mlp.up_proj.input_scale",
    "self_attn.kv_cache_scaling_factor", "self_attn.k_bmm_quantizer._amax", "self_attn.prob_output_scale",
]  # fmt: skip


@pytest.mark.parametrize("shape", [(), (1,), (2,)])
@pytest.mark.parametrize("name", SCALES)
def test_scales_of_a_kv_cache_are_left_out(name, shape, tmp_path):
    scales = {f"model.layers.{layer}.{name}": np.ones(shape, np.float32) for layer in range(2)}
    plain, _ = converted(folder(tmp_path / "plain", LLAMA))
    names, notes = converted(folder(tmp_path / "scaled", LLAMA, {**tensors_of(LLAMA), **scales}))
    assert names == plain
    assert f"model.layers.*.{name} (2)" in notes


def test_scales_are_left_out_of_a_model_like_another(tmp_path):
    qgemm.convert(folder(tmp_path / "plain", LLAMA), tmp_path / "base.gguf", "f16")
    scales = {"model.layers.0.self_attn.k_scale": np.ones(1, np.float32)}
    source = folder(tmp_path / "scaled", LLAMA, {**tensors_of(LLAMA), **scales})
    names, notes = converted(source, like=tmp_path / "base.gguf")
    assert "left out, as llama.cpp's converter does: model.layers.0.self_attn.k_scale" in notes
    assert not any("scale" in name for name in names)


def test_an_unknown_tensor_is_still_refused(tmp_path):
    for name in ("self_attn.k_gain", "self_attn.scale", "mlp.down_proj.weight_other"):
        tensors = {**tensors_of(LLAMA), f"model.layers.0.{name}": np.ones(1, np.float32)}
        with pytest.raises(qgemm.QgemmError, match=r"has no name in a \.gguf model"):
            converted(folder(tmp_path / "hf", LLAMA, tensors))
        _, notes = converted(folder(tmp_path / "hf", LLAMA, tensors), drop=[rf"{name}$"])
        assert f"left out by --drop: model.layers.0.{name}" in notes


def test_a_vision_part_is_said_to_be_left_out(tmp_path):
    tensors = {**tensors_of(LLAMA), "vision_tower.blocks.0.w.weight": normal(2, 2)}
    assert "vision_tower.blocks.0.w.weight" in converted(folder(tmp_path / "hf", LLAMA, tensors))[1]


@pytest.mark.parametrize("suffix", ["gguf", "safetensors", "npz"])
def test_what_a_user_drops(suffix, run, tmp_path):
    source = safetensors(
        tmp_path / "x.safetensors", {"a.weight": normal(2, 32), "b.weight": normal(2, 32), "c": normal(3)}
    )
    target = tmp_path / f"y.{suffix}"
    status, out, _ = run("convert", source, target, "f32", "--drop", "^b", "--drop", "c$")
    assert (status, "note: left out by --drop: b.weight, c" in out) == (0, True)
    with qgemm.load(target) as checkpoint:
        assert list(checkpoint) == ["a.weight"]


def test_an_empty_tensor_is_dropped(tmp_path):
    source = safetensors(tmp_path / "x.safetensors", {"a.weight": normal(2, 32), "b": np.zeros((0, 4), np.float32)})
    with pytest.raises(qgemm.QgemmError, match=r"'b': is empty: shape \(0, 4\); --drop leaves it out"):
        converted(source)
    assert converted(source, drop=["^b$"])[0] == {"a.weight"}


def test_a_drop_that_fits_nothing(tmp_path):
    with pytest.raises(qgemm.QgemmError, match="--drop 'nothing' fits no tensor's name"):
        converted(model(tmp_path / "x.gguf"), drop=["attn", "nothing"])


def test_the_shape_of_a_dropped_tensor_is_dropped(tmp_path):
    source = safetensors(tmp_path / "x.safetensors", {"a": normal(2, 2, 2, 2, 32), "b": normal(2, 2, 2, 2, 32)})
    qgemm.convert(source, tmp_path / "five.gguf", "f16")
    done = qgemm.convert(tmp_path / "five.gguf", tmp_path / "y.gguf", "f16", drop=["a"])
    assert [line.name for line in done.lines] == ["b"]
    with qgemm.open(tmp_path / "y.gguf") as file:
        assert [key for key in file.metadata if "orig_shape" in key] == ["comfy.gguf.orig_shape.b"]


# ---------------------------------------------------------------- token tables and output matrices


@pytest.mark.parametrize("architecture", [LLAMA, "Qwen3ForCausalLM", "Gemma3ForCausalLM"])
@pytest.mark.parametrize("size", [39, 41, 64])
def test_a_vocabulary_of_another_size(architecture, size, tmp_path):
    with pytest.raises(
        qgemm.QgemmError, match=rf"'token_embd\.weight': has 40 rows, vocab_size of the config is {size}"
    ):
        converted(folder(tmp_path / "hf", architecture, vocab_size=size))


@pytest.mark.parametrize("tie", [False, None])
def test_a_missing_output_matrix(tie, run, tmp_path):
    tensors = {name: tensor for name, tensor in tensors_of(LLAMA).items() if name != HEAD}
    path = folder(tmp_path / "hf", LLAMA, tensors, tie_word_embeddings=tie)
    with pytest.raises(qgemm.QgemmError, match=r"'lm_head\.weight': is missing, .*tie_word_embeddings.*--tied"):
        converted(path)
    assert "output.weight" not in converted(path, tied=True)[0]
    assert run("convert", path, tmp_path / "z.gguf", "f16", "--tied")[0] == 0
    tied = folder(tmp_path / "hf", LLAMA, tensors, tie_word_embeddings=True)
    assert converted(tied)[0] == converted(path, tied=True)[0]


def test_an_output_matrix_is_tied_only_if_it_is_dropped(tmp_path):
    path = folder(tmp_path / "hf", LLAMA)
    with pytest.raises(qgemm.QgemmError, match=r"'output\.weight': is there, so that nothing is tied"):
        converted(path, tied=True)
    with pytest.raises(qgemm.QgemmError, match="is missing"):
        converted(path, drop=["lm_head"])
    assert "output.weight" not in converted(path, drop=["lm_head"], tied=True)[0]


def test_tied_is_for_folders(tmp_path):
    source = model(tmp_path / "x.gguf")
    for options in ({}, {"like": source}):
        with pytest.raises(qgemm.QgemmError, match="--tied is for a folder of Hugging Face"):
            converted(source, tied=True, **options)


@pytest.mark.parametrize("shape", [(0,), (0, 256), (256, 0), (0, 0), (0, 2, 256), (2, 0, 256), (2, 256, 0)])
@pytest.mark.parametrize("kind", [0, 8, 12, 30])
def test_every_command_reads_a_tensor_without_elements(kind, shape, run, tmp_path):
    source, target = tmp_path / "x.gguf", tmp_path / "y.gguf"
    ne = shape[::-1]
    source.write_bytes(file_of((), [tensor(b"w", ne, kind), tensor(b"v", (32,))], ONE))
    with qgemm.open(source) as file:
        assert (file["w"].shape, file["w"].dequantize().shape, file["w"].read(0, 0).size) == (shape, shape, 0)
    for words in (("info", source), ("info", "--json", source), ("verify", source), ("verify", "--json", source)):
        assert run(*words)[0] == 0, words
    assert run("convert", source, target, "q8_0", "--drop", "^w$")[0] == 0


def emptied(path: Path, name: bytes, rows: int, offset: int | None = None) -> Path:
    """A .gguf file whose tensor `name` [rows, 32] gets no rows in the header, and an offset of its own."""
    data = path.read_bytes()
    end = data.index(len(name).to_bytes(8, "little") + name) + 8 + len(name) + 4
    assert data[end : end + 16] == (32).to_bytes(8, "little") + rows.to_bytes(8, "little")
    data = data[: end + 8] + bytes(8) + data[end + 16 :]
    if offset is not None:
        data = data[: end + 20] + offset.to_bytes(8, "little") + data[end + 28 :]
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("offset", [None, 0, 1 << 40])
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_an_empty_tensor_of_gguf_stops_nothing_but_itself(name, offset, run, tmp_path):
    tensors = {key: qgemm.quantize(normal(2 + number, 32), "q8_0") for number, key in enumerate("abc")}
    qgemm.write(tmp_path / "x.gguf", tensors)
    source = emptied(tmp_path / "x.gguf", name.encode(), len(tensors[name]), offset)
    for copy in (False, True):
        with qgemm.open(source, copy=copy) as file:
            assert list(file) == ["a", "b", "c"]
            assert (file[name].shape, file[name].dequantize().shape) == ((0, 32), (0, 32))
            assert qgemm.matmul(normal(2, 32), file[name]).shape == (2, 0)
            for key in set(tensors) - {name}:
                np.testing.assert_array_equal(file[key].dequantize(), tensors[key].dequantize())
    status, out, _ = run("info", source)
    assert (status, "(0, 32)" in out) == (0, True)
    status, out, _ = run("verify", source)
    assert (status, "3 tensors: 3 ok" in out) == (0, True)
    with pytest.raises(qgemm.QgemmError, match=rf"'{name}': is empty: shape \(0, 32\); --drop leaves it out"):
        converted(source)
    assert converted(source, drop=[f"^{name}$"])[0] == {"a", "b", "c"} - {name}

"""Diffusion models: the architecture of their .gguf files, told by names, and what ComfyUI-GGUF does not quantize."""

from __future__ import annotations

import numpy as np
import pytest
from files import model, safetensors
from helpers import normal

import qgemm
from qgemm.converter.diffusion import MODELS, architecture_of

MARKS = [(name, marks) for name, kind in MODELS.items() for marks in kind.marks]


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "net."])
@pytest.mark.parametrize(("name", "marks"), MARKS, ids=[f"{name}-{len(marks)}" for name, marks in MARKS])
def test_each_architecture_is_told_by_its_tensors(tmp_path, name, marks, prefix):
    tensors = {prefix + mark: normal(2, 32) for mark in marks}
    assert architecture_of(tensors) == name
    assert architecture_of(list(tensors)[1:]) != name or len(marks) == 1 or len(MODELS[name].marks) > 1
    qgemm.convert(safetensors(tmp_path / "x.safetensors", tensors), tmp_path / "y.gguf", "q8_0")
    with qgemm.open(tmp_path / "y.gguf") as file:
        assert file.metadata["general.architecture"] == name


def test_an_unknown_model_stays_ours(tmp_path):
    qgemm.convert(safetensors(tmp_path / "x.safetensors", {"w": normal(2, 32)}), tmp_path / "y.gguf", "q8_0")
    with qgemm.open(tmp_path / "y.gguf") as file:
        assert file.metadata["general.architecture"] == "qgemm"


WAN = {
    # name                            shape             type of the file
    "blocks.0.self_attn.norm_q.weight": ((64,), "F32"),
    "text_embedding.2.weight": ((64, 64), "F16"),
    "head.modulation": ((1, 2, 1024), "F32"),
    "blocks.0.modulation": ((1, 6, 1024), "F32"),
    "blocks.0.self_attn.q.weight": ((64, 64), "Q8_0"),
    "blocks.0.self_attn.q.bias": ((64,), "F32"),
    "blocks.0.ffn.2.weight": ((64, 256), "Q8_0"),
    "blocks.0.conv.weight": ((64, 64, 3), "F16"),
    "blocks.0.few.weight": ((4, 32), "Q8_0"),
    "patch_embedding.weight": ((64, 16, 1, 2, 2), "F16"),
}


def test_types_of_a_model(tmp_path):
    """Matrices are quantized, but for first and last layers; parameters that are read as they are become F32."""
    source = safetensors(tmp_path / "x.safetensors", {name: normal(*shape) for name, (shape, _) in WAN.items()})
    done = qgemm.convert(source, tmp_path / "y.gguf", "q8_0")
    assert {line.name: line.new for line in done.lines} == {name: kind for name, (_, kind) in WAN.items()}
    with qgemm.open(tmp_path / "y.gguf") as file:
        assert file.metadata["general.architecture"] == "wan"
        assert file.metadata["comfy.gguf.orig_shape.patch_embedding.weight"].tolist() == [64, 16, 1, 2, 2]


def test_bf16_keeps_its_type_where_it_is_not_quantized(tmp_path):
    bf16 = pytest.importorskip("ml_dtypes").bfloat16
    names = {"double_blocks.0.img_attn.proj.weight": "Q4_0", "img_in.weight": "BF16", "img_in.bias": "F32"}
    tensors = {name: normal(64, 64).astype(bf16) for name in names}
    tensors["img_in.bias"] = normal(64).astype(bf16)
    done = qgemm.convert(safetensors(tmp_path / "x.safetensors", tensors), tmp_path / "y.gguf", "q4_0")
    assert {line.name: line.new for line in done.lines} == names


def test_a_checkpoint_gives_its_diffusion_model(tmp_path):
    """Names lose their prefix, and a VAE beside the model is left out, with a note."""
    names = "model.diffusion_model.double_blocks.0.img_attn.proj.weight", "first_stage_model.conv.weight"
    source = safetensors(tmp_path / "x.safetensors", {name: normal(64, 64) for name in names})
    done = qgemm.convert(source, tmp_path / "y.gguf", "q8_0")
    assert [line.name for line in done.lines] == ["double_blocks.0.img_attn.proj.weight"]
    assert any("first_stage_model.conv.weight" in note for note in done.notes)


def test_an_option_names_the_architecture(run, tmp_path):
    source = safetensors(tmp_path / "x.safetensors", {"w.weight": normal(2, 32), "time_in.weight": normal(64, 64)})
    assert run("convert", source, tmp_path / "y.gguf", "q8_0", "--architecture", "flux")[0] == 0
    with qgemm.open(tmp_path / "y.gguf") as file:
        assert file.metadata["general.architecture"] == "flux"
        assert str(file["time_in.weight"].format) == "F16"
    converted = model(tmp_path / "z.gguf", {"w": normal(2, 32)}, {"general.architecture": "qgemm"})
    assert run("convert", converted, tmp_path / "z2.gguf", "q8_0", "--architecture", "sd3")[0] == 0
    with qgemm.open(tmp_path / "z2.gguf") as file:
        assert file.metadata["general.architecture"] == "sd3"
        assert np.array(file["w"].shape).tolist() == [2, 32]


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (("y.npz", "f32", "--architecture", "flux"), "changed only in a .gguf file"),
        (("y.gguf", "q8_0", "--architecture", "Flux 1"), "is not a name of lower-case letters"),
    ],
)
def test_architectures_that_are_refused(run, tmp_path, arguments, rule):
    source = safetensors(tmp_path / "x.safetensors", {"w": normal(2, 32)})
    status, _, err = run("convert", source, tmp_path / arguments[0], *arguments[1:])
    assert status == 1
    assert rule in err

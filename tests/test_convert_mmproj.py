"""The vision part of a folder becomes the projector that llama.cpp's converter writes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from vision_folders import CLASSES, IMAGE_BREAK, folder, projector, tensors_of

import qgemm
from qgemm.converter.vision_architectures import PROJECTORS
from qgemm.converter.vision_projector import VisionPart
from qgemm.converter.weight import Weight, numbers_of
from qgemm.errors import QgemmError

QWEN2, QWEN25, QWEN3 = (f"{name}ForConditionalGeneration" for name in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL"))
GEMMA3, LLAMA4, MISTRAL3, LLAVA = (
    f"{name}ForConditionalGeneration" for name in ("Gemma3", "Llama4", "Mistral3", "Llava")
)
IMAGES_OF = {GEMMA3: {"image_seq_length": 4}}


@pytest.mark.parametrize("name", CLASSES)
def test_keys_names_types_and_shapes(name, tmp_path):
    values, types, metadata = projector(folder(tmp_path / "m", name, images=IMAGES_OF.get(name)), tmp_path / "y.gguf")
    assert {key: [types[key], list(value.shape)] for key, value in values.items()} == CLASSES[name]["file"]
    clip = {key: value for key, value in metadata.items() if key.startswith("clip.")}
    assert set(clip) == set(CLASSES[name]["keys"])
    for key, value in CLASSES[name]["keys"].items():
        stored = clip[key]
        assert np.allclose(stored, value, rtol=1e-6) if isinstance(value, (float, list)) else stored == value, key
    assert metadata["general.architecture"] == "clip"
    assert metadata["general.type"] == "mmproj"
    assert metadata["general.file_type"] == 1


@pytest.mark.parametrize("name", [*CLASSES])
def test_types(name, tmp_path):
    """Convolutions are F32 but in F16 files, and the projection of Gemma 3 is F16 in every file."""
    path = folder(tmp_path / "m", name, images=IMAGES_OF.get(name))
    for kind in ("f32", "bf16", "q8_0"):
        types = projector(path, tmp_path / "y.gguf", kind).types
        for key, (f16, shape) in CLASSES[name]["file"].items():
            matrix = f16 == "f16" and "patch_embd" not in key and "patch_merger" not in key
            expected = "f16" if key == "mm.input_projection.weight" else kind if matrix else "f32"
            if expected == "q8_0" and shape[-1] % 32:
                expected = "f16"
            assert types[key] == expected, (kind, key)


def test_values_of_qwen2_vl(tmp_path):
    source = tensors_of(QWEN2)
    values = projector(folder(tmp_path / "m", QWEN2), tmp_path / "y.gguf", "f32").values
    w = source["visual.blocks.1.attn.qkv.weight"]
    b = source["visual.blocks.1.attn.qkv.bias"]
    for i, part in enumerate("qkv"):
        assert_array_equal(values[f"v.blk.1.attn_{part}.weight"], w[64 * i : 64 * i + 64])
        assert_array_equal(values[f"v.blk.1.attn_{part}.bias"], b[64 * i : 64 * i + 64])
    patches = source["visual.patch_embed.proj.weight"]
    assert_array_equal(values["v.patch_embd.weight"], patches[:, :, 0])
    assert_array_equal(values["v.patch_embd.weight.1"], patches[:, :, 1])
    assert_array_equal(values["mm.2.weight"], source["visual.merger.mlp.2.weight"])


@pytest.mark.parametrize("name", [MISTRAL3, LLAVA])
def test_values_of_pixtral(name, tmp_path):
    source = tensors_of(name)
    values = projector(folder(tmp_path / "m", name), tmp_path / "y.gguf", "f32").values
    stem = "vision_tower.transformer.layers.2.attention"
    for part in "qk":
        w = source[f"{stem}.{part}_proj.weight"].reshape(4, 2, 8, 64)
        assert_array_equal(values[f"v.blk.2.attn_{part}.weight"], w.swapaxes(1, 2).reshape(64, 64))
    assert_array_equal(values["v.blk.2.attn_v.weight"], source[f"{stem}.v_proj.weight"])
    row = source["language_model.model.embed_tokens.weight"][IMAGE_BREAK]
    assert_array_equal(values["v.token_embd.img_break"], row)


def test_values_of_gemma3_and_llama4(tmp_path):
    source = tensors_of(GEMMA3)
    path = folder(tmp_path / "m", GEMMA3, images=IMAGES_OF[GEMMA3])
    values = projector(path, tmp_path / "y.gguf", "f32").values
    norm = source["multi_modal_projector.mm_soft_emb_norm.weight"].astype(np.float32) + 1
    assert_array_equal(values["mm.soft_emb_norm.weight"], norm)
    projection = source["multi_modal_projector.mm_input_projection_weight"]
    assert_array_equal(values["mm.input_projection.weight"], projection)
    source = tensors_of(LLAMA4)
    values = projector(folder(tmp_path / "n", LLAMA4), tmp_path / "y.gguf", "f32").values
    norm = source["vision_model.model.layers.0.post_attention_layernorm.weight"]
    assert_array_equal(values["v.blk.0.ln2.weight"], norm)


def test_deep_mergers_have_the_numbers_of_their_layers(tmp_path):
    source = tensors_of(QWEN3)
    values, _, metadata = projector(folder(tmp_path / "m", QWEN3), tmp_path / "y.gguf", "f32")
    for i, layer in enumerate((0, 2)):
        w = source[f"model.visual.deepstack_merger_list.{i}.linear_fc1.weight"]
        assert_array_equal(values[f"v.deepstack.{layer}.fc1.weight"], w)
    assert list(metadata["clip.vision.is_deepstack_layers"]) == [True, False, True]


def test_names_of_other_versions_of_transformers(tmp_path):
    """Wrappers of names differ by version; SigLIP's head is left out."""
    source = tensors_of(GEMMA3)
    expected = projector(folder(tmp_path / "m", GEMMA3, images=IMAGES_OF[GEMMA3]), tmp_path / "y.gguf").values
    bare = {key.replace("vision_tower.vision_model.", "vision_tower."): array for key, array in source.items()}
    head = {"vision_tower.head.probe": np.zeros((1, 1, 64), np.float16)}
    wrapped = {f"model.{key}": array for key, array in source.items()}
    for tensors in (bare | head, wrapped):
        path = folder(tmp_path / "n", GEMMA3, tensors, images=IMAGES_OF[GEMMA3])
        renamed = projector(path, tmp_path / "y.gguf").values
        assert set(renamed) == set(expected)
        for key, values in expected.items():
            assert_array_equal(renamed[key], values)


def test_image_settings_of_processor_config(tmp_path):
    path = folder(tmp_path / "m", QWEN2)
    (path / "preprocessor_config.json").unlink()
    with pytest.raises(QgemmError, match="image_mean: 'None' is needed, a list of 3 numbers"):
        projector(path, tmp_path / "y.gguf")
    (path / "processor_config.json").write_text(
        '{"image_processor": {"image_mean": [0, 0, 0], "image_std": [1, 1, 1]}}'
    )
    stored = projector(path, tmp_path / "y.gguf").metadata["clip.vision.image_std"]
    assert stored.tolist() == [1, 1, 1]
    assert stored.dtype == np.float32
    folder(path, QWEN2)  # with preprocessor_config.json again
    metadata = projector(path, tmp_path / "y.gguf").metadata
    assert metadata["clip.vision.image_std"].tolist() == [1, 1, 1]


def test_a_row_of_an_embedding_that_is_read_in_steps(tmp_path):
    numbers = np.arange(16 * 24, dtype=np.float32)

    def read(start, stop):
        assert start % 64 == 0
        assert stop % 64 == 0
        return numbers[start:stop]

    part = object.__new__(VisionPart)
    part.folder = str(folder(tmp_path / "m", MISTRAL3))
    name = "model.embed_tokens.weight"
    part.source = SimpleNamespace(weights={name: Weight(name, (16, 24), "X", numbers.nbytes, 64, values=read)})
    row = part._row("[IMG_BREAK]", "v.token_embd.img_break")
    assert_array_equal(numbers_of(row)(0, 24), numbers.reshape(16, 24)[IMAGE_BREAK])


VISION = [  # class, key of vision_config, a value that llama.cpp does not compute with
    (QWEN2, "hidden_act", "silu"), (QWEN2, "spatial_merge_size", 3), (QWEN2, "temporal_patch_size", 1),
    (QWEN2, "in_channels", 1), (QWEN2, "rope_parameters", {"rope_type": "axial", "rope_theta": 5e5}),
    (QWEN2, "num_heads", 5), (QWEN2, "depth", 999), (QWEN2, "hidden_size", 32),
    (QWEN25, "hidden_act", "gelu"), (QWEN25, "window_size", 56), (QWEN25, "fullatt_block_indexes", [1, 2]),
    (QWEN25, "fullatt_block_indexes", []), (QWEN25, "out_hidden_size", 32),
    (QWEN3, "num_position_embeddings", 15), (QWEN3, "deepstack_visual_indexes", [0, 3]),
    (QWEN3, "hidden_act", "gelu"), (GEMMA3, "hidden_act", "gelu"), (GEMMA3, "model_type", "clip_vision_model"),
    (LLAMA4, "hidden_act", "silu"), (LLAMA4, "pixel_shuffle_ratio", 0.4), (LLAMA4, "vision_feature_layer", -2),
    (LLAMA4, "multi_modal_projector_bias", True), (LLAMA4, "vision_feature_select_strategy", "full"),
    (MISTRAL3, "hidden_act", "quick_gelu"), (MISTRAL3, "head_dim", 8), (MISTRAL3, "model_type", "siglip"),
    (LLAVA, "model_type", "clip_vision_model"), (LLAVA, "rope_theta", 100.0),
]  # fmt: skip
MODEL = [  # class, key of config.json, value
    (GEMMA3, "mm_tokens_per_image", 5), (MISTRAL3, "projector_hidden_act", "relu"),
    (MISTRAL3, "vision_feature_layer", -2), (MISTRAL3, "text_config", {"hidden_size": 64, "rms_norm_eps": 1e-6}),
    (LLAVA, "vision_feature_select_strategy", "default"), (LLAVA, "spatial_merge_size", 2),
    (QWEN2, "vision_config", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "key", "value"), VISION)
def test_values_that_are_refused(name, key, value, tmp_path):
    path = folder(tmp_path / "m", name, vision={key: value})
    named = {"num_heads": "num_attention_heads", "depth": "num_hidden_layers", "hidden_size": "intermediate_size"}
    with pytest.raises(QgemmError, match=f"vision_config: {named.get(key, key) if name == QWEN2 else key}:"):
        projector(path, tmp_path / "y.gguf")


@pytest.mark.parametrize(("name", "key", "value"), MODEL)
def test_values_of_the_model_that_are_refused(name, key, value, tmp_path):
    path = folder(tmp_path / "m", name, **{key: value})
    with pytest.raises(QgemmError, match="rms_norm_eps" if key == "text_config" else f"{key}: "):
        projector(path, tmp_path / "y.gguf")


@pytest.mark.parametrize(
    "images", [{"image_std": [1.0]}, {"rescale_factor": 1.0}, {"rescale_factor": 1 / 256}, {"do_normalize": False}]
)
def test_image_settings_that_are_refused(images, tmp_path):
    path = folder(tmp_path / "m", QWEN2, images=images)
    with pytest.raises(QgemmError, match=f"preprocessor_config.json: {next(iter(images))}: "):
        projector(path, tmp_path / "y.gguf")


@pytest.mark.parametrize("name", [QWEN25, MISTRAL3])
def test_values_of_any_kind_are_read_or_refused(name, tmp_path):
    """No value of a key raises anything but a QgemmError."""
    path = folder(tmp_path / "m", name)
    keys = [*CLASSES[name]["config"]["vision_config"], "rope_theta", "head_dim", "deepstack_visual_indexes"]
    refused = 0
    for key in keys:
        for value in (0, -1, 1e308, "x", [], ["a"], {"rope_type": 5}, True):
            folder(path, name, vision={key: value})
            try:
                qgemm.convert(path, tmp_path / "y.gguf", "f16", mmproj=True, dry_run=True)
            except QgemmError:
                refused += 1
    assert refused > 4 * len(keys)


def test_tensors_that_are_refused(tmp_path):
    tensors = tensors_of(QWEN2)
    name = "visual.blocks.0.attn.proj.weight"
    strange = {**tensors, "visual.blocks.0.attn.gate.weight": tensors[name]}
    with pytest.raises(QgemmError, match=r"visual.blocks.0.attn.gate.weight': has no name in a projector"):
        projector(folder(tmp_path / "m", QWEN2, strange), tmp_path / "y.gguf")
    missing = {key: array for key, array in tensors.items() if key != name}
    with pytest.raises(QgemmError, match=r"attn.proj.weight': is missing"):
        projector(folder(tmp_path / "m", QWEN2, missing), tmp_path / "y.gguf")
    with pytest.raises(QgemmError, match=r"has shape \(64, 32\), \(64, 64\) by the config"):
        projector(folder(tmp_path / "m", QWEN2, {**tensors, name: tensors[name][:, :32]}), tmp_path / "y.gguf")
    patches = {**tensors, "visual.patch_embed.proj.weight": tensors["visual.patch_embed.proj.weight"][:, :, :1]}
    with pytest.raises(QgemmError, match="not that of a convolution over 2 frames"):
        projector(folder(tmp_path / "m", QWEN2, patches), tmp_path / "y.gguf")


def test_a_missing_token_is_refused(tmp_path):
    path = folder(tmp_path / "m", MISTRAL3)
    (path / "tokenizer_config.json").unlink()
    with pytest.raises(QgemmError, match=r"no token '\[IMG_BREAK\]', which the projector needs"):
        projector(path, tmp_path / "y.gguf")


def test_other_types_sources_and_options_are_refused(tmp_path):
    path = folder(tmp_path / "m", QWEN2)
    with pytest.raises(QgemmError, match="a projector is written as f32, f16, bf16, q8_0, not as q4_k_m"):
        projector(path, tmp_path / "y.gguf", "q4_k_m")
    projector(path, tmp_path / "y.gguf")
    with pytest.raises(QgemmError, match="--mmproj is for a Hugging Face folder"):
        projector(tmp_path / "y.gguf", tmp_path / "z.gguf")
    with pytest.raises(QgemmError, match=r"has no config.json: --mmproj is for"):
        projector(path / "model.safetensors", tmp_path / "z.gguf")
    with pytest.raises(QgemmError, match="mmproj: a projector has its own names"):
        qgemm.convert(path, tmp_path / "z.gguf", "f16", mmproj=True, like=tmp_path / "y.gguf")
    with pytest.raises(QgemmError, match="without pure, layout and mmproj"):
        qgemm.convert(path, tmp_path / "z.gguf", size="8bpw", mmproj=True)
    config = {"architectures": ["Gemma3nForConditionalGeneration"]}
    with pytest.raises(
        QgemmError, match="'Gemma3nForConditionalGeneration' has no vision part that becomes a projector"
    ):
        projector(folder(tmp_path / "m", QWEN2, **config), tmp_path / "y.gguf")


def test_edits_of_a_projector(tmp_path):
    """Keys may be set; layers and architecture belong to the encoder."""
    path = folder(tmp_path / "m", QWEN2)
    with pytest.raises(QgemmError, match="--architecture: that of a projector is clip"):
        qgemm.convert(path, tmp_path / "y.gguf", "f16", mmproj=True, architecture="llama")
    with pytest.raises(QgemmError, match="--prune-layers: the layers of a projector"):
        qgemm.convert(path, tmp_path / "y.gguf", "f16", mmproj=True, prune_layers=[1])
    qgemm.convert(path, tmp_path / "y.gguf", "f16", mmproj=True, set_metadata={"general.name": "eyes"})
    with pytest.raises(QgemmError, match="--prune-layers: the layers of a projector"):
        qgemm.convert(tmp_path / "y.gguf", tmp_path / "z.gguf", "f16", prune_layers=[1])
    with qgemm.open(tmp_path / "y.gguf") as file:
        assert file.metadata["general.name"] == "eyes"


def test_a_projector_is_quantized_again_as_a_gguf_file(tmp_path):
    """A projector that is a .gguf file already may become any type, as llama-quantize allows."""
    projector(folder(tmp_path / "m", QWEN2), tmp_path / "y.gguf")
    qgemm.convert(tmp_path / "y.gguf", tmp_path / "z.gguf", "q4_0")
    with qgemm.open(tmp_path / "z.gguf") as file:
        assert file["v.blk.0.ffn_up.weight"].format.name == "q4_0"
        assert file["v.patch_embd.weight"].format.name == "f16"


def test_every_class_has_a_golden_list():
    alike = {"Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe"}  # as Qwen3VL
    assert {name.removesuffix("ForConditionalGeneration") for name in PROJECTORS} - alike == {
        name.removesuffix("ForConditionalGeneration") for name in CLASSES
    }

"""Checkpoints of FP8, with and without scales: numbers times scales, of any shape in which the field writes them."""

from __future__ import annotations

import json
from pathlib import Path

import foreign
import ml_dtypes
import numpy as np
import pytest
from files import safetensors
from helpers import converted, normal
from numpy.testing import assert_array_equal

import qgemm
from qgemm.converter import open_source
from qgemm.converter.checkpoints.fp8 import NUMBERS
from qgemm.errors import CheckpointError

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
FINEGRAINED = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def configured(folder: Path, settings: dict | None, name: str = "config.json") -> Path:
    folder.mkdir(exist_ok=True)
    if settings is not None:
        document = {"quantization": settings} if name.startswith("hf_") else {"quantization_config": settings}
        (folder / name).write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize(("kind", "dtype"), [("F8_E4M3", E4M3), ("F8_E5M2", E5M2)])
def test_all_numbers(kind, dtype):
    codes = np.arange(256, dtype=np.uint8)
    assert_array_equal(NUMBERS[kind], codes.view(dtype).astype(np.float32))


SCALED = {
    # shape of the weights, of the scale, its name, its dtype, config
    "one":                   ((6, 64), (), "w.weight_scale", np.float32, {"quant_method": "fp8"}),
    "one in a list":         ((6, 64), (1,), "w.weight_scale", np.float16, None),
    "of ComfyUI":            ((6, 64), (), "w.scale_weight", np.float32, None),
    "a row":                 ((6, 64), (6, 1), "w.weight_scale", ml_dtypes.bfloat16, {"quant_method": "fbgemm_fp8"}),
    "a row, flat":           ((6, 64), (6,), "w.weight_scale", np.float32, None),
    "128 x 128":             ((200, 320), (2, 3), "w.weight_scale_inv", np.float32, FINEGRAINED),
    "128 x 128, whole":      ((256, 256), (2, 2), "w.weight_scale_inv", np.float32, None),
    "64 x 32":               ((128, 96), (2, 3), "w.weight_scale_inv", np.float32,
                              {"quant_method": "fp8", "weight_block_size": [64, 32]}),
    "experts":               ((3, 6, 64), (3, 6, 1), "w.weight_scale", np.float32, None),
    "experts, one each":     ((3, 6, 64), (3, 1, 1), "w.weight_scale", np.float32, None),
    "experts, columns":      ((3, 6, 64), (3, 1, 64), "w.weight_scale", np.float32, None),
    "experts, 128 x 128":    ((2, 130, 256), (2, 2, 2), "w.weight_scale_inv", np.float32, None),
}  # fmt: skip


def spread(scale: np.ndarray, shape: tuple[int, ...], block: tuple[int, int]) -> np.ndarray:
    """Scales for each weight, repeated over the rows and columns that share one."""
    if scale.size == 1:
        return np.broadcast_to(scale.reshape(()), shape)
    scale = scale.reshape(*shape[:-2], *scale.shape[len(shape) - 2 :], *([1] * (len(shape) - scale.ndim)))
    for axis, size in zip((-2, -1), block, strict=True):
        if scale.shape[axis] not in (1, shape[axis]):
            scale = np.repeat(scale, size, axis=axis)
    return np.broadcast_to(scale[..., : shape[-2], : shape[-1]], shape)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("name", SCALED)
def test_scales(name, dtype, tmp_path):
    shape, grid, called, kind, settings = SCALED[name]
    w = normal(*shape, seed=1).astype(dtype)
    scale = (np.random.default_rng(2).random(grid) + 0.5).astype(kind)
    folder = configured(tmp_path / "m", settings)
    tensors = {"w.weight": w, called: scale, "w.input_scale": np.ones((), np.float32), "n.weight": normal(4)}
    safetensors(folder / "model.safetensors", tensors)
    block = tuple((settings or {}).get("weight_block_size", (128, 128)))
    want = w.astype(np.float32) * spread(scale.astype(np.float32), shape, block)
    line = converted(folder, tmp_path / "y.gguf", "f32")["w.weight"]
    assert (line.how, line.old) == ("exact", "F8_E4M3" if dtype is E4M3 else "F8_E5M2")
    with qgemm.open(tmp_path / "y.gguf") as file:
        assert set(file) == {"w.weight", "n.weight"}
        assert_array_equal(file["w.weight"].dequantize(), want)
    with open_source(folder) as source:  # ranges start and end anywhere that the step allows
        weight = source.weights["w.weight"]
        for start in range(0, weight.size, 7 * weight.step):
            stop = min(start + 7 * weight.step, weight.size)
            assert_array_equal(weight.values(start, stop), want.ravel()[start:stop])


def test_what_scaled_numbers_become(tmp_path):
    """Plain types and q8_0 at once, other formats if asked: FP8 was a quantization already."""
    w = normal(6, 64).astype(E4M3)
    tensors = {"w.weight": w, "w.weight_scale": np.full(1, 0.3, np.float32)}
    path = safetensors(tmp_path / "x.safetensors", {**tensors, "scaled_fp8": np.zeros(0, E4M3)})
    want = w.astype(np.float32) * np.float32(0.3)
    for fmt in ("f16", "bf16", "q8_0"):
        converted(path, tmp_path / "y.gguf", fmt)
        with qgemm.open(tmp_path / "y.gguf") as file:
            assert list(file) == ["w.weight"]
            assert file["w.weight"].blocks.tobytes() == qgemm.FORMATS[fmt].quantize(want).tobytes()
    with pytest.raises(qgemm.QgemmError, match=r"is F8_E4M3: quantizing it again, to Q4_0, .* --allow-requantize"):
        converted(path, tmp_path / "y.gguf", "q4_0")
    assert converted(path, tmp_path / "y.gguf", "q4_0", allow_requantize=True)["w.weight"].how == "requantized"


def test_numbers_without_scales(tmp_path):
    path = safetensors(tmp_path / "x.safetensors", {"w.weight": normal(6, 64).astype(E4M3)})
    assert converted(path, tmp_path / "y.gguf", "q4_0")["w.weight"].how == "quantized"
    assert converted(path, tmp_path / "y.gguf", "f16")["w.weight"].how == "exact"


SCALES_REFUSED = {
    "of another matrix": ({"w.weight_scale": np.ones((5, 1), np.float32)}, None, r"\[5, 1\] scales are not those of"),
    "of integers": ({"w.weight_scale": np.ones(1, np.int32)}, None, "its scale is I32, which is not read"),
    "twice": ({"w.weight_scale": np.ones(1, np.float32), "w.scale": np.ones(1, np.float32)}, None, "has scales twice"),
    "none": ({}, FINEGRAINED, "has no scale, which the config speaks of"),
    "blocks of no size": ({}, {"quant_method": "fp8", "weight_block_size": [0, 128]}, r"a block of '\[0, 128\]'"),
    "a block of one number": ({}, {"quant_method": "fp8", "weight_block_size": [128]}, "is not two numbers"),
}


@pytest.mark.parametrize("name", SCALES_REFUSED)
def test_scales_that_are_not_read(name, tmp_path):
    tensors, settings, message = SCALES_REFUSED[name]
    folder = configured(tmp_path / "m", settings)
    safetensors(folder / "model.safetensors", {"w.weight": normal(6, 64).astype(E4M3), **tensors})
    with pytest.raises(CheckpointError, match=message):
        open_source(folder)


FEW_BITS = {"plain": True, "change": {"weight": np.full((16, 64), 8, np.int8)}}
UNFIT = {
    # who writes it, how, the error
    "five bits in four": (foreign.compressed, FEW_BITS, "weight has 8 to 8 in 4 bits"),
    "integers in blocks without a size": (
        foreign.compressed, {"weights": {"strategy": "block", "group_size": None}},
        "block_structure: 'None' does not fit the strategy block",
    ),
    "floats of one form as another": (
        foreign.compressed, {"form": "mxfp8-quantized"}, "num_bits / type: .*'4 bits, int' is not read in the format",
    ),
    "scales of other blocks": (
        foreign.compressed, {"rows": 8, "change": {"weight_scale": np.ones((3, 2), np.float16)}},
        r"weight_scale is F16 \[3, 2\], not \[2, 2\] floats",
    ),
    "bytes as floats": (
        foreign.mxfp8, {"change": {"weight_scale": np.ones((8, 3), np.float32)}}, "its scale is F32, .*U8 is",
    ),
    "exponents without a word of them": (
        foreign.mxfp8, {"settings": {"quant_method": "fp8", "weight_block_size": [1, 32]}, "name": "weight_scale_inv"},
        "its scale is U8, which is not read",
    ),
    "mxfp8 in groups of 16": (
        foreign.mxfp8, {"settings": {"quant_method": "mxfp8", "weight_block_size": [1, 16]}},
        r"weight_block_size: blocks of \(1, 16\) are not those of mxfp8",
    ),
    "an exponent of 255": (
        foreign.mxfp8, {"change": {"weight_scale": np.full((8, 3), 255, np.uint8)}}, "a scale is 255, which is no",
    ),
    "int8 without scales": (foreign.bitsandbytes_int8, {"change": {"SCB": None}}, "'layer.q_proj': there is no SCB"),
    "int8 with too few scales": (
        foreign.bitsandbytes_int8, {"change": {"SCB": np.ones(7, np.float32)}}, r"SCB is F32 \[7\], not F32 \[8\]",
    ),
    "int8 in another layout": (
        foreign.bitsandbytes_int8, {"change": {"weight_format": np.array(1, np.uint8)}}, "weight_format: only rows",
    ),
    "floats with scales of int8": (
        foreign.bitsandbytes_int8, {"change": {"weight": np.ones((8, 96), np.float16)}}, "not a matrix of I8",
    ),
    "int8 by a config of four bits": (
        foreign.bitsandbytes_int8, {"settings": {"load_in_4bit": True, "load_in_8bit": False}}, "'layer.q_proj.SCB'",
    ),
    "mxfp6 of half the scales": (
        foreign.mxfp6, {"change": {"weight_scale": np.ones((8, 1), np.uint8)}}, r"\[8, 1\] scales are not those of",
    ),
    "mxfp6, an exponent of 255": (
        foreign.mxfp6, {"change": {"weight_scale": np.full((8, 2), 255, np.uint8)}}, "a scale is 255, which is no",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_parts_that_contradict_the_config(name, tmp_path):
    write, options, message = UNFIT[name]
    write(tmp_path / "m", **options)
    with pytest.raises(CheckpointError, match=message), qgemm.load(tmp_path / "m") as model:
        model[f"{foreign.MODULE}.weight"]


@pytest.mark.parametrize(("n", "k", "fmt"), [(8, 96, "i8_g32"), (3, 48, "i8_g16")])
@pytest.mark.parametrize("scales", [np.float32, np.float16])
def test_bitsandbytes_int8(n, k, fmt, scales, tmp_path):
    """The converter's values are the library's; scales of a loaded tensor are rounded once before they multiply."""
    want = foreign.bitsandbytes_int8(tmp_path / "m", n=n, k=k, scales=scales)
    name = f"{foreign.MODULE}.weight"
    assert converted(tmp_path / "m", tmp_path / "x.gguf", "f32")[name].how == "exact"
    with qgemm.open(tmp_path / "x.gguf") as file:
        assert_array_equal(file[name].dequantize(), want)
    with qgemm.load(tmp_path / "m") as model:
        w = model[name]
        assert list(model) == [name, "layer.norm.weight"]
    assert w.format.name == fmt
    assert (np.abs(w.dequantize() - want) <= 2**-23 * np.abs(want)).all()
    if k % 32 == 0:
        line = converted(tmp_path / "m", tmp_path / "y.gguf", "q8_0")[name]
        assert line.how == "rounded-scale"
        assert line.error < 2**-11


# ---------------------------------------------------------------- checkpoints that are not decoded

WORDS, BYTES = np.zeros((4, 8), np.int32), np.zeros((4, 2, 16), np.uint8)
CT = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}}
OTHERS = {
    # its tensors, its config, how the config names it
    "compressed-tensors": (
        {"w.weight_packed": WORDS, "w.weight_scale": np.ones((4, 1), np.float16), "w.weight_shape": np.array([4, 64])},
        {**CT, "format": "marlin-24"}, "format: compressed-tensors in the format .*'marlin-24', 'dense'",
    ),
    "sparse": (
        {"w.compressed": normal(4, 8), "w.bitmask": BYTES[0]},
        {**CT, "format": "dense", "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask",
    ),
    "MXFP6": (
        {"mlp.experts.down_proj_blocks": BYTES, "mlp.experts.down_proj_scales": BYTES[..., 0]},
        {"quant_method": "mxfp6", "modules_to_not_convert": []}, "quantized by 'mxfp6'",
    ),
    "NVFP4": (
        {"w.weight": BYTES[0], "w.weight_scale": normal(4, 2).astype(E4M3), "w.weight_scale_2": np.ones(1, np.float32)},
        {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quantized by ModelOpt as 'NVFP4_AWQ'",
    ),
    "bitsandbytes": (
        {"w.weight": BYTES[0], "w.weight.absmax": normal(4), "w.weight.quant_map": normal(16)},
        {"quant_method": "bitsandbytes", "load_in_8bit": False, "load_in_4bit": False}, "load_in_4bit: both are false",
    ),
    "HQQ": ({"w.W_q": BYTES[0]}, {"quant_method": "hqq", "rotation": 3}, "'rotation': '3': this field is not read"),
    "int8": (
        {"w.weight": np.zeros((4, 64), np.int8), "w.weight_scale": np.ones((4, 1), np.float32)},
        {**CT, "format": "int-quantized"}, r"'w': weight_scale is F32 \[4, 1\], not \[1, 1\] floats",
    ),
    "of no name": ({"w.weight": normal(4, 64)}, {"bits": 2, "quant_method": "new"}, "quantized by 'new'"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_quantizations_are_refused(name, run, tmp_path):
    """By the config's name of the method, be it a folder's or a single file's; without a config by tensors' names."""
    tensors, settings, message = OTHERS[name]
    folder = configured(tmp_path / "m", settings)
    path = safetensors(folder / "model.safetensors", {**tensors, "norm.weight": np.ones(4, np.float16)})
    for source in (folder, path):
        with pytest.raises(CheckpointError, match=message):
            open_source(source)
    status, _, err = run("convert", path, tmp_path / "y.gguf", "f16")
    assert (status, message.split("'")[1] in err if "'" in message else True) == (1, True)
    assert not (tmp_path / "y.gguf").exists()
    (folder / "config.json").unlink()
    if name == "of no name":
        return
    with pytest.raises(CheckpointError, match=r"has the name of a packed tensor|has scales twice"):
        open_source(path)
    np.savez(tmp_path / "x.npz", **{key: np.asarray(array).view(array.dtype) for key, array in tensors.items()
                                    if array.dtype != E4M3})  # fmt: skip
    with pytest.raises(CheckpointError, match=r"x\.npz: .*has the name of a packed tensor"):
        open_source(tmp_path / "x.npz")


def test_where_configs_speak(tmp_path):
    """ModelOpt's own file; the text model's part of a config; the older name of the section."""
    tensors = {"w.weight": normal(4, 64).astype(E4M3), "w.weight_scale": np.ones((), np.float32)}
    folder = configured(tmp_path / "a", {"quant_algo": "FP8", "kv_cache_quant_algo": None}, "hf_quant_config.json")
    safetensors(folder / "model.safetensors", tensors)
    converted(folder, tmp_path / "y.gguf", "f16")
    configured(folder, {"quant_algo": "W4A8"}, "hf_quant_config.json")
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: quantized by ModelOpt as 'W4A8'"):
        open_source(folder)
    for document in (
        {"text_config": {"quantization_config": {"quant_method": "mxfp6"}}},
        {"compression_config": {"quant_method": "mxfp6"}},
    ):
        folder = configured(tmp_path / "b", None)
        safetensors(folder / "model.safetensors", tensors)
        (folder / "config.json").write_text(json.dumps(document))
        with pytest.raises(CheckpointError, match=r"config\.json: quantized by 'mxfp6'"):
            open_source(folder)


def test_compressed_tensors_of_eight_bits(tmp_path):
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    settings = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    w, scale = normal(6, 64).astype(E4M3), np.linspace(1, 2, 6, dtype=ml_dtypes.bfloat16)[:, None]
    folder = configured(tmp_path / "m", {**settings, "config_groups": {"group_0": {"weights": weights}}})
    safetensors(folder / "model.safetensors", {"w.weight": w, "w.weight_scale": scale})
    converted(folder, tmp_path / "y.gguf", "f32")
    with qgemm.open(tmp_path / "y.gguf") as file:
        assert_array_equal(file["w.weight"].dequantize(), w.astype(np.float32) * scale.astype(np.float32))
    configured(folder, {**settings, "config_groups": {"group_0": {"weights": {**weights, "num_bits": 4}}}})
    with pytest.raises(CheckpointError, match="compressed-tensors of '4 bits, float' is not read"):
        open_source(folder)
    configured(folder, {**settings, "format": "dense"})
    safetensors(folder / "model.safetensors", {"w.weight": normal(6, 64)})
    assert converted(folder, tmp_path / "y.gguf", "q8_0")["w.weight"].how == "quantized"

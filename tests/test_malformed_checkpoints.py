"""Malformed or unsupported checkpoints of other libraries: refused by the tensor or the field."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from foreign import E4M3, MODULE, awq, gpt_oss, gptq, hqq, mxfp4, nvfp4
from foreign import bitsandbytes as bnb
from foreign import compressed as ct

import qgemm
from qgemm.errors import CheckpointError

I32, F16, F32, U8 = np.int32, np.float16, np.float32, np.uint8
NAN = np.full((8, 8), 0x7F, U8).view(E4M3)


OPENED = {
    # writer, its arguments, message on opening
    "awq: no qzeros":            (awq, {"change": {"qzeros": None}}, "there is no qzeros"),
    "awq: no scales":            (awq, {"change": {"scales": None}}, "there is no scales"),
    "awq: words of floats":      (awq, {"change": {"qweight": np.ones((64, 2), F32)}}, "qweight is F32"),
    "awq: a vector of words":    (awq, {"change": {"qweight": np.ones(64, I32)}}, r"qweight is I32 \[64\]"),
    "awq: no words":             (awq, {"change": {"qweight": np.ones((0, 2), I32)}}, "has no weights"),
    "awq: zeros of others":      (awq, {"change": {"qzeros": np.ones((1, 2), I32)}}, "do not fit 4 bits"),
    "awq: scales of others":     (awq, {"change": {"scales": np.ones((2, 8), F16)}}, "do not fit 4 bits"),
    "awq: scales of integers":   (awq, {"change": {"scales": np.ones((2, 16), I32)}}, "scales is I32"),
    "awq: another group_size":   (awq, {"settings": {"group_size": 48}}, "groups of 48"),
    "awq: a group_size of 0":    (awq, {"settings": {"group_size": 0}}, "group_size of 0"),
    "awq: 3 bits":               (awq, {"settings": {"bits": 3}}, "bits: awq of 3 bits"),
    "awq: gemv":                 (awq, {"settings": {"version": "gemv"}}, "the layout 'gemv'"),
    "awq: an unknown field":     (awq, {"settings": {"rotation": "hadamard"}}, "'rotation': 'hadamard'"),
    "awq: bits of two minds":    (awq, {"settings": {"w_bit": 8}}, "bits / w_bit"),
    "gptq: no g_idx":            (gptq, {"order": True, "change": {"g_idx": None}}, "without g_idx"),
    "gptq: g_idx too large":     (gptq, {"change": {"g_idx": np.full(64, 2, I32)}}, "groups 2 to 2"),
    "gptq: g_idx below 0":       (gptq, {"change": {"g_idx": np.full(64, -1, I32)}}, "groups -1 to -1"),
    "gptq: a short g_idx":       (gptq, {"change": {"g_idx": np.zeros(63, I32)}}, r"g_idx is I32 \[63\]"),
    "gptq: g_idx of floats":     (gptq, {"change": {"g_idx": np.zeros(64, F32)}}, "g_idx is F32"),
    "gptq: 5 bits":              (gptq, {"settings": {"bits": 5}}, "bits: gptq of 5 bits"),
    "gptq: 3 bits of 4":         (gptq, {"settings": {"bits": 3}}, "do not fit 3 bits"),
    "gptq: marlin":              (gptq, {"settings": {"checkpoint_format": "marlin"}}, "checkpoint_format: the layout"),
    "gptq: words of 64":         (gptq, {"settings": {"pack_dtype": "int64"}}, "'pack_dtype': 'int64'"),
    "gptq: an adapter":          (gptq, {"settings": {"adapter": {"rank": 8}}}, "'adapter': "),
    "gptq: sym that is not":     (gptq, {"settings": {"sym": True}}, r"symmetric by its config \(sym\)"),
    "gptq: a module left out":   (gptq, {"settings": {"dynamic": {r"-:layer\.q": {}}}}, "dynamic leaves it out"),
    "gptq: a module of 8 bits":  (gptq, {"settings": {"dynamic": {r"layer\.": {"bits": 8}}}}, "do not fit 8 bits"),
    "gptq: dynamic of a list":   (gptq, {"settings": {"dynamic": {"a": 3}}}, "dynamic: 'a': '3' is not an object"),
    "gptq: dynamic, a field":    (gptq, {"settings": {"dynamic": {"a": {"bit": 8}}}}, "dynamic: 'a': 'bit': '8'"),
    "gptq: a bad expression":    (gptq, {"settings": {"dynamic": {"(": {}}}}, "dynamic: '\\(' is not a regular"),
    "gptq: a slow expression":   (gptq, {"settings": {"dynamic": {"(a+)+$": {}}}}, "repeats too much"),
    "gptq: a slow one, escaped": (gptq, {"settings": {"dynamic": {r"(a|a|\\)*$": {}}}}, "repeats too much"),
    "gptq: many repeats":        (gptq, {"settings": {"dynamic": {".*.*.*.*.*x": {}}}}, "repeats too much"),
    "ct: no scale":              (ct, {"change": {"weight_scale": None}}, "there is no weight_scale"),
    "ct: no shape":              (ct, {"change": {"weight_shape": None}}, "there is no weight_shape"),
    "ct: another shape":         (ct, {"change": {"weight_shape": np.array([16, 65])}}, r"\[16, 65\]"),
    "ct: a shape below 0":       (ct, {"change": {"weight_shape": np.array([16, -64])}}, "-64"),
    "ct: a shape of three":      (ct, {"change": {"weight_shape": np.ones(3, np.int64)}}, "weight_shape"),
    "ct: scales of others":      (ct, {"change": {"weight_scale": np.ones((16, 3), F16)}}, "weight_scale"),
    "ct: scales of integers":    (ct, {"change": {"weight_scale": np.ones((16, 2), I32)}}, "is I32"),
    "ct: zeros missing":         (ct, {"weights": {"symmetric": False}}, "there is no weight_zero_point"),
    "ct: zeros of others":       (ct, {"symmetric": False, "change": {
                                  "weight_zero_point": np.zeros((16, 2), I32)}}, "weight_zero_point is I32"),
    "ct: a zero of rows":        (ct, {"symmetric": False, "group": 0, "change": {
                                  "weight_zero_point": np.zeros((16, 1), np.int8)}}, r"zero_point is I8 \[16, 1\]"),
    "ct: a zero of 5 bits":      (ct, {"symmetric": False, "group": 0, "change": {
                                  "weight_zero_point": np.full(1, 8, np.int8)}}, "weight_zero_point has 8 to 8 in 4"),
    "ct: zeros where symmetric": (ct, {"change": {
                                  "weight_zero_point": np.ones((16, 2), np.int8)}}, "symmetric by its config, but"),
    "ct: g_idx too large":       (ct, {"order": True, "change": {
                                  "weight_g_idx": np.full(64, 2, I32)}}, "weight_g_idx names groups 2"),
    "ct: g_idx of others":       (ct, {"order": True, "change": {
                                  "weight_g_idx": np.zeros(32, I32)}}, r"weight_g_idx is I32 \[32\]"),
    "ct: groups of 48":          (ct, {"weights": {"group_size": 48}}, "group_size"),
    "ct: a group of none":       (ct, {"weights": {"group_size": None}}, "group_size: None"),
    "ct: 9 bits":                (ct, {"weights": {"num_bits": 9}}, "num_bits / type"),
    "ct: floats of 4 bits":      (ct, {"weights": {"type": "float"}}, "num_bits / type"),
    "ct: a strategy":            (ct, {"weights": {"strategy": "token"}}, "strategy: 'token'"),
    "ct: dynamic weights":       (ct, {"weights": {"dynamic": True}}, "'dynamic': 'True'"),
    "ct: an order":              (ct, {"weights": {"actorder": "random"}}, "'actorder': 'random'"),
    "ct: a field of weights":    (ct, {"weights": {"rotate": 1}}, "'rotate': '1'"),
    "ct: a transform":           (ct, {"settings": {"transform_config": {"a": 1}}}, "'transform_config'"),
    "ct: sparse":                (ct, {"settings": {"sparsity_config": {"format": "sparse-bitmask"}}},
                                  "sparsity_config"),
    "ct: a format":              (ct, {"settings": {"format": "mxfp5-pack-quantized"}}, "format: "),
    "ct: no groups":             (ct, {"settings": {"config_groups": {}}}, "config_groups: names no group"),
    "ct: ignored":               (ct, {"settings": {"ignore": [MODULE]}}, "ignore or the targets"),
    "ct: ignored by expression": (ct, {"settings": {"ignore": [r"re:layer\..*"]}}, "ignore or the targets"),
    "ct: ignore of numbers":     (ct, {"settings": {"ignore": [3]}}, "ignore: .* is not a list of names"),
    "nvfp4: no global scale":    (nvfp4, {"change": {"weight_global_scale": None}}, "there is no weight_global"),
    "nvfp4: global scales":      (nvfp4, {"change": {"weight_global_scale": np.ones(2, F32)}}, "not one F32"),
    "nvfp4: no scales":          (nvfp4, {"change": {"weight_scale": None}}, "there is no weight_scale"),
    "nvfp4: scales of others":   (nvfp4, {"change": {"weight_scale": NAN[:, :7]}}, "are not those of"),
    "nvfp4: scales of floats":   (nvfp4, {"change": {"weight_scale": np.ones((8, 8), F16)}}, "is F16"),
    "modelopt: a group of 32":   (nvfp4, {"modelopt": True, "settings": {"group_size": 32}}, "as 'NVFP4'"),
    "modelopt: pre_quant_scale": (nvfp4, {"modelopt": True, "settings": {"pre_quant_scale": True}}, "pre_quant_scale"),
    "mxfp4: scales of others":   (mxfp4, {"change": {"weight_scale": np.ones((8, 3), U8)}}, "are not those of"),
    "mxfp4: a global scale":     (mxfp4, {"change": {"weight_global_scale": np.ones(1, F32)}}, "which MXFP4 has not"),
    "mxfp4: groups of 16":       (mxfp4, {"weights": {"group_size": 16}}, "groups of 16 by group, not of 32"),
    "nvfp4: a scale of no axes": (nvfp4, {"change": {"weight_global_scale": F32(2)}}, "not one F32"),
    "gpt-oss: no scales":        (gpt_oss, {"change": {"_scales": None}}, "no scales are no MXFP4"),
    "gpt-oss: blocks of 8":      (gpt_oss, {"change": {"_blocks": np.ones((3, 8, 2, 8), U8)}}, "are no MXFP4"),
    "hqq: no zero":              (hqq, {"change": {"zero": None}}, "there is no zero"),
    "hqq: no axis":              (hqq, {"change": {"axis": None}}, "there is no axis"),
    "hqq: axis 2":               (hqq, {"change": {"axis": np.int32(2)}}, "do not fit each other"),
    "hqq: a packing":            (hqq, {"change": {"packing": np.frombuffer(b"4bit_32", U8)}}, "packing '4bit_32'"),
    "hqq: a packing of Latin-1": (hqq, {"change": {"packing": np.full(7, 255, U8)}}, r"packing '\\xff"),
    "hqq: bits of another":      (hqq, {"change": {"nbits": np.int32(5)}}, "do not fit each other"),
    "hqq: half an axis":           (hqq, {"change": {"axis": np.float32(0.5)}}, "axis is 0.5, not a whole"),
    "hqq: quantized scales":     (hqq, {"change": {"quant_scale": U8(1)}}, "quant_scale is set"),
    "hqq: viewed as floats":     (hqq, {"change": {"view_as_float": U8(1)}}, "view_as_float is set"),
    "hqq: another shape":        (hqq, {"change": {"shape": np.array([8, 64])}}, "W_q is U8"),
    "hqq: a shape of one":       (hqq, {"change": {"shape": np.array([8])}}, "shape is not that of a matrix"),
    "hqq: scales of others":     (hqq, {"change": {"scale": np.ones((15, 1), F16)}}, "scale is F16"),
    "hqq: a group_size of 48":   (hqq, {"change": {"group_size": np.int32(48)}}, "do not fit each other"),
    "bnb: 8 bits":               (bnb, {"settings": {"load_in_8bit": True}}, "load_in_8bit, load_in_4bit: both are"),
    "bnb: 4 bits by 8":          (bnb, {"settings": {"load_in_8bit": True, "load_in_4bit": False}},
                                  "is nf4, though load_in_8bit"),
    "bnb: another kind":         (bnb, {"settings": {"bnb_4bit_quant_type": "fp4"}}, "is nf4, though"),
    "bnb: an unknown kind":      (bnb, {"settings": {"bnb_4bit_quant_type": "af4"}}, "bnb_4bit_quant_type"),
    "bnb: no absmax":            (bnb, {"change": {".absmax": None}}, "there is no absmax"),
    "bnb: no codebook":          (bnb, {"change": {".quant_map": None}}, "there is no quant_map"),
    "bnb: 15 levels":            (bnb, {"change": {".quant_map": np.ones(15, F32)}}, "quant_map is F32"),
    "bnb: a level of NaN":       (bnb, {"change": {".quant_map": np.full(16, np.nan, F32)}}, "holds NaN"),
    "bnb: absmax of others":     (bnb, {"nested": False, "change": {".absmax": np.ones(11, F32)}},
                                  r"absmax is F32 \[11\]"),
    "bnb: no nested codebook":   (bnb, {"change": {".nested_quant_map": None}}, "nested_quant_map"),
    "bnb: codes of others":      (bnb, {"change": {"": np.ones((383, 1), U8)}}, "383 bytes are not"),
    "bnb: a blocksize":          (bnb, {"state": {"blocksize": 48}}, "a blocksize of '48'"),
    "bnb: a shape of one":       (bnb, {"state": {"shape": [768]}}, "is not that of a matrix"),
    "bnb: an offset of text":    (bnb, {"state": {"nested_offset": "1"}}, "nested_offset"),
    "bnb: state of another":     (bnb, {"state": {"quant_type": "fp4"}}, "quant_type 'fp4' is not nf4"),
    "bnb: state no JSON":        (bnb, {"change": {
                                  ".quant_state.bitsandbytes__nf4": np.frombuffer(b"{'", U8)}}, "quant_state: "),
    "bnb: an offset of 1e308":   (bnb, {"state": {"nested_offset": 1e308}}, "nested_offset '1e.308' are not numbers"),
    "bnb: an offset of NaN":     (bnb, {"state": {"nested_offset": float("nan")}}, "nested_offset 'nan' are not num"),
    "bnb: a deep state":         (bnb, {"state": {"x": json.loads("[" * 64 + "]" * 64)}}, "nested 65 deep"),
    "bnb: state a list":         (bnb, {"change": {
                                  ".quant_state.bitsandbytes__nf4": np.frombuffer(b"[]", U8)}}, "is not a JSON object"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPENED)
def test_refused_when_opened(name, tmp_path):
    write, options, message = OPENED[name]
    write(tmp_path / "m", **options)
    with pytest.raises(CheckpointError, match=message) as caught:
        qgemm.load(tmp_path / "m")
    assert str(caught.value).startswith(str(tmp_path / "m"))
    assert str(caught.value).isascii()


UNHELD = {
    # read as floats by the converter, but no blocks hold it exactly
    "gptq: groups of 8":         (gptq, {"group": 8}, "groups of 8 weights are no multiple of 32"),
    "gptq: uneven groups":       (gptq, {"change": {"g_idx": np.arange(64, dtype=I32) // 48}},
                                  "g_idx gives group 0 another size than group_size"),
    "gptq: a last group of 8":   (gptq, {"group": 128, "k": 136}, "the last of 8, are no multiple of 32"),
    "hqq: axis 0":               (hqq, {"axis": 0}, "axis 0: groups of 64 do not lie in rows"),
    "hqq: across rows":          (hqq, {"group": 256}, "axis 1: groups of 256 do not lie in rows"),
    "hqq: zeros of float32":     (hqq, {"scales": F32}, "scales are float32|zeros are no float16"),
    "nvfp4: NaN as a scale":     (nvfp4, {"change": {"weight_scale": NAN}}, "is negative or NaN"),
    "nvfp4: rows of 48":         (nvfp4, {"k": 48}, "rows of 48 are no blocks of 64"),
    "bnb: rows of 80":           (bnb, {"k": 80, "n": 4}, "rows of 80 are no blocks of 32"),
    "mxfp4: NaN as a scale":     (mxfp4, {"change": {"weight_scale": np.full((8, 2), 255, U8)}}, "is 255"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNHELD)
def test_refused_when_looked_up(name, tmp_path):
    write, options, message = UNHELD[name]
    write(tmp_path / "m", **options)
    with qgemm.load(tmp_path / "m") as model:
        assert model["layer.norm.weight"].shape == (8,)
        with pytest.raises(CheckpointError, match=message):
            model[f"{MODULE}.weight"]
        with pytest.raises(qgemm.NameNotFoundError, match=r"there is no tensor 'layer\.q_pro\.weight'"):
            model["layer.q_pro.weight"]
    if "NaN" not in name:
        qgemm.convert(tmp_path / "m", tmp_path / "y.gguf", "f32")


@pytest.mark.parametrize("kind", ["mxfp4", "f32"])
@pytest.mark.parametrize(("write", "name"), [(mxfp4, "weight_scale"), (gpt_oss, "_scales")])
def test_exponents_of_nan_are_not_converted(write, name, kind, tmp_path):
    """ggml reads the exponent 255 as a number, so that even a copy of the blocks would be of other weights."""
    exponents = np.full((3, 8, 2) if write is gpt_oss else (8, 2), 127, U8)
    exponents[..., 1, 1] = 255
    write(tmp_path / "m", change={name: exponents})
    with pytest.raises(CheckpointError, match=rf"tensor '{MODULE}.*': a scale is 255, which is no number"):
        qgemm.convert(tmp_path / "m", tmp_path / "y.gguf", kind)


def damaged(path: Path, how: str) -> bytes:
    """The bytes of a .safetensors file, one of its places damaged."""
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    first, second, *_ = header.values()
    if how == "cut":
        return raw[:-1]
    if how == "cut in the header":
        return raw[: size // 2]
    if how == "longer":
        return raw + b"\0"
    if how == "overlapping":
        second["data_offsets"] = [0, second["data_offsets"][1] - second["data_offsets"][0]]
    elif how == "a hole":
        first["data_offsets"][0] += 1
    elif how == "beyond the end":
        first["data_offsets"] = [value + len(data) for value in first["data_offsets"]]
    elif how == "a dtype":
        first["dtype"] = "I4"
    elif how == "a shape":
        first["shape"] = [value + 1 for value in first["shape"]]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


HOW = ("cut", "cut in the header", "longer", "overlapping", "a hole", "beyond the end", "a dtype", "a shape")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("write", [awq, bnb], ids=lambda write: write.__name__)
def test_damaged_files(write, how, tmp_path):
    write(tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    path.write_bytes(damaged(path, how))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: "):
        qgemm.load(tmp_path / "m")


def test_fields_that_change_no_weight_are_read(tmp_path):
    """How weights were found and who multiplies by them; an empty or false field of any name."""
    settings = {
        "damp_percent": 0.1,
        "meta": {"quantizer": ["a:1"]},
        "static_groups": True,
        "unheard_of": None,
        "new": False,
    }
    want = gptq(tmp_path / "m", settings={**settings, "dynamic": {r"-:lm_head": {}, r"+:layer\.k": {"bits": 8}}})
    with qgemm.load(tmp_path / "m") as model:
        assert (model[f"{MODULE}.weight"].dequantize() == want).all()


def test_settings_by_module(tmp_path):
    """GPTQModel's `dynamic` and the groups of compressed-tensors: a name comes before a class."""
    want = gptq(tmp_path / "m", bits=8, settings={"bits": 4, "dynamic": {r".*q_proj": {"bits": 8}}})
    with qgemm.load(tmp_path / "m") as model:
        assert (model[f"{MODULE}.weight"].dequantize() == want).all()
    others = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
    own = {"targets": [r"re:layer\.[qk]_proj$"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}
    want = ct(tmp_path / "c", settings={"config_groups": {"a": others, "b": own}})
    with qgemm.load(tmp_path / "c") as model:
        assert (model[f"{MODULE}.weight"].dequantize() == want).all()

"""`qgemm.load`: what checkpoints of other libraries hold, exactly, as tensors that multiply."""

from __future__ import annotations

import pickle

import foreign
import ml_dtypes
import numpy as np
import pytest
from files import safetensors
from foreign import MODULE
from helpers import expected_sums, normal
from hypothesis import given
from hypothesis import strategies as st
from measured_errors import Expected
from numpy.testing import assert_array_equal

import qgemm
from qgemm.codec.error_bound import U
from qgemm.converter import open_source
from qgemm.formats.kbit import kbit_float32

NAME = f"{MODULE}.weight"
CASES = {
    # who writes it, how, and the format that holds it
    "awq":                       (foreign.awq, {}, "u4z_g32"),
    "awq, 128":                  (foreign.awq, {"group": 128, "k": 256}, "u4z_g128"),
    "awq, symmetric":            (foreign.awq, {"zero": 8, "group": 64}, "u4_g64"),
    "awq, a row":                (foreign.awq, {"group": -1, "k": 256}, "u4z_row"),
    "awq, bfloat16":             (foreign.awq, {"scales": ml_dtypes.bfloat16}, "u4z_g32_bf16"),
    "gptq v1":                   (foreign.gptq, {}, "u4z_g32"),
    "gptq v2, 2 bits":           (foreign.gptq, {"bits": 2, "v2": True}, "u2z_g32"),
    "gptq, 3 bits":              (foreign.gptq, {"bits": 3, "k": 96}, "u3z_g32"),
    "gptq, 8 bits, symmetric":   (foreign.gptq, {"bits": 8, "zero": 128, "settings": {"sym": True}}, "u8_g32"),
    "gptq, groups of 512":       (foreign.gptq, {"group": 512, "k": 1024}, "u4z_g256"),
    "gptq, a short last group":  (foreign.gptq, {"group": 128, "k": 672}, "u4z_g32"),
    "gptq, a last group of 64":  (foreign.gptq, {"group": 128, "k": 704, "zero": 8}, "u4_g64"),
    "gptq, 3 bits, short":       (foreign.gptq, {"group": 128, "k": 160, "bits": 3}, "u3z_g32"),
    "gptq, short, act-order":    (foreign.gptq, {"group": 128, "k": 672, "order": True}, "u4z_g32"),
    "gptq, short of a group":    (foreign.gptq, {"group": 128, "k": 96, "v2": True}, "u4z_g32"),
    "gptq, groups of 96, short": (foreign.gptq, {"group": 96, "k": 160}, "u4z_g32"),
    "gptq, groups of 16":        (foreign.gptq, {"group": 16}, "i8_g16"),
    "gptq, groups of 48":        (foreign.gptq, {"group": 48, "k": 96, "bits": 3, "zero": 4}, "i8_g16"),
    "gptq, 8 bits, 16":          (foreign.gptq, {"bits": 8, "group": 16, "zero": 128}, "i8_g16"),
    "gptq, float32 scales":      (foreign.gptq, {"scales": np.float32}, "i8_g32"),
    "ct int4, groups of 16":     (foreign.compressed, {"group": 16}, "i8_g16"),
    "gptq, act-order":           (foreign.gptq, {"order": True, "k": 128}, "u4z_g32"),
    "gptq, act-order, 3 bits":   (foreign.gptq, {"order": True, "bits": 3, "k": 128, "group": 64}, "u3z_g64"),
    "ct int4":                   (foreign.compressed, {"group": 128, "k": 256}, "u4_g128_bf16"),
    "ct int4, zeros":            (foreign.compressed, {"symmetric": False, "scales": np.float16}, "u4z_g32"),
    "ct int4, zeros of int8":    (foreign.compressed, {"symmetric": False, "packed_zeros": False}, "u4z_g32_bf16"),
    "ct int8, a row":            (foreign.compressed, {"bits": 8, "group": -1, "k": 256}, "u8_row_bf16"),
    "ct int8, a row of 96":      (foreign.compressed, {"bits": 8, "group": -1, "k": 96}, "u8_g32_bf16"),
    "ct int8, the tensor":       (foreign.compressed, {"bits": 8, "group": 0}, "u8_g64_bf16"),
    "ct int4, a zero":           (foreign.compressed, {"group": 0, "symmetric": False, "seed": 1}, "u4z_g64_bf16"),
    "ct int8, a zero":           (foreign.compressed, {"bits": 8, "group": 0, "symmetric": False, "plain": True},
                                  "u8z_g64_bf16"),
    "ct int8, not packed":       (foreign.compressed, {"bits": 8, "group": -1, "plain": True}, "u8_g64_bf16"),
    "ct W4A8, not packed":       (foreign.compressed, {"plain": True, "group": 64}, "u4_g64_bf16"),
    "ct W4AFP8, naive":          (foreign.compressed, {"plain": True, "group": 64, "form": "naive-quantized"},
                                  "u4_g64_bf16"),
    "ct int4, zeros, no pack":   (foreign.compressed, {"plain": True, "symmetric": False, "packed_zeros": False},
                                  "u4z_g32_bf16"),
    "ct int4, blocks":           (foreign.compressed, {"rows": 8, "n": 20, "k": 96}, "u4_g32_bf16"),
    "ct int4, blocks, zeros":    (foreign.compressed, {"rows": 8, "n": 24, "symmetric": False}, "u4z_g32_bf16"),
    "ct int8, blocks, a rest":   (foreign.compressed, {"rows": 128, "group": 128, "n": 130, "k": 160, "bits": 8,
                                   "plain": True}, "u8_g32_bf16"),
    "ct int3, zeros":            (foreign.compressed, {"bits": 3, "symmetric": False}, "u3z_g32_bf16"),
    "ct int5":                   (foreign.compressed, {"bits": 5, "n": 9}, "u5_g32_bf16"),
    "ct int1":                   (foreign.compressed, {"bits": 1}, "u1z_g32_bf16"),
    "ct act-order":              (foreign.compressed, {"order": True, "k": 128}, "u4_g32_bf16"),
    "ct nvfp4":                  (foreign.nvfp4, {}, "nvfp4"),
    "modelopt nvfp4":            (foreign.nvfp4, {"modelopt": True}, "nvfp4"),
    "modelopt nvfp4, factor 1":  (foreign.nvfp4, {"modelopt": True, "factor": 1}, "nvfp4"),
    "ct mxfp4":                  (foreign.mxfp4, {}, "mxfp4"),
    "ct mxfp6":                  (foreign.mxfp6, {}, "i8_g32"),
    "ct mxfp8":                  (foreign.mxfp8, {}, "f8_e4m3_g32"),
    "modelopt mxfp8":            (foreign.mxfp8, {"settings": {"quant_method": "modelopt", "quant_algo": "MXFP8"}},
                                  "f8_e4m3_g32"),
    "sglang mxfp8":              (foreign.mxfp8, {"name": "weight_scale_inv", "settings": {"quant_method": "mxfp8",
                                   "weight_block_size": [1, 32]}}, "f8_e4m3_g32"),
    "fp8, exponents":            (foreign.mxfp8, {"name": "weight_scale_inv", "scale_type": ml_dtypes.float8_e8m0fnu,
                                   "settings": {"quant_method": "fp8", "weight_block_size": [1, 32]}}, "f8_e4m3_g32"),
    "fp8, 128 x 128":            (foreign.fp8, {}, "f8_e4m3_g64"),
    "fp8, the tensor":           (foreign.fp8, {"n": 8, "k": 256, "grid": (), "block": (8, 256)}, "f8_e4m3_g256"),
    "fp8, rows, e5m2":           (foreign.fp8, {"n": 8, "k": 96, "grid": (8, 1), "block": (1, 96),
                                   "kind": ml_dtypes.float8_e5m2}, "f8_e5m2_g32"),
    "hqq":                       (foreign.hqq, {}, "u4f_g64"),
    "hqq, 8 bits":               (foreign.hqq, {"bits": 8}, "u8f_g64"),
    "hqq, 3 bits":               (foreign.hqq, {"bits": 3, "group": 32}, "u3f_g32"),
    "hqq, 2 bits":               (foreign.hqq, {"bits": 2, "group": 128}, "u2f_g128"),
    "hqq, 1 bit":                (foreign.hqq, {"bits": 1, "group": 32}, "u1f_g32"),
    "hqq, whole zeros":          (foreign.hqq, {"whole": True}, "u4z_g64"),
    "bitsandbytes":              (foreign.bitsandbytes, {}, "kbit4_f32"),
    "bitsandbytes, fp4":         (foreign.bitsandbytes, {"kind": "fp4", "nested": False, "k": 64}, "kbit4_f32"),
    "bitsandbytes, as bfloat16": (foreign.bitsandbytes, {"storage": ml_dtypes.bfloat16, "block": 32}, "kbit4_f32"),
}  # fmt: skip


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("name", CASES)
def test_checkpoints_load_exactly(name, tmp_path):
    """Bit for bit the values of the format's description, and a product within the bound of any a16 product."""
    write, options, fmt = CASES[name]
    want = write(tmp_path / "m", **options)
    with qgemm.load(tmp_path / "m") as model:
        w = model[NAME]
        assert list(model) == [NAME, "layer.norm.weight"]
        assert model["layer.norm.weight"].format.name == "f16"
    assert (w.format.name, w.shape, w.name) == (fmt, want.shape, NAME)
    got = w.dequantize()
    assert got.dtype == np.float32
    assert_array_equal(got, want)
    if "fp4" not in w.format.name and write is not foreign.mxfp6:  # one zero, where libraries have a negative one too
        assert got.tobytes() == want.tobytes()
    x = normal(3, want.shape[1], seed=9)
    exact = x.astype(np.float64) @ want.T.astype(np.float64)
    for y in (qgemm.matmul(x, w), x @ w.T, qgemm.matmul_many(x, [w, w])[1]):
        assert y.dtype == np.float32
        expected_of(x, w)._replace(y=exact).check(y)


def expected_of(x: np.ndarray, w: qgemm.Tensor | qgemm.Reordered | qgemm.Scaled) -> Expected:
    """The a16 product; for a view that of its stored matrix, times the factor, which rounds once more."""
    if isinstance(w, qgemm.Scaled):
        factor = 1 / abs(w.factor) if w.divides else abs(w.factor)
        stored, dense, wide = expected_of(x, w.tensor), w.dequantize(np.float64), x.astype(np.float64)
        bound = stored.bound * factor + 2**-21 * np.abs(wide) @ np.abs(dense).T
        return Expected(wide @ dense.T, bound, np.hypot(stored.noise * factor, U * np.sqrt(wide**2 @ dense.T**2)))
    if isinstance(w, qgemm.Reordered):
        return expected_of(x[:, w.columns], w.tensor)
    return expected_sums(x, w)


@pytest.mark.parametrize("name", CASES)
def test_one_reader_serves_the_converter(name, tmp_path):
    """Its values are those of the tensor, in ranges that start and end anywhere it allows."""
    write, options, _ = CASES[name]
    want = write(tmp_path / "m", **options).ravel()
    with open_source(tmp_path / "m") as source:
        weight = source.weights[NAME]
        for start in range(0, weight.size, 3 * weight.step):
            stop = min(start + 3 * weight.step, weight.size)
            assert_array_equal(weight.values(start, stop), want[start:stop])


@pytest.mark.usefixtures("engine")
def test_experts_of_gpt_oss(tmp_path):
    want = foreign.gpt_oss(tmp_path / "m")
    with qgemm.load(tmp_path / "m") as model:
        w = model[MODULE]
    assert w.shape == want.shape
    assert_array_equal(w.dequantize(), want)
    x = normal(2, want.shape[2])
    expected_sums(x, w[1])._replace(y=x @ want[1].T.astype(np.float64)).check(qgemm.matmul(x, w[1]))


def test_info_lists_them(tmp_path, run):
    foreign.gptq(tmp_path / "m")
    status, out, _ = run("info", tmp_path / "m")
    assert status == 0
    assert [line.split()[:4] for line in out.split("\n") if line.startswith("layer.")] == [
        [NAME, "GPTQ4", "(32,", "64)"],
        ["layer.norm.weight", "F16", "(8,)", "1"],
    ]


def test_numbers_without_scales(tmp_path):
    w = normal(3, 4, 64).astype(foreign.E4M3)
    path = safetensors(tmp_path / "x.safetensors", {"w": w, "v": w[0, :, :48]})
    with qgemm.load(path) as model:
        assert_array_equal(model["w"].dequantize(), w.astype(np.float32))
        with pytest.raises(qgemm.CheckpointError, match="'v': F8_E4M3: scales of 48 weights side by side"):
            model["v"]


def test_names_of_families_are_formats():
    """So that a tensor of each can be pickled, and its format named."""
    for name in ("f8_e4m3_g128", "f8_e5m2_g32", "kbit4_f32", "u4z_g128_bf16"):
        fmt = qgemm.FORMATS[name.upper()]
        assert (fmt.name, name in qgemm.FORMATS, name in list(qgemm.FORMATS)) == (name, True, False)
        assert pickle.loads(pickle.dumps(fmt)) is fmt or name == "kbit4_f32"
    for name in ("f8_e4m3_g48", "f8_e3m4_g32", "kbit6_f32", "f8_e4m3"):
        assert name not in qgemm.FORMATS
    book = kbit_float32(4, foreign.FP4)
    assert pickle.loads(pickle.dumps(book)) == book


@given(st.integers(1, 8), st.integers(1, 70), st.integers(1, 3), st.integers(0, 9))
def test_streams_of_codes(bits, count, rows, seed):
    """Packed as one long integer a row, over words' ends."""
    from qgemm.converter.checkpoints import bits as packing

    codes = np.random.default_rng(seed).integers(0, 2**bits, (rows, count)).astype(np.uint8)
    words = foreign.stream(codes, bits).view(np.uint32)
    assert_array_equal(packing.unpack_codes(words, bits, count), codes)
    assert_array_equal(packing.pack_codes(codes, bits), words)


def packed_layer(w: qgemm.Tensor, text: str = "") -> dict[str, np.ndarray]:
    """A layer as qgemm.torch saves it: bytes of rows, and format and shape as the bytes of a text."""
    described = text or " ".join(map(str, (w.format.name, *w.shape)))
    rows = w.blocks.view(np.uint8).reshape(*w.shape[:-1], -1)
    return {NAME: rows, NAME.replace("weight", "_extra_state"): np.frombuffer(described.encode(), np.uint8)}


@pytest.mark.parametrize(("fmt", "shape"), [("q4_k", (8, 512)), ("u4z_g128", (4, 256)), ("q8_0", (3, 8, 64))])
def test_packed_layers_of_torch_are_read(fmt, shape, tmp_path):
    """Blocks do not depend on the name of the file; a tied layer's text may stand alone."""
    w = qgemm.quantize(normal(*shape), fmt)
    tied = {"head._extra_state": np.frombuffer(b"q8_0 8 64", np.uint8)}
    path = safetensors(tmp_path / "x.safetensors", {**packed_layer(w), **tied, "bias": normal(8)})
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "qgemm", "activation": "a16"}}')
    with qgemm.load(path) as model:
        assert sorted(model) == ["bias", NAME]
        assert (model[NAME].format, model[NAME].shape) == (w.format, shape)
        assert model[NAME].blocks.tobytes() == w.blocks.tobytes()
    qgemm.convert(path, tmp_path / "x.gguf", "q8_0", keep=["."])
    with qgemm.open(tmp_path / "x.gguf") as file:
        assert file[NAME].blocks.tobytes() == w.blocks.tobytes()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q4_0 8 32", r"Q4_0 \[8, 32\] is U8 \[8, 18\], this is U8 \[8, 36\]"),
        ("q4_0 8 33", "row length 33 is not a multiple of 32"),
        ("q4_9 8 64", "there is no format 'q4_9'"),
        ("kbit3_f16:0000803f 8 64", "there is no format 'kbit3_f16:0000803f'"),  # a codebook of its own
    ],
)
def test_damaged_packed_layers_are_refused(text, message, tmp_path):
    w = qgemm.quantize(normal(8, 64), "q4_0")
    path = safetensors(tmp_path / "x.safetensors", packed_layer(w, text))
    with pytest.raises(qgemm.CheckpointError, match=message), qgemm.load(path):
        pass


@pytest.mark.parametrize("view", ["column_order", "factor", "divisor"])
def test_packed_layers_with_a_view_are_refused(view, tmp_path):
    layer = packed_layer(qgemm.quantize(normal(8, 64), "q4_0"))
    order = {NAME.replace("weight", view): np.arange(64, dtype=np.int32)}
    path = safetensors(tmp_path / "x.safetensors", layer | order)
    with pytest.raises(qgemm.CheckpointError, match=rf"has a {view}, with which qgemm\.torch alone"):
        qgemm.load(path)

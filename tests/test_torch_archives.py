"""PyTorch's files are read as data: HQQ's qmodel.pt and state dicts; nothing in a pickle runs."""

from __future__ import annotations

import zipfile
from contextlib import suppress
from math import prod

import foreign
import ml_dtypes
import numpy as np
import pytest
import torch_archives
from foreign import MODULE
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from torch_archives import ORDERED, Called, Name, Reference, instructions, size, tensor

import qgemm
from qgemm.converter import open_source
from qgemm.errors import CheckpointError
from qgemm.files.safetensors import SafetensorsFile

NAME = f"{MODULE}.weight"
DTYPES = {"F16": np.float16, "U8": np.uint8, "I32": np.int32}


def qmodel(folder, *, nested: bool = False, settings: dict | None = None, **options) -> np.ndarray:
    """The checkpoint that foreign.hqq writes, as the library's own file; nested: settings in a dictionary "meta"."""
    want = foreign.hqq(folder, **options)
    file = SafetensorsFile(folder / "model.safetensors")
    arrays = {
        part: file.read(entry, 0, prod(entry.shape)).view(DTYPES[entry.type]).reshape(entry.shape)
        for part in ("W_q", "scale", "zero")
        for entry in [file.tensors[f"{MODULE}.{part}"]]
    }
    file.close()
    bits, group = options.get("bits", 4), options.get("group", 64)
    packing = {8: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}[bits]
    parts = {part: tensor(part, array) for part, array in arrays.items()}
    meta = {
        "nbits": bits, "group_size": group, "shape": size(*want.shape), "scale": parts["scale"], "zero": parts["zero"],
        "axis": options.get("axis", 1), "packing": packing, "unpack_view_dtype": Name("torch", "uint8"),
        "view_as_float": False, "quant_scale": False, "quant_zero": False, "compute_dtype": Name("torch", "float16"),
        **(settings or {}),
    }  # fmt: skip
    codes = Called(Name("torch._utils", "_rebuild_parameter"), (parts["W_q"], False, Called(ORDERED, ())))
    module = {"W_q": codes, "offload_meta": None, **({"bias": None, "meta": meta} if nested else meta)}
    norm = np.ones(8, np.float16)
    value = {MODULE: module, "layer.norm": {"weight": tensor("norm", norm)}}
    torch_archives.write(folder / "qmodel.pt", value, {**arrays, "norm": norm})
    (folder / "model.safetensors").unlink()
    (folder / "config.json").write_text("{}")
    return want


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"bits": 3, "group": 32}, {"bits": 8, "whole": True}, {"bits": 1, "group": 32}, {"axis": 0}]
)
def test_qmodel_of_hqq(nested, options, tmp_path):
    want = qmodel(tmp_path / "m", nested=nested, **options)
    with open_source(tmp_path / "m") as source:
        assert sorted(source.weights) == ["layer.norm.weight", NAME]
        assert_array_equal(source.weights[NAME].values(0, want.size), want.ravel())
    if "axis" not in options:
        with qgemm.load(tmp_path / "m" / "qmodel.pt") as model:
            assert_array_equal(model[NAME].dequantize(), want)
    qgemm.convert(tmp_path / "m", tmp_path / "y.gguf", "f32")
    with qgemm.open(tmp_path / "y.gguf") as file:
        assert_array_equal(file[NAME].dequantize(), want)


@pytest.mark.parametrize("nested", [False, True])
def test_viewed_as_floats(nested, tmp_path):
    qmodel(tmp_path / "m", nested=nested, settings={"view_as_float": True})
    with pytest.raises(CheckpointError, match=f"'{MODULE}': view_as_float is set, which is not read"):
        open_source(tmp_path / "m")


def quantized_zeros(
    folder, *, groups: str = "tensor", part: str = "zero", dtype: str = "float16", change: dict | None = None
) -> np.ndarray:
    """A module whose zeros (part) are codes of eight bits; returns the weights. groups: "tensor", "columns", "rows"."""
    rng = np.random.default_rng(1)
    n, k = 8, 128
    codes, numbers = rng.integers(0, 16, (n * k // 32, 32)), (rng.random((n * k // 32, 1)) / 8).astype(np.float16)
    shape = {"tensor": (32, 1), "columns": (8, 4), "rows": (4, 8)}[groups]
    inner = rng.integers(0, 256, shape).astype(np.uint8)
    outer_shape = {"tensor": (), "columns": (1, 4), "rows": (4, 1)}[groups]
    scale, zero = ((rng.random(outer_shape) * factor).astype(dtype) for factor in (0.1, 60))
    outer = ((inner.astype(dtype) - zero) * scale).reshape(32, 1)
    scales, zeros = (numbers, outer) if part == "zero" else (outer, numbers)
    meta = {
        "nbits": 8, "group_size": None, "shape": size(32, 1), "scale": tensor("b", np.asarray(scale)),
        "zero": tensor("c", np.asarray(zero)), "axis": int(groups == "rows"), "packing": "8bit_u8",
        "compute_dtype": Name("torch", dtype), **(change or {}),
    }  # fmt: skip
    packed = (codes[:16] << 4 | codes[16:]).astype(np.uint8)
    module = {
        "W_q": tensor("w", packed), "meta": {
            "nbits": 4, "group_size": 32, "shape": size(n, k), "axis": 1, "packing": "4bit_u8",
            ("scale" if part == "zero" else "zero"): tensor("s", numbers), f"{part}_q": tensor("z", inner),
            "quant_zero": part == "zero", "quant_scale": part == "scale", f"meta_{part}": meta,
        },
    }  # fmt: skip
    arrays = {"w": packed, "s": numbers, "z": inner, "b": np.asarray(scale), "c": np.asarray(zero)}
    torch_archives.write(folder / "qmodel.pt", {MODULE: module}, arrays)
    return ((codes - zeros.astype(np.float32)) * scales.astype(np.float32)).astype(np.float32).reshape(n, k)


@pytest.mark.parametrize("groups", ["tensor", "columns", "rows"])
@pytest.mark.parametrize("part", ["zero", "scale"])
def test_zeros_of_hqq_that_are_quantized(groups, part, tmp_path):
    """The library decodes them in float16, both steps."""
    want = quantized_zeros(tmp_path / "m", groups=groups, part=part)
    with qgemm.load(tmp_path / "m") as model:
        assert list(model) == [NAME]
        assert_array_equal(model[NAME].dequantize(), want)


@pytest.mark.parametrize("part", ["zero", "scale"])
def test_zeros_of_hqq_that_are_quantized_in_float32(part, tmp_path):
    """Both steps in the type of the settings."""
    want = quantized_zeros(tmp_path / "m", groups="rows", part=part, dtype="float32")
    with open_source(tmp_path / "m") as source:
        assert_allclose(source.weights[NAME].values(0, want.size), want.reshape(-1), rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"packing": "4bit_u8"}, "zero_q and meta_zero are no codes of eight bits"),
        ({"compute_dtype": Name("torch", "bfloat16")}, "compute_dtype is none of torch.float16, torch.float32"),
        ({"shape": size(31, 1)}, r"zero_q \[32, 1\] does not fit 1 scales along axis 0"),
        ({"scale": None}, "zero_q and meta_zero are no codes"),
        ({"zero": tensor("s", np.ones(32, np.float16))}, r"zero_q \[32, 1\] does not fit 1 scales"),
        ({"scale": tensor("z", np.ones((), np.uint8))}, "meta_zero has scales of U8 and zeros of F16"),
    ],
)
def test_quantized_zeros_that_do_not_fit(change, message, tmp_path):
    quantized_zeros(tmp_path / "m", change=change)
    with pytest.raises(CheckpointError, match=f"'{MODULE}': quant_zero: {message}"):
        open_source(tmp_path / "m")


def test_config_of_another_method_decides(tmp_path):
    qmodel(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    with pytest.raises(CheckpointError, match=r"'layer.q_proj.W_q': has the name of a packed tensor \(HQQ\)"):
        open_source(tmp_path / "m")


def test_state_dict(tmp_path):
    """Every dtype; two tensors of one storage; a file is recognized whatever its name."""
    arrays = {
        dtype: np.arange(-6, 6).astype(getattr(ml_dtypes, dtype, dtype)).reshape(3, 4)
        for dtype in torch_archives.STORAGES
    }
    state = {name: tensor(name, array) for name, array in arrays.items()}
    half = arrays["float32"].reshape(-1)[8:]
    state |= {"half": tensor("float32", half, offset=8), "number": tensor("float32", half[:1].reshape(()), offset=8)}
    for name in ("pytorch_model.bin", "m.pt"):
        path = torch_archives.write(tmp_path / name, state, arrays)
        with qgemm.load(path) as model:
            assert sorted(model) == sorted(state)
            for dtype in ("float32", "float16", "bfloat16"):
                assert_array_equal(model[dtype].dequantize(), arrays[dtype].astype(np.float32))
            assert_array_equal(model["half"].dequantize(), half)
            assert model["number"].shape == (1,)


VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)
GOOD = tensor("0", VALUES)
MALFORMED = {
    # value or pickle, the error
    "code": ({"x": Called(Name("posix", "system"), ("touch x",))}, "data.pkl: names 'posix.system', which is not read"),
    "code of torch": ({"x": Called(Name("torch.jit", "load"), ("y",))}, "names 'torch.jit.load'"),
    "no dictionary": ((1, 2), "is no dictionary of tensors"),
    "a number": ({"epoch": 3, "w": GOOD}, "'epoch': is int, not a tensor"),
    "a call": ({"w": size(3)}, "'w': is Call, not a tensor"),
    "deep": ({"a": {"b": {"c": {"d": {"w": GOOD}}}}}, "'a.b.c.d': dictionaries are nested more than 3 deep"),
    "columns": ({"w": tensor("0", VALUES, strides=(1, 3))}, r"'w': strides \[1, 3\] of \[3, 4\] are not those of rows"),
    "beyond": ({"w": tensor("0", VALUES, offset=1)}, r"'w': F32 \[3, 4\] does not lie within its storage"),
    "before": ({"w": tensor("0", VALUES, offset=-1)}, "does not lie within its storage"),
    "huge": ({"w": tensor("0", VALUES, shape=(2**30, 2**30), strides=(2**30, 1))}, "does not lie within its storage"),
    "no storage": ({"w": tensor("0", VALUES, storage=None)}, "'w': has no storage"),
    "of no key": ({"w": tensor("7", VALUES)}, "'w': its storage is missing"),
    "a shape of text": ({"w": tensor("0", VALUES, shape="34")}, "'w': has no shape"),
    "no arguments": ({"w": Called(Name("torch._utils", "_rebuild_tensor_v3"), ())}, "'w': has no storage"),
    "no dtype": (
        {"w": Called(Name("torch._utils", "_rebuild_tensor_v3"), GOOD.arguments[:4])},
        "'w': its storage is missing",
    ),
    "twice": ({"a": {"b": GOOD}, "a.b": GOOD}, "'a.b': is there twice"),
    "no stack": (b"\x80\x02R.", "is a damaged pickle"),
    "cut": (b"\x80\x02" + instructions({"w": GOOD})[:-9], "is a damaged pickle"),
    "an object": (b"\x80\x02}(X\x01\0\0\0wccollections\nOrderedDict\n)\x81u.", "has the instruction NEWOBJ"),
    "a reference": ({"w": Reference(("storage",))}, "'w': is Persistent, not a tensor"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    value, message = MALFORMED[name]
    raw = {"raw": value} if isinstance(value, bytes) else {}
    path = torch_archives.write(tmp_path / "m.pt", value, {"0": VALUES}, **raw)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_source(path)
    assert str(path) in str(caught.value)
    assert not (tmp_path / "x").exists()


def test_malformed_archives(tmp_path):
    path, value = tmp_path / "m.pt", {"w": GOOD}
    for options, message in (
        ({"method": zipfile.ZIP_DEFLATED}, "'w': its storage is missing, compressed"),
        ({"others": {"m/byteorder": b"big"}}, "byteorder: only little-endian"),
        ({"others": {"n/data.pkl": b"."}}, "has 2 members NAME/data.pkl"),
    ):
        torch_archives.write(path, value, {"0": np.zeros((3, 4), np.float32)}, **options)
        with pytest.raises(CheckpointError, match=message):
            open_source(path)
    torch_archives.write(path, None, {}, raw=b"\x80\x02" + b"}" * 200_000)
    with pytest.raises(CheckpointError, match=r"'m/data\.pkl': 200002 bytes are more than a file of"):
        open_source(path)
    path.write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")
    with pytest.raises(CheckpointError, match=r"it is a pickle, as PyTorch wrote before 1\.6, which may run code"):
        open_source(path)


@given(st.data())
def test_any_damage_is_an_error_of_the_checkpoint(tmp_path_factory, data):
    """Bytes of a pickle that are changed, cut or repeated."""
    raw = bytearray(b"\x80\x02" + instructions({"a": {"W_q": GOOD, "shape": size(3, 4), "nbits": 4}, "w": GOOD}) + b".")
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.pt"
    torch_archives.write(path, None, {"0": VALUES}, raw=bytes(raw[: data.draw(st.integers(1, len(raw)))]))
    with suppress(CheckpointError):
        open_source(path).close()

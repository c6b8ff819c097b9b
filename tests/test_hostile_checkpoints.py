"""Checkpoints made to do harm: CheckpointError that names the file, at little cost, whatever sizes they claim.

`refused` measures the allocations of Python and NumPy: reading may need 16 MiB more than the file's size.
"""

from __future__ import annotations

import json
import os
import struct
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from files import safetensors, with_header
from helpers import normal
from hostile import BEYOND, refused

import qgemm
from qgemm.converter import open_source
from qgemm.converter.tokenizer import added_tokens
from qgemm.converter.weight import pack_groups, weight_from_tensor
from qgemm.errors import CheckpointError, QgemmError
from qgemm.files.imatrix import read_imatrix

# ---------------------------------------------------------------- safetensors

TENSOR = '"dtype":"U8","shape":[],"data_offsets":[%d,%d]'


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b'{"\\ud800":{' + TENSOR.encode() % (0, 1) + b"}}", "header: a string at byte 1 is not one of UTF-8"),
        (b'{"\xed\xa0\x80":{' + TENSOR.encode() % (0, 1) + b"}}", "header: a string at byte 1 is not one of UTF-8"),
        (b'{"__metadata__":{"a":"\\udc00"}}', "is not one of UTF-8"),
        (b'{"__metadata__":{"a":"b","a":"c"}}', "__metadata__: a name comes twice"),
        (b'{"__metadata__":{},"__metadata__":{}}', "header: a name comes twice"),
        (b'{"a\nb":{}}', "header: a string at byte 1"),
        (b'{"a', "header: a string at byte 1"),
        (b'{"a":', "tensor 'a': must have dtype, shape and data_offsets"),
        (b'{"a":{"dtype":"U8","dtype":"U8","shape":[]}}', "tensor 'a': must have dtype, shape and data_offsets"),
        (b'{"a":{"dtype":"U8","shape":[01],"data_offsets":[0,1]}}', "tensor 'a': shape must be a list of whole"),
        (b'{"a":{"dtype":"U8","shape":[1,],"data_offsets":[0,1]}}', "tensor 'a': shape must be a list of whole"),
        (b'{"a":{"dtype":"U8","shape":["1"],"data_offsets":[0,1]}}', "tensor 'a': must have dtype, shape and"),
        (b'{"a":{"dtype":[1],"shape":[1],"data_offsets":[0,1]}}', "tensor 'a': dtype '[1]' is not the name of one"),
        (b'{"a":{"dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,1]}}', "2^63 elements or more"),
        (b"{" + b" " * 99, "header: ends where"),
        (b"{}x", "header: has 'x' after its end"),
        (b'{"__metadata__":{}]', "header: has ']' at byte 18 where , or } must be"),
    ],
)  # fmt: skip
def test_headers_that_are_refused(header, message, tmp_path):
    assert message in refused(with_header(tmp_path / "x.safetensors", header, b"x"))


def test_headers_with_spaces_and_escapes(tmp_path):
    text = json.dumps(
        {
            "__metadata__": {"a": 'ä"\n', "b": "\U0001f600"},
            "ä\\": {"shape": [2], "data_offsets": [0, 2], "dtype": "U8"},
        },
        indent=1,
    )
    for raw in (text.encode(), text.encode().replace(b"\\u00e4", "ä".encode()) + b" \t\r\n"):
        with open_source(with_header(tmp_path / "x.safetensors", raw, b"ab")) as source:
            assert list(source.weights) == ["ä\\"]
            assert source.metadata == {"safetensors.a": 'ä"\n', "safetensors.b": "\U0001f600"}


MIB = 1 << 20


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":' + b"[[]," * (17 * MIB),  # 67 MiB, more than the file has weights for
        b'{"a":' + b"[[]," * (MIB // 2),
        b'{"a":{"dtype":"U8","shape":[' + b"1," * MIB,
        b"{" + b",".join(b'"%x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i for i in range(35_000)) + b"}",
        b'{"__metadata__":{' + b",".join(b'"%x":"ab"' % i for i in range(130_000)) + b"}}",
        b'{"' + "\U0001f600".encode() * (MIB // 2) + b'":3}',
        b'{"' + b"\\n" * (MIB - 100) + b'":3}',
    ],
    ids=["67 MiB", "lists", "axes", "tensors", "notes", "wide", "escapes"],
)
def test_headers_of_much(header, tmp_path):
    refused(with_header(tmp_path / "x.safetensors", header, bytes(8)))


def test_a_header_of_many_tensors_is_read(tmp_path):
    """The header has as many tensors as models do, and almost a MiB of notes about training."""
    arrays = {f"model.layers.{i}.weight": np.ones(1, np.uint8) for i in range(4_000)}
    path = safetensors(tmp_path / "x.safetensors", arrays, {"notes": json.dumps([{"tag": "é"}] * 30_000)})
    with open_source(path) as source:
        assert len(source.weights) == 4_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[[]," * (MIB // 6), "is made of brackets"),
        (b'{"weight_map":{' + b" " * MIB + b"}}", "the weights beside it cannot need more than"),
        (b'{"weight_map":{},"weight_map":{}}', "a name comes twice in an object"),
        (b'{"a":' + b"9" * 100_000 + b"}", "a number has 100000 digits"),
        (b'{"a":' + b"[" * 900 + b"]" * 900 + b"}", "is JSON nested 901 deep, at most 64 are read"),
        (b'{"weight_map":{"a":"\\ud800.safetensors"}}', "no file can have this name"),
    ],
)
def test_indexes_of_much(text, message, tmp_path):
    path = tmp_path / "x.safetensors.index.json"
    path.write_bytes(text)
    if "no file" in message:
        with pytest.raises(QgemmError, match=message):
            open_source(path)
    else:
        assert message in refused(path)


def test_a_tokenizer_may_be_large_beside_a_small_model(tmp_path):
    """Gemma 3 270M has 33 MB beside 536 MB in bfloat16, SmolLM2-135M 3.5 MB beside 96 MB in Q4_1."""
    text = b'{"added_tokens":[]' + b" " * 2 * MIB + b"}"
    (tmp_path / "tokenizer.json").write_bytes(text)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(MIB))
    with pytest.raises(QgemmError, match="the weights beside it cannot need more than"):
        list(added_tokens(tmp_path))
    os.truncate(weights, 3 * MIB)
    assert not list(added_tokens(tmp_path))


def test_text_may_have_brackets(tmp_path):
    path = safetensors(tmp_path / "m.safetensors", {"w": normal(2)})
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"template": "[" * 9_000}, "weight_map": {"w": path.name}}))
    with open_source(index) as source:
        assert list(source.weights) == ["w"]


@pytest.mark.parametrize("settings", [{"bits": "\xe9"}, {"quant_method": "fp8", "weight_block_size": "\u202e"}])
def test_what_configs_say_is_printed_as_ascii(settings, tmp_path):
    safetensors(tmp_path / "x.safetensors", {"w": normal(2)})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    with pytest.raises(CheckpointError, match="is not one") as caught:
        open_source(tmp_path / "x.safetensors")
    assert str(caught.value).isascii()


def test_as_many_groups_as_weights(tmp_path):
    """Zeros are unpacked a few at a time: whole, 16 MiB of words would be 64 MiB of int16."""
    k, n = 1 << 15, 1 << 10
    parts = {
        "l.qweight": np.zeros((k // 8, n), np.int32),
        "l.qzeros": np.full((k, n // 8), 0x77777777, np.int32),
        "l.scales": np.ones((k, n), np.float16),
    }
    parts["l.qzeros"][-1, -1] = 0x67777777
    safetensors(tmp_path / "x.safetensors", parts)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 1, "sym": True}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    del parts
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=r"is symmetric by its config \(sym\), but has zeros of 7 to 8"):
        open_source(tmp_path / "x.safetensors")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < BEYOND


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        *(({"w.in_sum2": [1.0, 1], "w.counts": [count]}, "a count is negative") for count in (-1, np.nan, np.inf)),
        ({"w.in_sum2": [1.0, 1], "w.counts": [1], "v.counts": [1]}, r"v\.counts.* no \.in_sum2 beside"),
        ({"w.in_sum2": [1.0, 1], "v.in_sum2": [1.0, 1], "w.counts": [1]}, r"'v': needs \.in_sum2 and \.counts"),
    ],
)
def test_counts_of_an_importance_matrix(tensors, message, tmp_path):
    qgemm.write(tmp_path / "i.gguf", {name: np.float32(numbers) for name, numbers in tensors.items()})
    with pytest.raises(CheckpointError, match=message):
        read_imatrix(tmp_path / "i.gguf")


def test_empty_sums_of_an_importance_matrix(tmp_path):
    path = tmp_path / "i.gguf"
    qgemm.write(path, {"w.in_sum2": np.float32([1, 1]), "w.counts": np.float32([1])})
    shape = b"w.in_sum2" + struct.pack("<I", 1)
    assert path.read_bytes().count(shape) == 1
    path.write_bytes(path.read_bytes().replace(shape + struct.pack("<Q", 2), shape + struct.pack("<Q", 0)))
    with pytest.raises(CheckpointError, match="of type F32, not empty"):
        read_imatrix(path)


def test_entries_of_an_importance_matrix_come_once(tmp_path):
    entry = struct.pack("<i1s2if", 1, b"w", 1, 1, 1)
    (tmp_path / "i.dat").write_bytes(struct.pack("<i", 2) + 2 * entry)
    with pytest.raises(CheckpointError, match=r"i\.dat: 'w': comes twice"):
        read_imatrix(tmp_path / "i.dat")


def test_numbers_of_chunks_beyond_their_key_are_no_origin(tmp_path):
    """The new file's key is a UINT32."""
    tensors = {"w.in_sum2": np.float32([1, 1]), "w.counts": np.float32([1])}
    qgemm.write(tmp_path / "i.gguf", tensors, {"imatrix.chunk_count": np.uint64(2**40)})
    assert read_imatrix(tmp_path / "i.gguf").origin.chunks == 0


def test_what_overflows_warns_nobody(tmp_path):
    """Warnings are errors in tests: sums by counts, doubles as floats, scales times codes."""
    qgemm.write(tmp_path / "i.gguf", {"w.in_sum2": np.float32([3e38, 1]), "w.counts": np.float32([1e-9])})
    with pytest.raises(CheckpointError, match="not finite"):
        read_imatrix(tmp_path / "i.gguf")
    (tmp_path / "i.dat").write_bytes(struct.pack("<2i1s2iI", 1, 1, b"w", 1, 1, 0x7F800001))  # a NaN that signals
    with pytest.raises(CheckpointError, match="not finite"):
        read_imatrix(tmp_path / "i.dat")
    np.save(tmp_path / "x.npy", np.array([[1e300, 1]], np.float64))
    with open_source(tmp_path / "x.npy") as source:
        assert np.isinf(source.weights["x"].values(0, 1))
    blocks = np.zeros((1, 1), qgemm.FORMATS["q4_0"].dtype)
    blocks["d"], blocks["qs"] = np.inf, 0x88
    weight = weight_from_tensor(qgemm.Tensor("q4_0", (1, 32), blocks))
    assert np.isnan(weight.codes.read(0, 32).values()).all()
    blocks["d"] = 6e4
    with np.errstate(all="ignore"):  # the format's own rounding to float16 may overflow
        assert np.isinf(pack_groups(qgemm.FORMATS["q4_1"], weight.codes.read(0, 32))["m"]).all()


@pytest.mark.parametrize("dtype", [np.uint64, ml_dtypes.float8_e4m3fn])
def test_parts_of_types_that_no_part_has(dtype, tmp_path):
    """Found by fuzzing: what GGUF has no type for was left out with the parts that were joined, in silence."""
    path = safetensors(tmp_path / "x.safetensors", {"w": normal(2), "k.kbit_planes": np.zeros((2, 16), dtype)})
    kind = "U64" if dtype is np.uint64 else "F8_E4M3"
    with pytest.raises(QgemmError, match=rf"tensor 'k\.kbit_planes': is {kind}, as no part of a kbit tensor is"):
        open_source(path)

"""The writer: its files read back exactly, and no failure damages an existing file."""

from __future__ import annotations

import os
import random
import tracemalloc
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from files import ones, written
from gguf import GGUFReader
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from qgemm import Tensor, quantize
from qgemm.codec.format import Format
from qgemm.errors import GGUFError
from qgemm.files.gguf.layout import ALIGNMENT, SPLIT_KEYS
from qgemm.files.gguf.parts import RESERVED
from qgemm.files.gguf.reader import open as open_gguf
from qgemm.files.gguf.writer import MAX_ALIGNMENT, write
from qgemm.formats import GGML_TYPES

EXCERPT = Path(__file__).parent / "data" / "minilm_excerpt.gguf"
NUMBERS = ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8")


# ---------------------------------------------------------------- round trips


@st.composite
def numbers(draw: st.DrawFn) -> np.generic | np.ndarray:
    """A NumPy scalar or array of any type that GGUF has, of any bit pattern."""
    dtype = np.dtype(draw(st.sampled_from(NUMBERS)))
    count = draw(st.one_of(st.none(), st.integers(0, 5)))
    raw = draw(st.binary(min_size=(count or 1) * dtype.itemsize, max_size=(count or 1) * dtype.itemsize))
    array = np.frombuffer(raw, dtype)
    return array[0] if count is None else array[:count]


def texts(limit: int = 20) -> st.SearchStrategy[str]:
    """Text, or any bytes as a reader gives them."""
    raw = st.binary(max_size=limit).map(lambda b: b.decode("utf-8", "surrogateescape"))
    return st.one_of(st.text(max_size=limit // 4), raw)


VALUES = st.one_of(
    numbers(),
    st.booleans(),
    st.lists(st.booleans(), max_size=4).map(lambda bools: np.array(bools, bool)),
    texts(),
    st.lists(texts(), max_size=4),
)
TAKEN = {*RESERVED, *SPLIT_KEYS, ALIGNMENT}  # keys whose values say something about the file
KEYS = st.text(st.characters(min_codepoint=1, max_codepoint=127), min_size=1, max_size=30).filter(
    lambda key: key not in TAKEN
)
METADATA = st.tuples(st.dictionaries(KEYS, VALUES, max_size=5), st.sampled_from((None, 1, 2, 8, 32, 4096))).map(
    lambda drawn: drawn[0] if drawn[1] is None else {**drawn[0], ALIGNMENT: np.uint32(drawn[1])}
)
NAMES = st.text(max_size=63).filter(lambda name: "\0" not in name and len(name.encode()) <= 63)


@st.composite
def stored(draw: st.DrawFn) -> Tensor:
    """A Tensor of any ggml type and random bytes, 1 to 4 dimensions."""
    fmt = draw(st.sampled_from(list(GGML_TYPES.values())))
    *leading, blocks = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    raw = random.Random(draw(st.integers(0, 99))).randbytes(int(np.prod(leading)) * blocks * fmt.block_bytes)
    packed = np.frombuffer(raw, fmt.dtype).reshape(*leading, blocks)
    return Tensor(fmt, (*leading, blocks * fmt.weights), packed)


def assert_same(ours: Mapping, theirs: Mapping) -> None:
    """Equal metadata: keys in order, types and bits of the values."""
    assert list(ours) == list(theirs)
    for key, value in theirs.items():
        assert type(ours[key]) is type(value), key
        if isinstance(value, (np.ndarray, np.generic)):
            assert (ours[key].dtype, ours[key].shape) == (value.dtype, value.shape)
            assert ours[key].tobytes() == value.tobytes()
        else:
            assert ours[key] == value


@settings(max_examples=100)
@given(tensors=st.dictionaries(NAMES, stored(), max_size=4), metadata=METADATA)
@example(tensors={}, metadata={})
@example(tensors={"": quantize(np.ones((1, 32), np.float32), "q4_0")}, metadata={"k": "", "l": [], "m": [""]})
def test_round_trip(tensors, metadata, tmp_path_factory):
    """What `write` accepts, `open` accepts, and nothing changes: order, types, bits."""
    path = tmp_path_factory.getbasetemp() / "round-trip.gguf"
    write(path, tensors, metadata)
    with open_gguf(path) as file:
        assert list(file) == list(tensors)
        for name, tensor in tensors.items():
            assert (file[name].format, file[name].shape) == (tensor.format, tensor.shape)
            assert file[name].blocks.tobytes() == tensor.blocks.tobytes()
        assert_same(file.metadata, metadata)
        assert file.alignment == metadata.get(ALIGNMENT, 32)
        copy_path = path.with_suffix(".again")
        write(copy_path, file, file.metadata)
        assert copy_path.read_bytes() == path.read_bytes()


def test_excerpt_is_rewritten_byte_for_byte(tmp_path):
    with open_gguf(EXCERPT) as file:
        path = written(tmp_path / "x.gguf", file, file.metadata)
    assert path.read_bytes() == EXCERPT.read_bytes()


def test_gguf_package_reads_what_is_written(tmp_path):
    tensors = {str(fmt): quantize(np.ones((3, 64), np.float32), fmt) for fmt in map(str, ("q4_0", "q8_0", "f16"))}
    metadata = {"a": 3, "general.architecture": "test", "b": [1.5, 2], "c": ["x", "yz"], "d": np.int8([-1, 2])}
    oracle = GGUFReader(written(tmp_path / "x.gguf", tensors, metadata))
    assert [tensor.name for tensor in oracle.tensors] == list(tensors)
    for theirs, ours in zip(oracle.tensors, tensors.values(), strict=True):
        assert theirs.shape.tolist() == [64, 3]
        assert theirs.data.tobytes() == ours.blocks.tobytes()
    values = {name: field.contents() for name, field in oracle.fields.items() if not name.startswith("GGUF.")}
    assert values == {"a": 3, "general.architecture": "test", "b": [1.5, 2], "c": ["x", "yz"], "d": [-1, 2]}
    assert list(values) == list(metadata)


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (True, True),
        (7, np.uint32(7)),
        (-7, np.int32(-7)),
        (2**32, np.int64(2**32)),
        (2**63, np.uint64(2**63)),
        (0.1, np.float32(0.1)),
        (1e300, np.float64(1e300)),
        (float("inf"), np.float32("inf")),
        ("text", "text"),
        (np.str_("text"), "text"),
        (np.array("text"), "text"),
        (np.array(3, np.int16), np.int16(3)),
        (np.bool_(True), True),
        (np.float64(0.1), np.float64(0.1)),
        ((1, 2), np.uint32([1, 2])),
        ([1, -1], np.int32([1, -1])),
        ([1, 2**40], np.int64([1, 2**40])),
        ([1, 2.5], np.float32([1, 2.5])),
        ([1.0, 1e40], np.float64([1.0, 1e40])),
        ([True, False], np.array([True, False])),
        ([np.int8(1), np.int8(2)], np.int8([1, 2])),
        (np.array(["a", "bc"]), ["a", "bc"]),
        (np.array(["a", 1], object)[:1], ["a"]),
        (np.arange(3, dtype=">i4"), np.int32([0, 1, 2])),
        (np.arange(6, dtype="u2")[::2], np.uint16([0, 2, 4])),
        ([], []),
        (np.array([], np.float64), np.float64([])),
    ],
    ids=repr,
)
def test_types_of_values(value, stored, tmp_path):
    with open_gguf(written(tmp_path / "x.gguf", {}, {"k": value})) as file:
        assert_same(file.metadata, {"k": stored})


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "i2", "i4", "i8", ">f4", ">i2", ml_dtypes.bfloat16], ids=str)
def test_arrays(dtype, tmp_path):
    """Plain arrays in any memory order are stored in C order."""
    x = np.arange(2 * 3 * 4).reshape(2, 3, 4).astype(dtype)
    tensors = {"c": x, "f": np.asfortranarray(x), "t": x.T, "s": x[:, ::2, ::-1], "1": x[0, 0], "m": x[0]}
    with open_gguf(written(tmp_path / "x.gguf", tensors)) as file:
        for name, want in tensors.items():
            assert file[name].shape == want.shape
            bits = file[name].blocks
            got = bits.view(ml_dtypes.bfloat16) if file[name].format.name == "bf16" else bits
            assert_array_equal(got.astype(np.float64), want.astype(np.float64))


def test_rows_and_planes_of_a_tensor(tmp_path):
    weight = quantize(np.random.default_rng(0).standard_normal((4, 6, 64)).astype(np.float32), "q5_1")
    tensors = {"rows": weight[1], "every second": weight[:, ::2], "row": weight[2, 3]}
    with open_gguf(written(tmp_path / "x.gguf", tensors)) as file:
        for name, want in tensors.items():
            assert file[name].blocks.tobytes() == want.blocks.tobytes()


def test_tensors_made_on_demand(tmp_path):
    """Each is looked up for its shape, and later for its blocks, which are made once."""

    class Made(Mapping):
        def __iter__(self):
            return iter(("a", "b", "c"))

        def __len__(self):
            return 3

        def __getitem__(self, name):
            def blocks() -> np.ndarray:
                looked_up.append(name)
                return np.full((2, 4), ord(name), "<f4")

            return Tensor(GGML_TYPES[0], (2, 4), blocks)

    looked_up: list[str] = []
    with open_gguf(written(tmp_path / "x.gguf", Made())) as file:
        assert looked_up == ["a", "b", "c"]
        assert [t.blocks[0, 0] for t in file.values()] == [97, 98, 99]


def test_blocks_that_are_not_what_was_promised(tmp_path):
    tensor = Tensor(GGML_TYPES[0], (2, 4), lambda: np.zeros((2, 5), "<f4"))
    with pytest.raises(GGUFError, match=r"x\.gguf: tensor 'w': is .* with 40 bytes of blocks"):
        write(tmp_path / "x.gguf", {"w": tensor})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("layout", ["mapped", "transposed"])
def test_memory_is_bounded(layout, tmp_path):
    matrix = np.memmap(tmp_path / "matrix", np.float32, "w+", shape=(4096, 4096))  # 64 MiB
    tracemalloc.start()
    try:
        write(tmp_path / "x.gguf", {"w": matrix if layout == "mapped" else matrix.T})
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------- refusals, by the reader's rules

REFUSED = {
    # tensors, metadata, message
    "empty key": ({}, {"": 1}, "key '': a key must not be empty"),
    "NUL in a key": ({}, {"a\0b": 1}, "key 'a\\x00b': a key must be ASCII without NUL"),
    "key of another language": ({}, {"größe": 1}, "key 'gr\\xf6\\xdfe': a key must be ASCII without NUL"),
    "surrogate in a key": ({}, {"\ud800": 1}, "key '\\ud800': a key must be ASCII"),
    "long key": ({}, {"k" * 65536: 1}, "key 'kkk"),
    "integer": ({}, {"k": 2**64}, "key 'k': 18446744073709551616 to 18446744073709551616 are too large"),
    "integers": ({}, {"k": [-1, 2**63]}, "key 'k': -1 to 9223372036854775808 are too large for 64 bits"),
    "matrix": ({}, {"k": np.zeros((2, 2))}, "key 'k': an array must have one dimension, has 2"),
    "surrogate": ({}, {"k": "\ud800"}, "key 'k': the string '\\ud800' holds a surrogate"),
    "alignment of 3": ({}, {"general.alignment": 3}, "key 'general.alignment': must be a power of two, is 3"),
    "alignment of 0": ({}, {"general.alignment": 0}, "key 'general.alignment': must be a power of two, is 0"),
    "alignment as u64": ({}, {"general.alignment": np.uint64(32)}, "key 'general.alignment': must be UINT32"),
    "alignment as text": ({}, {"general.alignment": "32"}, "key 'general.alignment': must be UINT32, is STRING"),
    "alignment as array": ({}, {"general.alignment": [32]}, "key 'general.alignment': must be UINT32, is ARRAY"),
    "huge alignment": ({}, {"general.alignment": 2 * MAX_ALIGNMENT}, "key 'general.alignment': is 2097152"),
    "a shard": ({}, {"split.count": 2}, "key 'split.count': is not 1 as it must be in a file that is not split"),
    "a later shard": ({}, {"split.no": 1}, "key 'split.no': is not 0"),
    "other total": (ones(), {"split.tensors.count": 2}, "key 'split.tensors.count': is not 1"),
    "total as text": (ones(), {"split.tensors.count": "1"}, "key 'split.tensors.count': is not 1"),
    "long name": ({"n" * 64: np.ones(1)}, {}, "tensor 'nnn"),
    "long name in bytes": ({"ö" * 32: np.ones(1)}, {}, "tensor '\\xf6"),
    "NUL in a name": ({"a\0b": np.ones(1)}, {}, "tensor 'a\\x00b': a name must not hold NUL"),
    "one name twice": ({"é": np.ones(1), "\udcc3\udca9": np.ones(1)}, {}, "tensor '\\udcc3\\udca9': another name"),
    "no dimension": ({"w": np.array(1.0)}, {}, "tensor 'w': 0 dimensions are not 1 to 5"),
    "six dimensions": ({"w": np.ones((1,) * 6)}, {}, "tensor 'w': 6 dimensions are not 1 to 5"),
    "empty": ({"w": np.ones((0, 4))}, {}, "tensor 'w': shape (0, 4) holds a zero"),
    "format of no file": (
        {"w": Tensor(Format("own", 1, np.dtype("u1")), (4,), np.zeros(4, "u1"))},
        {},
        "tensor 'w': ggml has no type for OWN",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusal(name, tmp_path):
    tensors, metadata, message = REFUSED[name]
    with pytest.raises(GGUFError) as caught:
        write(tmp_path / "x.gguf", tensors, metadata)
    assert str(caught.value).startswith(f"{tmp_path / 'x.gguf'}: {message}")
    assert str(caught.value).isascii()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({}, {1: 1}, "key '1': a key must be str, is int"),
        ({}, {"k": None}, "key 'k': GGUF has no type for NoneType"),
        ({}, {"k": b"bytes"}, "key 'k': GGUF has no type for bytes"),
        ({}, {"k": {"a": 1}}, "key 'k': GGUF has no type for dict"),
        ({}, {"k": [1, "a"]}, "key 'k': GGUF has no type for int and str"),
        ({}, {"k": [True, 1]}, "key 'k': GGUF has no type for bool and int"),
        ({}, {"k": [[1]]}, "key 'k': GGUF has no type for list"),
        ({}, {"k": [np.int8(1), np.int16(1)]}, "key 'k': GGUF has no type for int16 and int8"),
        ({}, {"k": np.float16(1)}, "key 'k': GGUF has no type for float16"),
        ({}, {"k": 1j}, "key 'k': GGUF has no type for complex"),
        ({1: np.ones(1)}, {}, "tensor '1': a name must be str, is int"),
        ({"w": [1.0]}, {}, r"tensor 'w': must be a qgemm\.Tensor or a NumPy array, is list"),
        ({"w": np.ones(1, bool)}, {}, "tensor 'w': GGUF has no type for arrays of bool, only for "),
        ({"w": np.ones(1, np.uint16)}, {}, "tensor 'w': GGUF has no type for arrays of uint16"),
    ],
    ids=str,
)
def test_what_gguf_has_no_type_for(tensors, metadata, message, tmp_path):
    with pytest.raises(TypeError, match=message):
        write(tmp_path / "x.gguf", tensors, metadata)
    assert os.listdir(tmp_path) == []

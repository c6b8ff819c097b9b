"""The reader against malformed, hostile, odd and valid files: a right verdict, in words, with nothing left behind."""

from __future__ import annotations

import hashlib
import random
import struct
import sys
import tracemalloc

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType, dequantize
from gguf_bytes import (
    ACCEPTED,
    ARRAY,
    BOOL,
    CASES,
    F32,
    I32,
    ONE,
    OURS,
    STRING,
    U8,
    U16,
    U64,
    VERDICTS,
    array,
    case_path,
    file_of,
    key,
    refused,
    saved,
    tensor,
    text,
)
from helpers import EXCERPT
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from qgemm.errors import GGUFError, UnsupportedError
from qgemm.files.gguf.reader import open as open_gguf
from qgemm.formats import GGML_TYPES

# ---------------------------------------------------------------- the cases


@pytest.mark.parametrize("name", CASES)
def test_verdict(name):
    case = CASES[name]
    path = case_path(name)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == case["sha256"]
    assert not (case["firm"] and name in OURS), "only a matter of policy can be decided otherwise"
    tracemalloc.start()
    try:
        if VERDICTS[name] == "reject":
            refused(path)
        else:
            with open_gguf(path) as file:
                list(file.items())
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


MESSAGES = {
    "ALN-014": "key 'general.alignment': must be UINT32, is STRING",
    "ARR-003": "key 't.arr': the file ends within its value: 18446744073709551615 bytes needed, 16 left",
    "ARR-014": "key 't.arr': nested arrays are not read: the readers of GGUF disagree on what they mean",
    "DIM-008": "tensor 'w': the file ends within its data: it has 4224 of 73786976294838206592 bytes",
    "DIM-018": "tensor 'w': row length 128 is not a multiple of 256 (Q4_K)",
    "HDR-001": "is empty",
    "HDR-003": "header: not a GGUF file: it starts with 'GGU'",
    "HDR-008": "header: not a GGUF file: it starts with 'vers', it is a git-lfs pointer, `git lfs pull` fetches "
    "the file itself",
    "HDR-014": "header: version 1 is not 2 or 3",
    "HDR-020": "header: big-endian files are not read, gguf-convert-endian makes them little-endian",
    "KV-008": r"key 't.\udcff\udcfe': a key must be ASCII without NUL",
    "KV-023": "key 't.k': a bool must be 0 or 1, is 2",
    "OFF-009": "tensor 'b': offset 36 is not a multiple of the alignment 32",
    "OFF-011": "tensor 'b': offset 96 lies inside tensor 'a'",
    "TI-008": r"tensor 'w\x00a': a name must not hold NUL",
    "TI-018": "tensor 'w': 4294967295 dimensions are not 1 to 5",
    "TRN-035": "tensor 'a.weight': the file ends within its offset: 8 bytes needed, 4 left",
    "TYP-001": "tensor 'w': type 4 was Q4_2, which ggml removed",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_message(name):
    assert refused(case_path(name)) == MESSAGES[name]


@pytest.mark.parametrize("path", [*map(case_path, ACCEPTED), EXCERPT], ids=lambda path: path.stem)
def test_accepted_reads_as_gguf_reader(path):
    """The gguf package reads the same names, shapes, types, offsets, bytes and values."""
    oracle = GGUFReader(path)
    content = path.read_bytes()
    with open_gguf(path) as file:
        assert list(file) == [tensor.name for tensor in oracle.tensors]
        for theirs in oracle.tensors:
            ours = file[theirs.name]
            assert ours.format is GGML_TYPES[theirs.tensor_type]
            assert ours.shape == tuple(map(int, reversed(theirs.shape)))
            assert file.place(theirs.name) == (str(path), theirs.data_offset)
            assert not ours.blocks.flags.writeable
            raw = ours.blocks.tobytes()
            assert raw == content[theirs.data_offset :][: len(raw)]
            if str(ours.format) != "Q8_1":  # to which the package gives 40 bytes per block, where ggml has 36
                assert raw == theirs.data.tobytes()
        fields = {name: field for name, field in oracle.fields.items() if not name.startswith("GGUF.")}
        assert list(file.metadata) == list(fields)
        for name, field in fields.items():
            assert_same_value(file.metadata[name], field)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("DAT-")])
def test_any_bit_pattern_decodes_as_the_package_decodes_it(name):
    """NaN, infinite, subnormal scales: values are data."""
    for theirs in GGUFReader(case_path(name)).tensors:
        with open_gguf(case_path(name)) as file:
            ours = file[theirs.name]
            if ours.format.levels is None or ours.format.name == "q8_1":  # the package gguf does not decode it
                continue
            with np.errstate(all="ignore"):
                want = dequantize(theirs.data, theirs.tensor_type)
            assert_array_equal(
                ours.dequantize().view(np.uint32)[~np.isnan(want)], want.view(np.uint32)[~np.isnan(want)]
            )
            assert_array_equal(np.isnan(ours.dequantize()), np.isnan(want))


def assert_same_value(ours, field):
    parts = [field.parts[index] for index in field.data]
    if field.types[-1] == GGUFValueType.STRING:
        raw = [text.encode("utf-8", "surrogateescape") for text in ([ours] if len(field.types) == 1 else ours)]
        assert raw == [part.tobytes() for part in parts]
    elif field.types[0] == GGUFValueType.ARRAY:
        theirs = np.concatenate(parts) if parts else np.empty(0)
        assert isinstance(ours, np.ndarray)
        assert ours.tobytes() == theirs.tobytes()
    else:
        assert isinstance(ours, (bool, np.generic))
        assert np.asarray(ours).tobytes() == parts[0].tobytes()
        assert isinstance(ours, bool) or ours.dtype == parts[0].dtype


# ---------------------------------------------------------------- rules that no case of the sample tests

BROKEN = {
    # content, message
    "n_tensors beyond 2^63": (
        b"GGUF" + struct.pack("<IQQ", 3, 2**64 - 1, 2**64 - 1) + bytes(64),
        "header: 18446744073709551615 tensors and 18446744073709551615 keys need",
    ),
    "version 0": (file_of(version=0), "header: version 0"),
    "big-endian version 2": (b"GGUF" + struct.pack(">IQQ", 2, 0, 0), "header: big-endian"),
    "zip archive": (b"PK\3\4" + bytes(60), "header: not a GGUF file: it starts with 'PK\\x03\\x04', it is a zip"),
    "safetensors": (struct.pack("<Q", 64) + b'{"__metadata__":', "header: not a GGUF file: it starts with '@\\x00"),
    "empty key": (file_of([key(b"", U8, b"\0\0\0\0")]), "key '': a key must not be empty"),
    "key that is not ASCII": (file_of([key("naïve".encode(), U8, b"\0")]), "key 'na\\xefve': a key must be ASCII"),
    "escape in a key": (file_of([key(b"\x1b[2J\n", 99, b"\0")]), "key '\\x1b[2J\\n': there is no type 99"),
    "second key truncated": (
        file_of([key(b"long", U8, b"\0"), key(b"b", U8, b"")], alignment=1),
        "key 'b': the file ends within its value",
    ),
    "alignment 0": (
        file_of([key(b"general.alignment", 4, struct.pack("<I", 0))]),
        "key 'general.alignment': must be a power of two, is 0",
    ),
    "alignment beyond the file": (
        file_of([key(b"general.alignment", 4, struct.pack("<I", 1 << 31))], [tensor(b"w", (32,))], ONE),
        "tensor 'w': the file ends within its data: it has 224 of 2147483776",
    ),
    "alignment as a large array": (
        file_of([key(b"general.alignment", ARRAY, array(4, 99, bytes(396)))]),
        "key 'general.alignment': must be UINT32, is ARRAY",
    ),
    "empty nested array": (file_of([key(b"k", ARRAY, array(ARRAY, 0, b""))]), "key 'k': nested arrays"),
    "empty array of no type": (file_of([key(b"k", ARRAY, array(13, 0, b""))]), "key 'k': there is no type 13"),
    "bool array with a 2": (file_of([key(b"k", ARRAY, array(BOOL, 3, b"\0\1\2"))]), "key 'k': a bool must be"),
    "strings beyond the end": (
        file_of([key(b"k", ARRAY, array(STRING, 2**61, text(b"a")))]),
        "key 'k': the file ends before string",
    ),
    "last string beyond the end": (
        file_of([key(b"k", ARRAY, array(STRING, 2, text(b"a") + text(b"b" * 99)[:-90]))], alignment=1),
        "key 'k': the file ends within its strings",
    ),
    "string length that wraps": (
        file_of([key(b"k", ARRAY, array(STRING, 2, struct.pack("<Q", 2**64 - 8) + bytes(64)))]),
        "key 'k': the file ends before string 1 of 2",
    ),
    "name of 128 bytes": (file_of((), [tensor(b"n" * 128, (32,))], ONE), "tensor 'nnnn"),
    "escape in a name": (file_of((), [tensor(b"\x1b]0;x\7", (32,), 99)], ONE), "tensor '\\x1b]0;x\\x07': type 99"),
    "six dimensions": (file_of((), [tensor(b"w", (1,) * 6)], ONE), "tensor 'w': 6 dimensions are not 1 to 5"),
    "an empty tensor too large": (file_of((), [tensor(b"w", (2**62, 0))], ONE), f"tensor 'w': shape (0, {2**62}) is"),
    "four factors that wrap": (
        file_of((), [tensor(b"w", (2**16,) * 4, 24)], ONE),
        "tensor 'w': the file ends within its data",
    ),
    "no data at all": (file_of((), [tensor(b"w", (32,))]), "tensor 'w': the file ends within its data"),
    "overlap out of order": (
        file_of((), [tensor(b"a", (64,), 0, 128), tensor(b"b", (64,), 0, 0)], bytes(384)),
        "tensor 'a': offset 128 lies inside tensor 'b'",
    ),
    "a name twice": (file_of((), [tensor(b"a", (8,)), tensor(b"a", (8,), 0, 32)], ONE), "tensor 'a': this name comes"),
    "name of one byte": (file_of((), [tensor(b"\xff", (8,))], ONE), "tensor '\\udcff': a name must be UTF-8"),
    "name that is overlong": (
        file_of((), [tensor(b"\xc0\xaf", (8,))], ONE),
        "tensor '\\udcc0\\udcaf': a name must be UTF-8",
    ),
    "name of a surrogate": (
        file_of((), [tensor(b"\xed\xa0\x80", (8,))], ONE),
        "tensor '\\udced\\udca0\\udc80': a name must be",
    ),
    "name beyond Unicode": (file_of((), [tensor(b"\xf4\x90\x80\x80", (8,))], ONE), "tensor '\\udcf4\\udc90"),
    "name cut short": (file_of((), [tensor("ä".encode()[:1], (8,))], ONE), "tensor '\\udcc3': a name must be UTF-8"),
    "key of one byte": (file_of([key(b"\xff", U8, b"\0")]), "key '\\udcff': a key must be ASCII"),
    "split.count of a string": (file_of([key(b"split.count", STRING, text(b"2"))]), "key 'split.count': must be an"),
    "split.no without a split": (file_of([key(b"split.no", U16, b"\1\0")]), "key 'split.no': shard 1"),
    "split.tensors.count": (
        file_of([key(b"split.tensors.count", I32, struct.pack("<i", 2))], [tensor(b"w", (32,))], ONE),
        "key 'split.tensors.count': is 2, there are 1",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rule(name, tmp_path):
    content, message = BROKEN[name]
    assert refused(saved(tmp_path / "broken.gguf", content)).startswith(message)


@pytest.mark.parametrize("kind", sorted(GGML_TYPES))
def test_every_type_opens_and_lists(kind, tmp_path):
    """Types without a codec too: using one names the missing codec."""
    fmt = GGML_TYPES[kind]
    raw = random.Random(kind).randbytes(6 * fmt.block_bytes)
    content = file_of((), [tensor(b"w", (2 * fmt.weights, 3), kind)], raw)
    with open_gguf(saved(tmp_path / "x.gguf", content)) as file:
        w = file["w"]
        assert (w.format, w.shape, w.nbytes) == (fmt, (3, 2 * fmt.weights), len(raw))
        assert w.blocks.tobytes() == raw
        if fmt.levels is None:
            with pytest.raises(UnsupportedError, match=str(fmt)):
                w.dequantize()


@pytest.mark.parametrize("kind", [kind for kind, fmt in sorted(GGML_TYPES.items()) if fmt.weights > 1])
def test_every_type_refuses_what_its_blocks_do_not_fit(kind, tmp_path):
    """Rows of a part of a block, a last block cut short, and the sizes of a fork to which the number is another type:
    the next tensor lies inside this one, or further after it than an alignment explains.
    """
    fmt, blocks = GGML_TYPES[kind], 1024

    def verdict(k: int, start: int, size: int) -> str:
        """The verdict on w [512, k], and v at `start` in `size` bytes of data."""
        tensors = tensor(b"w", (k, blocks // 2), kind), tensor(b"v", (8,), 0, start)
        return refused(saved(tmp_path / "x.gguf", file_of((), tensors, bytes(size))))

    k, size = 2 * fmt.weights, blocks * fmt.block_bytes
    assert str(fmt.weights) in verdict(k - fmt.weights // 2, size, size + 32)
    assert "tensor 'v': the file ends within its data" in verdict(k, size, size + 16)
    assert f"offset {size - 8 * blocks} lies inside tensor 'w'" in verdict(k, size - 8 * blocks, size + 32)
    more = size + 4 * blocks
    assert f"blocks are of another size: {fmt} of another program" in verdict(k, more, more + 32)
    with open_gguf(saved(tmp_path / "y.gguf", file_of((), [
        tensor(b"w", (k, blocks // 2), kind), tensor(b"v", (8,), 0, more - 32)
    ], bytes(more)))) as file:  # fmt: skip
        assert file["w"].nbytes == size  # padded to a page


def test_odd_but_well_formed(tmp_path):
    """Empty values at the very end, odd names, one-byte alignment, merged split, trailing bytes."""
    keys = [
        key(b"general.alignment", 4, struct.pack("<I", 1)),
        key(b"split.no", U16, b"\0\0"),
        key(b"split.count", U16, b"\0\0"),  # what merging shards leaves behind
        key(b"UPPER and \x1b", BOOL, b"\1"),
        key(b"none", ARRAY, array(F32, 0, b"")),
        key(b"nothing", ARRAY, array(STRING, 0, b"")),
        key(b"empty", STRING, text(b"")),
    ]
    names = [b"", b"\x7f", "größe".encode(), b"a\x1b[0m\n", b"n" * 63]
    tensors = [tensor(name, (3,), 24, 5 * i) for i, name in enumerate(names)]
    content = file_of(keys, tensors, bytes(range(25)), alignment=1) + b"trailing"
    with open_gguf(saved(tmp_path / "odd.gguf", content)) as file:
        assert [name.encode() for name in file] == names
        assert [t.blocks.tolist() for t in file.values()] == [[5 * i, 5 * i + 1, 5 * i + 2] for i in range(5)]
        assert file.alignment == 1
        assert file.metadata["UPPER and \x1b"] is True
        assert file.metadata["none"].dtype == np.float32
        assert file.metadata["nothing"] == []
        assert file.metadata["empty"] == ""
        assert "\x1b" not in repr(list(file.items()))
    content = file_of([*keys[1:], key(b"last", ARRAY, array(U64, 0, b""))], alignment=1)
    with open_gguf(saved(tmp_path / "keys.gguf", content)) as file:
        assert file.metadata["last"].shape == (0,)
        assert len(file) == 0


def test_strings_keep_their_bytes(tmp_path):
    raw = [b"\xff\xfe", b"\xed\xa0\x80", "å".encode(), b"", b"\x1b[31m\n\0"]
    keys = [key(b"tokens", ARRAY, array(STRING, len(raw), b"".join(map(text, raw))))]
    with open_gguf(saved(tmp_path / "x.gguf", file_of(keys))) as file:
        assert [token.encode("utf-8", "surrogateescape") for token in file.metadata["tokens"]] == raw


# ---------------------------------------------------------------- large files


@pytest.mark.slow
def test_large_values_are_not_read_on_opening(tmp_path):
    """256k strings, 280k merges, 16 MiB of bytes, an 8 MiB string and trailing bytes cost no objects."""
    tokens = [b"token %d" % i for i in range(256_000)]
    keys = [
        key(b"general.architecture", STRING, text(b"test")),
        key(b"tokens", ARRAY, array(STRING, len(tokens), b"".join(map(text, tokens)))),
        key(b"merges", ARRAY, array(STRING, 280_000, text(b"a b") * 280_000)),
        key(b"bytes", ARRAY, array(U8, 1 << 24, bytes(1 << 24))),
        key(b"bools", ARRAY, array(BOOL, 1 << 20, bytes(1 << 20))),
        key(b"template", STRING, text(b"x" * (8 << 20))),
    ]
    path = saved(tmp_path / "large.gguf", file_of(keys) + bytes(1 << 20))
    tracemalloc.start()
    try:
        file = open_gguf(path)
        assert "tokens" in file.metadata
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    with file:
        assert file.metadata["tokens"][255_999] == "token 255999"
        assert file.metadata["bytes"].shape == (1 << 24,)
        assert len(file.metadata["template"]) == 8 << 20


@pytest.mark.slow
def test_many_tensors(tmp_path):
    tensors = [tensor(b"t%d" % i, (32,), 2, 32 * i) for i in range(50_000)]
    with open_gguf(saved(tmp_path / "many.gguf", file_of((), tensors, bytes(32 * 50_000)))) as file:
        assert len(file) == 50_000
        assert file["t49999"].shape == (32,)


@pytest.mark.parametrize("depth", [2, 200_000])
def test_nesting_is_refused_at_the_first_level(depth, tmp_path):
    """Whatever the recursion limit, since nothing recurses."""
    nested = key(b"deep", ARRAY, array(ARRAY, 1, b"") * (depth - 1) + array(U8, 1, b"\0"))
    path = saved(tmp_path / "deep.gguf", file_of([nested]))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10**6)
    try:
        assert refused(path).startswith("key 'deep': nested arrays")
    finally:
        sys.setrecursionlimit(limit)


# ---------------------------------------------------------------- fuzzing

VALID = [case_path(name).read_bytes() for name in ACCEPTED if CASES[name]["size"] < 1000]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A valid file with bytes changed, numbers replaced by hostile ones, parts cut, doubled or of another file."""
    content = bytearray(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, max(len(content) - 1, 0)))
        kind = draw(st.sampled_from(("flip", "number", "cut", "insert", "splice")))
        if kind == "flip" and content:
            content[position] ^= draw(st.integers(1, 255))
        elif kind == "number":
            number = draw(st.sampled_from((0, 1, 7, 8, 9, 13, 2**31, 2**32 - 1, 2**61, 2**63 - 1, 2**64 - 1)))
            content[position : position + 8] = struct.pack("<Q", number)
        elif kind == "cut":
            del content[position : position + draw(st.integers(1, 64))]
        elif kind == "insert":
            content[position:position] = draw(st.binary(min_size=1, max_size=40))
        elif kind == "splice":
            content[position:] = draw(st.sampled_from(VALID))[draw(st.integers(0, 200)) :]
    return bytes(content)


@settings(max_examples=400)
@given(content=damaged())
def test_damaged_files_open_or_are_refused(content, tmp_path_factory):
    path = saved(tmp_path_factory.getbasetemp() / "damaged.gguf", content)
    try:
        file = open_gguf(path)
    except GGUFError:
        refused(path)
        return
    with file:
        repr((file, dict(file.metadata)))
        for t in file.values():
            assert len(t.blocks.tobytes()) == t.nbytes

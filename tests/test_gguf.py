"""The reader against malformed, hostile, odd and valid files: a right verdict, in words, with nothing left behind."""

from __future__ import annotations

import hashlib
import json
import os
import random
import socket
import struct
import sys
import threading
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter, dequantize
from helpers import DATA, EXCERPT
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from qgemm.errors import GGUFAccessError, GGUFError, GGUFNotFoundError, UnsupportedError
from qgemm.files.gguf.reader import GGUFFile
from qgemm.files.gguf.reader import open as open_gguf
from qgemm.formats import GGML_TYPES

MALFORMED = DATA / "malformed"
CASES = {case["id"]: case for case in json.loads((MALFORMED / "cases.json").read_text())["cases"]}
OURS = {  # cases that are a matter of policy, in which the rules here part from what cases.json suggests
    "DIM-002": "reject",  # ne > 0: an empty tensor is in no real file, and its place in the data is no one's
    "DIM-003": "reject",
    "TI-004": "reject",  # at most 63 bytes: ggml as everybody builds it reads no longer name
    "TI-012": "reject",  # n_dims 1 to 4: a scalar has no row to be packed
    "OFF-015": "accept",  # a gap is waste, not ambiguity
    "OFF-016": "accept",  # as is another order
}
VERDICTS = {name: OURS.get(name, case["expect"]) for name, case in CASES.items()}
ACCEPTED = [name for name, verdict in VERDICTS.items() if verdict == "accept"]
REJECTED = [name for name, verdict in VERDICTS.items() if verdict == "reject"]
U8, U16, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 2, 5, 6, 7, 8, 9, 10


def case_path(name: str) -> Path:
    return MALFORMED / CASES[name]["file"]


# ---------------------------------------------------------------- files by hand


def text(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, elements: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + elements


def tensor(name: bytes, ne: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, kind, offset)


def file_of(keys=(), tensors=(), data: bytes = b"", alignment: int = 32, version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join((*keys, *tensors))
    return head + bytes(-len(head) % alignment) + data


def saved(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def refused(path) -> str:
    """The message with which a file is refused, checked for what every message has to be."""
    with pytest.raises(GGUFError) as caught:
        open_gguf(path)
    message = str(caught.value)
    assert message.isascii()
    assert message.isprintable()
    assert len(message) < 800
    assert message.startswith(ascii(os.fsdecode(path))[1:-1] + ": ")
    return message.removeprefix(ascii(os.fsdecode(path))[1:-1] + ": ")


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
    "TI-018": "tensor 'w': 4294967295 dimensions are not 1 to 4",
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
            if ours.format.levels is None or ours.format.name == "q8_1":  # which the package does not decode
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

ONE = bytes(128)  # data of a float32 tensor of 32 weights
BROKEN = {
    # content, and what is said of it
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
    "name of 64 bytes": (file_of((), [tensor(b"n" * 64, (32,))], ONE), "tensor 'nnnn"),
    "escape in a name": (file_of((), [tensor(b"\x1b]0;x\7", (32,), 99)], ONE), "tensor '\\x1b]0;x\\x07': type 99"),
    "five dimensions": (file_of((), [tensor(b"w", (1,) * 5)], ONE), "tensor 'w': 5 dimensions are not 1 to 4"),
    "zero in the middle": (file_of((), [tensor(b"w", (32, 0, 2))], ONE), "tensor 'w': shape (2, 0, 32) holds a zero"),
    "four factors that wrap": (
        file_of((), [tensor(b"w", (2**16,) * 4, 24)], ONE),
        "tensor 'w': the file ends within its data",
    ),
    "no data at all": (file_of((), [tensor(b"w", (32,))]), "tensor 'w': the file ends within its data"),
    "overlap out of order": (
        file_of((), [tensor(b"a", (64,), 0, 128), tensor(b"b", (64,), 0, 0)], bytes(384)),
        "tensor 'a': offset 128 lies inside tensor 'b'",
    ),
    "equal after decoding": (
        file_of((), [tensor(b"\xff", (8,)), tensor(b"\xff", (8,), 0, 32)], ONE),
        "tensor '\\udcff': this name comes twice",
    ),
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
    """Also those without a codec: what is missing is said when it is used."""
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


def test_odd_but_well_formed(tmp_path):
    """Empty values at the very end, names of any bytes, one-byte alignment, merged split, trailing bytes."""
    keys = [
        key(b"general.alignment", 4, struct.pack("<I", 1)),
        key(b"split.no", U16, b"\0\0"),
        key(b"split.count", U16, b"\0\0"),  # what merging shards leaves behind
        key(b"UPPER and \x1b", BOOL, b"\1"),
        key(b"none", ARRAY, array(F32, 0, b"")),
        key(b"nothing", ARRAY, array(STRING, 0, b"")),
        key(b"empty", STRING, text(b"")),
    ]
    names = [b"", b"\xff\xfe", "größe".encode(), b"a\x1b[0m\n", b"n" * 63]
    tensors = [tensor(name, (3,), 24, 5 * i) for i, name in enumerate(names)]
    content = file_of(keys, tensors, bytes(range(25)), alignment=1) + b"trailing"
    with open_gguf(saved(tmp_path / "odd.gguf", content)) as file:
        assert [name.encode("utf-8", "surrogateescape") for name in file] == names
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


# ---------------------------------------------------------------- paths


def test_what_is_not_a_regular_file(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link to folder").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "link to device").symlink_to("/dev/zero")
    (tmp_path / "link to fifo").symlink_to(tmp_path / "fifo")
    for name in ("fifo", "link to folder", "link to device", "link to fifo", "."):
        assert refused(tmp_path / name) == "is not a regular file"
    (tmp_path / "link to memory").symlink_to("/proc/self/mem")
    assert refused(tmp_path / "link to memory") == "is empty"


def test_socket(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        with pytest.raises(GGUFAccessError, match=r"^socket: cannot be read: No such device"):
            open_gguf("socket")


def test_missing_file(tmp_path):
    (tmp_path / "dangling").symlink_to("nowhere")
    for path in (tmp_path / "none.gguf", tmp_path / "dangling", tmp_path / "none" / "x.gguf"):
        refused(path)
        with pytest.raises(GGUFNotFoundError) as caught:
            open_gguf(path)
        assert isinstance(caught.value, FileNotFoundError)
        assert caught.value.errno == 2


def test_paths_that_lead_nowhere(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    saved(tmp_path / "file", b"")
    for path in (tmp_path / "loop", tmp_path / "file" / "x", tmp_path / ("n" * 300)):
        assert refused(path).startswith("cannot be read: ")
    for path in ("a\0b", b"a\0b", "\ud800.gguf"):
        assert refused(path) == "no file can have this name"
    assert refused("") == "cannot be read: No such file or directory"
    for path in (3, None, 1.5):
        with pytest.raises(TypeError):
            open_gguf(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path):
    path = saved(tmp_path / "x.gguf", file_of())
    path.chmod(0)
    assert refused(path) == "cannot be read: Permission denied"


def test_file_name_of_any_bytes(tmp_path):
    for name in (b"\xff\xfe.gguf", b"\x1b[31m\n.gguf", "größe.gguf".encode()):
        path = os.fsencode(tmp_path) + b"/" + name
        Path(os.fsdecode(path)).write_bytes(file_of((), [tensor(b"w", (32,))], ONE))
        for spelled in (path, os.fsdecode(path), Path(os.fsdecode(path))):
            with open_gguf(spelled) as file:
                assert file["w"].shape == (32,)
                assert "\x1b" not in repr(file)
                assert os.fsencode(file.path) == path
        Path(os.fsdecode(path)).write_bytes(b"GGUF")
        assert refused(path).startswith("header: ")


# ---------------------------------------------------------------- what happens to an open file


@pytest.fixture
def model(tmp_path) -> Path:
    """A copy of the excerpt, last written long ago."""
    path = saved(tmp_path / "model.gguf", EXCERPT.read_bytes())
    os.utime(path, ns=(0, 0))
    return path


def test_mapping(model):
    with open_gguf(model) as file:
        assert isinstance(file, GGUFFile)
        names = list(file)
        assert len(file) == len(names) == 33
        assert file[names[0]] is file[names[0]]
        assert names[0] in file
        assert "other" not in file
        with pytest.raises(KeyError):
            file["other"]
        assert file.path == str(model)
        assert file.paths == (str(model),)
        assert (file.version, file.alignment, file.closed) == (3, 32, False)
        assert repr(file) == f"<GGUFFile {str(model)!r}: 33 tensors, 4 keys>"
        assert repr(file.metadata) == "<Metadata: 4 keys>"
        with pytest.raises(TypeError):
            file["other"] = file[names[0]]
    assert repr(file).endswith(", closed>")


def test_closing(model):
    """Names and shapes stay, and so do views that were taken; no new ones are given out."""
    file = open_gguf(model)
    before = file["blk.2.ffn_down.q4_0"].blocks
    raw = before.tobytes()
    file.close()
    file.close()
    assert file.closed
    assert before.tobytes() == raw
    assert file["blk.2.ffn_down.q4_0"].shape == (64, 1536)
    for use in (lambda: file["blk.2.ffn_down.q4_0"].blocks, lambda: file.metadata["general.name"]):
        with pytest.raises(GGUFError, match=r"model\.gguf: was closed"):
            use()


def test_tensor_keeps_its_file_open(model):
    weight = open_gguf(model)["blk.2.ffn_down.q4_0"]
    assert weight.blocks.shape == (64, 48)


def test_truncated_after_opening(model):
    with open_gguf(model) as file:
        os.truncate(model, 100)
        for use in [lambda t=t: t.blocks for t in file.values()] + [lambda: dict(file.metadata)]:
            with pytest.raises(GGUFError, match=r"model\.gguf: changed since it was opened"):
                use()
        assert len([t.shape for t in file.values()]) == 33


def test_rewritten_after_opening(model):
    with open_gguf(model) as file:
        with model.open("r+b") as other:
            other.seek(-64, os.SEEK_END)
            other.write(b"x" * 64)
        with pytest.raises(GGUFError, match="changed since it was opened"):
            file["blk.2.ffn_down.q4_0"].blocks  # noqa: B018


def test_replaced_after_opening(model, tmp_path):
    raw = [t.blocks.tobytes() for t in open_gguf(EXCERPT).values()]
    with open_gguf(model) as file:
        os.replace(saved(tmp_path / "other", b"other"), model)
        assert [t.blocks.tobytes() for t in file.values()] == raw


def test_threads(model):
    with open_gguf(model) as file:
        want = {name: t.blocks.tobytes() for name, t in file.items()}
        wrong = []

        def read(seed: int) -> None:
            for name in random.Random(seed).sample(list(file), len(file)):
                if file[name].blocks.tobytes() != want[name] or len(dict(file.metadata)) != 4:
                    wrong.append(name)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_fork(model):
    with open_gguf(model) as file:
        want = [t.blocks.tobytes() for t in file.values()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside BLAS's idle threads
            child = os.fork()
        if child == 0:
            same = [t.blocks.tobytes() for t in file.values()] == want
            os._exit(0 if same else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert [t.blocks.tobytes() for t in file.values()] == want


def test_nothing_leaks_from_refusals():
    def held() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), maps.count(".gguf")

    paths = [*map(case_path, REJECTED)]
    errors = []  # with their tracebacks, which must not hold a file either
    before = held()
    for turn in range(10_000):
        try:
            open_gguf(paths[turn % len(paths)])
        except GGUFError as error:
            errors = [*errors[-200:], error]
    assert held() == before


def test_nothing_leaks_from_files_that_nobody_closed():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        assert len(open_gguf(EXCERPT)["blk.2.ffn_down.q4_0"].blocks) == 64
    assert len(os.listdir("/proc/self/fd")) == before


# ---------------------------------------------------------------- split models


@pytest.fixture
def shards(tmp_path) -> list[Path]:
    """Three shards of five tensors, as the gguf package splits them."""
    writer = GGUFWriter(tmp_path / "m.gguf", "test", split_max_tensors=2)
    writer.add_string("general.name", "split")
    for i in range(5):
        writer.add_tensor(f"t{i}", np.full((2, 8), i, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    paths = sorted(tmp_path.glob("*.gguf"))
    assert [path.name for path in paths] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    return paths


def test_split(shards):
    with open_gguf(shards[0]) as file:
        assert list(file) == ["t0", "t1", "t2", "t3", "t4"]
        assert_array_equal([t.blocks[1, 7] for t in file.values()], range(5))
        assert file.paths == tuple(map(str, shards))
        assert file.place("t4")[0] == str(shards[2])
        assert dict(file.metadata) == {"general.architecture": "test", "general.name": "split"}


def test_split_through_links(shards, tmp_path):
    """Caches keep the files under other names: the links' names count."""
    for i, shard in enumerate(shards):
        shard.rename(tmp_path / f"blob{i}")
        shard.symlink_to(f"blob{i}")
    with open_gguf(shards[0]) as file:
        assert len(file) == 5


def test_split_refusals(shards, tmp_path):
    second, name = shards[1].read_bytes(), str(shards[0])
    assert refused(shards[1]) == f"is shard 2 of 3: open the first, {name}"

    def first_refused() -> str:
        with pytest.raises(GGUFError) as caught:
            open_gguf(shards[0])
        return str(caught.value)

    shards[1].unlink()
    assert first_refused() == f"{shards[1]}: cannot be read: No such file or directory"
    shards[1].write_bytes(shards[2].read_bytes())
    assert first_refused() == f"{shards[1]}: key 'split.no': is 2 of 3, by its name it is 1 (from 0)"
    shards[1].write_bytes(second.replace(b"t2", b"t0"))
    assert first_refused() == f"{shards[1]}: tensor 't0': is also in {name}"
    total = b"split.tensors.count" + struct.pack("<I", I32)
    shards[1].write_bytes(second.replace(total + b"\5", total + b"\6"))
    assert first_refused() == f"{shards[1]}: key 'split.tensors.count': is 6, there are 5 tensors"
    shards[1].write_bytes(second[:-40])
    assert first_refused().startswith(f"{shards[1]}: tensor 't3': the file ends")
    shards[0].rename(tmp_path / "renamed.gguf")
    message = "key 'split.count': is 3, but the name does not end in -00001-of-00003.gguf"
    assert refused(tmp_path / "renamed.gguf") == message


# ---------------------------------------------------------------- fuzzing

VALID = [case_path(name).read_bytes() for name in ACCEPTED if CASES[name]["size"] < 1000]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A valid file with bytes changed, numbers replaced by hostile ones, parts cut, doubled or of another file."""
    content = bytearray(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(content) - 1, 0)))
        kind = draw(st.sampled_from(("flip", "number", "cut", "insert", "splice")))
        if kind == "flip" and content:
            content[at] ^= draw(st.integers(1, 255))
        elif kind == "number":
            number = draw(st.sampled_from((0, 1, 7, 8, 9, 13, 2**31, 2**32 - 1, 2**61, 2**63 - 1, 2**64 - 1)))
            content[at : at + 8] = struct.pack("<Q", number)
        elif kind == "cut":
            del content[at : at + draw(st.integers(1, 64))]
        elif kind == "insert":
            content[at:at] = draw(st.binary(min_size=1, max_size=40))
        elif kind == "splice":
            content[at:] = draw(st.sampled_from(VALID))[draw(st.integers(0, 200)) :]
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

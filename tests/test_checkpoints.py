"""Checkpoints of other libraries: safetensors, NumPy's files, AWQ, GPTQ, importance matrices, malformed or whole.

The packers here are written from the layouts, code by code, and know nothing of the reader.
"""

from __future__ import annotations

import contextlib
import io
import json
import struct
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from files import KINDS, safetensors, with_header
from gguf import GGUFWriter
from helpers import converted, normal
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

import qgemm
from qgemm.codec.search import search, searched
from qgemm.converter import open_source
from qgemm.errors import CheckpointError, GGUFNotFoundError
from qgemm.files.imatrix import read_imatrix

GOLDEN = np.load(Path(__file__).parent / "data" / "ggml_search.npz")


# ---------------------------------------------------------------- safetensors


def test_safetensors_of_every_dtype(tmp_path):
    numbers = np.arange(64).reshape(2, 32)
    few = {"bool": numbers % 2, "float8_e8m0fnu": 2 ** (numbers % 4)}  # the second has powers of two alone
    arrays = {
        name: few.get(name, numbers).astype(dtype)
        for name, dtype in ((name, getattr(ml_dtypes, name, name)) for name in KINDS)
        if name != "uint64"
    }
    arrays |= {"scalar": np.array(3.5, np.float32)}
    path = safetensors(tmp_path / "x.safetensors", arrays, {"format": "pt"})
    lines = converted(path, tmp_path / "y.gguf", "f32")
    with qgemm.open(tmp_path / "y.gguf") as file:
        for name, array in arrays.items():
            want = array.astype(np.float64).reshape(array.shape or (1,))
            assert_array_equal(np.asarray(file[name].blocks, np.float64), want)
        assert file.metadata["safetensors.format"] == "pt"
    assert {line.how for line in lines.values()} == {"exact"}
    converted(path, tmp_path / "q.gguf", "q8_0")  # FP8 is quantized as other floats are
    with qgemm.open(tmp_path / "q.gguf") as file:
        for name in ("float8_e4m3fn", "bfloat16", "float64"):
            want = qgemm.quantize(arrays[name].astype(np.float32), "q8_0")
            assert file[name].blocks.tobytes() == want.blocks.tobytes()


def test_numbers_that_gguf_cannot_hold(tmp_path):
    path = safetensors(tmp_path / "x.safetensors", {"w": np.zeros((2, 32), np.uint64)})
    with pytest.raises(qgemm.QgemmError, match="tensor 'w': holds integers"):
        converted(path, tmp_path / "y.gguf", "f32")


ONE = '{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
MALFORMED = {
    # header, bytes of data, message
    "not json": (b"{nonsense", 0, "header: "),
    "a list": (b"[]", 0, "is not a JSON object"),
    "deep": (b"{" * 50_000, 0, "header: "),
    "not utf-8": (b'{"\xff":1}', 0, "header: "),
    "a name twice": (f'{ONE},"w":{{}}}}'.encode(), 8, "header: a name comes twice"),
    "an entry of no kind": (b'{"w":3}', 0, "tensor 'w': must have dtype, shape and data_offsets"),
    "more in an entry": (f"{ONE[:-1]},\"x\":1}}}}".encode(), 8, "tensor 'w': must have dtype, shape"),
    "unknown dtype": (ONE.replace("F32", "F31").encode() + b"}", 8, "tensor 'w': dtype 'F31' is not one of"),
    "negative shape": (ONE.replace("[2]", "[-2]").encode() + b"}", 8, "tensor 'w': shape must be a list of whole"),
    "float shape": (ONE.replace("[2]", "[2.0]").encode() + b"}", 8, "tensor 'w': shape must be a list of whole"),
    "huge shape": (ONE.replace("[2]", "[99999999999]").encode() + b"}", 8, "must span the 399999999996 bytes"),
    "one offset": (ONE.replace("[0,8]", "[8]").encode() + b"}", 8, "tensor 'w': data_offsets"),
    "no offsets": (ONE.replace("[0,8]", "[]").encode() + b"}", 8, "tensor 'w': data_offsets"),
    "backwards": (ONE.replace("[0,8]", "[8,0]").encode() + b"}", 8, "tensor 'w': data_offsets"),
    "a hole": (ONE.replace("[0,8]", "[4,12]").encode() + b"}", 12, "tensor 'w': starts at byte .*, a hole behind"),
    "overlap": (
        f'{ONE},"v":{{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}}}'.encode(), 12, "tensor 'v': .* inside tensor"
    ),
    "short": (ONE.encode() + b"}", 7, "the tensors end at byte"),
    "long": (ONE.encode() + b"}", 9, "the tensors end at byte"),
    "metadata of numbers": (b'{"__metadata__":{"a":1}}', 0, "__metadata__ must be an object of strings"),
    "metadata of no kind": (b'{"__metadata__":[]}', 0, "__metadata__ must be an object of strings"),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_safetensors(name, tmp_path):
    header, size, message = MALFORMED[name]
    path = with_header(tmp_path / "x.safetensors", header, bytes(size))
    with pytest.raises(CheckpointError, match=message) as caught:
        open_source(path)
    assert str(caught.value).startswith(str(path))
    assert str(caught.value).isascii()


@pytest.mark.parametrize("raw", [b"", b"\0" * 8, b"\xff" * 20, struct.pack("<Q", 200_000_000) + b"{}"])
def test_what_is_no_safetensors_file(raw, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"x\.safetensors: "):
        open_source(path)


@given(st.binary(max_size=60), st.integers(0, 100))
def test_damaged_safetensors(tmp_path_factory, junk, offset):
    """Any bytes at any place: an error of ours, or a file."""
    path = safetensors(tmp_path_factory.getbasetemp() / "d.safetensors", {"w": normal(1, 32), "v": normal(2)})
    raw = bytearray(path.read_bytes())
    raw[offset : offset + len(junk)] = junk
    path.write_bytes(raw)
    with contextlib.suppress(CheckpointError):
        open_source(path).close()


def sharded(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    names = {"a.weight": "m-00001-of-00002.safetensors", "b.weight": "m-00002-of-00002.safetensors"}
    for name, file in names.items():
        safetensors(folder / file, {name: normal(4, 64, seed=len(file) + ord(name[0]))})
    index = folder / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {**names, **changes}}))
    return index


def test_sharded_safetensors(tmp_path):
    index = sharded(tmp_path / "m")
    converted(index, tmp_path / "y.gguf", "q8_0")
    converted(tmp_path / "m", tmp_path / "z.gguf", "q8_0")
    assert (tmp_path / "y.gguf").read_bytes() == (tmp_path / "z.gguf").read_bytes()
    with qgemm.open(tmp_path / "y.gguf") as file:
        assert list(file) == ["a.weight", "b.weight"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"c.weight": "m-00001-of-00002.safetensors"}, r"'c\.weight': is not in the file that the index says"),
        ({"a.weight": "m-00002-of-00002.safetensors"}, r"'a\.weight': is not in|'b\.weight'"),
        ({"a.weight": "../x.safetensors"}, "is not the name of a .safetensors file beside it"),
        ({"a.weight": 3}, "weight_map must be an object of file names"),
        ({"a.weight": "none.safetensors"}, "cannot be read: No such file"),
    ],
)
def test_indexes_that_are_wrong(changes, message, tmp_path):
    with pytest.raises(qgemm.QgemmError, match=message):
        open_source(sharded(tmp_path / "m", **changes))


def test_folders_without_one_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors file"):
        open_source(tmp_path)
    for name in "ab":
        safetensors(tmp_path / f"{name}.safetensors", {"w": normal(2)})
    with pytest.raises(CheckpointError, match="name the one that is meant"):
        open_source(tmp_path)
    safetensors(tmp_path / "model.safetensors", {"x": normal(2)})  # beside consolidated.safetensors, for example
    with open_source(tmp_path) as source:
        assert list(source.weights) == ["x"]


# ---------------------------------------------------------------- NumPy's files


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f4", "i1", ">i8", "?", "u1"])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(save, dtype, tmp_path):
    x = np.arange(64).reshape(2, 32).astype(dtype)
    save(tmp_path / "x.npz", x=x, scalar=x[1, 3], **{"a/b.weight": x[0]})
    np.save(tmp_path / "w.npy", x)
    converted(tmp_path / "x.npz", tmp_path / "y.gguf", "f32")
    converted(tmp_path / "w.npy", tmp_path / "z.gguf", "f32")
    with qgemm.open(tmp_path / "y.gguf") as y, qgemm.open(tmp_path / "z.gguf") as z:
        assert list(y) == ["x", "scalar", "a/b.weight"]
        assert_array_equal(y["x"].blocks, x)
        assert_array_equal(z["w"].blocks, x)
        assert_array_equal(y["scalar"].blocks, x[1:, 3])


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.asfortranarray(normal(4, 3)), "is in Fortran order"),
        (np.array(["a"]), "is not a type of weights"),
        (np.array([1j]), "is not a type of weights"),
        (np.array([{}], object), "is not a type of weights"),
    ],
)
def test_npy_that_is_not_read(array, message, tmp_path):
    np.save(tmp_path / "x.npy", array, allow_pickle=True)
    with pytest.raises(CheckpointError, match=rf"x\.npy: array 'x': .*{message}"):
        open_source(tmp_path / "x.npy")


def test_npy_cut_short(tmp_path):
    raw = io.BytesIO()
    np.save(raw, normal(4, 8))
    for size in (3, 9, 40, len(raw.getvalue()) - 1):
        (tmp_path / "x.npy").write_bytes(raw.getvalue()[:size])
        with pytest.raises(CheckpointError, match=r"x\.npy: array 'x': "):
            open_source(tmp_path / "x.npy")
    np.savez(tmp_path / "x.npz", x=normal(4, 8))
    whole = (tmp_path / "x.npz").read_bytes()
    for damaged in (whole[:100], whole[:-30], b"PK\3\4"):
        (tmp_path / "x.npz").write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"x\.npz: "):
            open_source(tmp_path / "x.npz")


# ---------------------------------------------------------------- importance matrices


@pytest.mark.parametrize("importance", ["ones", "cubes", "holes"])
@pytest.mark.parametrize(
    "fmt",
    [
        name
        for name, fmt in qgemm.FORMATS.items()
        if searched(fmt) and fmt.encoding.weighted is None and fmt.ggml_type is not None
    ],
)
def test_search_is_ggmls(fmt, importance):
    """Golden blocks from ggml's C with an importance matrix; also block by block, as the sums may not depend on it."""
    x, weights = GOLDEN["x"], GOLDEN[f"importance/{importance}"]
    blocks = search(qgemm.FORMATS[fmt], x, weights)
    assert blocks.view(np.uint8).tobytes() == GOLDEN[f"{fmt}/{importance}"].tobytes()
    row = np.tile(x[:1, :32], (1, 1))
    alone = search(qgemm.FORMATS[fmt], row, weights[:32])
    beside = search(qgemm.FORMATS[fmt], np.repeat(row, 5, axis=0), weights[:32])
    assert alone.tobytes() == beside[3:4].tobytes()


def legacy(path: Path, entries: dict[str, tuple[int, np.ndarray]]) -> Path:
    raw = struct.pack("<i", len(entries))
    for name, (calls, sums) in entries.items():
        raw += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, sums.size) + sums.tobytes()
    path.write_bytes(raw + struct.pack("<i", 7) + struct.pack("<i", 4) + b"data")
    return path


def test_imatrix_files(tmp_path):
    """Both kinds give the same means; experts have rows of their own; what saw nothing weighs alike."""
    rng = np.random.default_rng(0)
    sums, counts = rng.random((3, 64)).astype(np.float32), np.float32([[4], [0], [2]])
    expert = rng.random(96).astype(np.float32)
    qgemm.write(
        tmp_path / "i.gguf",
        {
            "e.weight.in_sum2": sums,
            "e.weight.counts": counts,
            "w.weight.in_sum2": expert,
            "w.weight.counts": np.float32([8]),
        },
        {"general.type": "imatrix"},
    )
    new = read_imatrix(tmp_path / "i.gguf")
    assert_array_equal(new["e.weight"], np.where(counts > 0, sums / np.where(counts > 0, counts, 1), 1))
    old = read_imatrix(legacy(tmp_path / "i.dat", {"w.weight": (8, expert)}))
    assert_array_equal(old["w.weight"], new["w.weight"][0])

    x = {"e.weight": normal(3, 8, 64), "w.weight": normal(5, 96), "other.weight": normal(4, 64)}
    qgemm.write(tmp_path / "x.gguf", x)
    lines = converted(tmp_path / "x.gguf", tmp_path / "y.gguf", "q4_0", importance=new)
    q4_0 = qgemm.FORMATS["q4_0"]
    with qgemm.open(tmp_path / "y.gguf") as file:
        for e in range(3):
            assert file["e.weight"].blocks[e].tobytes() == search(q4_0, x["e.weight"][e], new["e.weight"][e]).tobytes()
        assert file["w.weight"].blocks.tobytes() == search(q4_0, x["w.weight"], new["w.weight"][0]).tobytes()
        assert file["other.weight"].blocks.tobytes() == q4_0.quantize(x["other.weight"]).tobytes()
    searched = converted(tmp_path / "x.gguf", tmp_path / "y.gguf", "q4_0", search=True)
    assert searched["other.weight"].error < lines["other.weight"].error
    with pytest.raises(qgemm.QgemmError, match=r"'w\.weight': its importance has 64 values, not those of 1 x 96"):
        converted(tmp_path / "x.gguf", tmp_path / "y.gguf", "q4_0", importance={"w.weight": np.ones(64, np.float32)})


@pytest.mark.parametrize(
    "raw", [b"", b"\1\0\0\0", struct.pack("<ii", 1, -5), struct.pack("<ii", 1, 2**30), struct.pack("<i", 0)]
)
def test_what_is_no_imatrix(raw, tmp_path):
    (tmp_path / "i.dat").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"i\.dat: "):
        read_imatrix(tmp_path / "i.dat")
    for bad in (np.nan, -1):
        with pytest.raises(CheckpointError, match="an importance is negative or not finite"):
            read_imatrix(legacy(tmp_path / "i.dat", {"w": (1, np.float32([1, bad]))}))


@pytest.mark.parametrize("tail", [b"", b"\7\0\0", struct.pack("<ii", 7, -1), struct.pack("<ii", 7, 5) + b"data"])
def test_an_old_imatrix_whose_end_says_nothing(tail, tmp_path):
    """Its entries are read; of a text and its chunks nothing is known."""
    path = legacy(tmp_path / "i.dat", {"w": (1, np.float32([1, 2]))})
    whole = read_imatrix(path).origin
    assert (whole.dataset, whole.chunks) == ("data", 7)
    path.write_bytes(path.read_bytes()[:-12] + tail)
    importances = read_imatrix(path)
    assert_array_equal(importances["w"], [1, 2])
    assert (importances.origin.dataset, importances.origin.chunks) == ("", 0)


# ---------------------------------------------------------------- shards


def names_of(path: Path, **options: bool) -> list[str]:
    with open_source(path, **options) as source:
        return sorted(source.weights)


@pytest.mark.parametrize("indexed", [True, False])
def test_the_first_shard_brings_the_others(indexed, tmp_path):
    """As of .gguf files, with an index beside or without; a folder of shards is opened so too."""
    index = sharded(tmp_path / "m")
    first, second = sorted((tmp_path / "m").glob("*.safetensors"))
    if not indexed:
        index.unlink()
    both = ["a.weight", "b.weight"]
    assert names_of(first) == names_of(tmp_path / "m") == both
    assert (names_of(first, part=True), names_of(second, part=True)) == (both[:1], both[1:])
    with open_source(first) as source:
        assert {str(first), str(second)} <= set(source.files)
    with pytest.raises(CheckpointError, match=r"is shard 2 of 2: open the first, .*m-00001-of-00002\.safetensors"):
        open_source(second)
    second.unlink()
    with pytest.raises(GGUFNotFoundError, match=r"00002-of-00002.*No such file.*one of 2 shards.*--part"):
        open_source(first)
    assert names_of(first, part=True) == both[:1]


def test_shards_that_do_not_fit(tmp_path):
    index = sharded(tmp_path / "m")
    first, second = sorted((tmp_path / "m").glob("*.safetensors"))
    index.write_text(json.dumps({"weight_map": {"a.weight": first.name}}))
    with pytest.raises(CheckpointError, match=r"00002\.safetensors: tensor 'b\.weight': the index has it in no file"):
        open_source(first)
    index.unlink()
    second.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match=r"00002\.safetensors: tensor 'a\.weight': is also in .*00001"):
        open_source(first)


@pytest.mark.parametrize("count", [30_000_000, 2**60, 10**19])
def test_more_shards_than_the_folder_holds(count, tmp_path):
    path = safetensors(tmp_path / f"m-00001-of-{count}.safetensors", {"w": normal(2)})
    tracemalloc.start()
    with pytest.raises(GGUFNotFoundError, match="m-00002-of-"):
        open_source(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize(
    "name", ["m-00001-of-00001", "m-00000-of-00002", "m-00003-of-00002", "m-1-of-2", "m-000001-of-00002"]
)
def test_names_that_are_not_those_of_shards(name, tmp_path):
    assert names_of(safetensors(tmp_path / f"{name}.safetensors", {"w": normal(2)})) == ["w"]


def test_part_of_a_split_gguf_file(run, tmp_path):
    """One shard of .gguf, the second too, becomes a file that is whole: nothing in it says that it was a shard."""
    writer = GGUFWriter(tmp_path / "m.gguf", "test", split_max_tensors=1)
    for name in "ab":
        writer.add_tensor(name, normal(4, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    first, second = sorted(tmp_path.glob("*.gguf"))
    assert names_of(first) == ["a", "b"]
    assert (names_of(first, part=True), names_of(second, part=True)) == (["a"], ["b"])
    for part, name in ((first, "a"), (second, "b")):
        assert run("convert", part, tmp_path / f"{name}.gguf", "q8_0", "--part")[0] == 0
        with qgemm.open(tmp_path / f"{name}.gguf") as file:
            assert list(file) == [name]
            assert not [key for key in file.metadata if key.startswith("split.")]
    assert len(qgemm.convert(second, tmp_path / "c.gguf", "f16", part=True).lines) == 1

"""kbit tensors in .gguf files: they read back as written, other readers open the file, and errors name the fault."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from strategies import CODEBOOKS, codebooks, over_formats, raw_blocks

import qgemm
from qgemm.files.gguf.parts import SUFFIXES, VERSION

LEVELS = [0.5, -1.0, 0.5, 1.0]  # neither sorted nor distinct


def kbit(shape=(3, 64), fmt="kbit4", seed=0, **options) -> qgemm.Tensor:
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return qgemm.quantize(x, fmt, **options)


def assert_same(got: qgemm.Tensor, want: qgemm.Tensor) -> None:
    assert (got.format, got.shape) == (want.format, want.shape)
    assert got.blocks.tobytes() == want.blocks.tobytes()
    assert got.codebook.tobytes() == want.codebook.tobytes()
    assert not got.blocks.flags.writeable


# ---------------------------------------------------------------- writing


@over_formats(CODEBOOKS)
@given(data=st.data())
def test_round_trip(fmt, data, tmp_path_factory):
    """Any blocks, any codebook, 1 to 4 dimensions; a copy of the file is the file, and so is a second write."""
    path = tmp_path_factory.getbasetemp() / "kbit.gguf"
    fmt = fmt.variant(data.draw(codebooks(fmt)), None)
    *leading, count = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    raw = raw_blocks(data.draw, fmt, (*leading, count))
    w = qgemm.Tensor(fmt, (*leading, 32 * count), raw)
    tensors = {"first": np.ones((2, 3), np.float32), "w": w, "q": qgemm.quantize(np.ones((2, 64)), "q4_0"), "": w}
    metadata = {"k": np.uint32(3), "general.architecture": "llama", "general.alignment": np.uint32(8)}
    keys = data.draw(st.lists(st.sampled_from(list(metadata)), unique=True))
    metadata = {key: metadata[key] for key in keys}
    qgemm.write(path, tensors, metadata)
    before = path.read_bytes()
    with qgemm.open(path) as file:
        assert list(file) == list(tensors)
        assert list(file.metadata.items()) == list(metadata.items())
        for name in ("w", ""):
            assert_same(file[name], w)
        assert file["first"].blocks.tobytes() == tensors["first"].tobytes()
        assert file["q"].blocks.tobytes() == tensors["q"].blocks.tobytes()
        qgemm.write(path.with_suffix(".copy"), file, file.metadata)
    assert path.with_suffix(".copy").read_bytes() == before
    qgemm.write(path, tensors, metadata)
    assert path.read_bytes() == before


@over_formats(CODEBOOKS)
def test_gguf_package_reads_the_parts(fmt, tmp_path):
    w = kbit((2, 5, 96), fmt)
    qgemm.write(tmp_path / "x.gguf", {"w": w}, {"general.architecture": "llama", "general.name": "test"})
    oracle = GGUFReader(tmp_path / "x.gguf")
    fields = {name: field.contents() for name, field in oracle.fields.items() if not name.startswith("GGUF.")}
    assert fields == {
        "general.architecture": "qgemm",
        "general.name": "test",
        "qgemm.general.architecture": "llama",
        "qgemm.kbit.version": 1,
    }
    absmax, planes, codebook = oracle.tensors
    bits = w.blocks["planes"].shape[-1]
    assert [part.name for part in oracle.tensors] == ["w.kbit_absmax", "w.kbit_planes", "w.kbit_codebook"]
    assert [part.shape.tolist() for part in oracle.tensors] == [[3, 5, 2], [3 * bits, 5, 2], [2**bits]]
    assert absmax.tensor_type.name == ("F16" if fmt.scale_fields else "I8")
    assert (planes.tensor_type.name, codebook.tensor_type.name) == ("I32", "F32")
    assert absmax.data.tobytes() == w.blocks["absmax"].tobytes()
    assert planes.data.tobytes() == w.blocks["planes"].tobytes()
    np.testing.assert_array_equal(codebook.data, w.codebook)


def test_without_an_architecture(tmp_path):
    qgemm.write(tmp_path / "x.gguf", {"w": kbit()}, {"k": 1})
    assert list(GGUFReader(tmp_path / "x.gguf").fields)[3:] == ["general.architecture", "k", "qgemm.kbit.version"]
    with qgemm.open(tmp_path / "x.gguf") as file:
        assert dict(file.metadata) == {"k": 1}


def test_a_file_without_kbit_has_none_of_it(tmp_path):
    """Names that parts would have are names like others there, and so is the architecture "qgemm"."""
    tensors = {"w.kbit_planes": np.ones((2, 3), np.int32), "w": np.ones(2, np.float32)}
    metadata = {"general.architecture": "qgemm", "qgemm.general.architecture": "llama"}
    qgemm.write(tmp_path / "x.gguf", tensors, metadata)
    with qgemm.open(tmp_path / "x.gguf") as file:
        assert list(file) == list(tensors)
        assert dict(file.metadata) == metadata
    assert VERSION not in GGUFReader(tmp_path / "x.gguf").fields


def test_default_codebooks_are_those_of_the_formats(tmp_path):
    tensors = {str(fmt): kbit(fmt=fmt) for fmt in CODEBOOKS}
    own = {"own": kbit(fmt="kbit2", codebook=LEVELS), "other": kbit(seed=1, fmt="kbit2", codebook=LEVELS)}
    qgemm.write(tmp_path / "x.gguf", tensors | own)
    with qgemm.open(tmp_path / "x.gguf") as file:
        assert all(file[str(fmt)].format is fmt for fmt in CODEBOOKS)
        assert file["own"].format is file["other"].format is not qgemm.FORMATS["kbit2"]
        assert file["own"].codebook.tolist() == LEVELS


def test_tensors_are_made_on_demand(tmp_path):
    """Twice each, as for other formats, not once for each part."""

    class Lazy(dict):
        lookups = 0

        def __getitem__(self, name):
            Lazy.lookups += 1
            return super().__getitem__(name)

    tensors = Lazy(a=kbit(), b=kbit(fmt="kbit2"))
    qgemm.write(tmp_path / "x.gguf", tensors)
    assert Lazy.lookups == 4


def test_a_tensor_that_changes_while_it_is_written(tmp_path):
    class Changing(dict):
        def __getitem__(self, name):
            self["w"], tensor = np.ones((3, 64), np.float32), super().__getitem__("w")
            return tensor

    with pytest.raises(
        qgemm.GGUFError, match=r"tensor 'w': is <Tensor F32 3 x 64> when it is written, was 'w\.kbit_abs"
    ):
        qgemm.write(tmp_path / "x.gguf", Changing(w=kbit()))
    assert os.listdir(tmp_path) == []


REFUSED = {
    # tensors, metadata, message
    "long name": ({"n" * 50: kbit()}, {}, f"tensor '{'n' * 50}': is stored as '{'n' * 50}.kbit_codebook': a name must"),
    "long for all": ({"n" * 64: kbit()}, {}, f"tensor '{'n' * 64}': a name must not be longer than 63 bytes"),
    "name of a part": (
        {"w": kbit(), "v.kbit_planes": np.ones((2, 3), np.int32)},
        {},
        "tensor 'v.kbit_planes': beside kbit tensors only their parts have such names",
    ),
    "its own part": (
        {"w": kbit(), "w.kbit_absmax": kbit()},
        {},
        "tensor 'w.kbit_absmax': another name has the same bytes",
    ),
    "the part before": (
        {"w.kbit_absmax": np.ones(3, np.int8), "w": kbit()},
        {},
        "tensor 'w': is stored as 'w.kbit_absmax': another name has the same bytes",
    ),
    "name twice": (
        {"é": kbit(), "\udcc3\udca9": kbit()},
        {},
        "tensor '\\udcc3\\udca9': another name has the same bytes",
    ),
    "other twice": (
        {"é": kbit(), "\udcc3\udca9": np.ones(2)},
        {},
        "tensor '\\udcc3\\udca9': another name has the same bytes",
    ),
    "version": ({"w": kbit()}, {VERSION: 1}, f"key '{VERSION}': is written with kbit tensors, not given"),
    "version of no kbit": (
        {"w": np.ones(2)},
        {VERSION: 1},
        f"key '{VERSION}': is written with kbit tensors, not given",
    ),
    "architecture": (
        {"w": kbit()},
        {"qgemm.general.architecture": "x"},
        "key 'qgemm.general.architecture': is written with kbit tensors, not given",
    ),
    "count": ({"w": kbit()}, {"split.tensors.count": 1}, "key 'split.tensors.count': is not 3"),
    "empty": ({"w": kbit((0, 64))}, {}, "tensor 'w': shape (0, 64) holds a zero"),
    "six dimensions": ({"w": kbit((1, 1, 1, 1, 2, 64))}, {}, "tensor 'w': 6 dimensions are not 1 to 5"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusal(name, tmp_path):
    tensors, metadata, message = REFUSED[name]
    with pytest.raises(qgemm.GGUFError) as caught:
        qgemm.write(tmp_path / "x.gguf", tensors, metadata)
    assert str(caught.value).startswith(f"{tmp_path / 'x.gguf'}: {message}")
    assert os.listdir(tmp_path) == []


def test_longest_name(tmp_path):
    qgemm.write(tmp_path / "x.gguf", {"n" * 49: kbit()})
    with qgemm.open(tmp_path / "x.gguf") as file:
        assert_same(file["n" * 49], kbit())


# ---------------------------------------------------------------- reading


def test_blocks_are_put_together_once_in_a_row(tmp_path):
    qgemm.write(tmp_path / "x.gguf", {"a": kbit(), "b": kbit(seed=1)})
    with qgemm.open(tmp_path / "x.gguf") as file:
        first = file["a"].blocks
        assert file["a"].blocks is first
        assert np.shares_memory(file["a"][1:].blocks, first)
        assert_same(file["b"], kbit(seed=1))
        assert_same(file["a"], kbit())
    assert first.tobytes() == kbit().blocks.tobytes()


def test_use_of_an_opened_tensor(tmp_path):
    w = kbit((5, 7, 96), "kbit3", codebook=[*LEVELS, *LEVELS])
    x = np.random.default_rng(2).standard_normal((2, 96)).astype(np.float32)
    qgemm.write(tmp_path / "x.gguf", {"w": w})
    with qgemm.open(tmp_path / "x.gguf") as file:
        np.testing.assert_array_equal(file["w"].dequantize(), w.dequantize())
        np.testing.assert_array_equal(qgemm.matmul(x, file["w"][3]), qgemm.matmul(x, w[3]))
        assert repr(file["w"]) == "<Tensor 'w' KBIT3 5 x 7 x 96>"
        path, offset = file.place("w")
        assert Path(path).read_bytes()[offset : offset + 5] == w.blocks["absmax"].tobytes()[:5]


@pytest.mark.parametrize("how", ["closed", "changed"])
def test_the_file_is_looked_at_before_kept_blocks_are_given(how, tmp_path):
    path = tmp_path / "x.gguf"
    qgemm.write(path, {"w": kbit()})
    with qgemm.open(path) as file:
        w = file["w"]
        held = w.blocks.tobytes()
        if how == "closed":
            file.close()
        else:
            os.truncate(path, 100)
        with pytest.raises(qgemm.GGUFError, match=how):
            w.blocks  # noqa: B018
        assert (w.shape, held) == ((3, 64), kbit().blocks.tobytes())


def test_parts_in_several_shards(tmp_path):
    """As a tool that splits files puts them, who knows nothing of parts."""
    want = {"a": kbit(), "b": kbit(fmt="kbit5_f16")}
    qgemm.write(tmp_path / "whole.gguf", want, {"general.architecture": "llama"})
    whole = GGUFReader(tmp_path / "whole.gguf")
    writer = GGUFWriter(tmp_path / "m.gguf", "qgemm", split_max_tensors=2)
    writer.add_string("qgemm.general.architecture", "llama")
    writer.add_uint32(VERSION, 1)
    for part in whole.tensors:
        writer.add_tensor(part.name, part.data, raw_dtype=part.tensor_type)
    finish(writer)
    assert len(list(tmp_path.glob("m-*.gguf"))) == 3
    with qgemm.open(tmp_path / "m-00001-of-00003.gguf") as file:
        assert list(file) == ["a", "b"]
        assert dict(file.metadata) == {"general.architecture": "llama"}
        for name, w in want.items():
            assert_same(file[name], w)


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def parts(**changes) -> dict[str, np.ndarray | None]:
    """The parts of a matrix (2, 64) of kbit3 as arrays; a change to None leaves the part out."""
    good = {"absmax": np.ones((2, 2), np.int8), "planes": np.zeros((2, 6), np.int32)}
    good["codebook"] = np.linspace(-1, 1, 8, dtype=np.float32)
    return {f"w.kbit_{part}": array for part, array in (good | changes).items() if array is not None}


def saved(path: Path, tensors, version=1, architecture: str | None = "qgemm") -> Path:
    writer = GGUFWriter(path, architecture or "")
    if version is not None:
        add = {str: writer.add_string, int: writer.add_uint32, np.uint64: writer.add_uint64}[type(version)]
        add(VERSION, version)
    for name, array in tensors.items():
        kinds = {np.dtype(np.int8): GGMLQuantizationType.I8}
        writer.add_tensor(name, array, raw_dtype=kinds.get(array.dtype))
    finish(writer)
    return path


def test_what_the_malformed_files_are_made_of_is_good(tmp_path):
    with qgemm.open(saved(tmp_path / "x.gguf", parts())) as file:
        assert repr(file["w"]) == "<Tensor 'w' KBIT3 2 x 64>"
        assert (file["w"].dequantize() == -qgemm.decode_e4m4(np.uint8(1))).all()
    with qgemm.open(saved(tmp_path / "x.gguf", parts(absmax=np.ones((2, 2), np.float16)))) as file:
        assert (file["w"].dequantize() == -1).all()
    with qgemm.open(saved(tmp_path / "x.gguf", {"v": np.ones(2, np.float32)})) as file:
        assert list(file) == ["v"]


MALFORMED = {
    # parts, message
    "no absmax": (parts(absmax=None), "tensor 'w.kbit_planes': there is no 'w.kbit_absmax' beside it"),
    "no planes": (parts(planes=None), "tensor 'w.kbit_absmax': there is no 'w.kbit_planes' beside it"),
    "no codebook": (parts(codebook=None), "tensor 'w.kbit_absmax': there is no 'w.kbit_codebook' beside it"),
    "codebook alone": (parts(absmax=None, planes=None), "tensor 'w.kbit_codebook': there is no 'w.kbit_absmax'"),
    "absmax of floats": (
        parts(absmax=np.ones((2, 2), np.float32)),
        "tensor 'w.kbit_absmax': must be I8 or F16, is F32",
    ),
    "planes of floats": (parts(planes=np.ones((2, 6), np.float32)), "tensor 'w.kbit_planes': must be I32, is F32"),
    "codebook of halves": (parts(codebook=np.ones(8, np.float16)), "tensor 'w.kbit_codebook': must be F32, is F16"),
    "five levels": (
        parts(codebook=np.ones(5, np.float32)),
        "tensor 'w.kbit_codebook': shape (5,) is not one of [4, 8, 16, 32] levels",
    ),
    "levels in a matrix": (
        parts(codebook=np.ones((2, 8), np.float32)),
        "tensor 'w.kbit_codebook': shape (2, 8) is not one of [4, 8, 16, 32] levels",
    ),
    "more levels than planes": (
        parts(codebook=np.ones(16, np.float32)),
        "tensor 'w.kbit_planes': shape (2, 6) must be (2, 8) beside (2, 2) of absmax",
    ),
    "more rows of planes": (
        parts(planes=np.ones((3, 6), np.int32)),
        "tensor 'w.kbit_planes': shape (3, 6) must be (2, 6) beside (2, 2) of absmax",
    ),
    "shorter rows of planes": (
        parts(planes=np.ones((2, 5), np.int32)),
        "tensor 'w.kbit_planes': shape (2, 5) must be (2, 6) beside (2, 2) of absmax",
    ),
    "other axes": (
        parts(planes=np.ones((2, 1, 6), np.int32)),
        "tensor 'w.kbit_planes': shape (2, 1, 6) must be (2, 6) beside (2, 2) of absmax",
    ),
    "NaN in the codebook": (
        parts(codebook=np.array([*range(7), np.nan], np.float32)),
        "tensor 'w.kbit_codebook': KBIT3: a level must be finite in float32, level 7 is nan",
    ),
    "the whole as well": (
        {"w": np.ones(3, np.float32), **parts()},
        "tensor 'w.kbit_absmax': there is a tensor 'w' as well, of which it cannot be a part",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_parts(name, tmp_path):
    tensors, message = MALFORMED[name]
    path = saved(tmp_path / "x.gguf", tensors)
    with pytest.raises(qgemm.GGUFError) as caught:
        qgemm.open(path)
    assert str(caught.value).startswith(f"{path}: {message}")


@pytest.mark.parametrize(
    ("version", "architecture", "message"),
    [
        (2, "qgemm", f"key '{VERSION}': is 2, only layout 1 is read"),
        ("1", "qgemm", f"key '{VERSION}': must be UINT32, is STRING"),
        (np.uint64(1), "qgemm", f"key '{VERSION}': must be UINT32, is UINT64"),
        (1, "llama", "key 'general.architecture': must be 'qgemm' in a file of kbit tensors"),
        (1, None, "key 'general.architecture': must be 'qgemm' in a file of kbit tensors"),
    ],
)
def test_malformed_keys(version, architecture, message, tmp_path):
    path = saved(tmp_path / "x.gguf", parts(), version, architecture)
    with pytest.raises(qgemm.GGUFError) as caught:
        qgemm.open(path)
    assert str(caught.value) == f"{path}: {message}"


def test_parts_without_the_version_are_tensors_like_others(tmp_path):
    with qgemm.open(saved(tmp_path / "x.gguf", parts(), None)) as file:
        assert list(file) == [f"w{suffix}" for suffix in SUFFIXES]
        assert file["w.kbit_planes"].shape == (2, 6)


def test_damaged_files_open_or_are_refused(tmp_path):
    """A byte at a time: a typed error, or tensors whose blocks can be read."""
    path = saved(tmp_path / "x.gguf", parts())
    content = path.read_bytes()
    for position in range(len(content)):
        for flip in (0x01, 0x80, 0xFF):
            path.write_bytes(content[:position] + bytes([content[position] ^ flip]) + content[position + 1 :])
            try:
                file = qgemm.open(path)
            except qgemm.GGUFError:
                continue
            with file:
                assert all(len(w.blocks.tobytes()) == w.nbytes for w in file.values())

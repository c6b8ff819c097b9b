"""Group formats in .gguf files: the blocks of a tensor as one plain tensor, by every reader and by this library."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from gguf import GGUFReader
from helpers import converted, normal, random_tensor

import qgemm
from qgemm.converter import range_encoding
from qgemm.formats import format_of

NAMES = ("u1_g32", "u4z_g128", "u5f_g64_bf16", "u8_row", "f8_e4m3_g128", "s7_1of2")


def drawn(name, seed=0):
    return random_tensor(format_of(name), 7, 512, np.random.default_rng(seed))


@pytest.fixture
def path(tmp_path):
    """A file of tensors in all of these formats, one of ggml's and one of kbit's."""
    tensors = {f"t.{name}": drawn(name) for name in NAMES}
    tensors |= {"q": qgemm.quantize(normal(3, 64), "q4_0"), "k": qgemm.quantize(normal(3, 64), "kbit3")}
    qgemm.write(tmp_path / "x.gguf", tensors, {"general.architecture": "llama", "k": 7})
    return tmp_path / "x.gguf"


@pytest.mark.parametrize("copied", [False, True])
def test_tensors_come_back(path, copied):
    with qgemm.open(path, copy=copied) as file:
        assert list(file) == [*(f"t.{name}" for name in NAMES), "q", "k"]
        assert dict(file.metadata) == {"general.architecture": "llama", "k": 7}
        for name in NAMES:
            w, want = file[f"t.{name}"], drawn(name)
            assert (w.format, w.shape) == (format_of(name), want.shape)
            assert w.blocks.tobytes() == want.blocks.tobytes()
            assert w.read(2, 5).tobytes() == want.blocks.reshape(-1)[2:5].tobytes()
            assert not w.blocks.flags.writeable
            assert pickle.loads(pickle.dumps(w)).blocks.tobytes() == want.blocks.tobytes()
            assert copy.copy(w).shape == want.shape
            x = normal(2, 512)
            np.testing.assert_array_equal(qgemm.matmul(x, w), qgemm.matmul(x, want))


def test_other_readers_list_the_bytes(path):
    listed = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    for name in NAMES:
        part = listed[f"t.{name}.qgemm_{name}"]
        assert part.tensor_type.name == "I8"
        assert part.data.tobytes() == drawn(name).blocks.tobytes()


def test_a_file_is_written_again_and_verified(path, tmp_path, run):
    with qgemm.open(path) as file:
        qgemm.write(tmp_path / "again.gguf", dict(file), file.metadata)
    assert (tmp_path / "again.gguf").read_bytes() == path.read_bytes()
    status, out, _ = run("info", path)
    assert status == 0
    assert all(name.upper() in out for name in NAMES)
    assert run("verify", path)[0] == 0


@pytest.mark.parametrize(
    ("fmt", "search"),
    [("u4z_g128", False), ("u4z_g128", True), ("u3_g64", True), ("u8_g32_bf16", False), ("f8_e4m3_g128", False)],
)
def test_the_converter_writes_them(fmt, search, tmp_path):
    """As quantize makes them, or by the search with less error."""
    x = normal(40, 512, seed=4)
    qgemm.write(tmp_path / "x.gguf", {"blk.0.attn_q.weight": x})
    converted(tmp_path / "x.gguf", tmp_path / "y.gguf", fmt, search=search)
    want = qgemm.quantize(x, fmt)
    with qgemm.open(tmp_path / "y.gguf") as file:
        w = file["blk.0.attn_q.weight"]
        assert w.format is format_of(fmt)
        if not search:
            assert w.blocks.tobytes() == want.blocks.tobytes()
        else:
            assert ((w.dequantize() - x) ** 2).sum() < ((want.dequantize() - x) ** 2).sum()


def test_rows_of_one_scale_are_converted_whole(tmp_path, monkeypatch):
    """Also where a range of the converter is shorter than a row."""
    monkeypatch.setattr(range_encoding, "CHUNK", 256)
    monkeypatch.setattr(range_encoding, "RANGE_WEIGHTS", 256)
    x = normal(4, 512)
    qgemm.write(tmp_path / "x.gguf", {"blk.0.attn_q.weight": x})
    converted(tmp_path / "x.gguf", tmp_path / "y.gguf", "u4_row")
    with qgemm.open(tmp_path / "y.gguf") as file:
        assert (file["blk.0.attn_q.weight"].blocks == qgemm.quantize(x, "u4_row").blocks).all()


BYTES = np.zeros((2, 2 * 67), np.int8)  # two blocks of u4z_g128 per row
KBIT = {"k": qgemm.quantize(normal(1, 32), "kbit2")}  # a file with kbit tensors stores parts


@pytest.mark.parametrize(
    ("stored", "rule"),
    [
        ({"w.qgemm_u4z_g128": BYTES[:, 1:]}, "rows of 133 bytes are no whole blocks of U4Z_G128, which have 67"),
        ({"w.qgemm_u4z_g128": BYTES.astype(np.int16)}, "must be I8, is I16"),
        ({"w": BYTES, "w.qgemm_u4z_g128": BYTES}, "there is a tensor 'w' as well"),
        ({"w.qgemm_u4z_g128": BYTES, "w.qgemm_u8_g32": BYTES[:, :68]}, "there is a tensor 'w' as well"),
    ],
)  # fmt: skip
def test_parts_that_make_no_tensor_are_refused(stored, rule, tmp_path):
    plain = tmp_path / "plain.gguf"
    metadata = {"general.architecture": "qgemm", "qgemm.kbit.versioo": np.uint32(1)}
    qgemm.write(plain, stored, metadata)
    data = plain.read_bytes().replace(b"qgemm.kbit.versioo", b"qgemm.kbit.version")
    plain.write_bytes(data)
    with pytest.raises(qgemm.GGUFError, match=rule):
        qgemm.open(plain)


def test_names_of_parts_are_for_parts(tmp_path):
    """Beside tensors in parts; in other files they are names like others, as those of unknown formats always are."""
    with pytest.raises(qgemm.GGUFError, match="only their parts have such names"):
        qgemm.write(tmp_path / "x.gguf", {"w.qgemm_u4z_g128": BYTES, **KBIT})
    qgemm.write(tmp_path / "x.gguf", {"w.qgemm_u4z_g128": BYTES})
    with qgemm.open(tmp_path / "x.gguf") as file:
        assert list(file) == ["w.qgemm_u4z_g128"]
    qgemm.write(tmp_path / "x.gguf", {"w.qgemm_u9_g128": BYTES, **KBIT})
    with qgemm.open(tmp_path / "x.gguf") as file:
        assert list(file) == ["w.qgemm_u9_g128", "k"]

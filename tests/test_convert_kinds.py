"""Files under any name: sources are told apart by their first bytes, targets by a suffix in any case."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from files import model
from files import safetensors as write_safetensors
from helpers import normal
from hf_folders import folder
from numpy.testing import assert_array_equal

import qgemm
from qgemm.converter.source_readers import open_source
from qgemm.files.gguf.writer import drafting

W = {"w.weight": normal(4, 64)}
OLLAMA = "sha256-8daa9615cce30c259a9555b1cc250d461d1bc69980a274b44d7eda0be78076d8"


def gguf(path: Path) -> Path:
    qgemm.write(path, W)
    return path


def npz(path: Path) -> Path:
    with path.open("wb") as file:
        np.savez(file, **W)
    return path


def npy(path: Path) -> Path:
    with path.open("wb") as file:
        np.save(file, W["w.weight"])
    return path


@pytest.mark.parametrize(
    "name", [OLLAMA, "M.GGUF", "m.gguf.part", "m.gguf.download", "model", "m.bin", "m.safetensors"]
)
def test_a_gguf_file_may_have_any_name(name, run, tmp_path):
    source = gguf(tmp_path / name)
    done = qgemm.convert(source, tmp_path / "y.gguf", "q8_0")
    assert [line.new for line in done.lines] == ["Q8_0"]
    for words in (["info", source], ["verify", tmp_path / "y.gguf", "--against", source]):
        assert run(*words)[::2] == (0, "")
    with qgemm.load(source) as checkpoint:
        assert_array_equal(checkpoint["w.weight"].dequantize(), W["w.weight"])


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (lambda path: write_safetensors(path, W), "M.SAFETENSORS"), (lambda path: write_safetensors(path, W), "blob"),
        (npz, "W.NPZ"), (npz, "w.npz.tmp"), (npy, "W.NPY"), (npy, "w"),
    ],
)  # fmt: skip
def test_other_kinds_are_told_by_their_first_bytes(write, name, run, tmp_path):
    with open_source(write(tmp_path / name)) as source:
        assert [weight.shape for weight in source.weights.values()] == [(4, 64)]
    assert run("convert", tmp_path / name, tmp_path / "y.gguf", "q4_0")[0] == 0


@pytest.mark.parametrize("name", ["notes.txt", "model.bin"])
@pytest.mark.parametrize("content", [b"hello", b"PK\x03\x04" + bytes(26) + b"word/document.xml"])
def test_no_weights(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(qgemm.QgemmError, match=r"is no file of weights by its first bytes, and its name does not end"):
        open_source(tmp_path / name)


def test_a_missing_file_is_said_to_be_missing(tmp_path):
    with pytest.raises(qgemm.GGUFNotFoundError, match="No such file"):
        open_source(tmp_path / "model")


def test_shards_in_capitals(tmp_path):
    source = model(tmp_path / "x.gguf")
    with qgemm.open(source) as file:
        names = list(file)
    for number, own in enumerate((names[:2], names[2:])):
        keys = {"split.no": np.uint16(number), "split.count": np.uint16(2), "split.tensors.count": np.int32(len(names))}
        with qgemm.open(source) as file:
            shard = {name: file[name] for name in own}
            with drafting(tmp_path / f"M-0000{number + 1}-of-00002.GGUF", shard, keys, part=True) as draft:
                for name, tensor in shard.items():
                    draft.append(name, tensor.blocks)
    done = qgemm.convert(tmp_path / "M-00001-of-00002.GGUF", tmp_path / "Y.GGUF", "f16", keep_split=True)
    assert [line.name for line in done.lines] == names
    assert {name for name in os.listdir(tmp_path) if name.startswith("Y")} == {
        "Y-00001-of-00002.GGUF", "Y-00002-of-00002.GGUF",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["Y.GGUF", "Y.Safetensors", "y.NPZ"])
def test_a_target_in_any_case(name, tmp_path):
    done = qgemm.convert(gguf(tmp_path / "x.gguf"), tmp_path / name, "f16")
    assert [line.new for line in done.lines] == ["F16"]
    with open_source(tmp_path / name) as source:
        assert list(source.weights) == ["w.weight"]


def test_a_folder_becomes_a_model_in_capitals(tmp_path):
    """The suffix decides whether a Hugging Face folder becomes a model."""
    qgemm.convert(folder(tmp_path / "hf", "LlamaForCausalLM"), tmp_path / "M.GGUF", "f16")
    with qgemm.open(tmp_path / "M.GGUF") as file:
        assert file.metadata["general.architecture"] == "llama"


def test_a_folder_is_read_by_the_file_in_it(tmp_path):
    """Safetensors in any case, else the only .gguf file or the first shard of one."""
    for number, (write, names) in enumerate(
        [
            (lambda path: write_safetensors(path, W), ["MODEL.SAFETENSORS"]), (gguf, ["m.gguf"]), (gguf, ["M.GGUF"]),
            (gguf, ["a.gguf", "model.gguf"]),
        ]
    ):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in names:
            write(folder / name)
        assert [line.name for line in qgemm.convert(folder, tmp_path / f"{number}.gguf", "f16").lines] == ["w.weight"]
    gguf(tmp_path / "1" / "n.gguf")
    with pytest.raises(qgemm.QgemmError, match=r"holds 'm\.gguf', 'n\.gguf': name the one that is meant"):
        open_source(tmp_path / "1")


PIECES = [
    "m.gguf.part00", "m.gguf.part1of2", "m.gguf-split-a", "m.gguf.partab", "m.gguf.001", "m.gguf.aa", "m.part-02",
    "m.GGUF.Part2", "m.safetensors.part01",
]  # fmt: skip


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("first", [True, False])
def test_pieces_are_named_as_such(name, first, run, tmp_path):
    """Whether a piece begins with the magic or is a later one."""
    whole = write_safetensors(tmp_path / "whole", W) if "safetensors" in name else gguf(tmp_path / "whole")
    raw = whole.read_bytes()
    (tmp_path / name).write_bytes(raw[: len(raw) // 2] if first else raw[len(raw) // 2 :])
    status, _, err = run("convert", tmp_path / name, tmp_path / "y.gguf", "f16")
    assert status == 1
    assert "by its name it is a piece of 'm" in err
    if "safetensors" not in name:
        assert "by its name it is a piece of 'm" in run("info", tmp_path / name)[2]


@pytest.mark.parametrize("name", ["m.gguf", "model-00001-of-00002.gguf", "apart.gguf", "m.gguf.part"])
def test_other_names_are_no_pieces(name, run, tmp_path):
    (tmp_path / name).write_bytes(gguf(tmp_path / "whole").read_bytes()[:100])
    status, _, err = run("info", tmp_path / name)
    assert (status, "by its name" in err) == (1, False)


def test_a_piece_that_is_whole_is_read(tmp_path):
    assert qgemm.convert(gguf(tmp_path / "m.gguf.part00"), tmp_path / "y.gguf", "f16").lines

"""Files where nothing can be mapped, as on mergerfs and some network disks: everything reads by descriptors."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from files import model
from gguf import GGUFWriter
from gguf_bytes import VERDICTS, case_path
from helpers import normal
from numpy.testing import assert_array_equal

import qgemm
from qgemm.errors import GGUFError
from qgemm.files.gguf import shard


@pytest.fixture
def unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that maps no file."""

    def mmap(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr("mmap.mmap", mmap)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return model(tmp_path / "source.gguf")


def importance_matrix(path: Path) -> Path:
    """The importances of one tensor, in llama.cpp's .gguf file."""
    ones = {"blk.0.attn_q.weight.in_sum2": np.ones((1, 64), np.float32)}
    qgemm.write(path, {**ones, "blk.0.attn_q.weight.counts": np.ones((1, 1), np.float32)})
    return path


@pytest.mark.usefixtures("unmapped")
@pytest.mark.parametrize("copy", [True, False])
def test_opened_files_hold_the_same(copy, source):
    with qgemm.open(source, copy=copy) as opened:
        assert opened.metadata["words"] == ["", "a", "ä"]
        assert_array_equal(opened["output.weight"].dequantize(), normal(40, 64, seed=5))
        assert opened["output.weight"].blocks is opened["output.weight"].blocks


@pytest.mark.usefixtures("unmapped")
def test_every_command_works(run, source, tmp_path):
    target, imatrix = tmp_path / "q.gguf", importance_matrix(tmp_path / "imatrix.gguf")
    for words in (
        ("convert", source, target, "q4_0", "--imatrix", imatrix),
        ("convert", source, tmp_path / "like.gguf", "q4_0", "--like", source),
        ("verify", target, "--against", source),
        ("info", target),
        ("matmul", target, "blk.0.attn_q.weight", "--m", "1"),
    ):
        status, _, err = run(*words)
        assert (status, err) == (0, "")
    with qgemm.load(source) as checkpoint:
        assert_array_equal(checkpoint["output.weight"].dequantize(), normal(40, 64, seed=5))


def maps(path: Path) -> Iterator[str]:
    return (line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path)))


def test_copies_need_no_mapping(source):
    """Asked for copies, nothing is mapped on any system, so that a cut file cannot end the process."""
    with qgemm.open(source, copy=True) as opened:
        assert opened["output.weight"].blocks.size
        assert opened.metadata["words"]
        assert not list(maps(source))
    with qgemm.open(source):
        assert list(maps(source))


def test_a_header_longer_than_the_first_bytes(tmp_path, monkeypatch):
    """A key, a string, a tensor's description may end after the bytes that were read first."""
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_array("tokens", [f"token {i}" for i in range(300)])
    writer.add_array("scores", [float(i) for i in range(300)])
    writer.add_array("flags", [True, False] * 100)
    for i in range(20):
        writer.add_tensor(f"tensor.{i}", np.full((2, 8), i, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with qgemm.open(tmp_path / "m.gguf") as mapped:
        for size in (*range(64, 128), 1000, 3000):
            monkeypatch.setattr(shard, "FIRST_BYTES", size)
            with qgemm.open(tmp_path / "m.gguf", copy=True) as copied:
                assert dict(copied).keys() == dict(mapped).keys()
                assert copied.metadata["tokens"] == mapped.metadata["tokens"]
                assert_array_equal(copied.metadata["scores"], mapped.metadata["scores"])
                assert_array_equal(copied["tensor.19"].dequantize(), mapped["tensor.19"].dequantize())


@pytest.mark.parametrize("size", [64, 1 << 20])
def test_malformed_files_are_refused_in_the_same_words(size, monkeypatch):
    monkeypatch.setattr(shard, "FIRST_BYTES", size)
    for name in VERDICTS:
        assert words(name, True) == words(name, False), name


def words(name: str, copy: bool) -> str:
    """The error of a case, "" if it opens."""
    try:
        qgemm.open(case_path(name), copy=copy).close()
    except GGUFError as error:
        return str(error)
    return ""

"""Keys of a .gguf file set and removed without decoding tensors: in place, or in a new file that replaces the old."""

from __future__ import annotations

import errno
import os
import random
import signal
import time

import numpy as np
import pytest
from files import METADATA, model
from helpers import forked, normal
from numpy.testing import assert_array_equal

import qgemm
from qgemm.converter import file_metadata
from qgemm.errors import GGUFAccessError, QgemmError
from qgemm.system import system

KEYS = {**METADATA, "llama.rope.freq_base": np.float32(1e4), "big": np.uint64(2**40), "name": "first"}


@pytest.fixture
def path(tmp_path):
    return model(tmp_path / "m.gguf", metadata=KEYS)


def contents(path):
    """The keys, and the bytes of the tensors by name."""
    with qgemm.open(path, copy=True) as file:
        return dict(file.metadata), {name: tensor.blocks.tobytes() for name, tensor in file.items()}


def assert_keys(path, expected):
    metadata, _ = contents(path)
    assert list(metadata) == list(expected)
    for key, value in expected.items():
        assert_array_equal(metadata[key], value)
        if isinstance(value, (np.ndarray, np.generic)):
            assert np.asarray(metadata[key]).dtype == np.asarray(value).dtype


@pytest.mark.parametrize(
    ("values", "removed", "in_place"),
    [
        ({"general.file_type": np.uint32(7)}, [], True),
        ({"name": "other"}, [], True),
        ({"general.file_type": np.uint32(1)}, [], True),  # as it is
        ({"name": "longer than before"}, [], False),
        ({"general.file_type": np.uint64(7)}, [], False),
        ({"new": [1, 2, 3], "words": ["b"] * 100}, [], False),
        ({}, ["words", "none"], False),
        ({"new": True}, list(KEYS), False),
    ],
)
def test_changes(path, values, removed, in_place):
    """Other keys stay in their places, new ones come last; tensors keep their bytes."""
    before, inode = contents(path)[1], path.stat().st_ino
    assert qgemm.set_metadata(path, values, removed) == in_place
    expected = {key: value for key, value in {**KEYS, **values}.items() if key not in removed}
    assert_keys(
        path,
        {key: np.uint32(value) if key == "new" and value == [1, 2, 3] else value for key, value in expected.items()},
    )
    assert contents(path)[1] == before
    assert (path.stat().st_ino == inode) == in_place


def test_padding_follows_the_alignment(tmp_path):
    path = model(tmp_path / "m.gguf", metadata={"general.alignment": np.uint32(128), "a": "x"})
    before = contents(path)[1]
    for size in (1, 60, 128, 200):
        qgemm.set_metadata(path, {"a": "x" * size})
        assert contents(path)[1] == before


def test_one_write_within_a_sector(path, monkeypatch):
    """Several keys at once: in place if all bytes that differ lie in one sector."""
    writes = []
    write = system.write
    monkeypatch.setattr(
        type(system),
        "write",
        lambda self, fd, data, offset: writes.append((offset, len(data))) or write(fd, data, offset),
    )
    assert qgemm.set_metadata(path, {"general.file_type": np.uint32(2**32 - 1), "half": np.float64(0.75)})
    ((offset, size),) = writes
    assert offset // 512 == (offset + size - 1) // 512
    texts = {f"t{i}": "x" * 400 for i in range(4)}
    assert not qgemm.set_metadata(path, texts)
    writes.clear()
    assert not qgemm.set_metadata(path, {"t0": "y" * 400, "t3": "y" * 400})
    assert len(writes) == 1  # the header of the new file; the system copies the tensors
    assert contents(path)[0]["t3"] == "y" * 400


def test_a_right_value_writes_nothing(path):
    before = path.stat()
    assert qgemm.set_metadata(path, {"name": "first"})
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns, after.st_size) == (before.st_ino, before.st_mtime_ns, before.st_size)


def test_a_hard_link_keeps_the_old_file(path, tmp_path):
    link = tmp_path / "link.gguf"
    link.hardlink_to(path)
    assert not qgemm.set_metadata(path, {"general.file_type": np.uint32(7)})
    assert contents(link)[0]["general.file_type"] == 1
    assert contents(path)[0]["general.file_type"] == 7


@pytest.mark.parametrize("piece", [64, 8 << 20])
def test_a_system_without_a_call_that_copies(path, monkeypatch, piece):
    """Tensors are copied in pieces: one, and many, the last of them shorter."""
    before = contents(path)[1]
    assert sum(map(len, before.values())) > 2 * 64
    monkeypatch.setattr(file_metadata, "PIECE", piece)
    monkeypatch.setattr(type(system), "copy", lambda *arguments: 0)
    assert not qgemm.set_metadata(path, {"name": "longer than before"})
    assert contents(path)[1] == before


def test_a_full_disk_leaves_the_old_file(path, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = path.read_bytes()
    monkeypatch.setattr(type(system), "copy", full)
    with pytest.raises(GGUFAccessError, match="No space left"):
        qgemm.set_metadata(path, {"name": "longer than before"})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]


def test_killed_at_any_moment(tmp_path):
    """The file has the old keys or the new ones, and its tensors."""
    path = model(tmp_path / "m.gguf", {"w": normal(512, 512)}, KEYS)
    before = contents(path)[1]
    rng = random.Random(0)

    def work():
        for number in range(10**6):
            qgemm.set_metadata(path, {"name": "x" * (number % 3 * 40), "general.file_type": np.uint32(number)})

    for _ in range(12):
        child = forked(work)
        time.sleep(rng.uniform(0.02, 0.15))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        metadata, tensors = contents(path)
        assert list(metadata) == list(KEYS)
        assert metadata["name"] in ("first", *("x" * size for size in (0, 40, 80)))
        assert tensors == before
    qgemm.set_metadata(path, {"name": "longer than before"})
    assert os.listdir(tmp_path) == [path.name]  # what killed processes left is removed


@pytest.mark.parametrize(
    ("values", "removed", "rule"),
    [
        ({"general.alignment": np.uint32(64)}, [], "follows from the tensors"),
        ({"split.count": np.uint16(2)}, [], "follows from the tensors"),
        ({"comfy.gguf.orig_shape.w": [1]}, [], "follows from the tensors"),
        ({}, ["split.no"], "follows from the tensors"),
        ({}, ["nothing"], "there is no key 'nothing' to remove"),
        ({"name": "x"}, ["name"], "is set and removed"),
        ({"ä": "x"}, [], "a key must be ASCII"),
        ({"x": "\udfff"}, [], "holds a surrogate"),
    ],
)
def test_keys_that_are_refused(path, values, removed, rule):
    before = path.read_bytes()
    with pytest.raises(QgemmError, match=rule):
        qgemm.set_metadata(path, values, removed)
    assert path.read_bytes() == before


def test_kbit_files_are_left_to_convert(tmp_path):
    path = model(tmp_path / "m.gguf", {"w": qgemm.quantize(normal(4, 4096), "kbit4")}, {"general.name": "x"})
    with pytest.raises(QgemmError, match="holds kbit tensors"):
        qgemm.set_metadata(path, {"general.name": "y"})


def test_command(run, path):
    """A number keeps its type; the line says how the file was changed."""
    status, out, _ = run(
        "metadata", path, "--set", "big=int:5", "--set", "half=float:0.25", "--set", "general.file_type=int:2"
    )
    assert (status, out) == (0, f"{path}: 3 keys set, 0 removed, in place\n")
    status, out, _ = run("metadata", path, "--set", "a.b=bool:true", "--remove", "words", "--remove", "none")
    assert (status, out) == (0, f"{path}: 1 key set, 2 removed, in a new file, which has replaced the old one\n")
    expected = {**KEYS, "big": np.uint64(5), "half": np.float64(0.25), "general.file_type": np.uint32(2), "a.b": True}
    assert_keys(path, {key: value for key, value in expected.items() if key not in ("words", "none")})


def test_one_shard_of_several(run, tmp_path):
    source = model(tmp_path / "m.gguf", metadata=KEYS)
    qgemm.convert(source, tmp_path / "s.gguf", "f32", split_max_size=8192)
    shard = sorted(tmp_path.glob("s-*.gguf"))[0]
    assert run("metadata", shard, "--set", "name=str:longer than before")[0] == 0
    assert contents(shard)[0]["name"] == "longer than before"


@pytest.mark.parametrize(
    ("flags", "status", "rule"),
    [
        ([], 2, "name a change"),
        (["--set", "a=b"], 2, "--set 'a=b' is not KEY=TYPE:VALUE"),
        (["--set", "general.file_type=int:-1"], 2, "is not KEY=TYPE:VALUE"),
        (["--remove", "nothing"], 1, "there is no key 'nothing' to remove"),
    ],
)
def test_commands_that_are_refused(refused, path, flags, status, rule):
    assert rule in refused("metadata", path, *flags, status=status)

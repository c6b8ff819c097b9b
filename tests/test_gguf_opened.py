"""GGUF files and their surroundings: paths, what happens to an open file, threads, forks, split models."""

from __future__ import annotations

import os
import random
import socket
import struct
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from gguf_bytes import I32, ONE, REJECTED, U64, case_path, file_of, key, refused, saved, tensor
from helpers import EXCERPT, at_once
from numpy.testing import assert_array_equal

from qgemm.errors import GGUFAccessError, GGUFError, GGUFNotFoundError
from qgemm.files.gguf.reader import GGUFFile
from qgemm.files.gguf.reader import open as open_gguf

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


def test_blocks_are_viewed_once(model):
    """Each product asks for them. The view does not outlive the file, nor serve another tensor at its offset."""
    with open_gguf(model) as file:
        tensor = file["blk.2.ffn_down.q4_0"]
        shard, entry = tensor._blocks._shard, tensor._blocks._entry
        assert tensor.blocks is tensor.blocks
        other = entry._replace(shape=(entry.shape[-1],))
        assert shard.blocks(other).shape == other.block_shape
        assert_array_equal(shard.blocks(entry), tensor.blocks)
    assert not shard._views


@pytest.mark.parametrize("viewed", [False, True])
def test_truncated_after_opening(viewed, model):
    with open_gguf(model) as file:
        if viewed:
            assert all(tensor.blocks.nbytes for tensor in file.values())
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

        at_once(read, range(16))
    assert wrong == []


def test_fork(model):
    with open_gguf(model) as file:
        want = [t.blocks.tobytes() for t in file.values()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork beside BLAS's idle threads
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


@pytest.mark.parametrize("count", [30_000_000, 2**60, 2**64 - 1])
def test_more_shards_than_the_folder_holds(count, tmp_path):
    """The first name without a file ends it: no list of names is made."""
    claims = [key(b"split.count", U64, struct.pack("<Q", count)), key(b"split.no", U64, bytes(8))]
    paths = [tmp_path / f"m-{number:05d}-of-{count:05d}.gguf" for number in (1, 2, 3)]
    for path in paths[:2]:
        saved(path, file_of(claims))
    tracemalloc.start()
    with pytest.raises(GGUFNotFoundError) as caught:
        open_gguf(paths[0])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(caught.value) == f"{paths[2]}: cannot be read: No such file or directory"
    assert peak < 1 << 20

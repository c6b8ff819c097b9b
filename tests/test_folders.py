"""Outputs of several files: all old, all new, or refused, whatever happens to the writer and whoever else is there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import resource
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import faults
import numpy as np
import pytest
from files import model, safetensors
from helpers import left_over, normal

import qgemm
from qgemm.errors import GGUFAccessError, GGUFError, QgemmError
from qgemm.files import folders, journal, temporary
from qgemm.files.folders import replacing_files, replacing_folder
from qgemm.files.gguf import reader

HEAD = "config.json"
OLD = {HEAD: b"old config", "model.bin": b"old weights", "vocab.txt": b"old words"}
NEW = {"model.bin": b"new weights", HEAD: b"new config"}


def belongs(name: str) -> bool:
    return name in OLD


def put(path: Path, files: dict[str, bytes], replace: bool = True, during: Callable[[], object] = lambda: None) -> None:
    """Replace a folder by one with these files."""
    with replacing_folder(str(path), HEAD, belongs, replace) as create:
        for name, data in files.items():
            with create(str(path / name)) as fd:
                os.write(fd, data)
        during()


def put_files(path: Path, files: dict[str, bytes], replace: bool = True) -> None:
    """Replace files of a folder together."""
    with replacing_files([str(path / name) for name in sorted(files)], replace) as create:
        for name, data in files.items():
            with create(str(path / name)) as fd:
                os.write(fd, data)


def contents(path: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in path.iterdir() if entry.is_file()}


@pytest.fixture
def old(tmp_path) -> Path:
    """A folder that is to be replaced."""
    put(tmp_path / "out", OLD)
    return tmp_path / "out"


@pytest.fixture
def without_exchange(monkeypatch):
    """A system without renameat2, such as macOS."""
    monkeypatch.setattr(temporary, "_renameat2", lambda: None)


def one_error(monkeypatch, module, name: str, number: int, error: int = errno.EIO) -> None:
    """The call of this number fails, counted from 0."""
    real, calls = getattr(module, name), []

    def call(*arguments, **named):
        calls.append(name)
        if len(calls) == number + 1:
            raise OSError(error, os.strerror(error))
        return real(*arguments, **named)

    monkeypatch.setattr(module, name, call)


# ---------------------------------------------------------------- kills and errors of the disk


@pytest.fixture(scope="module")
def writers(tmp_path_factory):
    return faults.writers(tmp_path_factory.mktemp("sources"))


NAMES = [
    "new awq", "new compressed-tensors", "gptq over gptq", "gptq in place", "new split", "split over split",
    "file over file",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_fault_leaves_old_or_new_output(name, writers, tmp_path):
    """A share of the campaign of tools/faults.py."""
    assert list(writers) == NAMES
    bench = faults.Bench(writers[name], tmp_path)
    results = list(faults.campaign(bench, stride=29, random=2, seed=NAMES.index(name)))
    assert [result for result in results if result[2]] == []
    assert {verdict for _, verdict, _ in results} <= {"old", "new", "refused"}


@pytest.mark.parametrize("kind", ["fsync", "_rename"])
@pytest.mark.parametrize("name", ["gptq over gptq", "split over split"])
def test_error_of_one_call_leaves_one_output_and_nothing_else(kind, name, writers, tmp_path, monkeypatch):
    """Each fsync, and each rename."""
    bench = faults.Bench(writers[name], tmp_path)
    outcomes = []
    for number in range(100):
        bench.reset()
        with monkeypatch.context() as patched:
            one_error(patched, os if kind == "fsync" else temporary, kind, number)
            try:
                bench.writer.new(bench.place)
                break
            except QgemmError as error:
                outcomes.append((str(error), bench.verdict()))
        assert left_over(bench.place) == []
    assert bench.verdict() == "new"
    assert len(outcomes) >= 1
    for message, verdict in outcomes:
        assert "Input/output error" in message
        assert verdict == ("new" if "was replaced" in message else "old")


@pytest.mark.parametrize("name", ["gptq over gptq", "split over split"])
def test_full_disk(name, writers, tmp_path):
    bench = faults.Bench(writers[name], tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = max(map(len, bench.new.values()))
    for limit in [*range(0, largest, largest // 7), largest - 1]:
        bench.reset()
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(GGUFAccessError, match=r"cannot be written: File too large") as caught:
                bench.writer.new(bench.place)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert ".qgemm-" not in str(caught.value)
        assert bench.verdict() == "old"
        assert left_over(bench.place) == []


# ---------------------------------------------------------------- the order of steps


def test_files_then_folder_then_name_then_parent(old, tmp_path, monkeypatch):
    """Each is on the disk before the next depends on it."""
    calls = []
    fsync, exchange = os.fsync, folders.exchange

    def synced(fd: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        calls.append("new folder" if name.startswith(".qgemm-") else name)
        fsync(fd)

    def exchanged(*arguments) -> None:
        calls.append("exchange")
        exchange(*arguments)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(folders, "exchange", exchanged)
    put(old, NEW)
    assert calls[:2] == ["model.bin", "config.json"]
    assert calls[-3:] == ["new folder", "exchange", tmp_path.name]


def test_journal_is_on_the_disk_before_the_first_move(tmp_path, monkeypatch):
    """The head goes first and comes last: no program opens the other files without it."""
    put_files(tmp_path, OLD)
    calls = []
    fsync, move, unlink = os.fsync, journal.move, os.unlink

    def synced(fd: int) -> None:
        calls.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))
        fsync(fd)

    def moved(name, source, target, new_name="") -> None:
        calls.append(("move", new_name or name))
        move(name, source, target, new_name)

    def unlinked(name, **named) -> None:
        calls.append(("unlink", name))
        unlink(name, **named)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(journal, "move", moved)
    monkeypatch.setattr(os, "unlink", unlinked)
    put_files(tmp_path, {name: b"new" for name in OLD})
    start = calls.index(("move", journal.NAME))
    here = ("sync", tmp_path.name)
    assert calls[start + 1] == here
    moves = [name for call, name in calls[start + 2 :] if call == "move"]
    assert moves[0] == moves[-1] == HEAD
    end = calls.index(("unlink", journal.NAME))
    assert calls[end - 1] == here
    assert calls[end + 1] == here
    assert all(call != "unlink" for call, _ in calls[:end])
    assert set(contents(tmp_path).values()) == {b"new"}
    assert left_over(tmp_path) == []


# ---------------------------------------------------------------- readers meanwhile


def reading(tmp_path: Path, write: Callable[[int], object], read: Callable[[], object], times: int) -> list[object]:
    """The results of `read` while another process writes; GGUFError is no result."""

    def work() -> None:
        for number in range(1 << 30):
            write(number % 2)

    child = faults.forked(work)
    results, refusals = [], []
    try:
        for _ in range(times):
            try:
                results.append(read())
            except QgemmError as error:
                refusals.append(str(error))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert [text for text in refusals if not re.search("replaced|cannot be read", text)] == []
    return results


@pytest.mark.parametrize("exchanged", [True, False])
def test_reader_of_a_checkpoint_sees_no_mixture(exchanged, tmp_path, monkeypatch):
    """The config of one and the weights of the other would be read as other weights."""
    if not exchanged:
        monkeypatch.setattr(temporary, "_renameat2", lambda: None)
    values = []
    for number, fmt in enumerate(("u4z_g32", "u4_g64")):
        model(tmp_path / "m.gguf", {"a.weight": normal(32, 64)})
        qgemm.convert(tmp_path / "m.gguf", tmp_path / str(number), fmt, layout="gptq")
        with qgemm.load(tmp_path / str(number)) as file:
            values.append(file["a.weight"].dequantize().tobytes())
    files = [contents(tmp_path / str(number)) for number in range(2)]

    def is_own(name: str) -> bool:
        return name in files[0]

    def write(number: int) -> None:
        with replacing_folder(str(tmp_path / "out"), HEAD, is_own) as create:
            for name, data in files[number].items():
                with create(str(tmp_path / "out" / name)) as fd:
                    os.write(fd, data)

    def read() -> bytes:
        with qgemm.load(tmp_path / "out") as file:
            return file["a.weight"].dequantize().tobytes()

    write(0)
    results = reading(tmp_path, write, read, 200)
    assert set(results) <= set(values)


def test_reader_of_shards_sees_no_mixture(writers, tmp_path):
    outputs = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (writers["split over split"].old, writers["split over split"].new)[number](folder)
        outputs.append(contents(folder))

    def read() -> set[str]:
        with qgemm.open(tmp_path / "x-00001-of-00003.gguf") as file:
            return {str(tensor.format) for tensor in file.values()}

    put_files(tmp_path, outputs[0])
    results = reading(tmp_path, lambda number: put_files(tmp_path, outputs[number]), read, 300)
    assert all(result in ({"Q8_0"}, {"Q4_0"}) for result in results)


def test_shards_that_are_replaced_while_they_are_opened(writers, tmp_path, monkeypatch):
    """The first shard is the old one, the others would be new."""
    writer = writers["split over split"]
    writer.old(tmp_path)
    shard, opened = reader.Shard, []

    def late(path, **named):
        opened.append(path)
        if len(opened) == 2:
            writer.new(tmp_path)
        return shard(path, **named)

    with monkeypatch.context() as patched:
        patched.setattr(reader, "Shard", late)
        with pytest.raises(GGUFError, match=r"x-00001-of-00003\.gguf: was replaced while it was opened: open it again"):
            qgemm.open(tmp_path / "x-00001-of-00003.gguf")
    writer.read(tmp_path)


def killed(work: Callable[[], object], moves: int) -> None:
    """Do the work in a child that is killed before its move of this number."""

    def dying() -> None:
        move, calls = journal.move, []

        def moved(*arguments) -> None:
            calls.append(arguments)
            if len(calls) > moves:
                os.kill(os.getpid(), signal.SIGKILL)
            move(*arguments)

        journal.move = moved
        work()

    _, status = os.waitpid(faults.forked(dying), 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


@pytest.mark.parametrize("moves", range(1, 7))
def test_killed_replacement_is_refused_by_a_sentence_and_finished(moves, writers, tmp_path):
    """By the next process that writes to the folder, whatever it writes."""
    writer = writers["split over split"]
    writer.old(tmp_path)
    before = contents(tmp_path)
    killed(lambda: writer.new(tmp_path), moves)
    for part in (False, True):
        with pytest.raises(GGUFError) as caught:
            qgemm.open(tmp_path / "x-00001-of-00003.gguf", part=part)
        message = "x-00001-of-00003.gguf: is being replaced together with other files; if that process was killed, "
        assert message in str(caught.value)
    with pytest.raises(GGUFError, match="is being replaced"):
        qgemm.load(tmp_path / "x-00001-of-00003.gguf")
    qgemm.write(tmp_path / "another.gguf", {"w": np.ones((2, 8), np.float32)})
    assert left_over(tmp_path) == []
    (tmp_path / "another.gguf").unlink()
    after = contents(tmp_path)
    assert after.keys() == before.keys()
    assert all(after[name] != before[name] for name in before)
    writer.read(tmp_path)


def test_killed_replacement_of_a_folder_is_refused(tmp_path, monkeypatch):
    model(tmp_path / "m.gguf")
    qgemm.convert(tmp_path / "m.gguf", tmp_path / "out", "u4_g32", layout="gptq")
    (tmp_path / "out" / "figures").mkdir()  # replaced in place

    def convert() -> None:
        qgemm.convert(tmp_path / "m.gguf", tmp_path / "out", "u8_g32", layout="gptq", force=True)

    killed(convert, 3)
    for path in (tmp_path / "out", tmp_path / "out" / "model.safetensors"):
        with pytest.raises(QgemmError, match=r"config\.json: is being replaced together with other files"):
            qgemm.load(path)
    with pytest.raises(QgemmError, match="exists; it is replaced only by force"):  # finished, and there
        qgemm.convert(tmp_path / "m.gguf", tmp_path / "out", "u4_g32", layout="gptq")
    with qgemm.load(tmp_path / "out") as file:
        assert file["blk.0.attn_q.weight"].format.name == "u8_g32"
    assert left_over(tmp_path / "out") == []


def test_replacement_that_cannot_be_finished_is_undone(tmp_path, monkeypatch):
    put_files(tmp_path, OLD)
    killed(lambda: put_files(tmp_path, {name: b"new" for name in OLD}), 5)
    fails = [journal.move]

    def once(*arguments) -> None:
        if fails:
            fails.pop()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        temporary.move(*arguments)

    monkeypatch.setattr(journal, "move", once)
    journal.finish_pending(os.open(tmp_path, os.O_RDONLY), "x")
    assert contents(tmp_path) == OLD
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("spoiled", ["text", "other folders", "no folder", "another user's", "a newer file"])
def test_journal_that_cannot_be_trusted_stays(spoiled, tmp_path):
    """No file moves by it, and the message says what to do."""
    put_files(tmp_path, OLD)
    killed(lambda: put_files(tmp_path, {name: b"new" for name in OLD}), 5)
    path = tmp_path / journal.NAME
    fields = json.loads(path.read_text())
    if spoiled == "text":
        path.write_text("{}")
    elif spoiled == "other folders":
        path.write_text(json.dumps({**fields, "names": ["../x"]}))
    elif spoiled == "no folder":
        path.write_text(json.dumps({**fields, "old": "missing"}))
    elif spoiled == "another user's":
        if os.geteuid():
            pytest.skip("only root gives files away")
        os.chown(path, 1234, 1234)
    else:
        (tmp_path / HEAD).write_bytes(b"by the user")
    before = contents(tmp_path)
    with pytest.raises(GGUFError, match=r"\.qgemm-journal beside it describes a replacement that cannot be finished"):
        put_files(tmp_path, {name: b"newer" for name in OLD})
    assert contents(tmp_path) == before
    path.unlink()
    put_files(tmp_path, {name: b"newer" for name in OLD})
    assert contents(tmp_path) == {name: b"newer" for name in OLD}
    assert left_over(tmp_path) == []


# ---------------------------------------------------------------- files of the user


def test_files_of_the_user_stay(old, tmp_path):
    """In the new folder, as the same files; files of the old checkpoint go, also where the new one has none."""
    (old / "README.md").write_text("mine")
    (old / "link").symlink_to("README.md")
    os.mkfifo(old / "pipe")
    number = (old / "README.md").stat().st_ino
    inode = old.stat().st_ino
    put(old, NEW)
    assert old.stat().st_ino != inode  # exchanged
    assert sorted(os.listdir(old)) == ["README.md", "config.json", "link", "model.bin", "pipe"]
    assert (old / "README.md").stat().st_ino == number
    assert (old / "README.md").stat().st_nlink == 1
    assert os.readlink(old / "link") == "README.md"
    assert left_over(tmp_path) == []


def test_folder_of_the_user_stays_and_files_are_replaced_in_place(old, tmp_path):
    (old / "figures").mkdir()
    (old / "figures" / "a.svg").write_text("mine")
    inode = old.stat().st_ino
    put(old, NEW)
    assert old.stat().st_ino == inode
    assert contents(old) == NEW
    assert (old / "figures" / "a.svg").read_text() == "mine"
    assert left_over(tmp_path) == left_over(old) == []


def test_file_that_comes_before_the_exchange_stays(old, tmp_path, monkeypatch):
    exchange = folders.exchange

    def late(*arguments) -> None:
        (old / "notes.txt").write_text("late")
        (old / "later").mkdir()
        exchange(*arguments)
        journal.remove_unfinished(os.open(tmp_path, os.O_RDONLY))  # by another process

    monkeypatch.setattr(folders, "exchange", late)
    put(old, NEW)
    assert (old / "notes.txt").read_text() == "late"
    assert (old / "later").is_dir()
    assert left_over(tmp_path) == []


def test_links_among_the_files_are_replaced(old, tmp_path):
    """As in a snapshot folder of Hugging Face: the files that they lead to stay."""
    store = tmp_path / "store"
    store.write_bytes(b"of the store")
    for path in (old, tmp_path / "files"):
        path.mkdir(exist_ok=True)
        (path / "model.bin").unlink(missing_ok=True)
        (path / "model.bin").symlink_to(store)
    put(old, NEW)
    put_files(tmp_path / "files", NEW)
    for path in (old, tmp_path / "files"):
        assert contents(path) == NEW
        assert not (path / "model.bin").is_symlink()
    assert store.read_bytes() == b"of the store"


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "quantize_config.json", "hf_quant_config.json"])
def test_files_of_another_checkpoint_are_refused(name, tmp_path):
    """They would be read with the new weights; and shards of a model are not removed unasked."""
    model(tmp_path / "m.gguf")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("{}")
    with pytest.raises(QgemmError, match=rf"out: holds '{name}' of another checkpoint"):
        qgemm.convert(tmp_path / "m.gguf", tmp_path / "out", "u4_g32", layout="gptq", force=True)
    assert os.listdir(tmp_path / "out") == [name]


def test_folder_of_the_source_is_refused(tmp_path):
    """Also by links, and where no file would be replaced."""
    folder = tmp_path / "m"
    folder.mkdir()
    safetensors(folder / "weights.safetensors", {"a.weight": normal(32, 64)})
    (tmp_path / "link").symlink_to("m")
    before = contents(folder)
    for source in (folder, folder / "weights.safetensors", tmp_path / "link" / "weights.safetensors"):
        for target in (folder, tmp_path / "link"):
            with pytest.raises(
                QgemmError, match=r"is the folder of .*weights\.safetensors, a file of this very command"
            ):
                qgemm.convert(source, target, "u4_g32", layout="gptq", force=True)
    assert contents(folder) == before
    qgemm.convert(folder, folder / "gptq", "u4_g32", layout="gptq")  # inside is another folder


def test_tokenizer_of_the_old_checkpoint_goes(tmp_path):
    """A tokenizer of one model beside the weights of another is a mixture."""
    model(tmp_path / "m.gguf")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    with pytest.raises(QgemmError, match=r"tokenizer\.json: exists; it is replaced only by force"):
        qgemm.convert(tmp_path / "m.gguf", tmp_path / "out", "u4_g32", layout="gptq")
    qgemm.convert(tmp_path / "m.gguf", tmp_path / "out", "u4_g32", layout="gptq", force=True)
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]


# ---------------------------------------------------------------- where the folder is


def test_new_folder_in_new_folders(tmp_path):
    put(tmp_path / "a" / "b" / "out", NEW)
    assert contents(tmp_path / "a" / "b" / "out") == NEW
    with pytest.raises(ZeroDivisionError):
        put(tmp_path / "c" / "d" / "out", NEW, during=lambda: 1 / 0)
    assert sorted(os.listdir(tmp_path)) == ["a"]


def test_link_to_a_folder_stays_a_link(old, tmp_path):
    link = tmp_path / "elsewhere" / "link"
    link.parent.mkdir()
    link.symlink_to(old)
    put(link, NEW)
    assert link.is_symlink()
    assert contents(old) == NEW
    assert left_over(link.parent) == left_over(tmp_path) == []
    dangling = tmp_path / "dangling"
    dangling.symlink_to("new")
    put(dangling, NEW)
    assert contents(tmp_path / "new") == NEW


def test_working_directory_is_replaced_in_place(old, tmp_path, monkeypatch):
    """A shell would stay in a folder that is gone."""
    monkeypatch.chdir(old)
    put(Path("."), NEW)
    assert sorted(os.listdir(".")) == sorted(NEW)
    assert contents(old) == NEW
    assert left_over(tmp_path) == []


def test_mount_point_is_replaced_in_place(tmp_path):
    """As the volume of a container is: its name cannot be changed."""
    volume, point = tmp_path / "volume", tmp_path / "point"
    put(volume, OLD)
    point.mkdir()
    if os.geteuid() or subprocess.run(["mount", "--bind", volume, point], capture_output=True).returncode:
        pytest.skip("this user mounts no folders")
    try:
        put(point, NEW)
        assert contents(volume) == NEW
    finally:
        subprocess.run(["umount", point], check=True)
    assert left_over(volume) == left_over(tmp_path) == []


def as_nobody(work: Callable[[], object]) -> None:
    """Do the work in a child without the rights of root."""

    def unprivileged() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        work()

    _, status = os.waitpid(faults.forked(unprivileged), 0)
    assert status == 0


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that an unprivileged user reaches, as he does not reach pytest's, and owns if root runs the tests."""
    with tempfile.TemporaryDirectory() as name:
        if os.geteuid() == 0:
            os.chown(name, 65534, 65534)
        yield Path(name)


@pytest.mark.parametrize("parent", ["read-only", "sticky"])
def test_folder_in_one_that_cannot_be_written_to(parent, shared):
    """A folder whose name this user cannot change is replaced in place."""
    if parent == "sticky" and os.geteuid():
        pytest.skip("only root gives files away")
    as_nobody(lambda: put(shared / "out", OLD))
    shared.chmod(0o555 if parent == "read-only" else 0o1777)
    if parent == "sticky":
        os.chown(shared, 0, 0)
        os.chown(shared / "out", 0, 0)
        (shared / "out").chmod(0o777)
    try:
        as_nobody(lambda: put(shared / "out", NEW))
        assert contents(shared / "out") == NEW
        assert left_over(shared) == left_over(shared / "out") == []
    finally:
        shared.chmod(0o755)


def test_no_permission(shared):
    """Before any work, by the name of the folder."""

    def refused() -> None:
        for path in (shared / "out", shared / "new"):
            with pytest.raises(GGUFAccessError, match=r"(out|new): cannot be written: Permission denied"):
                put(path, NEW, during=lambda: pytest.fail("did some work"))

    as_nobody(lambda: put(shared / "out", OLD))
    shared.chmod(0o555)
    (shared / "out").chmod(0o555)
    try:
        as_nobody(refused)
        assert contents(shared / "out") == OLD
    finally:
        shared.chmod(0o755)


@pytest.mark.parametrize("name", ["file", "fifo"])
def test_target_that_is_no_folder(name, tmp_path):
    (tmp_path / "file").write_text("mine")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(GGUFError, match=f"{name}: is not a folder"):
        put(tmp_path / name, NEW)
    assert sorted(os.listdir(tmp_path)) == ["fifo", "file"]


def test_modes(old):
    """The folder and its files have those of the old ones; nobody else sees unfinished ones."""
    old.chmod(0o2750)  # set-gid: new files have the group of the folder
    (old / HEAD).chmod(0o640)
    modes = []

    def during() -> None:
        (unfinished,) = left_over(old.parent)
        modes.append(stat.S_IMODE((old.parent / unfinished).stat().st_mode))

    umask = os.umask(0o022)
    try:
        with replacing_folder(str(old), HEAD, belongs) as create:
            for name, data in NEW.items():
                with create(str(old / name)) as fd:
                    os.write(fd, data)
            during()
        put(old.parent / "new", NEW)
    finally:
        os.umask(umask)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (old, old / HEAD, old.parent / "new")] == [
        0o2750, 0o640, 0o755,
    ]  # fmt: skip
    assert modes[0] & 0o077 == 0


# ---------------------------------------------------------------- systems that lack something


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOSYS, errno.EPERM])
def test_without_exchange(error, old, tmp_path, monkeypatch):
    """The files are replaced in place, by a journal."""
    one_error(monkeypatch, folders, "exchange", 0, error)
    (old / "README.md").write_text("mine")
    put(old, NEW)
    assert contents(old) == {**NEW, "README.md": b"mine"}
    assert left_over(tmp_path) == left_over(old) == []


def test_without_renameat2(old, tmp_path, without_exchange):
    put(old, NEW)
    assert contents(old) == NEW
    put(tmp_path / "new", NEW, replace=False)
    assert contents(tmp_path / "new") == NEW
    put_files(tmp_path, OLD, replace=False)
    with pytest.raises(QgemmError, match="exists; "):
        put_files(tmp_path, NEW, replace=False)
    put_files(tmp_path, NEW)
    assert contents(tmp_path) == {**OLD, **NEW}
    assert left_over(tmp_path) == left_over(old) == []


def test_without_hard_links(old, tmp_path, monkeypatch):
    (old / "README.md").write_text("mine")
    one_error(monkeypatch, os, "link", 0, errno.EPERM)
    put(old, NEW)
    assert contents(old) == {**NEW, "README.md": b"mine"}
    assert left_over(tmp_path) == left_over(old) == []


def test_without_locks(old, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    put(old, NEW)
    put_files(tmp_path, NEW)
    assert contents(old) == contents(tmp_path) == NEW
    assert left_over(tmp_path) == left_over(old) == []


# ---------------------------------------------------------------- other processes


def test_existing_output_stays_without_force(old, tmp_path):
    """Also what comes while the new one is written, and a folder without such files is no output."""
    for files in (NEW, {HEAD: b""}):
        with pytest.raises(QgemmError, match="exists; it is replaced only by force"):
            put(old, files, replace=False)
        with pytest.raises(QgemmError, match="exists; it is replaced only by force"):
            put_files(old, files, replace=False)
    assert contents(old) == OLD
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "README.md").write_text("mine")
    put(tmp_path / "empty", NEW, replace=False)
    assert contents(tmp_path / "empty") == {**NEW, "README.md": b"mine"}
    for name in ("new", "other"):
        if name == "other":
            (tmp_path / name).mkdir()
        with pytest.raises(QgemmError, match="exists; it is replaced only by force"):
            put(tmp_path / name, NEW, replace=False, during=lambda name=name: put(tmp_path / name, OLD))
        assert contents(tmp_path / name) == OLD
    assert left_over(tmp_path) == []


def test_temporary_folders_of_the_living_stay(old, tmp_path):
    """Another writer's folder is locked; one that nobody holds is removed; other folders are not."""
    stale, other = (tmp_path / f".qgemm-{name}.dir" for name in ("0" * 16, "notes"))
    for folder in (stale, other):
        folder.mkdir()
        (folder / "x").write_bytes(b"")

    def during() -> None:
        assert not stale.exists()
        (living,) = (name for name in left_over(tmp_path) if name != other.name)
        put(tmp_path / "another", NEW)
        put(old, OLD)
        assert (tmp_path / living).is_dir()

    put(old, NEW, during=during)
    assert contents(old) == NEW
    assert left_over(tmp_path) == [other.name]


def test_swapped_temporary_folder_is_not_published(old, tmp_path):
    def swap() -> None:
        (name,) = left_over(tmp_path)
        (tmp_path / name).rename(tmp_path / "moved")
        (tmp_path / name).mkdir()

    with pytest.raises(GGUFError, match="someone removed or replaced the unfinished files"):
        put(old, NEW, during=swap)
    assert contents(old) == OLD


def test_folder_that_goes_meanwhile_is_made_again(old, tmp_path):
    put(old, NEW, during=lambda: old.rename(tmp_path / "moved"))
    assert contents(old) == NEW
    assert contents(tmp_path / "moved") == OLD


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptq over gptq", "gptq in place", "split over split", "new awq", "new split"])
def test_two_writers_of_one_output(name, writers, tmp_path):
    """Both succeed, and the output is that of one of them."""
    writer = writers[name]
    bench = faults.Bench(writer, tmp_path)
    for _ in range(4):
        bench.reset()
        children = [faults.forked(lambda: writer.new(bench.place)) for _ in range(3)]
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
        assert bench.verdict() == "new"
        assert left_over(bench.place) == []
        for folder in bench.place.iterdir():
            assert not folder.is_dir() or left_over(folder) == []


def test_replacement_of_another_process_is_waited_for(tmp_path, monkeypatch):
    """Not forever: anyone who may read the journal can lock it."""
    put_files(tmp_path, OLD)
    killed(lambda: put_files(tmp_path, {name: b"new" for name in OLD}), 5)
    fd = os.open(tmp_path / journal.NAME, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    files = {name: b"newer" for name in OLD}
    with pytest.raises(GGUFAccessError, match=r"another process replaces files of this folder"):
        put_files(tmp_path, files)
    assert len(pauses) == journal.PAUSES
    os.close(fd)
    put_files(tmp_path, files)
    assert contents(tmp_path) == files
    assert left_over(tmp_path) == []

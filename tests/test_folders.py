"""Folders that are replaced: files of the user, odd places, other processes."""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import faults
import pytest
from files import model, safetensors
from helpers import left_over, normal
from replaced import HEAD, NEW, OLD, belongs, contents, put, put_files

import qgemm
from qgemm.errors import GGUFAccessError, GGUFError, QgemmError
from qgemm.files import folders, journal
from qgemm.files.folders import replacing_folder

pytest_plugins = ["replaced_folders"]  # its fixtures old and writers


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


def test_working_directory_that_was_removed(old, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    put(old, NEW)
    assert contents(old) == NEW


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


def test_old_file_that_is_moved_away_meanwhile_is_none(old, monkeypatch):
    """Another process replaces the files at this moment: the names were listed before, the files are gone."""
    listdir = os.listdir
    (old / HEAD).unlink()
    monkeypatch.setattr(os, "listdir", lambda folder: sorted({*listdir(folder), HEAD}))
    put_files(old, NEW)
    monkeypatch.undo()
    assert contents(old) == {**OLD, **NEW}


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

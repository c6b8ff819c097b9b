"""Outputs of a command: never over its inputs or other outputs, never over an old DST without --force."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from files import model, safetensors
from gguf import GGUFWriter
from helpers import converted, left_over, normal

import qgemm


@pytest.fixture
def source(tmp_path) -> Path:
    return model(tmp_path / "source.gguf")


def split_model(folder: Path) -> list[Path]:
    """The two shards of a model."""
    writer = GGUFWriter(folder / "m.gguf", "test", split_max_tensors=1)
    for i in range(2):
        writer.add_tensor(f"w{i}", normal(40, 64))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("m-*.gguf"))


def importance(path: Path, name: str) -> None:
    """An importance matrix for one tensor of 64 columns."""
    qgemm.write(path, {f"{name}.in_sum2": np.ones((1, 64), np.float32), f"{name}.counts": np.ones((1, 1), np.float32)})


# ---------------------------------------------------------------- DST


@pytest.mark.parametrize("how", ["path", "other spelling", "symbolic link", "hard link"])
@pytest.mark.parametrize("dry_run", [False, True])
def test_never_onto_its_own_input(how, dry_run, source, tmp_path):
    """Not by force either, by whatever name."""
    target = tmp_path / "other.gguf"
    if how == "path":
        target = source
    elif how == "other spelling":
        target = f"{tmp_path}/../{tmp_path.name}//./{source.name}"
    elif how == "symbolic link":
        target.symlink_to(source)
    else:
        target.hardlink_to(source)
    before = source.read_bytes()
    with pytest.raises(qgemm.QgemmError, match="is a file of this very command" if how == "path" else "is the same"):
        converted(source, target, "q4_0", force=True, dry_run=dry_run)
    assert source.read_bytes() == before


@pytest.mark.parametrize("suffix", ["gguf", "safetensors", "npz"])
def test_what_exists_is_replaced_only_by_force(suffix, source, tmp_path):
    """Refused before any work: nothing is read."""
    target = tmp_path / f"y.{suffix}"
    target.write_bytes(b"old")
    link = tmp_path / f"link.{suffix}"
    link.symlink_to(target)
    for path in (target, link):
        with pytest.raises(qgemm.QgemmError) as caught:
            converted(source, path, "f16", force=False, advance=lambda nbytes: pytest.fail("did some work"))
        assert str(caught.value) == f"{path}: exists; it is replaced only by force (--force, force=True)"
        converted(source, path, "f16", force=False, dry_run=True)
    assert target.read_bytes() == b"old"
    converted(source, link, "f16", force=True)
    assert target.stat().st_size > 3
    assert link.is_symlink()


@pytest.mark.parametrize("suffix", ["gguf", "safetensors", "npz"])
def test_what_comes_during_the_work_stays(suffix, source, tmp_path):
    target = tmp_path / f"y.{suffix}"
    with pytest.raises(qgemm.QgemmError, match=rf"y\.{suffix}: exists; "):
        converted(source, target, "f16", force=False, advance=lambda nbytes: target.write_bytes(b"of another"))
    assert target.read_bytes() == b"of another"
    assert left_over(tmp_path) == []
    converted(source, tmp_path / f"z.{suffix}", "f16", force=False)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A folder of two shards, with an index and a config."""
    folder = tmp_path / "model"
    folder.mkdir()
    shards = {"a-00001-of-00002.safetensors": "a.weight", "a-00002-of-00002.safetensors": "b.weight"}
    for shard, name in shards.items():
        safetensors(folder / shard, {name: normal(40, 64)})
    index = {"weight_map": {name: shard for shard, name in shards.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    return folder


def test_never_onto_a_file_of_a_checkpoint(checkpoint, tmp_path):
    """Shards, index and config, by links that end as DST must."""
    before = {path: path.read_bytes() for path in checkpoint.iterdir()}
    assert len(before) == 4
    for number, path in enumerate(before):
        for make in ("symlink_to", "hardlink_to"):
            target = tmp_path / f"{make}{number}.safetensors"
            getattr(target, make)(path)
            with pytest.raises(qgemm.QgemmError, match="is the same file as"):
                converted(checkpoint, target, "f16")
    with pytest.raises(qgemm.QgemmError, match="is a file of this very command"):
        converted(checkpoint, checkpoint / "a-00002-of-00002.safetensors", "f16")
    assert {path: path.read_bytes() for path in checkpoint.iterdir()} == before
    converted(checkpoint, checkpoint / "new.safetensors", "f16", force=False)


def test_never_onto_a_shard(tmp_path):
    names = split_model(tmp_path)
    for name in names:
        before = name.read_bytes()
        with pytest.raises(qgemm.QgemmError, match="is a file of this very command"):
            converted(names[0], name, "f16")
        assert name.read_bytes() == before


# ---------------------------------------------------------------- reports and pictures


@pytest.mark.parametrize("option", ["--report", "--plot"])
@pytest.mark.parametrize("protected", ["source", "target", "link to the source", "imatrix", "config"])
def test_reports_never_replace_what_is_needed(option, protected, checkpoint, run, tmp_path, monkeypatch):
    """Neither inputs nor other outputs; checked before any work."""
    monkeypatch.setattr("qgemm.cli.convert.check_plot", lambda path: None)
    monkeypatch.setattr("qgemm.cli.convert.plot", lambda path, lines: b"picture")
    imatrix, target, link = tmp_path / "imatrix.gguf", tmp_path / "y.gguf", tmp_path / "link"
    importance(imatrix, "a.weight")
    paths = {
        "source": checkpoint / "a-00001-of-00002.safetensors",
        "target": f"{tmp_path}/model/../y.gguf",
        "link to the source": link,
        "imatrix": imatrix,
        "config": checkpoint / "config.json",
    }
    link.symlink_to(paths["source"])
    before = {path: path.read_bytes() for path in (*checkpoint.iterdir(), imatrix)}
    words = ("convert", checkpoint, target, "q4_0", "--imatrix", imatrix, option)
    status, out, err = run(*words, paths[protected])
    assert (status, out) == (1, "")
    assert "write to another" in err
    assert not target.exists()
    assert {path: path.read_bytes() for path in before} == before
    assert run(*words, tmp_path / "report")[0] == 0
    assert (tmp_path / "report").stat().st_size


def test_report_and_picture_are_two_files(source, run, tmp_path, monkeypatch):
    monkeypatch.setattr("qgemm.cli.convert.check_plot", lambda path: None)
    words = "convert", source, tmp_path / "y.gguf", "q4_0", "--report", tmp_path / "r", "--plot", tmp_path / "." / "r"
    status, _, err = run(*words)
    assert (status, "write to another" in err) == (1, True)
    assert os.listdir(tmp_path) == ["source.gguf"]


def test_the_importance_matrix_is_not_the_output(source, run, tmp_path):
    imatrix = tmp_path / "imatrix.gguf"
    importance(imatrix, "blk.0.attn_q.weight")
    before = imatrix.read_bytes()
    status, _, err = run("convert", source, imatrix, "q4_0", "--imatrix", imatrix, "--force")
    assert (status, "write to another" in err) == (1, True)
    assert imatrix.read_bytes() == before


@pytest.mark.parametrize("where", ["none/r.json", "folder", "fifo"])
def test_reports_are_checked_before_the_work(where, source, run, tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    status, out, err = run("convert", source, tmp_path / "y.gguf", "q4_0", "--report", tmp_path / where)
    assert (status, out) == (1, "")
    assert f"{tmp_path / where}: " in err
    assert not (tmp_path / "y.gguf").exists()


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["pipe", "file", "file by its name"])
def test_reports_to_where_the_table_goes(stream, source, tmp_path):
    """A pipe cannot be replaced, and a file that is replaced would lose the printed table. Refused before the work."""
    log = tmp_path / "log"
    report = log if stream == "file by its name" else "/dev/stdout"
    words = [sys.executable, "-m", "qgemm", "convert", source, tmp_path / "y.gguf", "q4_0", "--report", report]
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with log.open("wb") as file:
        stdout = subprocess.PIPE if stream == "pipe" else file
        done = subprocess.run(words, stdout=stdout, stderr=subprocess.PIPE, env=here, text=True)
    assert (done.returncode, done.stdout or "") == (1, "")
    assert ("is not a regular file" if stream == "pipe" else "write to another") in done.stderr
    assert log.read_bytes() == b""
    assert sorted(os.listdir(tmp_path)) == ["log", "source.gguf"]


def test_force_of_the_command(source, run, tmp_path):
    words = "convert", source, tmp_path / "y.gguf", "q4_0"
    assert run(*words)[0] == 0
    before = (tmp_path / "y.gguf").read_bytes()
    status, out, err = run("convert", source, tmp_path / "y.gguf", "q8_0")
    assert (status, out) == (1, "")
    assert "y.gguf: exists; it is replaced only by force" in err
    assert (tmp_path / "y.gguf").read_bytes() == before
    assert run("convert", source, tmp_path / "y.gguf", "q8_0", "--force")[0] == 0
    assert (tmp_path / "y.gguf").read_bytes() != before


@pytest.mark.parametrize("protected", ["model", "x", "link", "hard link"])
def test_a_product_never_replaces_what_is_needed(protected, source, run, tmp_path):
    """`qgemm matmul --out` onto its model or its activations."""
    x = tmp_path / "x.npy"
    np.save(x, normal(2, 64))
    paths = {"model": source, "x": x, "link": tmp_path / "link.npy", "hard link": tmp_path / "hard.npy"}
    paths["link"].symlink_to(source)
    paths["hard link"].hardlink_to(source)
    before = source.read_bytes(), x.read_bytes()
    words = "matmul", source, "blk.0.attn_q.weight", "--x", x, "--out"
    status, out, err = run(*words, paths[protected])
    assert (status, out) == (1, "")
    assert "write to another" in err
    assert (source.read_bytes(), x.read_bytes()) == before
    assert run(*words, tmp_path / "none" / "y.npy")[:2] == (1, "")
    assert run(*words, tmp_path / "y.npy")[0] == 0
    assert np.load(tmp_path / "y.npy").shape == (2, 96)


def test_a_product_never_replaces_a_shard(run, tmp_path):
    names = split_model(tmp_path)
    for name in names:
        status, _, err = run("matmul", names[0], "w0", "--m", "1", "--out", name)
        assert (status, "write to another" in err) == (1, True)


@pytest.mark.parametrize("name", ["picture", "picture.", "picture.gguf", "picture.PNG.txt"])
def test_pictures_of_no_kind(name, source, run, tmp_path, monkeypatch):
    """Refused before the work, with what could be drawn."""

    class Figure:
        canvas = SimpleNamespace(get_supported_filetypes=lambda: {"png": "", "svg": ""})

    monkeypatch.setattr("qgemm.converter.plot.figure_type", lambda: Figure)
    status, out, err = run("convert", source, tmp_path / "y.gguf", "q4_0", "--plot", tmp_path / name)
    assert (status, out) == (1, "")
    assert err == f"qgemm: error: {tmp_path / name}: the name must end in .png, .svg\n"
    assert os.listdir(tmp_path) == ["source.gguf"]

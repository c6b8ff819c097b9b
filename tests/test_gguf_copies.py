"""Tensors of an open file elsewhere: copied, pickled, in other processes; files that are cut while they are used."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from helpers import EXCERPT, normal
from numpy.testing import assert_array_equal

import qgemm
from qgemm.errors import GGUFError, GGUFNotFoundError
from qgemm.formats import GGML_TYPES

CODEBOOK = np.linspace(-1, 1, 8, dtype=np.float32) ** 3


@pytest.fixture
def path(tmp_path) -> Path:
    qgemm.write(
        tmp_path / "m.gguf",
        {
            "a": qgemm.quantize(normal(6, 64), "q4_0"),
            "b": normal(3, 8, 32, seed=1),
            "k": qgemm.quantize(normal(4, 64, seed=2), qgemm.FORMATS["kbit3"].variant(CODEBOOK, None)),
        },
    )
    return tmp_path / "m.gguf"


def pickled(tensor):
    return pickle.loads(pickle.dumps(tensor))


WAYS = [copy.copy, copy.deepcopy, pickled]


@pytest.mark.parametrize("way", WAYS)
def test_tensors_of_a_file_survive(way, path):
    """Copies share memory as before; pickles and deep copies outlive the open file."""
    with qgemm.open(path) as model:
        want = {name: tensor.dequantize() for name, tensor in model.items()}
        tensors = way(dict(model))
        for name, tensor in tensors.items():
            assert repr(tensor) == repr(model[name])
            assert tensor.format == model[name].format
            assert_array_equal(tensor.dequantize(), want[name])
            assert tensor.read(1, 2).tobytes() == model[name].read(1, 2).tobytes()
        assert_array_equal(way(model["b"][1]).dequantize(), want["b"][1])
        assert_array_equal(qgemm.matmul(normal(2, 64), tensors["a"]), qgemm.matmul(normal(2, 64), model["a"]))
    if way is copy.copy:
        with pytest.raises(GGUFError, match=r"m\.gguf: was closed: what is in a file is read while it is open"):
            tensors["a"].dequantize()
    else:
        assert_array_equal(tensors["k"].dequantize(), want["k"])


@pytest.mark.parametrize("way", WAYS)
def test_tensors_in_memory_survive(way):
    for fmt in qgemm.FORMATS.values():
        if fmt.encode is None:
            continue
        alike = np.ones(fmt.weights) if fmt.encoding.needs_importance else None
        tensor = qgemm.quantize(normal(2, fmt.weights), fmt, imatrix=alike)
        restored = way(tensor)
        assert restored.format is tensor.format
        assert restored.blocks.tobytes() == tensor.blocks.tobytes()


@pytest.mark.parametrize("way", WAYS)
def test_formats_stay_what_they_are(way):
    for fmt in {*qgemm.FORMATS.values(), *GGML_TYPES.values()}:
        assert way(fmt) is fmt
    for name in ("kbit3", "kbit3_f16"):
        fmt = qgemm.FORMATS[name].variant(CODEBOOK, None)
        restored = way(fmt)
        assert restored == fmt
        assert restored.dtype == fmt.dtype
        assert_array_equal(restored.codebook, CODEBOOK)


def test_a_pickle_is_small_and_opens_nothing(path):
    """Path and offset, no blocks; one file for all tensors of a process."""
    large = path.parent / "large.gguf"
    qgemm.write(large, {name: normal(64, 1024) for name in "abcdefgh"})
    with qgemm.open(large) as model:
        raw = pickle.dumps(list(model.values()))
    assert len(raw) < 4096
    before = len(os.listdir("/proc/self/fd"))
    tensors = pickle.loads(raw)
    assert len(os.listdir("/proc/self/fd")) == before
    tensors[0].read(0, 1)
    with_one = len(os.listdir("/proc/self/fd"))
    assert [tensor.read(0, 1).size for tensor in tensors] == [1] * 8
    assert len(os.listdir("/proc/self/fd")) == with_one > before
    del tensors
    assert len(os.listdir("/proc/self/fd")) == before


def test_pickles_of_what_is_gone(path, monkeypatch):
    """A pickle opens its file again, no changed, replaced or removed one; a relative path keeps its meaning."""
    with qgemm.open(path) as model:
        raw, tensor = pickle.dumps(model["a"]), model["a"]
    for way in (pickle.dumps, copy.deepcopy):
        with pytest.raises(GGUFError, match=r"m\.gguf: was closed"):
            way(tensor)
    monkeypatch.chdir(path.parent)
    with qgemm.open(path.name) as model:
        relative = pickle.dumps(model["a"])
    monkeypatch.chdir("/")
    assert pickle.loads(relative).dequantize().shape == (6, 64)
    status = os.stat(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(GGUFError, match=r"m\.gguf: changed since its tensors were pickled or copied"):
        pickle.loads(raw).dequantize()
    path.unlink()
    with pytest.raises(GGUFNotFoundError, match=r"m\.gguf: cannot be read: No such file"):
        pickle.loads(raw).dequantize()


@pytest.mark.parametrize("way", [pickled, copy.copy, copy.deepcopy])
def test_open_files_are_not_copied_but_their_metadata_are(way):
    refusal = r".*minilm_excerpt\.gguf.*> cannot be pickled or copied; pickle its tensors"
    with qgemm.open(EXCERPT) as model:
        with pytest.raises(TypeError, match=f"^<GGUFFile {refusal}"):
            way(model)
        metadata = way(model.metadata)
        assert metadata == dict(model.metadata)
    assert metadata["general.architecture"]
    with qgemm.load(EXCERPT) as checkpoint, pytest.raises(TypeError, match=f"^<Checkpoint {refusal}"):
        way(checkpoint)


def product(tensor: qgemm.Tensor) -> np.ndarray:
    return qgemm.matmul(np.eye(tensor.shape[-1], dtype=np.float32), tensor)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers(method, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork beside threads
        with qgemm.open(path) as model, multiprocessing.get_context(method).Pool(2) as pool:
            tensors = [model["a"], model["k"], model["a"]]
            for tensor, remote in zip(tensors, pool.map(product, tensors), strict=True):
                assert_array_equal(remote, tensor.dequantize().T)


# ---------------------------------------------------------------- files that are cut while they are used


def test_copies_outlive_what_becomes_of_the_file(path):
    """Read at first use and kept: a file that is cut is an error, then no more of it is needed."""
    with qgemm.open(EXCERPT) as mapped, qgemm.open(EXCERPT, copy=True) as copied:
        for name, tensor in mapped.items():
            assert copied[name].blocks.tobytes() == tensor.blocks.tobytes()
            assert not copied[name].blocks.flags.writeable
            assert copied[name].blocks is copied[name].blocks
    with qgemm.open(path, copy=True) as model:
        blocks = model["a"].blocks
        os.truncate(path, path.stat().st_size // 2)
        assert model["a"].blocks is blocks
        assert np.isfinite(model["a"].dequantize()).all()
        with pytest.raises(GGUFError, match=r"m\.gguf: changed since it was opened"):
            model["b"].dequantize()
    with pytest.raises(GGUFError, match=r"m\.gguf: was closed"):
        model["a"].dequantize()


CUT = """
import os, sys
import numpy as np
import qgemm

path, copy = sys.argv[1], sys.argv[2] == "copy"
with qgemm.open(path, copy=copy) as model:
    blocks = model["w"].blocks
    os.truncate(path, 4096)  # after the last look at the file
    print(np.isfinite(blocks["d"].astype(np.float32)).all())
"""


@pytest.mark.parametrize(("way", "status"), [("map", -7), ("copy", 0)])
def test_a_mapping_of_a_cut_file_ends_the_process(way, status, tmp_path):
    """What README says, and what copy=True is for."""
    qgemm.write(tmp_path / "m.gguf", {"w": qgemm.quantize(normal(512, 1024), "q4_0")})
    done = subprocess.run([sys.executable, "-c", CUT, tmp_path / "m.gguf", way], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, "True\n" * (status == 0))

"""Mappings of files are copy-on-write; memory that cannot be written is recognized."""

from __future__ import annotations

import errno
import mmap

import numpy as np
import pytest
from helpers import random_tensor

import qgemm
from qgemm.files import mapping

Q4_0 = qgemm.FORMATS["q4_0"]


def model(path):
    """A file of one matrix, and that matrix."""
    w = random_tensor(Q4_0, 64, 256, np.random.default_rng(0))
    qgemm.write(path, {"w": w})
    return w


def test_a_write_into_a_mapping_stays_in_the_process(tmp_path):
    """Arrays are read-only; a write nevertheless changes a copy of the file's page."""
    w = model(tmp_path / "model.gguf")
    before = (tmp_path / "model.gguf").read_bytes()
    with qgemm.open(tmp_path / "model.gguf") as file:
        blocks = file["w"].blocks
        assert not blocks.flags.writeable
        assert mapping.is_writable(blocks)
        blocks.flags.writeable = True
        blocks.view(np.uint8)[...] = 0
        assert not file["w"].dequantize().any()
        with qgemm.open(tmp_path / "model.gguf") as other:
            assert other["w"].blocks.tobytes() == w.blocks.tobytes()
    assert (tmp_path / "model.gguf").read_bytes() == before


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EAGAIN])
def test_a_mapping_is_read_only_where_memory_is_reserved_for_copies(tmp_path, monkeypatch, number):
    """As under vm.overcommit_memory = 2, or a limit of data (ulimit -d)."""
    w, own = model(tmp_path / "model.gguf"), mmap.mmap

    def strict(fd, size, flags, prot):
        if prot & mmap.PROT_WRITE:
            raise OSError(number, "no memory")
        return own(fd, size, flags, prot)

    monkeypatch.setattr(mmap, "mmap", strict)
    with qgemm.open(tmp_path / "model.gguf") as file:
        assert file["w"].blocks.tobytes() == w.blocks.tobytes()
        assert not mapping.is_writable(file["w"].blocks)


def test_other_errors_of_a_mapping_are_raised(tmp_path, monkeypatch):
    """They say that the file cannot be mapped at all; `open` reads it then by its descriptor."""

    def refuse(*_):
        raise OSError(errno.ENODEV, "no mappings here")

    w = model(tmp_path / "model.gguf")
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(OSError, match="no mappings here"):
        mapping.map_private(0, 1)
    with qgemm.open(tmp_path / "model.gguf") as file:
        assert file["w"].blocks.tobytes() == w.blocks.tobytes()


def test_memory_that_can_be_written(tmp_path):
    """Own arrays and views of them, whatever their flag; not those over bytes or a read-only mapping."""
    own = np.zeros(8, np.uint8)
    own.flags.writeable = False
    np.zeros(8, np.uint8).tofile(tmp_path / "file")
    assert mapping.is_writable(own)
    assert mapping.is_writable(own[2:].view(np.uint16))
    assert mapping.is_writable(np.frombuffer(bytearray(8), np.uint8))
    assert mapping.is_writable(np.memmap(tmp_path / "file", np.uint8, "c"))
    assert not mapping.is_writable(np.frombuffer(bytes(8), np.uint8)[2:])
    assert not mapping.is_writable(np.memmap(tmp_path / "file", np.uint8, "r")[2:])

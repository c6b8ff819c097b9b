"""Hostile files of NumPy: headers that are no dicts, archives whose directory lies."""

from __future__ import annotations

import re
import struct
import tempfile
import tracemalloc
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers import converted, normal
from hostile import BEYOND, refused
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from qgemm.converter import open_source
from qgemm.errors import CheckpointError
from qgemm.files.paths import RegularFile
from qgemm.files.zip import inflate, members

# ---------------------------------------------------------------- .npy


def npy(path: Path, header: bytes, data: bytes = bytes(24), version: int = 1) -> Path:
    size = struct.pack("<H" if version == 1 else "<I", len(header))
    path.write_bytes(b"\x93NUMPY" + bytes([version, 0]) + size + header + data)
    return path


HEADERS = {
    # header for 24 bytes of float32 (2, 3), message
    "negative": (b"{'descr': '<f4', 'fortran_order': False, 'shape': (-2, -3), }", r"the header has .*\(-2, -3\)"),
    "a number": (b"{'descr': '<f4', 'fortran_order': False, 'shape': (6), }", "must have descr, fortran_order, shape"),
    "a sum": (b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 1+2), }", "is not read"),
    "leading zero": (b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 03), }", "once each"),
    "two commas": (b"{'descr': '<f4', 'fortran_order': False, 'shape': (2,, 3), }", "once each"),
    "only a comma": (b"{'descr': '<f4', 'fortran_order': False, 'shape': (,), }", "once each"),
    "2^63": (b"{'descr': '<f4', 'fortran_order': False, 'shape': (0, 9223372036854775808), }", r"or 2\^63 elements"),
    "many digits": (b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"9" * 5000 + b",), }", "once each"),
    "many axes": (b"{'descr': '<f4', 'fortran_order': False, 'shape': (6" + b", 1" * 64 + b"), }", "more than 64 axes"),
    "not closed": (b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)", "the header is no dict"),
    "a bracket": (b"{'descr': '<f4', 'fortran_order': False, 'shape': ((((((2, 3), }", "is not read"),
    "a statement": (b"import os", "the header is no dict"),
    "a call": (b"{'descr': str('<f4'), 'fortran_order': False, 'shape': (2, 3), }", "is not read"),
    "twice": (b"{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }", "once each"),
    "one too many": (b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), 'x': 'y'}", "once each"),
    "one too few": (b"{'descr': '<f4', 'shape': (2, 3), }", "has only descr, shape of"),
    "empty": (b"{}", "has only nothing of"),
    "no header": (b"", "the header is no dict"),
    "no bool": (b"{'descr': '<f4', 'fortran_order': 'x', 'shape': (2, 3), }", "once each"),
    "a list": (b"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2, 3), }", "is not read"),
    "no type": (b"{'descr': '<f4, <f4', 'fortran_order': False, 'shape': (2, 3), }", "is not a type of weights"),
    "NUL": (b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }\0", "the header is no dict"),
    "many spaces": (b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }" + b" " * 10_000, "is longer than"),
    "huge": (b"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999, 99999999999), }", "are not those"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_npy_headers_that_are_refused(name, tmp_path):
    header, message = HEADERS[name]
    error = refused(npy(tmp_path / "x.npy", header))
    assert error.startswith(f"{tmp_path / 'x.npy'}: array 'x': ")
    assert re.search(message, error)


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }      \n",
        b'{"shape": (2,3), "fortran_order": False,"descr": "<f4"}',
        b" {\n 'shape'\t:\t( 2 ,\n3 , ) ,'fortran_order':False , 'descr':\"<f4\"\r\n}\n",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (2L, 3L), }",  # as Python 2 wrote them
    ],
)
@pytest.mark.parametrize("version", [1, 2, 3])
def test_npy_headers_that_are_read(header, version, tmp_path):
    x = normal(2, 3)
    with open_source(npy(tmp_path / "x.npy", header, x.tobytes(), version)) as source:
        assert source.weights["x"].shape == (2, 3)
        assert_array_equal(source.weights["x"].values(0, 6), x.reshape(-1))


AXIS = st.integers(0, 3)


@given(st.lists(AXIS, max_size=4), st.sampled_from(["<f2", ">f4", "<f8", "|i1", "|u1", ">i8", "|b1"]), st.booleans())
def test_npy_headers_as_numpy_writes_them(tmp_path_factory, shape, dtype, old):
    path = tmp_path_factory.getbasetemp() / "n.npy"
    x = np.ones(shape, dtype)
    with path.open("wb") as file:
        np.lib.format.write_array(file, x, (1, 0) if old else (2, 0))
    with open_source(path) as source:
        assert source.weights["n"].shape == (tuple(shape) or (1,))


# ---------------------------------------------------------------- .npz


def npz(path: Path, save=np.savez_compressed, **arrays: np.ndarray) -> bytearray:
    save(path, **arrays)
    return bytearray(path.read_bytes())


@pytest.mark.slow
def test_a_bomb_is_unpacked_only_to_be_read(run, tmp_path, monkeypatch):
    """256 MiB of zeros in 256 KiB: opening needs neither memory nor disk for them."""
    path, size = tmp_path / "x.npz", 1 << 28
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("w.npy", "w", force_zip64=True) as w:
        np.lib.format.write_array_header_1_0(w, {"descr": "|u1", "fortran_order": False, "shape": (size // 1024, 1024)})
        for _ in range(size >> 24):
            w.write(bytes(1 << 24))
    spools = []
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: spools.append(1))
    tracemalloc.start()
    converted(path, tmp_path / "y.gguf", "f16", dry_run=True)
    assert run("info", path)[0] == 0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.stat().st_size + BEYOND
    assert not spools


def test_what_is_damaged_inside_is_found_when_it_is_unpacked(tmp_path):
    """Invalid codes of deflate, another array, a shorter one, bytes after the end."""
    x = normal(512, 256)
    raw = npz(tmp_path / "x.npz", w=x)
    file = RegularFile(str(tmp_path / "x.npz"))
    [member] = members(file)
    file.close()
    start, size = member.start, member.packed
    for offset, junk in ((size - 5000, b"\xff" * 5000), (size - 1, b"\0"), (size // 2, b"abcd")):
        damaged = bytearray(raw)
        damaged[start + offset : start + offset + len(junk)] = junk
        (tmp_path / "x.npz").write_bytes(damaged)
        with open_source(tmp_path / "x.npz") as source, pytest.raises(CheckpointError, match=r"x\.npz: 'w\.npy': "):
            source.weights["w"].values(0, x.size)


def test_more_than_the_directory_says_is_not_unpacked(tmp_path):
    """16 MiB of zeros that are listed as 64 KiB: what comes after these is nobody's."""
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w.npy", bytes(1 << 24))
    raw = bytearray((tmp_path / "x.npz").read_bytes())
    struct.pack_into("<I", raw, raw.index(ENTRY) + 24, 1 << 16)
    (tmp_path / "x.npz").write_bytes(raw)
    file = RegularFile(str(tmp_path / "x.npz"))
    pieces = inflate(file, members(file)[0])
    assert len(next(pieces)) == 1 << 16
    with pytest.raises(CheckpointError, match="does not unpack to what the directory says"):
        next(pieces)
    file.close()


def test_unpacked_arrays_are_read_from_any_thread(tmp_path):
    arrays = {name: normal(64, 64, seed=ord(name)) for name in "abc"}
    npz(tmp_path / "x.npz", **arrays)
    with open_source(tmp_path / "x.npz") as source, ThreadPoolExecutor(8) as pool:
        jobs = [(name, row) for name in arrays for row in range(64)]
        for (name, row), values in zip(jobs, pool.map(lambda job: read_row(source, *job), jobs), strict=True):
            assert_array_equal(values, arrays[name][row])
    with pytest.raises(CheckpointError, match="was closed"):
        source.weights["a"].values(0, 64)


def read_row(source, name, row):
    return source.weights[name].values(64 * row, 64 * row + 64)


ENTRY, END = b"PK\1\2", b"PK\5\6"
DAMAGED = {
    # signature, offset from it, bytes that are written there, message
    "no end": (END, 0, b"XX", "has no end record"),
    "a comment": (END, 20, b"\1", "has no end record"),
    "another disk": (END, 4, b"\1", "split archive"),
    "fewer entries": (END, 8, b"\1\0\1\0", "after its 1 entries"),
    "more entries": (END, 8, b"\3\0\3\0", "3 members are more than"),
    "many entries": (END, 8, b"\xff\xff\xff\xff", "65535 members are more than"),
    "the directory elsewhere": (END, 16, b"\0\0\0\0", "does not end at"),
    "no entry": (ENTRY, 0, b"XX", "entry 0 of the directory is damaged"),
    "encrypted": (ENTRY, 8, b"\1", "is encrypted"),
    "not utf-8": (ENTRY, 46, b"\xff", "disagree"),
    "lzma": (ENTRY, 10, b"\x0e", "neither stored nor deflated"),
    "a long name": (ENTRY, 28, b"\xff\xff", "entry 0 of the directory is damaged"),
    "another name": (ENTRY, 46, b"x", "disagree"),
    "a header elsewhere": (ENTRY, 42, b"\1", "disagree"),
    "a header behind the end": (ENTRY, 42, b"\0\0\0\x70", "the file ends within its header"),
    "unpacked to much": (ENTRY, 24, b"\0\0\0\x70", "cannot unpack to"),
    "packed to much": (ENTRY, 20, b"\0\0\0\x70", "the file ends within it"),
    "overlapping": (ENTRY, 20, b"\0\1\0\0", "overlap"),
    "another size": (ENTRY, 24, b"\xff\3\0\0", "bytes are not those of"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_archives_that_are_damaged(name, tmp_path):
    signature, offset, junk, message = DAMAGED[name]
    raw = npz(tmp_path / "x.npz", a=normal(4, 8), b=normal(4, 8, seed=1))
    first = raw.index(signature) + offset
    raw[first : first + len(junk)] = junk
    (tmp_path / "x.npz").write_bytes(raw)
    assert message in refused(tmp_path / "x.npz")


def test_names_of_an_archive_are_utf_8(tmp_path):
    raw = npz(tmp_path / "x.npz", **{"\xe4": normal(2)})
    (tmp_path / "x.npz").write_bytes(raw.replace("\xe4".encode(), b"\xe4x"))
    assert "the name is not UTF-8" in refused(tmp_path / "x.npz")


def test_large_archives_and_their_ends(tmp_path):
    """Entries with sizes of 64 bits, and the end record that goes with them."""
    raw = npz(tmp_path / "x.npz", np.savez, w=normal(4, 8))
    start, end = raw.index(ENTRY), raw.index(END)
    size, header = struct.unpack_from("<I", raw, start + 24)[0], struct.unpack_from("<I", raw, start + 42)[0]
    entry = raw[start:end]
    struct.pack_into("<2I", entry, 20, 0xFFFFFFFF, 0xFFFFFFFF)
    struct.pack_into("<H", entry, 30, 28)
    struct.pack_into("<I", entry, 42, 0xFFFFFFFF)
    entry += struct.pack("<2H3Q", 1, 24, size, size, header)
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, len(entry), start)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, start + len(entry), 1)
    last = struct.pack("<4s4H2IH", END, 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    (tmp_path / "x.npz").write_bytes(raw[:start] + entry + end64 + locator + last)
    with open_source(tmp_path / "x.npz") as source:
        assert_array_equal(source.weights["w"].values(0, 32), normal(4, 8).reshape(-1))
    for damaged in (locator[:8] + bytes(8) + locator[16:], locator[:8] + b"\xff" * 8 + locator[16:]):
        (tmp_path / "x.npz").write_bytes(raw[:start] + entry + end64 + damaged + last)
        assert "the end record for large archives is not at" in refused(tmp_path / "x.npz")


def test_members_of_nothing(tmp_path):
    """Entries cost memory: more than the file has data for are refused before the first."""
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        for i in range(4_200):
            archive.writestr(f"{i}.npy", b"")
    assert "members are more than" in refused(tmp_path / "x.npz")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_nothing_in_an_archive(save, tmp_path):
    """No arrays, and arrays without elements, which are read as nothing."""
    save(tmp_path / "x.npz")
    with open_source(tmp_path / "x.npz") as source:
        assert not source.weights
    save(tmp_path / "x.npz", a=np.zeros((0, 4), np.float32))
    with open_source(tmp_path / "x.npz") as source:
        assert source.weights["a"].values(0, 0).shape == (0,)

"""The cache of compiled kernels: its keys, damaged and unwritable entries, and the keys that a GPU looks up."""

from __future__ import annotations

import hashlib
import os
import pwd
import shutil
import stat
import warnings
from contextlib import contextmanager

import compile_kernels
import pytest
from strategies import TILED, over_formats

import qgemm
from qgemm.cuda.jit import cache, codegen, nvrtc, sources
from qgemm.cuda.jit.nvrtc import compile_cubin  # not what conftest.py puts in its place
from qgemm.cuda.kernels import routes
from qgemm.cuda.problem import TYPES
from qgemm.files import compiled as compiled_files


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QGEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled_files, "_warned", set())


@pytest.fixture
def compiled(monkeypatch):
    """Replaces NVRTC by a fake compiler: the list of (source, arch) that it compiled."""
    compilations = []

    def counting(source, arch, headers=None):
        compilations.append((source, arch))
        return nvrtc.Compiled(f"cubin of {source} for {arch}".encode(), "5 registers")

    monkeypatch.setattr(cache, "compile_cubin", counting)
    monkeypatch.setattr(cache, "nvrtc_version", lambda: (13, 0))
    return compilations


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """edited(name, text) rewrites a file in a copy of the kernels and clears its cached text."""
    folder = tmp_path / "kernels"
    shutil.copytree(sources.kernels_dir(), folder)
    monkeypatch.setattr(sources, "kernels_dir", lambda: folder)

    def edit(name, text):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        sources._text.cache_clear()

    return edit


def test_a_unit_is_compiled_once(tmp_path, compiled):
    first = cache.cached("a", "sm_80")
    assert first == cache.cached("a", "sm_80") == (b"cubin of a for sm_80", "5 registers")
    assert len(compiled) == 1
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".cubin"]


def test_whatever_the_compiler_reads_is_in_the_key(compiled, edited, monkeypatch):
    """Source, architecture, headers on disk and in memory at any depth, options and version each change the key."""
    edited("a.cuh", '#include "deep/b.cuh"')
    edited("deep/b.cuh", '#include "c.cuh"\n  #  include "../d.cuh"')
    edited("deep/c.cuh", "1")
    edited("d.cuh", "1")
    unit = '#include "a.cuh"\n#include "made.cuh"'
    keys = {cache.key(unit, "sm_80", {"made.cuh": "1"})}
    keys.add(cache.key(unit + " ", "sm_80", {"made.cuh": "1"}))
    keys.add(cache.key(unit, "sm_90a", {"made.cuh": "1"}))
    keys.add(cache.key(unit, "sm_80", {"made.cuh": "2"}))
    for name in ("deep/c.cuh", "d.cuh"):
        edited(name, "2")
        keys.add(cache.key(unit, "sm_80", {"made.cuh": "1"}))
    for option in nvrtc.OPTIONS:
        with monkeypatch.context() as patched:
            patched.setattr(nvrtc, "OPTIONS", [other for other in nvrtc.OPTIONS if other != option])
            keys.add(cache.key(unit, "sm_80", {"made.cuh": "1"}))
    keys.add(cache.key(unit, "sm_80", {"made.cuh": "1"}))
    monkeypatch.setattr(cache, "nvrtc_version", lambda: (13, 1))
    keys.add(cache.key(unit, "sm_80", {"made.cuh": "1"}))
    assert len(keys) == 7 + len(nvrtc.OPTIONS)


def test_every_option_of_the_compiler_is_in_the_key(compiled, monkeypatch):
    """NVRTC receives the options that keys hold and the include paths, nothing else."""
    passed_options = []

    class Library:
        def __getattr__(self, name):
            return lambda *words: 0

        def nvrtcCompileProgram(self, program, count, options):
            passed_options.extend(option.decode() for option in options)
            return 0

    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: (Library(), "/headers"))
    compile_cubin("", "sm_80")
    places = [f"--include-path={path}" for path in (sources.kernels_dir(), "/headers")]
    assert passed_options == [*nvrtc.options_for("sm_80"), *places]


def test_what_a_unit_does_not_include_is_not_in_its_key(compiled, edited):
    """A comment in pack.cu does not rebuild prefill_sm90, nor one format's header the kernels of another."""
    q4_0, q5_1 = (qgemm.FORMATS[name] for name in ("q4_0", "q5_1"))
    units = {
        (kernel, fmt.name): codegen.compose(routes.source_of(kernel), fmt, **template)
        for fmt in (q4_0, q5_1)
        for kernel, template in routes.variants(fmt, 90)
    }

    headers = {fmt.name: codegen.headers(fmt) for fmt in (q4_0, q5_1)}

    def keys():
        return {name: cache.key(source, "sm_90a", headers[name[1]]) for name, source in units.items()}

    def rebuilt(name):
        before = keys()
        edited(name, (sources.kernels_dir() / name).read_text() + "// a comment\n")
        return {unit for unit, key in keys().items() if before[unit] != key}

    assert rebuilt("pack/pack.cu") == {("pack", "q4_0"), ("pack", "q5_1")}
    assert rebuilt("formats/q4_0.cuh") == {unit for unit in units if unit[1] == "q4_0"}
    assert rebuilt("formats/kbit4.cuh") == set()
    assert rebuilt("types.cuh") == set(units)


@pytest.mark.compiles
def test_headers_in_memory_come_first_and_reach_the_compiler():
    """NVRTC and the key resolve an #include to the same header."""
    unit = '#include "types.cuh"\n#include "made/a.cuh"\nextern "C" __global__ void k(int* x) { *x = ANSWER; }'
    headers = {"types.cuh": "", "made/a.cuh": '#include "b.cuh"', "b.cuh": "#define ANSWER 42"}
    assert sources.closure(unit, headers) == dict(sorted(headers.items()))
    assert cache.cached(unit, "sm_80", headers).cubin.startswith(b"\x7fELF")
    with pytest.raises(nvrtc.CompileError, match="ANSWER"):
        cache.cached(unit, "sm_80", {**headers, "b.cuh": ""})


@pytest.mark.slow
@over_formats(TILED)
def test_every_include_is_found(fmt):
    """An include that closure() misses would serve a stale kernel. Templates do not change a kernel's includes."""
    for kernel, template in dict(routes.variants(fmt, 90)).items():
        unit = codegen.compose(routes.source_of(kernel), fmt, **template)
        headers = sources.closure(unit, codegen.headers(fmt))
        names = [name for text in (unit, *headers.values()) for name in sources.INCLUDE.findall(text)]
        assert {name.rpartition("/")[2] for name in names} == {name.rpartition("/")[2] for name in headers}
        assert sources.kernel_path(routes.source_of(kernel)) in headers
    assert f"formats/{fmt.name}.cuh" in headers


def test_damaged_or_unwritable_cache_only_costs_time(tmp_path, compiled, monkeypatch):
    good = cache.cached("a", "sm_80")
    (entry,) = (tmp_path / "cache").iterdir()
    whole = entry.read_bytes()
    assert whole[:32] == hashlib.sha256(whole[32:]).digest()
    for damage in (b"", b"short", whole[:-1], whole[:-1] + b"x", whole[:40] + b"x" + whole[41:]):
        entry.write_bytes(damage)
        assert cache.cached("a", "sm_80") == good
        assert entry.read_bytes() == whole
    assert len(compiled) == 6
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QGEMM_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert cache.cached("a", "sm_80") == good


# ---------------------------------------------------------------- only this user writes to the cache


@contextmanager
def one_warning(*words):
    """The body warns once, in a sentence with these words."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    (text,) = [str(warning.message) for warning in caught]
    for word in (*words, "QGEMM_CACHE_DIR"):
        assert str(word) in text


def test_modes_under_any_umask(tmp_path, compiled, monkeypatch):
    for umask in (0, 0o002, 0o022, 0o077):
        home = tmp_path / f"{umask:o}"
        monkeypatch.setenv("QGEMM_CACHE_DIR", str(home / ".cache" / "qgemm"))
        before = os.umask(umask)
        try:
            cache.cached("a", "sm_80")
        finally:
            os.umask(before)
        (entry,) = (home / ".cache" / "qgemm").iterdir()
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (entry.parent.parent, entry.parent, entry)]
        assert modes == [0o700, 0o700, 0o600]


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o775, 0o777, 0o1777])
def test_a_folder_that_others_write_to(mode, tmp_path, compiled):
    """Nothing is loaded from it or written to it, and one warning says so."""
    good = cache.cached("a", "sm_80")
    folder = tmp_path / "cache"
    folder.chmod(mode)
    with one_warning("passed over", folder, f"others may write to it (mode {mode:o})"):
        assert cache.cached("a", "sm_80") == cache.cached("a", "sm_80") == good
        cache.cached("b", "sm_80")
    assert len(compiled) == 4
    assert len(list(folder.iterdir())) == 1
    folder.chmod(0o755)
    assert cache.cached("a", "sm_80") == good
    assert len(compiled) == 4


def test_a_folder_of_another_user(tmp_path, compiled, monkeypatch):
    """Root's folder is passed over as well, and root passes over the folder of anyone else."""
    cache.cached("a", "sm_80")
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with one_warning("passed over", tmp_path / "cache", f"belongs to another user (uid {owner})"):
        cache.cached("a", "sm_80")
        cache.cached("a", "sm_80")
    assert len(compiled) == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("target", ["folder", "file"])
def test_given_to_another_user(target, tmp_path, compiled):
    cache.cached("a", "sm_80")
    (entry,) = (tmp_path / "cache").iterdir()
    os.chown(entry if target == "file" else entry.parent, 1234, 1234)
    with one_warning("passed over", "belongs to another user (uid 1234)"):
        cache.cached("a", "sm_80")
    assert len(compiled) == 2
    if target == "file":
        assert entry.stat().st_uid == 0
        cache.cached("a", "sm_80")
        assert len(compiled) == 2


def test_a_link_for_a_folder(tmp_path, compiled, monkeypatch):
    (tmp_path / "real").mkdir(0o700)
    (tmp_path / "cache").symlink_to("real")
    with one_warning("passed over", tmp_path / "cache", "is a link"):
        cache.cached("a", "sm_80")
    assert list((tmp_path / "real").iterdir()) == []
    (tmp_path / "home").symlink_to(tmp_path)  # a link above the folder is allowed
    monkeypatch.setenv("QGEMM_CACHE_DIR", str(tmp_path / "home" / "real"))
    cache.cached("a", "sm_80")
    cache.cached("a", "sm_80")
    assert len(compiled) == 2


@pytest.mark.parametrize("kind", ["writable", "link", "fifo", "folder"])
def test_an_entry_that_others_may_have_made(kind, tmp_path, compiled):
    """It is not read, not waited for, and replaced where it is a file or a link."""
    good = cache.cached("a", "sm_80")
    (entry,) = (tmp_path / "cache").iterdir()
    whole = entry.read_bytes()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(whole)
    if kind == "writable":
        entry.chmod(0o620)
    else:
        entry.unlink()
    if kind == "link":
        entry.symlink_to(elsewhere)
    elif kind == "fifo":
        os.mkfifo(entry)
    elif kind == "folder":
        entry.mkdir()
    with one_warning("a compiled kernel is passed over", entry.name):
        assert cache.cached("a", "sm_80") == good
    assert len(compiled) == 2
    assert elsewhere.read_bytes() == whole
    if kind != "folder":
        assert cache.cached("a", "sm_80") == good
        assert len(compiled) == 2
        assert stat.S_IMODE(entry.lstat().st_mode) == 0o600
        assert stat.S_ISREG(entry.lstat().st_mode)


def test_no_home_and_an_unknown_uid(compiled, monkeypatch):
    """A container started with a numeric user id has neither."""

    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("QGEMM_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert compiled_files.cache_dir() is None
    with one_warning("no home folder"):
        assert cache.cached("a", "sm_80") == cache.cached("a", "sm_80")
    assert len(compiled) == 2


@pytest.mark.compiles
def test_the_cache_is_filled_with_what_a_gpu_looks_for(tmp_path, monkeypatch, capsys):
    """compile_kernels.py fills it, and its second run reads the reports of the first."""
    words = "--all", "--arch=sm_90a", "--kernel=pack", "--kernel=dequantize", "--format=q4_0", "--format=q8_0"
    monkeypatch.setattr("sys.argv", ["", *words])
    assert compile_kernels.main() == 0
    first, entries = capsys.readouterr().out, set((tmp_path / "cache").iterdir())
    assert f"8 of 8 cubins for sm_90a, 0 failures, in {tmp_path / 'cache'}" in first
    assert len(entries) == 8
    before = {path: path.stat().st_mtime_ns for path in entries}
    for out in TYPES:
        fmt = qgemm.FORMATS["q8_0"]
        cache.cached(codegen.compose("dequantize", fmt, Out=out), "sm_90a", codegen.headers(fmt))
    assert compile_kernels.main() == 0
    assert capsys.readouterr().out == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == before

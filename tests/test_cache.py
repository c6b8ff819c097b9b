"""The cache of compiled kernels: its keys, damaged and unwritable entries, what a GPU finds in it."""

from __future__ import annotations

import hashlib
import shutil

import compile_kernels
import pytest
from strategies import TILED, each

import qgemm
from qgemm.cuda.jit import cache, codegen, nvrtc, sources
from qgemm.cuda.kernels import routes
from qgemm.cuda.problem import TYPES


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QGEMM_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def compiled(monkeypatch):
    """A compiler that notes what it is given, without NVRTC."""
    given = []

    def counting(source, arch, headers=None):
        given.append((source, arch))
        return nvrtc.Compiled(f"cubin of {source} for {arch}".encode(), "5 registers")

    monkeypatch.setattr(cache, "compile_cubin", counting)
    monkeypatch.setattr(cache, "nvrtc_version", lambda: (13, 0))
    return given


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """Kernels of which one file can be edited: edited(name, text) -> nothing; a process reads a file once."""
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
    """Source, architecture, headers on disk and in memory, however deep, options, version: each alone."""
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
    monkeypatch.setattr(cache, "OPTIONS", ())
    keys.add(cache.key(unit, "sm_80", {"made.cuh": "1"}))
    monkeypatch.setattr(cache, "nvrtc_version", lambda: (13, 1))
    keys.add(cache.key(unit, "sm_80", {"made.cuh": "1"}))
    assert len(keys) == 8


def test_what_a_unit_does_not_include_is_not_in_its_key(compiled, edited):
    """A comment in pack.cu does not rebuild prefill_sm90, nor one format's header the kernels of another."""
    q4_0, q5_1 = (qgemm.FORMATS[name] for name in ("q4_0", "q5_1"))
    units = {
        (kernel, fmt.name): codegen.compose(kernel, fmt, **template)
        for fmt in (q4_0, q5_1)
        for kernel, template in routes.variants(fmt, 90)
    }

    made = {fmt.name: codegen.headers(fmt) for fmt in (q4_0, q5_1)}

    def keys():
        return {name: cache.key(source, "sm_90a", made[name[1]]) for name, source in units.items()}

    def rebuilt(name):
        before = keys()
        edited(name, (sources.kernels_dir() / name).read_text() + "// a comment\n")
        return {unit for unit, key in keys().items() if before[unit] != key}

    assert rebuilt("pack.cu") == {("pack", "q4_0"), ("pack", "q5_1")}
    assert rebuilt("formats/q4_0.cuh") == {unit for unit in units if unit[1] == "q4_0"}
    assert rebuilt("formats/kbit4.cuh") == set()
    assert rebuilt("types.cuh") == set(units)


@pytest.mark.compiles
def test_headers_in_memory_come_first_and_reach_the_compiler():
    """NVRTC and the key agree on what an #include means."""
    unit = '#include "types.cuh"\n#include "made/a.cuh"\nextern "C" __global__ void k(int* x) { *x = ANSWER; }'
    made = {"types.cuh": "", "made/a.cuh": '#include "b.cuh"', "b.cuh": "#define ANSWER 42"}
    assert sources.closure(unit, made) == dict(sorted(made.items()))
    assert cache.cached(unit, "sm_80", made).cubin.startswith(b"\x7fELF")
    with pytest.raises(nvrtc.CompileError, match="ANSWER"):
        cache.cached(unit, "sm_80", {**made, "b.cuh": ""})


@each(TILED)
def test_every_include_is_found(fmt):
    """One that closure() did not follow would serve a stale kernel. What a kernel includes no template changes."""
    for kernel, template in dict(routes.variants(fmt, 90)).items():
        unit = codegen.compose(kernel, fmt, **template)
        found = sources.closure(unit, codegen.headers(fmt))
        names = [name for text in (unit, *found.values()) for name in sources.INCLUDE.findall(text)]
        assert {name.rpartition("/")[2] for name in names} == {name.rpartition("/")[2] for name in found}
        assert f"{kernel}.cu" in found
    assert f"formats/{fmt.name}.cuh" in found


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


@pytest.mark.compiles
def test_the_cache_is_filled_with_what_a_gpu_looks_for(tmp_path, monkeypatch, capsys):
    """By the tool, whose second run reads the reports of the first."""
    words = "--all", "--arch=sm_90a", "--kernel=pack", "--kernel=dequantize", "--format=q4_0", "--format=q8_0"
    monkeypatch.setattr("sys.argv", ["", *words])
    assert compile_kernels.main() == 0
    first, kept = capsys.readouterr().out, set((tmp_path / "cache").iterdir())
    assert f"8 of 8 kernels are good for sm_90a, in {tmp_path / 'cache'}" in first
    assert len(kept) == 8
    before = {path: path.stat().st_mtime_ns for path in kept}
    for out in TYPES:
        fmt = qgemm.FORMATS["q8_0"]
        cache.cached_cubin(codegen.compose("dequantize", fmt, Out=out), "sm_90a", codegen.headers(fmt))
    assert compile_kernels.main() == 0
    assert capsys.readouterr().out == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == before

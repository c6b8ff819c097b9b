"""A wheel with compiled libraries: its name, the libraries that are chosen, and those that are never loaded."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from harness import compiles_once

import qgemm
from qgemm.cpu.native import calls, compiler, encoders, inventory, library, prebuilt
from qgemm.files.compiled import sealed, unsealed

pytest.importorskip("hatchling", reason="building a wheel needs hatchling (extra test)")
import build_wheel  # imports hatchling

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(library.reason()), reason=library.reason()),
    pytest.mark.skipif(build_wheel.HERE not in build_wheel.PLATFORMS, reason="no target for this machine"),
]
FORMATS = [qgemm.FORMATS[name] for name in ("q4_0", "q8_0")]
TARGETS = [target for target in prebuilt.TARGETS if build_wheel.platform_of(target) == build_wheel.HERE]
RUN_HERE = [target for target in TARGETS if prebuilt.runs(target)]

PROGRAM = """
import numpy as np, qgemm
rng = np.random.default_rng(0)
x = rng.standard_normal((17, 512), np.float32)
for name in ("q4_0", "q8_0"):
    w = qgemm.quantize(rng.standard_normal((40, 512), np.float32), name)
    print([qgemm.matmul(x[:m], w, how).tobytes().hex() for m in (1, 17) for how in ("a16", "a8")])
print(qgemm.backends()["cpu"].detail)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """With libraries for two formats, for each target of this machine."""
    return build_wheel.build(build_wheel.HERE, tmp_path_factory.mktemp("wheel"), FORMATS)


@pytest.fixture
def folder(wheel, tmp_path):
    """The wheel as it lies in site-packages."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    return tmp_path / "site"


def program(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process that has the wheel, and no compiler."""
    env = {**os.environ, "PYTHONPATH": str(folder), "PATH": "", "CC": "", "QGEMM_CACHE_DIR": str(folder / "cache")}
    env.pop("QGEMM_CPU", None)
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, cwd=folder, env={**env, **environment}, capture_output=True, text=True, timeout=300)


def of_target(folder: Path, target: prebuilt.Target) -> Path:
    return folder / "qgemm" / "prebuilt" / target.name


def of_format(folder: Path, target: prebuilt.Target, fmt: qgemm.Format) -> Path:
    return of_target(folder, target) / prebuilt.entry(target, build_wheel.inventory.libraries.source(fmt))


def test_the_name_says_the_platform(wheel):
    """The tag of a platform, and no version of Python: nothing in a library knows Python."""
    name, _, python, abi, platforms = wheel.name.removesuffix(".whl").split("-")
    assert (name, python, abi) == ("gguf_matmul", "py3", "none")
    assert platforms.startswith("manylinux_2_")
    assert platforms.endswith(platform.machine())
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [file for file in archive.namelist() if file.endswith(".dist-info/WHEEL")]
        assert f"Tag: py3-none-{platforms}\n" in archive.read(metadata).decode()
        assert "Root-Is-Purelib: false\n" in archive.read(metadata).decode()
        codes = [archive.read(file) for file in archive.namelist() if file.endswith(".so")]
    assert platforms == f"manylinux_2_{build_wheel.glibc(codes)}_{platform.machine()}"


@pytest.mark.parametrize("system", sorted(build_wheel.TAGS))
def test_wheels_of_other_systems(system, tmp_path, monkeypatch):
    """Compiled by Zig, whatever compilers there are; the code of the libraries does not matter here."""
    monkeypatch.setattr(build_wheel, "zig", lambda: compiler.Compiler(("zig", "cc"), ("zig", 0, 0)))
    monkeypatch.setattr(build_wheel, "libraries", lambda by, target, formats: {"a.so": " ".join(target.zig).encode()})
    wheel = build_wheel.build(system, tmp_path)
    assert wheel.name.endswith(f"-py3-none-{build_wheel.TAGS[system]}.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".so")]
        assert f"-target {system}".encode() in unsealed(archive.read(name))


def test_the_oldest_glibc():
    assert build_wheel.glibc([b""]) == 17
    assert build_wheel.glibc([b"..GLIBC_2.2.5..GLIBC_2.34.", b"GLIBC_2.17\0"]) == 34


def test_every_target_has_every_library(folder):
    expected = inventory.sources(FORMATS)
    assert len(expected) == 3 + len(encoders.SOURCES) + len(FORMATS)
    for target in TARGETS:
        names = {path.name for path in of_target(folder, target).iterdir()}
        assert names == {prebuilt.entry(target, source) for source in expected}


def test_it_multiplies_without_a_compiler(folder, monkeypatch):
    """By each target that this CPU can run, the best first, and with the bits of code compiled for this CPU."""
    monkeypatch.delenv("QGEMM_CPU")
    environment = {**os.environ, "PYTHONPATH": str(folder.parent)}
    own = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    *want, last = own.stdout.splitlines()
    assert "code compiled by" in last
    for target in RUN_HERE:
        done = program(folder)
        assert (done.returncode, done.stderr) == (0, "")
        *names, detail = done.stdout.splitlines()
        assert names == want
        assert detail.endswith(f"compiled code built for {target.name}")
        shutil.rmtree(of_target(folder, target))
    assert not (folder / "cache").exists()
    last = program(folder).stdout.splitlines()[-1]
    assert "NumPy alone: no C compiler (cc) was found" in last
    assert "'gguf-matmul[cpu]'" in last


def test_it_is_used_where_there_is_a_compiler(folder):
    done = program(folder, PATH=os.environ["PATH"])
    assert done.stdout.splitlines()[-1].endswith(f"compiled code built for {RUN_HERE[0].name}")
    assert not (folder / "cache").exists()


@pytest.mark.parametrize("damage", ["cut", "flipped", "of another format", "sealed, of another format"])
def test_what_is_not_the_library_is_never_loaded(folder, damage):
    """With one warning; NumPy multiplies, or a compiler makes it anew."""
    q4_0, q8_0 = (of_format(folder, RUN_HERE[0], fmt) for fmt in FORMATS)
    data = q4_0.read_bytes()
    broken = {
        "cut": data[:-1000],
        "flipped": data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
        "of another format": q8_0.read_bytes(),
        "sealed, of another format": sealed(unsealed(q8_0.read_bytes())),
    }
    q4_0.write_bytes(broken[damage])
    done = program(folder)
    assert done.returncode == 0
    assert done.stderr.count(f"{q4_0} is passed over") == 1
    assert "NumPy alone: there is no prebuilt library of products.c, and no C compiler" in done.stdout
    done = program(folder, PATH=os.environ["PATH"], CC=compiles_once(compiler.compiler().command))
    assert done.stderr.count(f"{q4_0} is passed over") == 1
    assert [path.suffix for path in (folder / "cache").iterdir()] == [".so"]


def test_libraries_of_other_sources_are_not_used(folder):
    """One letter of a header that no format of these includes: nothing is loaded, for a library is of all sources."""
    with open(folder / "qgemm" / "kernels" / "cpu" / "formats" / "tq2_0.h", "a") as file:
        file.write("// more\n")
    done = program(folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "NumPy alone: no C compiler (cc) was found" in done.stdout


def test_a_cpu_that_can_do_more_compiles(monkeypatch, tmp_path):
    """Where the kernels know better instructions than the target's, a compiler is asked; without one they serve."""
    better = next((target for target in TARGETS if target.beyond), TARGETS[0])
    (tmp_path / better.name).mkdir()
    (tmp_path / better.name / prebuilt.entry(better, calls.POOL)).touch()
    monkeypatch.setattr(prebuilt, "folder", lambda: tmp_path)
    prebuilt.target.cache_clear()
    try:
        for flags, by, own in (
            (better.needs, compiler.compiler(), False),
            (better.needs | better.beyond, compiler.compiler(), bool(better.beyond)),
            (better.needs | better.beyond, None, False),
        ):
            monkeypatch.setattr(prebuilt, "cpu", lambda flags=flags: " ".join(flags))
            prebuilt.target.cache_clear()
            assert prebuilt.target() == better
            assert library._own(by) == own
    finally:
        prebuilt.target.cache_clear()


@pytest.mark.parametrize("target", prebuilt.TARGETS, ids=lambda target: target.name)
def test_a_cpu_that_lacks_one_instruction_gets_no_library(target, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: target.machine)
    monkeypatch.setattr(sys, "platform", "freebsd")
    monkeypatch.setattr(prebuilt, "cpu", lambda: "flags: " + " ".join(target.needs))
    assert not prebuilt.runs(target)
    monkeypatch.setattr(sys, "platform", target.system)
    for flag in target.needs:
        monkeypatch.setattr(prebuilt, "cpu", lambda flag=flag: "flags: " + " ".join(target.needs - {flag}))
        assert not prebuilt.runs(target)
    monkeypatch.setattr(prebuilt, "cpu", lambda: "flags: " + " ".join(target.needs))
    assert prebuilt.runs(target)
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert not prebuilt.runs(target)


def test_zig_is_the_last_compiler(monkeypatch, tmp_path):
    """The ziglang wheel is a C compiler where the system has none; nothing of it is run to find that out."""
    package = tmp_path / "ziglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "zig").write_text("#!/bin/sh\nexit 1\n")
    (package / "zig").chmod(0o755)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    find = compiler.compiler.__wrapped__
    assert find() != compiler.zig()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find() == compiler.zig()
    assert find().command == (str(package / "zig"), "cc")

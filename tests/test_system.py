"""Other systems than Linux: files and products in a process that lacks the calls that macOS and Windows lack."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import qgemm
from qgemm.cpu.native import library
from qgemm.system import portable, posix, process

ROOT = Path(__file__).parents[1]
SYSTEMS = ["macos", "windows"]
START = """
import os, sys
from pathlib import Path
import numpy as np
import qgemm
from qgemm.system import portable, posix, system
assert isinstance(system, portable.PortableFiles if sys.argv[1] == "windows" else posix.PosixFiles)
os.chdir(sys.argv[3])
x = np.random.default_rng(0).standard_normal((40, 256)).astype("f4")
"""


def program(system: str, folder: Path, text: str, **environment: str) -> str:
    """The output of a program in a process like one of another system."""
    command = [sys.executable, "-W", "error", str(ROOT / "tests" / "system_like.py"), system, START + text, str(folder)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "QGEMM_CPU": "numpy", **environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_both_sides_have_the_same_calls():
    public = {name for name in vars(posix.PosixFiles) if not name.startswith("_")}
    assert public == {name for name in vars(portable.PortableFiles) if not name.startswith("_")}
    assert posix.is_complete()


CALLS = re.compile(
    r"\b(fcntl|os\.(O_(?!RDONLY|RDWR|WRONLY|CREAT|EXCL)\w+|geteuid|memfd_create|register_at_fork|sched_\w+|fch\w+"
    r"|p?readv?\b|copy_file_range|pwritev?|posix_\w+|fork)|dir_fd|renameat2)\b|/proc/"
)


def test_no_other_module_calls_posix():
    """Only qgemm/system/ names these calls, comments aside."""
    offenders = []
    for path in sorted((ROOT / "qgemm").rglob("*.py")):
        if path.parent.name != "system":
            lines = enumerate(path.read_text().splitlines(), 1)
            offenders += [f"{path}:{n}: {line}" for n, line in lines if CALLS.search(line.partition("#")[0])]
    assert offenders == []


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_file_is_converted_opened_and_multiplied(system, tmp_path):
    """Into a file that replaces an old one; no temporary file stays."""
    text = """
for fmt in ("q8_0", "q4_0"):
    qgemm.write("w.gguf", {"a.weight": x, "b.weight": x})
    qgemm.convert("w.gguf", "out.gguf", fmt, force=True)
    with qgemm.open("out.gguf") as file:
        print(sorted(file), file["a.weight"].format, qgemm.matmul(x, file["a.weight"]).shape)
qgemm.convert("w.gguf", "out.gguf", "q4_0", force=True)
with qgemm.open("out.gguf", copy=True) as file:
    print(qgemm.matmul(x, file["a.weight"]).tobytes().hex()[:64])
print(sorted(os.listdir(".")))
"""
    lines = program(system, tmp_path, text).splitlines()
    assert lines[-1] == "['out.gguf', 'w.gguf']"
    x = np.random.default_rng(0).standard_normal((40, 256)).astype("f4")
    with qgemm.open(tmp_path / "out.gguf") as file:
        assert lines[-2] == qgemm.matmul(x, file["a.weight"]).tobytes().hex()[:64]


@pytest.mark.parametrize("system", SYSTEMS)
def test_folders_and_shards_are_replaced(system, tmp_path):
    """By a journal where two folders cannot exchange their names; a user's file stays."""
    text = """
qgemm.write("w.gguf", {"a.weight": x, "b.weight": x})
for fmt, layout in (("u4z_g32", "gptq"), ("u4_g64", "gptq")):
    qgemm.convert("w.gguf", "model", fmt, layout=layout, force=True)
    Path("model", "README.md").write_text("kept")
    print(sorted(os.listdir("model")))
print(sorted(os.listdir(".")), os.listdir("model").count("README.md"))
"""
    lines = program(system, tmp_path, text).splitlines()
    assert lines[-1] == "['model', 'w.gguf'] 1"
    assert not [name for name in os.listdir(tmp_path / "model") if name.startswith(".qgemm")]


@pytest.mark.parametrize("system", SYSTEMS)
def test_an_error_leaves_the_old_file(system, tmp_path):
    text = """
from qgemm.files.atomic import replacing, write_file
write_file("f", b"old")
try:
    with replacing("f") as fd:
        os.write(fd, b"new")
        raise KeyError
except KeyError:
    pass
print(Path("f").read_bytes(), os.listdir("."))
try:
    with replacing("f", replace=False):
        pass
except qgemm.GGUFError as error:
    print(error)
os.symlink("f", "link")
write_file("link", b"new")
print(Path("f").read_bytes(), os.path.islink("link"))
"""
    lines = program(system, tmp_path, text).splitlines()
    assert lines[0] == "b'old' ['f']"
    assert "exists; it is replaced only by force" in lines[1]
    assert lines[2] == "b'new' True"


@pytest.mark.compiles
@pytest.mark.skipif(bool(library.lacking()), reason=library.lacking())
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_library_is_loaded_by_its_path(system, tmp_path, monkeypatch):
    """Compiled code multiplies as here, and the folder of its file goes at once."""
    text = """
w = qgemm.quantize(x, "q4_0")
print(qgemm.backends()["cpu"].detail)
print(qgemm.matmul(x, w).tobytes().hex()[:64])
"""
    (tmp_path / "temporary").mkdir()
    environment = {"QGEMM_CPU": "", "TMPDIR": str(tmp_path / "temporary")}
    monkeypatch.delenv("QGEMM_CPU")
    compiled, values = program(system, tmp_path, text, **environment).splitlines()
    assert "NumPy alone" not in compiled
    x = np.random.default_rng(0).standard_normal((40, 256)).astype("f4")
    assert values == qgemm.matmul(x, qgemm.quantize(x, "q4_0")).tobytes().hex()[:64]
    assert os.listdir(tmp_path / "temporary") == []


def test_features_of_a_mac_have_their_names_of_linux(monkeypatch):
    monkeypatch.setattr(process.platform, "machine", lambda: "x86_64")
    lines = [
        "machdep.cpu.brand_string: Intel(R) Core(TM) i7",
        "machdep.cpu.features: FPU SSE3 SSSE3 FMA CX16 SSE4.1 SSE4.2 MOVBE POPCNT XSAVE AVX1.0 F16C",
        "machdep.cpu.leaf7_features: BMI1 AVX2 BMI2",
        "machdep.cpu.extfeatures: SYSCALL LAHF LZCNT",
    ]
    assert set(process.V3.split()) <= set(process.of_sysctl(lines)[-1].split())
    monkeypatch.setattr(process.platform, "machine", lambda: "arm64")
    features = process.of_sysctl(["hw.optional.arm.FEAT_DotProd: 1", "hw.optional.arm.FEAT_I8MM: 0"])[-1].split()
    assert {"asimd", "asimddp"} <= set(features)
    assert "i8mm" not in features

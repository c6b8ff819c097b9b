"""Run tests of kernels/cpu/ with AddressSanitizer and UndefinedBehaviorSanitizer: `python tools/sanitize_cpu.py`.

The libraries are compiled by a $CC that adds the sanitizers, and cached as usual; Python starts with the runtimes
preloaded, so that NumPy arrays have guards as well. An error ends the run.

A passing run without arguments is remembered with the digest of its inputs, and not repeated until one of them changes.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "sanitized"
# -O0 compiles four times as fast as -O1 and merges no accesses. GCC itself runs without the runtimes.
WRAPPER = """#!/bin/sh
unset LD_PRELOAD
exec {compiler} "$@" -O0 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined
"""
TESTS = (
    *(f"tests/test_native{part}.py" for part in ("", "_decode", "_encoders", "_finish")),
    "tests/test_experts_in_c.py",
    "tests/test_interleaved.py",
)
SELECTED = "not instructions"  # leave out tests of other machine code from the same sources


def wrapper(compiler: str) -> Path:
    """A C compiler with sanitizers; written only once, because the cache key includes its modification time."""
    path, text = FOLDER / "cc", WRAPPER.format(compiler=compiler)
    if not path.is_file() or path.read_text() != text:
        FOLDER.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return path


def runtimes(compiler: str) -> list[str]:
    """The installed runtime libraries of the sanitizers."""
    paths = []
    for name in ("libasan.so", "libubsan.so"):
        command = [compiler, f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        paths += [path] if os.path.isabs(path) else []
    return paths


def read_by(gcc: str) -> str:
    """The digest of the inputs of a run: C, Python, tests and their data, installed packages, the compiler."""
    digest = hashlib.sha256()
    compiler = subprocess.run([gcc, "--version"], capture_output=True, check=True).stdout
    packages = sorted((package.name, package.version) for package in importlib.metadata.distributions())
    digest.update(repr((compiler, sys.version, packages)).encode())
    folders = (ROOT / "kernels" / "cpu", ROOT / "qgemm", ROOT / "benchmarks", ROOT / "tools", ROOT / "tests")
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    for path in sorted([*paths, ROOT / "pyproject.toml"]):
        digest.update(repr((path.relative_to(ROOT).as_posix(), path.read_bytes())).encode())
    return digest.hexdigest()


def main() -> int:
    """pytest's exit code; arguments are added to its command."""
    gcc = shutil.which("gcc")
    preloaded = runtimes(gcc) if gcc else []
    if gcc is None or len(preloaded) < 2:
        print("sanitize_cpu: skipped: GCC and its sanitizers are not installed")
        return 0
    passed, facts = FOLDER / "passed", read_by(gcc)
    if not sys.argv[1:] and passed.is_file() and passed.read_text() == facts:
        print(f"sanitize_cpu: passed before, and its inputs have not changed since: {passed}")
        return 0
    environment = {**os.environ, "CC": str(wrapper(gcc)), "LD_PRELOAD": " ".join(preloaded)}
    for old in FOLDER.glob("report.*"):
        old.unlink()
    log = f"log_path={FOLDER / 'report'}"  # pytest would lose the stderr of a process that aborts
    environment["ASAN_OPTIONS"] = f"{log}:detect_leaks=0"  # Python does not free everything at exit
    environment["UBSAN_OPTIONS"] = f"{log}:print_stacktrace=1"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-x", *TESTS, "-k", SELECTED, *sys.argv[1:]]
    status = subprocess.run(command, cwd=ROOT, env=environment).returncode
    reports = sorted(FOLDER.glob("report.*"))
    for report in reports:
        print(report.read_text(errors="replace"))
    if not (status or reports or sys.argv[1:]):
        passed.write_text(facts)
    return status or bool(reports)


if __name__ == "__main__":
    raise SystemExit(main())

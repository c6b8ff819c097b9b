"""Run the quick tests with another Python than that of .venv, and with the oldest or the newest dependencies.

    tools/other_python.py 3.10         with one of VERSIONS
    tools/other_python.py --turn 48    with the one whose turn it is in that week

The interpreter is python3.10 on PATH or one of pyenv's. Without it the Python that runs this tool takes its place, so
that the dependencies are tested in any case. uv installs them into build/python-3.10.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Version of Python -> how uv resolves the ranges of pyproject.toml.
VERSIONS = {"3.10": "lowest-direct", "3.13": "highest", "3.12": "highest"}
QUICK = ("--hypothesis-profile", "quick", "-m", "not (compiles or slow)")
ELSEWHERE = ("--ignore=tests/gpu", "--ignore=tests/with_torch")


def candidates(version: str) -> Iterator[str]:
    """Paths at which an interpreter of this version may be."""
    if (program := shutil.which(f"python{version}")) is not None:
        yield program
    yield from map(str, sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python")))


def interpreter(version: str) -> str | None:
    """The path of the first interpreter that runs: pyenv's commands on PATH may only print an error."""
    code = f"import sys, venv; sys.exit('{version}' != '%d.%d' % sys.version_info[:2])"
    for path in candidates(version):
        if subprocess.run([path, "-c", code], capture_output=True).returncode == 0:
            return path
    return None


def environment(version: str, resolution: str) -> Path:
    """The Python of a venv with qgemm and the dependencies of its tests; made anew when they change, and each week."""
    base = interpreter(version)
    if base is None:
        base = sys.executable
        print(f"there is no Python {version}: its dependencies ({resolution}) are tested with {base}", flush=True)
    folder = ROOT / "build" / f"python-{version}"
    stamp, python = folder / "made-for", folder / "bin" / "python"
    identity = subprocess.run([base, "-VV"], capture_output=True, text=True, check=True).stdout
    project = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    facts = repr((str(ROOT), base, identity, resolution, project, date.today().isocalendar()[:2]))
    if not stamp.is_file() or stamp.read_text() != facts:
        shutil.rmtree(folder, ignore_errors=True)
        uv = [sys.executable, "-m", "uv"]
        subprocess.run([*uv, "venv", "--quiet", "--python", base, folder], check=True)
        install = [*uv, "pip", "install", "--quiet", "--python", python, "--resolution", resolution]
        subprocess.run([*install, "--editable", f"{ROOT}[test,nvrtc]"], check=True)
        stamp.write_text(facts)
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("version", nargs="?", choices=VERSIONS)
    choice.add_argument("--turn", type=int, metavar="WEEK")
    args = parser.parse_args()
    version = args.version or list(VERSIONS)[args.turn % len(VERSIONS)]
    python = environment(version, VERSIONS[version])
    show = "import sys, numpy, gguf; print('Python', sys.version.split()[0], 'NumPy', numpy.__version__, flush=True)"
    subprocess.run([python, "-c", show], check=True)
    return subprocess.run([python, "-m", "pytest", "-q", "-n", "2", *QUICK, *ELSEWHERE], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())

"""Build a wheel with the libraries of kernels/cpu/, compiled for kinds of CPUs: `python tools/build_wheel.py`.

`pip install .` builds a wheel of pure Python, which compiles its products on the user's machine. Wheels of this tool
need no compiler there: they have a library for each format and target of qgemm/cpu/native/prebuilt.py. Libraries for
another machine need a cross compiler (Debian: gcc-aarch64-linux-gnu) or Zig (the ziglang wheel, the extra `cpu`), those
for macOS and Windows Zig; nobody has run these. The name of the wheel has the oldest glibc that its libraries run on:
2.17 by Zig, else at most that of this machine.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from pathlib import Path

import wheel_hook

from qgemm.codec.format import Format
from qgemm.cpu.native import inventory, prebuilt
from qgemm.cpu.native.compiler import Compiler, compiler, named, stamp, zig
from qgemm.cpu.native.library import built
from qgemm.cpu.native.prebuilt import Target
from qgemm.cpu.native.sources import Source
from qgemm.files.compiled import sealed
from qgemm.formats import FORMATS
from qgemm.system.process import cpus, machine
from qgemm.version import DISTRIBUTION, __version__

ROOT = Path(__file__).resolve().parents[1]
SYSTEMS = {"linux": "", "darwin": "-macos", "win32": "-windows"}  # by Target.system: the end of a platform's name
TAGS = {  # tags of wheels by platform; a tag of Linux has the version of glibc besides
    "aarch64-macos": "macosx_11_0_arm64",
    "x86_64-macos": "macosx_11_0_x86_64",
    "x86_64-windows": "win_amd64",
}
OLDEST_GLIBC = 17  # 2.17: installers know no older one for 64-bit ARM
NO_COMPILER = "no compiler makes code for {}: install gcc-{}-linux-gnu, or the ziglang wheel"


def platform_of(target: Target) -> str:
    """The platform that the libraries of a target are for, such as x86_64 (on Linux) or aarch64-macos."""
    return f"{target.machine}{SYSTEMS[target.system]}"


PLATFORMS = tuple(dict.fromkeys(map(platform_of, prebuilt.TARGETS)))
HERE = f"{machine()}{SYSTEMS.get(sys.platform, '')}"


def compiler_for(platform: str, by_zig: bool = False) -> Compiler | None:
    """The compiler for a platform: its own, a cross compiler, or Zig; None if there is none."""
    if by_zig or platform in TAGS:
        return zig()
    own = compiler() if platform == HERE else named(f"{platform}-linux-gnu-gcc")
    return own or zig()


def libraries(cc: Compiler, target: Target, formats: Iterable[Format]) -> dict[str, bytes]:
    """All libraries for a target by file name, compiled on all cores or read from the cache."""
    march = target.zig if cc == zig() else target.march

    def entry_of(source: Source) -> tuple[str, bytes]:
        name = prebuilt.entry(target, source)
        return name, stamp(built(cc, source, march), name)

    with ThreadPool(len(cpus())) as pool:
        return dict(pool.map(entry_of, inventory.sources(formats)))


def glibc(codes: Iterable[bytes]) -> int:
    """The minor version of the oldest glibc 2.x that has all symbol versions of the libraries."""
    versions = (int(minor) for code in codes for minor in re.findall(rb"GLIBC_2\.(\d+)", code))
    return max(OLDEST_GLIBC, *versions, 0)


def build(platform: str, out: Path, formats: Iterable[Format] = FORMATS.values(), by_zig: bool = False) -> Path:
    """The wheel for a platform in the folder `out`."""
    cc = compiler_for(platform, by_zig)
    if cc is None:
        raise SystemExit(f"build_wheel: {NO_COMPILER.format(platform, platform)}")
    formats = list(formats)
    with tempfile.TemporaryDirectory() as name:
        folder, codes = Path(name, "prebuilt"), []
        for target in prebuilt.TARGETS:
            if platform_of(target) == platform:
                (folder / target.name).mkdir(parents=True)
                for entry, code in libraries(cc, target, formats).items():
                    (folder / target.name / entry).write_bytes(sealed(code))
                    codes.append(code)
        tag = f"py3-none-{TAGS.get(platform) or f'manylinux_2_{glibc(codes)}_{platform}'}"
        environment = {**os.environ, wheel_hook.FOLDER: str(folder), wheel_hook.TAG: tag}
        command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out)]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    return out / f"{DISTRIBUTION.replace('-', '_')}-{__version__}-{tag}.whl"


CHECK = """
import hashlib, warnings
import numpy as np
import qgemm
from qgemm.cpu.native import libraries
warnings.simplefilter("error")
rng, bits = np.random.default_rng(0), hashlib.sha256()
x = rng.standard_normal((17, 512), np.float32)
for fmt in qgemm.FORMATS.values():
    if libraries.source(fmt) is None:
        continue
    importance = np.ones(512, np.float32) if fmt.encoding.needs_importance else None
    w = qgemm.quantize(rng.standard_normal((40, 512), np.float32), fmt.name, imatrix=importance)
    for activation in ("a16", "a8") if fmt.integer else ("a16",):
        y = [qgemm.matmul(x[:m], w, activation) for m in (3, 17)]
        assert np.isfinite(y[1]).all() and np.abs(y[1] - x @ w.dequantize().T).max() < 2, fmt
        bits.update(b"".join(each.tobytes() for each in y))
print(bits.hexdigest(), qgemm.backends()["cpu"].detail.split(", ")[-1])
"""


@contextmanager
def installed(wheel: Path) -> Iterator[Path]:
    """A folder with the unpacked wheel, as in site-packages."""
    with tempfile.TemporaryDirectory() as name:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(name)
        yield Path(name)


def check(wheel: Path) -> list[str]:
    """Multiply by every format without a compiler, for each target that this CPU can run; returns a line for each."""
    seen = []
    with installed(wheel) as folder:
        environment = {**os.environ, "PYTHONPATH": str(folder), "PATH": "", "CC": "", "PYTHONDONTWRITEBYTECODE": "1"}
        environment["QGEMM_CACHE_DIR"] = str(folder / "cache")
        for target in prebuilt.TARGETS:
            libraries = folder / "qgemm" / "prebuilt" / target.name
            if not libraries.is_dir():
                continue
            if prebuilt.runs(target):
                command = [sys.executable, "-c", CHECK]
                done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
                if done.returncode or not done.stdout.endswith(f"built for {target.name}\n"):
                    raise SystemExit(f"build_wheel: {wheel.name}: {target.name}: {done.stdout}{done.stderr}")
                seen.append(done.stdout.strip())
            shutil.rmtree(libraries)  # qgemm then uses the next best target
        if (folder / "cache").exists():
            raise SystemExit(f"build_wheel: {wheel.name}: something was compiled")
    if len({line.split()[0] for line in seen}) > 1:
        raise SystemExit(f"build_wheel: {wheel.name}: targets differ: {seen}")
    return seen


def main() -> int:
    """Build, and check the libraries that this CPU can run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("platforms", nargs="*", metavar="PLATFORM", help=f"{', '.join(PLATFORMS)} (this one)")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the wheel (dist)")
    parser.add_argument("--zig", action="store_true", help="compile by Zig, for glibc 2.17 and later")
    parser.add_argument("--check", action="store_true", help="then multiply by every format, without a compiler")
    args = parser.parse_args()
    for platform in args.platforms or [HERE]:
        if platform not in PLATFORMS:
            parser.error(f"there are no targets for {platform}")
        wheel = build(platform, args.out, by_zig=args.zig)
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
        for line in check(wheel) if args.check else ():
            print(f"  {line}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

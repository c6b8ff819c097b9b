"""A C compiler that compiles a source only once: `python cc_once.py FOLDER CC WORDS... -o LIBRARY SOURCE`.

Tests of qgemm's cache of libraries fill that cache anew in many processes, and this wrapper saves the compilations.
FOLDER holds the libraries, named by a hash of the command and of the preprocessed source.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path


def main(folder: str, compiler: str, *words: str) -> int:
    """The compiler's exit code."""
    *flags, _, library, source = words
    read = subprocess.run([compiler, *flags, "-E", source], capture_output=True)
    if read.returncode:
        sys.stderr.buffer.write(read.stderr)
        return read.returncode
    cached = Path(folder, hashlib.sha256(repr((compiler, flags)).encode() + read.stdout).hexdigest())
    if not cached.exists():
        status = subprocess.run([compiler, *words]).returncode
        if status:
            return status
        partial = cached.with_suffix(f".{os.getpid()}")
        shutil.copyfile(library, partial)
        os.replace(partial, cached)
    os.utime(cached)  # libraries that are unused for a week are deleted
    shutil.copyfile(cached, library)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))

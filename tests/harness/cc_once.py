"""A C compiler that compiles the same only once: `python cc_once.py FOLDER CC WORDS... -o LIBRARY SOURCE`.

For processes that fill a cache of libraries anew, where the cache is what is tested. FOLDER holds what was made, by the
words of the command and the source as the preprocessor leaves it.
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
    made = Path(folder, hashlib.sha256(repr((compiler, flags)).encode() + read.stdout).hexdigest())
    if not made.exists():
        status = subprocess.run([compiler, *words]).returncode
        if status:
            return status
        partial = made.with_suffix(f".{os.getpid()}")
        shutil.copyfile(library, partial)
        os.replace(partial, made)
    os.utime(made)  # what nobody uses goes
    shutil.copyfile(made, library)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))

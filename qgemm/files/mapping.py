"""Map a file copy-on-write: a write into the mapping changes this process's copy of the page, never the file.

A library that writes into memory it was handed, as torch's DistributedDataParallel does with every parameter, would end
the process by SIGSEGV if the mapping were read-only. Reading costs the same: pages are shared with other processes
until they are written.
"""

from __future__ import annotations

import errno
import mmap
import sys

import numpy as np
from numpy.typing import NDArray

# Without this flag Linux refuses a writable mapping of a file larger than its memory. Python names it since 3.13;
# 0x4000 is its value on x86 and ARM, and a bit without effect on other machines.
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def map_private(fd: int, size: int) -> mmap.mmap:
    """The first `size` bytes of a file, copy-on-write, or read-only where the system reserves memory for all copies."""
    try:
        return mmap.mmap(fd, size, mmap.MAP_PRIVATE | MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        if error.errno not in (errno.ENOMEM, errno.EAGAIN):
            raise
    return mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ)


def is_writable(array: NDArray[np.generic]) -> bool:
    """Whether a write into an array's memory cannot fault, whatever the array's own flag says."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    if array.base is None or array.flags.writeable:
        return True
    try:
        return not memoryview(array.base).readonly
    except TypeError:  # the memory of an object that says nothing about it
        return False

"""Map a file copy-on-write: a write into the mapping changes this process's copy of the page, never the file.

A library that writes into memory it was handed, as torch's DistributedDataParallel does with every parameter, would end
the process by SIGSEGV if the mapping were read-only. Reading costs the same: pages are shared with other processes
until they are written.
"""

from __future__ import annotations

import errno
import mmap

import numpy as np
from numpy.typing import NDArray

from qgemm.system import system


def map_private(fd: int, size: int) -> mmap.mmap:
    """The first `size` bytes of a file, copy-on-write, or read-only where the system reserves memory for all copies."""
    try:
        return system.map_copied(fd, size)
    except OSError as error:
        if error.errno not in (errno.ENOMEM, errno.EAGAIN):
            raise
    return system.map_read_only(fd, size)


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

"""Calls of the operating system that not every system has. No other module makes them.

`system` has the calls on files: those of POSIX where Python has all of them (Linux, macOS), else the portable side
(Windows), which handles a folder by its path. process.py has the calls about CPUs, forks and libraries.
"""

from __future__ import annotations

from .files import EXISTING, FOLDER_ERRORS, NEW, READ, Files
from .portable import PortableFiles
from .posix import PosixFiles, is_complete

__all__ = ["EXISTING", "FOLDER_ERRORS", "NEW", "READ", "Files", "system"]

system: Files = PosixFiles() if is_complete() else PortableFiles()

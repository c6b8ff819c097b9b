"""Child processes of tests, which may be killed."""

from __future__ import annotations

import os
import warnings


def forked(work) -> int:
    """A child process that does `work` and ends."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside BLAS's idle threads
        child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child

"""The command `qgemm` from its first instruction: also while Python imports, Ctrl-C ends it by a line and code 130."""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130  # as shells have it


def main() -> int:
    """Run the command line of this process; returns the exit code."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a job in the background ignores Ctrl-C
    if ours:
        signal.signal(signal.SIGINT, _end)
    try:
        from .main import main as run

        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return run()
    except KeyboardInterrupt:
        return _end()


def _end(*_: object) -> int:
    """End at once: nothing was begun yet. Not by an exception, which the module that is being imported may take for an
    error of its own."""
    os.write(2, b"qgemm: interrupted\n")
    os._exit(INTERRUPTED)

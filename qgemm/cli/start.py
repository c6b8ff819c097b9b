"""The command `qgemm` from its first instruction on: Ctrl-C ends it with one line and code 130, even during imports."""

from __future__ import annotations

import os
import signal
import sys

INTERRUPTED = 130  # as shells have it


def main() -> int:
    """Run the command line of this process; returns the exit code."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a background job ignores Ctrl-C
    if ours:
        signal.signal(signal.SIGINT, _end)
    try:
        from .main import commands_of
        from .main import main as run

        commands_of(sys.argv[1:])
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return run()
    except KeyboardInterrupt:
        return _end()
    finally:
        if ours:  # the work is done and stdout is flushed: Python's own end would print a traceback
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end(*_: object) -> int:
    """Exit at once: nothing has started yet. An exception could be caught by the module that is being imported."""
    os.write(2, b"qgemm: interrupted\n")
    os._exit(INTERRUPTED)

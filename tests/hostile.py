"""Files made to do harm: refused with CheckpointError, at little cost."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from qgemm.converter import open_source
from qgemm.errors import CheckpointError

BEYOND = 16 << 20  # bytes


def refused(path: Path) -> str:
    """The message with which a source is refused, and which starts with its path."""
    inside = sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            open_source(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert peak < inside + BEYOND
    assert message.startswith(str(path))
    assert message.isascii()
    assert message.isprintable()
    assert len(message) < 800
    return message

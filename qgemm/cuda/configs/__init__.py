"""Measured choices of configs as data: a JSON file per kernel, which its record reads. docs/choosing-a-config.md."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any


@cache
def read(name: str) -> dict[str, Any]:
    """The parsed JSON file of a kernel, e.g. "decode"."""
    document: dict[str, Any] = json.loads(path(name).read_text(encoding="utf-8"))
    return document


def path(name: str) -> Path:
    """The path of a kernel's JSON file."""
    return Path(__file__).parent / f"{name}.json"

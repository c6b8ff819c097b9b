"""Measured choices of configs as data: a JSON file per kernel, which its record reads. docs/choosing-a-config.md."""

from __future__ import annotations

import json
import re
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


def gpu_path(gpu: str) -> Path:
    """The path of the times that users contributed for a GPU, by the driver's name of it."""
    return path(f"gpus/{re.sub(r'[^a-z0-9]+', '_', gpu.lower()).strip('_')}")


def shipped(gpu: str) -> list[Any]:
    """The rows of times that users contributed for a GPU; tools/merge_times.py writes them."""
    file = gpu_path(gpu)
    return list(json.loads(file.read_text(encoding="utf-8"))["rows"]) if file.is_file() else []

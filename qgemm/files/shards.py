"""The names of the shards of a model: STEM-00001-of-00003.gguf."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from .paths import system_errors

MARK = "-{:05d}-of-{:05d}"
MARKED = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5,20})-of-(?P<count>[0-9]{5,20})", re.DOTALL)


class ShardName(NamedTuple):
    """The parts of a shard's name: the stem, the number from 1, the number of shards, the suffix."""

    stem: str
    number: int
    shards: int
    suffix: str

    def path(self, number: int) -> str:
        """The path of another shard."""
        return f"{self.stem}{MARK.format(number, self.shards)}{self.suffix}"

    def paths(self) -> list[str]:
        """The paths of all shards, which must exist.

        GGUFNotFoundError for the first missing one, and GGUFAccessError. A file may claim any count: names are made one
        at a time, and no more of them than files exist.
        """
        paths: list[str] = []
        for number in range(1, self.shards + 1):
            path = self.path(number)
            with system_errors(path, "read"):
                os.stat(path)
            paths.append(path)
        return paths


def shard_name(path: str, suffix: str) -> ShardName | None:
    """The parts of a path's shard name, None if it has none."""
    match = MARKED.fullmatch(path.removesuffix(suffix))
    if match is None or not path.endswith(suffix):
        return None
    name = ShardName(match["stem"], int(match["number"]), int(match["count"]), suffix)
    return name if name.path(name.number) == path and 1 <= name.number <= name.shards else None

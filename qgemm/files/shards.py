"""The names of the shards of a model, STEM-00001-of-00003.gguf, and of the pieces of one file, NAME.gguf.part00."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from .paths import shown, system_errors

MARK = "-{:05d}-of-{:05d}"
PIECES = (  # names of pieces that must be joined, by the tools that split files
    re.compile(r"(?P<whole>.+?)[._-](?:part|split|chunk)[._-]?(?:\d{1,5}(?:[._-]?of[._-]?\d{1,5})?|[a-z]{1,2})", re.I),
    re.compile(r"(?P<whole>.+\.(?:gguf|safetensors|npz))[._-](?:\d{1,5}|[a-z]{2})", re.I),
)
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


def piece_hint(path: str) -> str:
    """The end of an error about a file that is a piece of another by its name; "" for other files."""
    for pattern in PIECES:
        if match := pattern.fullmatch(os.path.basename(path)):
            whole = shown(match["whole"])
            return f"; by its name it is a piece of {whole}: join all pieces, as by cat, in their order first"
    return ""


def shard_name(path: str, suffix: str) -> ShardName | None:
    """The parts of a path's shard name, None if it has none; the suffix may be in any case."""
    stem, end = path[: -len(suffix)], path[-len(suffix) :]
    match = MARKED.fullmatch(stem)
    if match is None or end.lower() != suffix:
        return None
    name = ShardName(match["stem"], int(match["number"]), int(match["count"]), end)
    return name if name.path(name.number) == path and 1 <= name.number <= name.shards else None

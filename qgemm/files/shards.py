"""The names of the shards of a model: STEM-00001-of-00003.gguf."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from .paths import system_errors

MARK = "-{:05d}-of-{:05d}"
MARKED = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5,20})-of-(?P<count>[0-9]{5,20})", re.DOTALL)


class ShardName(NamedTuple):
    """What the name of a shard says: what precedes the numbers, which shard, from 1, of how many, what follows."""

    stem: str
    number: int
    shards: int
    suffix: str

    def path(self, number: int) -> str:
        """The path of another shard."""
        return f"{self.stem}{MARK.format(number, self.shards)}{self.suffix}"

    def paths(self) -> list[str]:
        """The paths of all shards, each of which there is.

        GGUFNotFoundError for the first that is missing, and GGUFAccessError. A file may claim any count: names are
        made one at a time, no more of them than the folder holds.
        """
        found: list[str] = []
        for number in range(1, self.shards + 1):
            path = self.path(number)
            with system_errors(path, "read"):
                os.stat(path)
            found.append(path)
        return found


def shard_name(path: str, suffix: str) -> ShardName | None:
    """What a path says of its shard, None if it says nothing."""
    found = MARKED.fullmatch(path.removesuffix(suffix))
    if found is None or not path.endswith(suffix):
        return None
    name = ShardName(found["stem"], int(found["number"]), int(found["count"]), suffix)
    return name if name.path(name.number) == path and 1 <= name.number <= name.shards else None

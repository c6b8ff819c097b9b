"""Module names in a config: literal names, regular expressions ("re:...") or classes of modules ("Linear").

Expressions come from files, and Python's matching may need time exponential in the length of a name. Expressions that
repeat a group, or have more repetitions than real ones, are refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from qgemm.errors import CheckpointError
from qgemm.files.paths import shown

EXPRESSION = "re:"
CLASSES = ("Linear", "Embedding")  # torch's names; all others are names of modules
LONGEST = 300  # characters of an expression
REPEATS = 4  # per expression: the steps of a match grow as the name's length to this power
ESCAPED = re.compile(r"\\.", re.DOTALL)
REPEAT, REPEATED_GROUP = re.compile(r"[*+{]"), re.compile(r"\)[*+{]")
LONGEST_NAME = 200  # characters of a module's name; longer ones match no expression


class Modules(NamedTuple):
    """Modules of a model: names, regular expressions of names, and whether they include classes of modules."""

    names: frozenset[str] = frozenset()
    expressions: tuple[str, ...] = ()
    classes: bool = False

    @classmethod
    def parse(cls, entries: Sequence[Any], where: str) -> Modules:
        """Parse a config's list of modules; where: file and field, for the CheckpointError."""
        if not all(isinstance(entry, str) for entry in entries):
            raise CheckpointError(f"{where}: {shown(str(entries))} is not a list of names of modules")
        expressions = tuple(entry.removeprefix(EXPRESSION) for entry in entries if entry.startswith(EXPRESSION))
        for expression in expressions:
            check_expression(expression, where)
        names = frozenset(entry for entry in entries if not entry.startswith(EXPRESSION))
        return cls(names - {*CLASSES}, expressions, any(entry in CLASSES for entry in entries))

    def has(self, module: str) -> bool:
        """Whether a module is included, by its name or by an expression that matches from its beginning."""
        if module in self.names:
            return True
        return len(module) <= LONGEST_NAME and any(re.match(expression, module) for expression in self.expressions)


def check_expression(expression: str, where: str) -> None:
    """Refuse an invalid expression, and one whose matching may be slow; match no name above LONGEST_NAME with it."""
    bare = ESCAPED.sub("_", expression)
    if len(expression) > LONGEST or len(REPEAT.findall(bare)) > REPEATS or REPEATED_GROUP.search(bare):
        raise CheckpointError(f"{where}: the expression {shown(expression)} repeats too much")
    try:
        re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{where}: {shown(expression)} is not a regular expression: {error}") from None

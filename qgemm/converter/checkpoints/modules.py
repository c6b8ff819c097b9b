"""Names of modules in a config: as they stand, as regular expressions ("re:..."), or classes of modules ("Linear").

Expressions come from files, and Python's matching may take a time that doubles with each character: those that repeat
a group, or repeat anything more often than real ones do, are refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from qgemm.errors import CheckpointError
from qgemm.files.paths import shown

EXPRESSION = "re:"
CLASSES = ("Linear", "Embedding")  # of torch: their names are not those of modules
LONGEST = 300  # characters of an expression
REPEATS = 4  # of an expression: the steps of a match grow with the name's length to this power
ESCAPED = re.compile(r"\\.", re.DOTALL)
REPEAT, REPEATED_GROUP = re.compile(r"[*+{]"), re.compile(r"\)[*+{]")
LONGEST_NAME = 200  # of a module, that an expression is matched with


class Modules(NamedTuple):
    """Some modules of a model: their names, expressions of names, and whether classes of modules are among them."""

    names: frozenset[str] = frozenset()
    expressions: tuple[str, ...] = ()
    classes: bool = False

    @classmethod
    def of(cls, said: Sequence[Any], where: str) -> Modules:
        """Those that a list of a config names; where: file and field, for the CheckpointError."""
        if not all(isinstance(each, str) for each in said):
            raise CheckpointError(f"{where}: {shown(str(said))} is not a list of names of modules")
        expressions = tuple(each.removeprefix(EXPRESSION) for each in said if each.startswith(EXPRESSION))
        for each in expressions:
            _check(each, where)
        names = frozenset(each for each in said if not each.startswith(EXPRESSION))
        return cls(names - {*CLASSES}, expressions, any(each in CLASSES for each in said))

    def has(self, module: str) -> bool:
        """Whether a module is named, by its own name or an expression that fits its beginning."""
        if module in self.names:
            return True
        return len(module) <= LONGEST_NAME and any(re.match(each, module) for each in self.expressions)


def _check(expression: str, where: str) -> None:
    """Refuse what is no expression, and one whose matching may take long."""
    bare = ESCAPED.sub("_", expression)
    if len(expression) > LONGEST or len(REPEAT.findall(bare)) > REPEATS or REPEATED_GROUP.search(bare):
        raise CheckpointError(f"{where}: the expression {shown(expression)} repeats too much")
    try:
        re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{where}: {shown(expression)} is not a regular expression: {error}") from None

"""Types of the arguments of `qgemm.convert`. Text in place of a list, such as keep="attn", would be read by letters."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from qgemm.codec.format import Format

PATTERN = (str, re.Pattern)
TYPE = (str, Format)
NUMBER = (int, np.integer)


class Rule(NamedTuple):
    """The condition on an argument: its words, and its test."""

    words: str
    holds: Callable[[Any], bool]


def _instance(words: str, *kinds: type) -> Rule:
    """A value of one of these classes; True is no number."""
    return Rule(words, lambda value: isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds))


def _optional(rule: Rule) -> Rule:
    return Rule(f"{rule.words} or None", lambda value: value is None or rule.holds(value))


def _list_of(words: str, *kinds: type) -> Rule:
    """A collection of such values, or an iterator, whose values are not looked at; text and bytes are one value."""

    def holds(values: Any) -> bool:
        return (
            isinstance(values, Iterable)
            and not isinstance(values, (str, bytes, bytearray, memoryview, np.ndarray))
            and (
                not isinstance(values, Collection)
                or all(isinstance(value, kinds) and not isinstance(value, bool) for value in values)
            )
        )

    return Rule(f"a list of {words}", holds)


def _mapping(words: str, keys: tuple[type, ...], values: tuple[type, ...]) -> Rule:
    """A mapping, or None in its place."""

    def holds(mapping: Any) -> bool:
        return isinstance(mapping, Mapping) and all(
            isinstance(key, keys) and isinstance(value, values) for key, value in mapping.items()
        )

    return _optional(Rule(f"a mapping of {words}", holds))


FLAG = _instance("True or False", bool, np.bool_)
TEXT = _instance("text", str)
PATH = _instance("a path", str, bytes, os.PathLike)
FORMAT = _optional(_instance("a format or its name", *TYPE))
PATTERNS = _list_of("regular expressions", *PATTERN)

RULES = {
    "src": PATH,
    "dst": PATH,
    "type": FORMAT,
    "size": TEXT,
    "objective": TEXT,
    "types": _list_of("formats or their names", *TYPE),
    "recipe": _mapping("names to formats", (str,), TYPE),
    "tensor_types": _mapping("regular expressions to formats", PATTERN, TYPE),
    "token_embedding_type": FORMAT,
    "output_tensor_type": FORMAT,
    "leave_output_tensor": FLAG,
    "keep": PATTERNS,
    "drop": PATTERNS,
    "rename": _mapping("regular expressions to text", PATTERN, (str,)),
    "like": _optional(PATH),
    "tied": FLAG,
    "base": _optional(PATH),
    "mmproj": FLAG,
    "pure": FLAG,
    "keep_split": FLAG,
    "split_max_size": _instance("a number of bytes, or text like 2G", str, *NUMBER),
    "layout": TEXT,
    "allow_requantize": FLAG,
    "search": FLAG,
    "imatrix": _optional(PATH),
    "part": FLAG,
    "architecture": TEXT,
    "set_metadata": _mapping("keys to values", (str,), (object,)),
    "remove_metadata": _list_of("keys", str),
    "prune_layers": _list_of("numbers of layers", *NUMBER),
    "force": FLAG,
    "dry_run": FLAG,
    "threads": _optional(_instance("a whole number", *NUMBER)),
    "backend": TEXT,
    "max_rel_error": _optional(_instance("a number", float, np.floating, *NUMBER)),
    "progress": Rule("a function of two numbers", callable),
}


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """TypeError for an argument of `qgemm.convert` of another type than its own, by its name."""
    for name, value in arguments.items():
        words, holds = RULES[name]
        if not holds(value):
            shown = repr(value) if isinstance(value, (str, bytes)) else type(value).__name__
            raise TypeError(f"{name} must be {words}, got {shown[:80]}")

"""The data in a pickle, read without running it: no name in it is imported, no function called.

Python's pickle is a program for a stack machine that may call anything. This reader knows the instructions that build
numbers, text, tuples, lists and dictionaries. A call by name becomes a Call for the caller to interpret, and any name
that the caller does not list is refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Container
from typing import Any, NamedTuple

from qgemm.errors import CheckpointError

from .paths import shown

Refusal = Callable[[str], CheckpointError]
IGNORED = frozenset(("PROTO", "FRAME"))
VALUES = frozenset((
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
))  # fmt: skip
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
PUTS, GETS = frozenset(("BINPUT", "LONG_BINPUT")), frozenset(("BINGET", "LONG_BINGET"))
ORDERED = "collections.OrderedDict"  # becomes a dict


class Global(NamedTuple):
    """A class, a function or a constant by its name, MODULE.NAME."""

    name: str


class Call(NamedTuple):
    """A call by name."""

    function: str
    arguments: tuple[Any, ...]


class Persistent(NamedTuple):
    """A reference to data outside the pickle: what `persistent_id` returned."""

    fields: Any


def unpickled(raw: bytes, names: Container[str], refusal: Refusal) -> Any:
    """The value of a pickle; refusal: the error for a rule. names: those that it may have besides OrderedDict."""
    machine = _Machine(names, refusal)
    try:
        for opcode, argument, _ in pickletools.genops(raw):
            if opcode.name == "STOP":
                break
            machine.step(opcode.name, argument)
        [value] = machine.stack
    except CheckpointError:
        raise
    except (ValueError, IndexError, KeyError, OverflowError):
        raise refusal("is a damaged pickle") from None
    return value


class _Machine:
    """The stack, the memo and the marks of a pickle."""

    def __init__(self, names: Container[str], refusal: Refusal) -> None:
        self.names, self.refusal = names, refusal
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.marks: list[int] = []

    def step(self, name: str, argument: Any) -> None:
        """Execute one instruction."""
        if name in VALUES:
            self.stack.append(argument)
        elif name in CONSTANTS:
            self.stack.append(CONSTANTS[name])
        elif name in EMPTY:
            self.stack.append(EMPTY[name]())
        elif name in TUPLES:
            self.stack.append(tuple(self._top(TUPLES[name])))
        elif name in PUTS:
            self.memo[argument] = self.stack[-1]
        elif name in GETS:
            self.stack.append(self.memo[argument])
        elif name not in IGNORED:
            instruction = getattr(self, f"_{name.lower()}", None)
            if instruction is None:
                raise self.refusal(f"has the instruction {name}, which the data of tensors does not need")
            instruction(argument)

    def _top(self, count: int) -> list[Any]:
        """Take `count` values off the stack."""
        start = len(self.stack) - count
        if start < (self.marks[-1] if self.marks else 0):
            raise IndexError
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def _marked(self) -> list[Any]:
        """Take the values above the last mark off the stack."""
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def _mark(self, argument: None) -> None:
        self.marks.append(len(self.stack))

    def _memoize(self, argument: None) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def _tuple(self, argument: None) -> None:
        self.stack.append(tuple(self._marked()))

    def _append(self, argument: None) -> None:
        self._extend(self._top(1))

    def _appends(self, argument: None) -> None:
        self._extend(self._marked())

    def _extend(self, values: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise ValueError
        self.stack[-1].extend(values)

    def _setitem(self, argument: None) -> None:
        self._update(self._top(2))

    def _setitems(self, argument: None) -> None:
        self._update(self._marked())

    def _update(self, items: list[Any]) -> None:
        keys = items[::2]
        if type(self.stack[-1]) is not dict or not all(type(key) is str for key in keys):
            raise ValueError
        self.stack[-1].update(zip(keys, items[1::2], strict=True))

    def _global(self, argument: str) -> None:
        name = argument.replace(" ", ".")
        if name != ORDERED and name not in self.names:
            raise self.refusal(f"names {shown(name)}, which is not read: only the data of tensors is")
        self.stack.append(Global(name))

    def _stack_global(self, argument: None) -> None:
        module, name = self._top(2)
        if type(module) is not str or type(name) is not str:
            raise ValueError
        self._global(f"{module} {name}")

    def _binpersid(self, argument: None) -> None:
        self.stack.append(Persistent(*self._top(1)))

    def _reduce(self, argument: None) -> None:
        function, arguments = self._top(2)
        if type(function) is not Global or type(arguments) is not tuple:
            raise ValueError
        self.stack.append({} if function.name == ORDERED else Call(function.name, arguments))

    def _build(self, argument: None) -> None:
        self._top(1)  # attributes of a module's state dict, which hold versions of its layers

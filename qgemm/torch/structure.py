"""The structure of a module, read from the source of its class: layers that share an input, and gated blocks.

The source is interpreted without values: a variable holds the set of inputs that it may be, and each call of a layer,
`OWNER.LAYER(VARIABLE)`, notes them. Layers whose inputs meet may be called with the same tensor.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import torch

Inputs = frozenset[int]
Names = tuple[str, ...]


class GatedBlock(NamedTuple):
    """The layers of a block whose forward is exactly down(act(gate(x)) * up(x)), by their names."""

    down: str
    act: str
    gate: str
    up: str


def shared_inputs(parent: torch.nn.Module) -> tuple[Names, ...]:
    """Names of the layers of a module that its forward may call with the same input, in groups.

    The forward of an attention of diffusers is that of its processor.
    """
    kinds: list[Any] = [type(parent)]
    if hasattr(parent, "processor"):
        kinds.append(type(parent.processor))
    return tuple(group for kind in kinds for group in _groups_of_class(kind))


@cache
def _groups_of_class(kind: type) -> tuple[Names, ...]:
    """The groups of layers that the functions of a class, and those of its module that they call, show."""
    groups: list[Names] = []
    for function in _functions(kind):
        inputs = _Interpreter().run(function)
        for name, sets in inputs.items():
            joined = {name} | {other for other in inputs if any(a & b for a in sets for b in inputs[other])}
            names = tuple(other for other in inputs if other in joined)
            if len(names) > 1 and not any(set(names) <= set(group) for group in groups):
                groups = [group for group in groups if not set(group) <= set(names)] + [names]
    return tuple(groups)


def _functions(kind: type) -> Iterator[ast.FunctionDef]:
    """The forward of a class, or __call__ of a processor; then the methods, and functions of its module, in use."""
    pending = [getattr(kind, name, None) for name in ("forward", "__call__")]
    visited: set[Any] = set()
    while pending:
        function: Any = pending.pop(0)
        function = inspect.unwrap(function) if isinstance(function, FunctionType) else None
        if function is None or function in visited or function.__module__.startswith("torch."):
            continue
        visited.add(function)
        tree = _parsed(function)
        if tree is None:
            continue
        yield tree
        for call in (node.func for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name) and call.value.id == "self":
                pending.append(getattr(kind, call.attr, None))
            elif isinstance(call, ast.Name):
                called = function.__globals__.get(call.id)
                if getattr(called, "__module__", "") == function.__module__:
                    pending.append(called)


def _parsed(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """The definition of a function; None if its source is unavailable."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    return tree.body[0] if isinstance(tree.body[0], ast.FunctionDef) else None


class _Interpreter:
    """Follows the statements of a function in order. calls: by the name of a layer, the inputs of each call of it."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Inputs]] = {}
        self._count = 0

    def run(self, function: ast.FunctionDef) -> dict[str, list[Inputs]]:
        """The calls of layers in a function."""
        self._block(function.body, {})
        return self.calls

    def _new(self) -> Inputs:
        self._count += 1
        return frozenset((self._count,))

    def _block(self, statements: Iterable[ast.stmt], held: dict[str, Inputs]) -> None:
        """Run statements; held: the inputs that each variable may be, changed in place."""
        for statement in statements:
            blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
            blocks += [handler.body for handler in getattr(statement, "handlers", [])]
            if any(blocks) and not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                for name in ("test", "iter"):
                    self._expression(getattr(statement, name, None), held)
                self._branches(blocks, held)
            else:
                self._expression(statement, held)
            self._assign(statement, held)

    def _branches(self, blocks: Iterable[list[ast.stmt]], held: dict[str, Inputs]) -> None:
        """Run alternatives; afterwards a variable may be any input that it holds at the end of one of them."""
        ends = []
        for block in blocks:
            end = dict(held)
            self._block(block, end)
            ends.append(end)
        for end in ends:
            for name, inputs in end.items():
                others = [other.get(name, frozenset()) for other in ends]
                held[name] = inputs.union(*others)

    def _expression(self, node: ast.AST | None, held: dict[str, Inputs]) -> None:
        """Note the calls of layers in an expression or a statement."""
        for call in ast.walk(node) if node is not None else ():
            if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Name):
                function, variable = call.func, call.args[0].id
                if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
                    held.setdefault(variable, self._new())
                    self.calls.setdefault(function.attr, []).append(held[variable])

    def _assign(self, statement: ast.stmt, held: dict[str, Inputs]) -> None:
        """A variable that is assigned holds a new input, or that of the variable that it is set to."""
        value = getattr(statement, "value", None)
        for node in ast.walk(statement) if not hasattr(statement, "body") else ():
            if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
                same = isinstance(statement, ast.Assign) and isinstance(value, ast.Name)
                source = value.id if same else ""  # type: ignore[union-attr]
                held[node.id] = held.setdefault(source, self._new()) if same else self._new()


# ---------------------------------------------------------------- gated blocks


GATED = re.compile(
    r"self\.(?P<down>\w+)\((?:"
    r"self\.(?P<act>\w+)\(self\.(?P<gate>\w+)\(x\)\) \* self\.(?P<up>\w+)\(x\)|"
    r"self\.(?P<up2>\w+)\(x\) \* self\.(?P<act2>\w+)\(self\.(?P<gate2>\w+)\(x\)\))\)"
)


@cache
def gated_block(kind: type) -> GatedBlock | None:
    """The layers of a class whose forward(self, x) is down(act(gate(x)) * up(x)) and nothing else."""
    function: Any = getattr(kind, "forward", None)
    tree = _parsed(function) if isinstance(function, FunctionType) and not hasattr(function, "__wrapped__") else None
    if tree is None or tree.decorator_list or [bool(tree.args.kwonlyargs), len(tree.args.args)] != [False, 2]:
        return None
    value = _value(tree)
    match = None if value is None else GATED.fullmatch(value)
    if match is None:
        return None
    layers = {name.rstrip("2"): layer for name, layer in match.groupdict().items() if layer is not None}
    return GatedBlock(**layers)


def _value(function: ast.FunctionDef) -> str | None:
    """The text of the value that a function of one argument x returns, variables replaced by their values.

    None unless each is assigned once and used once, in a row of plain assignments before the return.
    """
    owner, argument = (arg.arg for arg in function.args.args)
    values: dict[str, ast.expr] = {}

    class Inlined(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            if node.id in (owner, argument):
                return ast.Name("self" if node.id == owner else "x")
            return values.pop(node.id, node)

    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    for statement in body:
        if not isinstance(statement, (ast.Assign, ast.Return)) or statement.value is None:
            return None
        value = Inlined().visit(statement.value)
        if isinstance(statement, ast.Return):
            return ast.unparse(value) if not values and statement is body[-1] else None
        target = statement.targets[0]
        if len(statement.targets) > 1 or not isinstance(target, ast.Name) or target.id in (owner, argument, *values):
            return None
        values[target.id] = value
    return None

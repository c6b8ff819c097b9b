"""Stand-ins of packages that are not installed: modules whose functions have the signatures of the real ones."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest

Modules = Mapping[str, Mapping[str, Any]]  # name -> its attributes


def install(monkeypatch: Any, modules: Modules) -> None:
    """Make the stand-ins importable; a module is an attribute of the package that it lies in."""
    for name, contents in modules.items():
        module = ModuleType(name)
        module.__path__ = []  # type: ignore[attr-defined]
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            monkeypatch.setattr(sys.modules[parent], child, module, raising=False)


def check_signatures(name: str, modules: Modules) -> None:
    """The functions and methods of a stand-in take no parameter that those of the installed module lack."""
    try:
        real = importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} is not installed: {error}")
    for attribute, stand_in in modules[name].items():
        genuine = getattr(real, attribute)
        methods = vars(stand_in).items() if inspect.isclass(stand_in) else ()
        pairs = [(genuine, stand_in)] if inspect.isfunction(stand_in) else []
        pairs += [
            (getattr(genuine, method), function)
            for method, function in methods
            if inspect.isfunction(function) and method != "__init__"
        ]
        for function, expected in pairs:
            named = {p for p in inspect.signature(expected).parameters if p not in ("args", "kwargs", "self", "cls")}
            assert named <= set(inspect.signature(function).parameters), (attribute, function)

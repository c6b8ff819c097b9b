"""SGLang's CUDA package imports on a CPU: put this folder on PYTHONPATH, so that all of its processes read this file.

sgl_kernel has CUDA code alone, and torchvision of the package index does not fit: empty packages take their places.
LoRA asks for pinned memory, which torch has beside a GPU only: plain memory takes its place.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

import torch

EMPTY = ("sgl_kernel", "torchvision")
PINNING = ("arange", "empty", "ones", "tensor", "zeros")  # functions of torch with the argument pin_memory


class AnyName(type):
    """A class that has a class of any name, and so on."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return AnyName(name, (), {})


class Empty(types.ModuleType):
    """A package that has a class of any name."""

    __path__ = ()
    __version__ = "0"
    __getattr__ = AnyName.__getattr__


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the packages of EMPTY, and whatever is inside them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in EMPTY:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def without_pinning(function: Any) -> Any:
    """A function of torch that ignores pin_memory."""
    return lambda *arguments, pin_memory=False, **options: function(*arguments, **options)


sys.meta_path.append(Finder())
for _name in PINNING:
    setattr(torch, _name, without_pinning(getattr(torch, _name)))
torch.Tensor.pin_memory = lambda tensor, device=None: tensor

"""Checkpoints in PyTorch's files: a state dict, or HQQ's qmodel.pt, whose settings are values beside the tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.errors import CheckpointError
from qgemm.files.paths import shown, shown_path
from qgemm.files.pickled import Call
from qgemm.files.safetensors import Entry
from qgemm.files.torch_archive import SIZE, TorchFile

from ..array_weights import Stored, Whole
from .hqq import PART, SETTINGS
from .hqq_nested import decoded

OLDER = ".meta."  # older files of HQQ have the settings of a module in a dictionary of their own
KINDS = {"uint8": "U8", "int32": "I32", "int64": "I64", "float32": "F32"}
NESTED = (".meta_scale.", ".meta_zero.")  # settings of scales and zeros that are quantized themselves


def stored_tensors(file: TorchFile) -> dict[str, Stored]:
    """The tensors, and HQQ's settings as the tensors that .safetensors files have for them."""
    modules = {name.removesuffix(PART) for name in file.tensors if name.endswith(PART)}

    def renamed(name: str) -> str:
        module, mark, part = name.partition(OLDER)
        return f"{module}.{part}" if mark and module in modules else name

    stored = {renamed(name): Stored(file, entry) for name, entry in file.tensors.items()}
    settings = {renamed(name): value for name, value in file.settings.items()}
    for full, value in file.settings.items():
        name = renamed(full)
        module, _, part = name.rpartition(".")
        if module not in modules:
            if any(f".{module}.".endswith(end) for end in NESTED):
                continue
            rule = f"is {type(value).__name__}, not a tensor"
            raise CheckpointError(f"{shown_path(file.path)}: {shown(full)}: {rule}")
        if part in SETTINGS and (array := _array(value)) is not None:
            stored[name] = Stored(Whole(file.path, array.reshape(-1)), Entry(KINDS[array.dtype.name], array.shape, 0))
    for module in modules:
        for part in ("scale", "zero"):
            if settings.get(f"{module}.quant_{part}") is True:
                stored[f"{module}.{part}"] = decoded(file.path, module, part, stored, settings)
                for name in (f"quant_{part}", f"{part}_q", f"meta_{part}.scale", f"meta_{part}.zero"):
                    del stored[f"{module}.{name}"]
    return stored


def _array(value: Any) -> NDArray[Any] | None:
    """A setting as an array, in HQQ's types for .safetensors files; None if it has none, as None and dtypes."""
    if type(value) is Call and value.function == SIZE and len(value.arguments) == 1:
        [value] = value.arguments
    if type(value) is bool:
        return np.array(value, np.uint8)
    if type(value) is int and -(2**31) <= value < 2**31:
        return np.array(value, np.int32)
    if type(value) is float:
        with np.errstate(over="ignore"):
            return np.array(value, np.float32)
    if type(value) is str and value.isascii():
        return np.frombuffer(value.encode(), np.uint8)
    if type(value) is tuple and all(type(size) is int and 0 <= size < 2**63 for size in value):
        return np.array(value, np.int64)
    return None

"""Calls of the CPU's libraries, written to a file with their outputs, and made again on another CPU (replay.c)."""

from __future__ import annotations

import ctypes
import struct
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

INPUT, OUTPUT, TO_PACK = range(3)
POISON = 0xA5  # the byte with which replay.c fills outputs
SOURCE = Path(__file__).with_name("replay.c")


class Packing(NamedTuple):
    """How the library packs x [m, k], of x_row bytes from a row to the next."""

    digits: int = 0
    tiles: int = 0
    m: int = 0
    k: int = 0
    x_row: int = 0


class PackingStruct(ctypes.Structure):
    """`packing` of kernels/cpu/calls.h."""

    _fields_ = (
        ("to", ctypes.c_void_p), ("to_row", ctypes.c_int64), ("x", ctypes.c_void_p), ("x_row", ctypes.c_int64),
        ("quantize", ctypes.c_void_p), ("m", ctypes.c_int64), ("k", ctypes.c_int64),
        ("digits", ctypes.c_int32), ("tiles", ctypes.c_int32),
    )  # fmt: skip


class ProductStruct(ctypes.Structure):
    """`product` of kernels/cpu/calls.h."""

    _fields_ = (
        ("w", ctypes.c_void_p), ("w_row", ctypes.c_int64), ("packed", ctypes.c_void_p), ("packed_row", ctypes.c_int64),
        ("y", ctypes.c_void_p), ("y_row", ctypes.c_int64), ("table", ctypes.c_void_p), ("eight", ctypes.c_void_p),
        ("m", ctypes.c_int64), ("n", ctypes.c_int64), ("k", ctypes.c_int64),
        ("unit", ctypes.c_float), ("digits", ctypes.c_int32), ("tiles", ctypes.c_int32),
    )  # fmt: skip


class Call(NamedTuple):
    """A call of function(argument), or of function(argument, 0, items).

    arrays: the arrays that fields of the argument point to, by field. Outputs hold the expected values.
    """

    library: Path
    function: str
    argument: ctypes.Structure
    arrays: Mapping[str, tuple[int, NDArray[Any]]]
    items: int = -1
    packing: Packing = Packing()


def written(path: Path, calls: Iterable[Call]) -> Path:
    """The file of calls that replay.c reads."""
    with open(path, "wb") as file:
        for call in calls:
            argument = bytes(call.argument)
            counts = (len(argument), len(call.arrays), call.items, *call.packing)
            file.write(struct.pack("<256s32s8q", str(call.library).encode(), call.function.encode(), *counts))
            file.write(argument)
            for field, (kind, array) in call.arrays.items():
                data = np.ascontiguousarray(array).tobytes()
                file.write(struct.pack("<3q", getattr(type(call.argument), field).offset, len(data), kind))
                file.write(data)
    return path


def replayed(program: list[str], path: Path) -> str:
    """The output of the program that repeats the calls; AssertionError if an output array differs."""
    done = subprocess.run([*program, str(path)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout

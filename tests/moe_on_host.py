"""Experts in host memory in place of a GPU's, launches that run kernels on the host, and the check of their results."""

from __future__ import annotations

import ctypes
from functools import partial

import cupy_like
import numpy as np

import qgemm
from qgemm.codec.format import float_dtype
from qgemm.cuda import libraries, upload
from qgemm.cuda.call import replay
from qgemm.cuda.driver import workspace as workspaces
from qgemm.cuda.layout import scaled_rows
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import C_TYPES, SCALED_ROWS
from qgemm.cuda.tensor import DeviceExperts


class Launch:
    """Stands for Launch: a call writes its pointers in front, and runs the grid at once."""

    seen: list[tuple[int, int]] = []  # noqa: RUF012 grids, cleared by each test

    def __init__(self, kernel, grid, block, shared, arguments, pointers, count, cluster=0):
        self.cluster = max(cluster, 1)
        self.kernel, self.grid, self.block, self.count = kernel, grid, block, count
        self.arguments, self.pointers = arguments, pointers

    def __call__(self, stream, *pointers):
        assert (stream, len(pointers)) == (7, self.count)
        raw = np.array(pointers, np.uint64).tobytes()
        ctypes.memmove(ctypes.addressof(self.pointers), raw, len(raw))
        Launch.seen.append(self.grid)
        self.kernel(self.grid, self.block, *self.arguments, cluster=self.cluster)

    def bound(self, *args):
        return partial(self, *args)


graphs: list[int] = []


def graph_of(launches):
    """Stands for driver/graph.py: notes how many launches there are, and makes them one by one."""
    graphs.append(len(launches))

    def enter():
        for launch, args in launches:
            launch(*args)
        return 0

    return enter


def install(monkeypatch):
    """CuPy over NumPy, whose arrays no earlier test has seen, and workspaces in its memory."""
    cupy_like.install(monkeypatch)
    monkeypatch.setattr(libraries, "LIBRARIES", libraries_seen := {})
    monkeypatch.setattr(replay, "LIBRARIES", libraries_seen)
    monkeypatch.setattr(workspaces, "_workspaces", {})


def on_device(w: qgemm.Tensor) -> DeviceExperts:
    e, n, k = w.shape
    if w.format.plain:
        return DeviceExperts(w.format, w.shape, cupy_like.asarray(w.blocks.reshape(e, n * k).view(np.uint8)))
    memory = cupy_like.zeros((e, upload.tiles_nbytes(w.format, n, k)), np.uint8)
    for expert in range(e):
        packed = tiles.pack(w.format, w.blocks[expert]).reshape(-1).view(np.uint8)
        memory[expert, : len(packed)] = cupy_like.asarray(packed)
    return DeviceExperts(w.format, w.shape, memory)


def device(array, dtype=None):
    return None if array is None else cupy_like.asarray(array.astype(float_dtype(dtype)) if dtype else array)


def rows_of_x(pointer, p):
    """Rows of x of a problem [m, k], float32."""
    if p.x != SCALED_ROWS:
        kind = next(name for name, spelled in C_TYPES.items() if spelled == p.x)
        return array(pointer, (p.m, p.k), kind).astype(np.float32)
    rows = array(pointer, (p.m, scaled_rows.pitch(p.k)), np.float16)
    factors = np.ascontiguousarray(rows[:, p.k : p.k + scaled_rows.FACTOR]).view(np.float32)
    with np.errstate(all="ignore"):  # rows beyond the sorted ones hold anything
        return rows[:, : p.k].astype(np.float32) * factors


def array(pointer, shape, dtype):
    """The array at an address."""
    dtype = float_dtype(dtype) if isinstance(dtype, str) and dtype == "bfloat16" else np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(int(pointer)), np.uint8).view(dtype).reshape(shape)

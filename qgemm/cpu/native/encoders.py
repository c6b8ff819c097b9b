"""Fits of the encoders by kernels/cpu/encode/: those of codec/search.py, with the same bytes."""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np

from qgemm.codec import grids, search
from qgemm.codec.grids import Grid, Indices
from qgemm.codec.packing import Floats
from qgemm.codec.search import Fit, Steps

from .calls import fields
from .library import library, reason
from .products import UNFUSED
from .sources import source_of

MOST_WEIGHTS = 32  # of a group


class Problem(ctypes.Structure):
    """Columns [size, n] to fit, for kernels/cpu/encode/fit.c, which takes its fields from here."""

    _fields_ = (
        ("size", ctypes.c_int64), ("n", ctypes.c_int64), ("x", ctypes.c_void_p), ("weights", ctypes.c_void_p),
        ("codes", ctypes.c_void_p), ("scale", ctypes.c_void_p), ("minimum", ctypes.c_void_p),
        ("most", ctypes.c_int32), ("tries", ctypes.c_int32), ("absolute", ctypes.c_int32),
        ("first", ctypes.c_float), ("step", ctypes.c_float),
    )  # fmt: skip


def fit(x: Floats, weights: Floats, most: int, steps: Steps | None) -> Fit | None:
    """As search.affine with steps, as search.symmetric of zero `most` without; None: NumPy must."""
    engine = None if reason() or len(x) > MOST_WEIGHTS or not x.size else _engine()
    if engine is None:
        return None
    x, weights = np.ascontiguousarray(x), np.ascontiguousarray(weights)
    codes, scale = np.empty(x.shape, np.int32), np.empty(x.shape[1], np.float32)
    minimum = None if steps is None else np.empty_like(scale)
    tried = steps or search.STEPS
    problem = Problem(
        *x.shape, x.ctypes.data, weights.ctypes.data, codes.ctypes.data, scale.ctypes.data,
        None if minimum is None else minimum.ctypes.data, most, tried.tries, tried.absolute, tried.first, tried.step,
    )  # fmt: skip
    engine.qgemm_fit(ctypes.byref(problem))
    return Fit(codes, scale, minimum)


class Search(ctypes.Structure):
    """Numbers [n] to find points for, for kernels/cpu/encode/closest.c, which takes its fields from here."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("points", "point_of", "starts", "counts", "neighbours")),
        *((name, ctypes.c_void_p) for name in ("numbers", "x", "weights", "levels", "found")),
        ("n", ctypes.c_int64), ("dims", ctypes.c_int64), ("base", ctypes.c_int64),
    )  # fmt: skip


FIT = source_of("encode/fit", {"FIT_FIELDS": fields(Problem)}, UNFUSED)
CLOSEST = source_of("encode/closest", {"SEARCH_FIELDS": fields(Search)}, UNFUSED)


def closest(of: Grid, numbers: Indices, x: Floats, weights: Floats, levels: Floats) -> Indices | None:
    """As Grid.closest; None: NumPy must."""
    engine = None if reason() or not len(numbers) else _finder()
    if engine is None:
        return None
    found = np.empty(len(numbers), np.int64)
    given = of.points, of.point_of, of.starts, of.counts, of.neighbours, numbers, x, weights, levels, found
    kept = [np.ascontiguousarray(array) for array in given]
    engine.qgemm_closest(ctypes.byref(Search(*(array.ctypes.data for array in kept), *x.shape[::-1], of.base)))
    return found


def install() -> None:
    """Encoders fit by compiled code from now on, where there is some."""
    search.use(fit)
    grids.use(closest)


@cache
def _finder() -> ctypes.CDLL | None:
    return library(CLOSEST)


@cache
def _engine() -> ctypes.CDLL | None:
    return library(FIT)

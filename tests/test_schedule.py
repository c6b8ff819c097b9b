"""How a persistent grid shares tiles of y, by the kernel's own code on the host: every part of every tile, once."""

from __future__ import annotations

import ctypes
from functools import cache

import harness
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qgemm.cuda.jit import codegen
from qgemm.cuda.jit.twins import Divisor
from qgemm.cuda.kernels import prefill_sm90, sm90_grid

pytestmark = [pytest.mark.compiles, harness.needs_compiler]

SMS = (78, 114, 132, 144)  # multiprocessors of an H100 PCIe, an H100 SXM, an H200, a GH100
FOUND = np.dtype([(name, "<i4") for name in ("cta", "tile", "first", "end", "first_peer", "peers", "finalized")])


@cache
def kernel():
    return harness.library(f'#include "{harness.FOLDER / "schedule.cpp"}"', codegen.headers())


def schedule(grid, count, units):
    """Parts of all CTAs [n] of FOUND."""
    found = np.zeros(count + 2 * grid.ctas, FOUND)
    stream_k = prefill_sm90.stream_k_of(grid, count, units, count)
    n = kernel().schedule(ctypes.byref(stream_k), units, grid.ctas, found.ctypes.data_as(ctypes.c_void_p), len(found))
    assert n < len(found)
    return found[:n]


@given(number=st.integers(0, 2**31 - 1), by=st.one_of(st.integers(1, 5000), st.integers(1, 2**31)))
def test_divisors_divide(number, by):
    """Also the numbers beside a multiple, where a quotient would first be wrong."""
    divisor = Divisor.by(by)
    for some in {number, number // by * by, max(0, number // by * by - 1), 2**31 - 1}:
        assert kernel().divide(ctypes.byref(divisor), some) == some // by


@given(
    count=st.one_of(st.integers(1, 450), st.sampled_from((1000, 4097))),
    units=st.one_of(st.integers(1, 130), st.sampled_from((448, 1024))),
    sms=st.sampled_from(SMS),
    single_tile=st.booleans(),
    k_blocks=st.sampled_from((1, 2, 4, 12)),
)
@example(count=4096 * 224, units=448, sms=132, single_tile=False, k_blocks=1)  # beyond 2^31 units
@example(count=64, units=128, sms=132, single_tile=True, k_blocks=1)  # pairs
@example(count=80, units=16, sms=132, single_tile=False, k_blocks=1)  # stream-K
@example(count=16, units=128, sms=132, single_tile=True, k_blocks=1)  # pairs of pairs
def test_grids_share_all_work(count, units, sms, single_tile, k_blocks):
    """Every unit along K of every tile once; the CTAs that share a tile agree on who they are; none does far more."""
    grid = sm90_grid.grid_of(count, units, sms, single_tile, k_blocks)
    assert 1 <= grid.ctas <= sms
    found = schedule(grid, count, units)
    assert (found["first"] < found["end"]).all()
    order = np.lexsort((found["first"], found["tile"]))
    parts = found[order]
    starts = np.flatnonzero(np.diff(parts["tile"], prepend=-1))
    assert (parts["tile"][starts] == np.arange(count)).all()
    assert (parts["first"][starts] == 0).all()
    ends = np.append(starts[1:], len(parts)) - 1
    assert (parts["end"][ends] == units).all()
    inside = np.setdiff1d(np.arange(1, len(parts)), starts)
    assert (parts["first"][inside] == parts["end"][inside - 1]).all()  # no gap, no overlap
    sizes = np.diff(np.append(starts, len(parts)))
    assert (parts["peers"] == np.repeat(sizes, sizes)).all()
    assert (parts["first_peer"] == np.repeat(parts["cta"][starts], sizes)).all()
    assert (np.add.reduceat(parts["finalized"], starts) == 0b11).all()  # each of two epilogue tiles, by one CTA
    assert (parts["cta"] == parts["first_peer"] + np.arange(len(parts)) - np.repeat(starts, sizes)).all()
    if (
        not grid.cluster_split_k
    ):  # all but the last CTA of a tile hand a part over; the workspace has room for one from each
        handed = parts["cta"][parts["end"] < units]
        assert len(set(handed)) == len(handed)
    work = np.bincount(found["cta"], found["end"] - found["first"], grid.ctas)
    ideal = -(-count * units // sms)
    assert work.max() <= (ideal * (1 + sm90_grid.WASTE) + 1 if count > sms else units)
    if grid.cluster_split_k:
        assert grid.cluster_split_k % sm90_grid.PAIR == 0
        assert (sizes == grid.cluster_split_k).all()

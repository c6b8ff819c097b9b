"""The schedule of a persistent grid, by the kernel's own code on the host: every part of every tile comes once."""

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
from qgemm.cuda.kernels import sm90_grid

pytestmark = [pytest.mark.compiles, harness.needs_compiler]

SMS = (78, 114, 132, 144)  # multiprocessors of an H100 PCIe, an H100 SXM, an H200, a GH100
PART = np.dtype([(name, "<i4") for name in ("cta", "tile", "first", "end", "first_peer", "peers", "finalized")])


@cache
def kernel():
    return harness.library(f'#include "{harness.FOLDER / "schedule.cpp"}"', codegen.headers())


def schedule(grid, count, units):
    """The parts of all CTAs [n]."""
    parts = np.zeros(count + 2 * grid.ctas, PART)
    stream_k = sm90_grid.stream_k_of(grid, count, units, count)
    n = kernel().schedule(ctypes.byref(stream_k), units, grid.ctas, parts.ctypes.data_as(ctypes.c_void_p), len(parts))
    assert n < len(parts)
    return parts[:n]


@given(number=st.integers(0, 2**31 - 1), by=st.one_of(st.integers(1, 5000), st.integers(1, 2**31)))
def test_divisors_divide(number, by):
    """The numbers beside a multiple are included, since quotients go wrong there first."""
    divisor = Divisor.by(by)
    for dividend in {number, number // by * by, max(0, number // by * by - 1), 2**31 - 1}:
        assert kernel().divide(ctypes.byref(divisor), dividend) == dividend // by


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
    """Every work unit of a tile comes once, CTAs that share a tile agree on their peers, and no CTA has much more."""
    grid = sm90_grid.grid_of(count, units, sms, single_tile, k_blocks)
    assert 1 <= grid.ctas <= sms
    by_cta = schedule(grid, count, units)
    assert (by_cta["first"] < by_cta["end"]).all()
    parts = by_cta[np.lexsort((by_cta["first"], by_cta["tile"]))]
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
    if not grid.cluster_split_k:  # the workspace holds one stored partial of each CTA
        storing = parts["cta"][parts["end"] < units]
        assert len(set(storing)) == len(storing)
    work = np.bincount(by_cta["cta"], by_cta["end"] - by_cta["first"], grid.ctas)
    ideal = -(-count * units // sms)
    assert work.max() <= (ideal * (1 + sm90_grid.WASTE) + 1 if count > sms else units)
    if grid.cluster_split_k:
        assert grid.cluster_split_k % sm90_grid.PAIR == 0
        assert (sizes == grid.cluster_split_k).all()

"""Rows of few columns: super-blocks of the CPU's products span them, with the bits of rows multiplied alone."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import random_tensor
from numpy.testing import assert_array_equal
from strategies import over_formats

import qgemm
from qgemm.cpu.native import library

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(library.reason()), reason=library.reason()),
]
SHORT = [fmt for fmt in qgemm.FORMATS.values() if fmt.integer and fmt.levels is not None and fmt.weights < 256]
BLOCKS = (1, 2, 3, 4, 5, 7, 9, 12, 15, 17, 20)  # super-blocks of q4_0 span rows of all but 17 blocks


@pytest.fixture(autouse=True)
def compiled_code(monkeypatch):
    monkeypatch.delenv("QGEMM_CPU")


def activations(m: int, k: int, rng: np.random.Generator) -> np.ndarray:
    x = rng.standard_normal((m, k), np.float32)
    x[0, ::2] *= 1e30
    if m > 1:
        x[1, 0], x[1, -1] = np.inf, np.nan
    return x


@over_formats(SHORT)
@pytest.mark.parametrize("activation", ["a8", "a16"])
@pytest.mark.parametrize("m", [1, 3])
def test_zeros_after_short_rows_change_nothing(fmt, activation, m):
    """Blocks of zeros after each row, which give it super-blocks of its own, leave the bits of y."""
    rng = np.random.default_rng(m)
    for blocks in BLOCKS:
        w = random_tensor(fmt, 37, blocks * fmt.weights, rng)
        whole = -(-w.shape[1] // 256) * 256
        padded = np.zeros((37, whole // fmt.weights), fmt.dtype)
        padded[:, :blocks] = w.blocks
        x = activations(m, w.shape[1], rng)
        zeros = np.zeros((m, whole), np.float32)
        zeros[:, : w.shape[1]] = x
        expected = qgemm.matmul(zeros, qgemm.Tensor(fmt, (37, whole), padded), activation)
        assert_array_equal(qgemm.matmul(x, w, activation), expected)


@over_formats(SHORT)
@pytest.mark.parametrize("activation", ["a8", "a16"])
def test_short_rows_of_any_place(fmt, activation):
    """A row alone, every second row, and rows with other columns after them have the bits of all rows in order."""
    rng = np.random.default_rng(2)
    for blocks in BLOCKS:
        w = random_tensor(fmt, 23, blocks * fmt.weights, rng)
        wide = np.concatenate([w.blocks, w.blocks[::-1]], axis=1)
        x = activations(2, w.shape[1], rng)
        y = qgemm.matmul(x, w, activation)
        for rows in (slice(5, 6), slice(3, None, 2), slice(None)):
            for rows_of_w in (w.blocks[rows], wide[rows, :blocks]):
                part = qgemm.Tensor(fmt, (len(rows_of_w), w.shape[1]), rows_of_w)
                assert_array_equal(qgemm.matmul(x, part, activation), y[:, rows])


@over_formats([fmt for fmt in SHORT if fmt.weights <= 32])
def test_quantized_x_and_short_rows(fmt):
    """Activations that were quantized before are repeated as blocks."""
    rng = np.random.default_rng(4)
    for blocks in BLOCKS:
        w = random_tensor(fmt, 19, blocks * fmt.weights, rng)
        x = rng.standard_normal((3, w.shape[1]), np.float32)
        y = qgemm.matmul(qgemm.quantize_activations(x, "a8"), w)
        assert_array_equal(y, qgemm.matmul(x, w, "a8"))

"""Layout of x as halves with a power of two for each row; kernels/quantize/scaled_rows.cuh says why."""

from __future__ import annotations

LINE = 64  # halves of a cache line, at whose multiples rows start
FACTOR = 2  # halves after the values of a row, which hold its factor


def pitch(k: int) -> int:
    """Halves of a row of K values."""
    return -(-(k + FACTOR) // LINE) * LINE


def nbytes(m: int, k: int) -> int:
    """Bytes of M rows of K values."""
    return 2 * m * pitch(k)

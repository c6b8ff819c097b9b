"""Encoding, the part of a format's record that only encoders read: importance, limits of scales, units of encoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .packing import Floats


@dataclass(frozen=True, eq=False)
class Encoding:
    """Options of a format's encoder.

    weighted: values [n, weights], their importance [n, weights] -> blocks [n]: ggml's encoder for an importance matrix,
    where it differs from the search of codec/search.py.
    needs_importance: ggml encodes the format with an importance matrix only.
    whole_rows: all blocks of a row have the same scale and zero, so encode accepts whole rows.
    limit: values of at least this magnitude are refused, because no scale can represent them. Float16 scales need no
    limit: they become infinite.
    ordinary: for each field of byte scales, the least code in trained weights and the code after the greatest.
    Benchmarks and tests draw codes from this range.
    """

    weighted: Callable[[Floats, Floats], NDArray[Any]] | None = None
    needs_importance: bool = False
    whole_rows: bool = False
    limit: float = np.inf
    ordinary: Mapping[str, tuple[int, int]] = field(default_factory=dict)

"""The stand-in for CuPy refuses and allows what CuPy does; tests/gpu/test_cupy_like.py asks CuPy itself."""

from __future__ import annotations

import cupy_like
import pytest
from cupy_refusals import HOST, assert_allows, assert_refuses


@pytest.mark.parametrize("check", [assert_refuses, assert_allows])
def test_a_stand_in(check):
    check(cupy_like.asarray(HOST))

"""The stand-in for CuPy (tests/cupy_like.py) refuses and allows what CuPy itself does."""

from __future__ import annotations

import pytest
from cupy_refusals import HOST, assert_allows, assert_refuses
from helpers import cupy


@pytest.mark.parametrize("check", [assert_refuses, assert_allows])
def test_an_array_of_cupy(check):
    check(cupy().asarray(HOST))

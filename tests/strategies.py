"""The one place that draws test data: formats, blocks, rows, matrices and problems.

Values are drawn from three sources, since each finds errors that the others miss: the float16 grid (ties are common and
1 / d stays finite), a format's own grid, and raw bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import pytest
from formats_of_tests import TEST_FORMATS
from helpers import bytes_as_blocks, set_scales, tame
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import qgemm
from qgemm.codec.format import Format
from qgemm.cuda.kernels import sm90_cost
from qgemm.formats import format_of
from qgemm.formats.groups import REPRESENTATIVES

T = TypeVar("T")
FORMATS = list(qgemm.FORMATS.values())
BLOCK_FORMATS = [fmt for fmt in FORMATS if not fmt.plain]
GGML_BLOCKS = [fmt for fmt in BLOCK_FORMATS if fmt.ggml_type is not None]
CODES = [fmt for fmt in FORMATS if fmt.integer]
INTEGER = [fmt for fmt in CODES if fmt.code_fields]
CODEBOOKS = [fmt for fmt in FORMATS if fmt.needs_table]
# Encoded from values alone; formats that need an importance have tests of their own.
ENCODED = [fmt for fmt in FORMATS if fmt.encode is not None and not fmt.encoding.needs_importance]
ENCODED_BLOCKS = [fmt for fmt in BLOCK_FORMATS if fmt in ENCODED]
GRIDS = [fmt for fmt in FORMATS if fmt.tile.grid is not None]
TILED = [fmt for fmt in FORMATS if fmt.tiled]
# With the formats of tests, which have no kernels of the library.
EVERY = FORMATS + TEST_FORMATS
EVERY_BLOCK = BLOCK_FORMATS + TEST_FORMATS
EVERY_CODES = CODES + TEST_FORMATS
EVERY_INTEGER = INTEGER + TEST_FORMATS
EVERY_ENCODED = ENCODED + TEST_FORMATS
EVERY_ENCODED_BLOCK = ENCODED_BLOCKS + TEST_FORMATS
EVERY_TILED = TILED + TEST_FORMATS
EVERY_GROUP = [format_of(name) for name in REPRESENTATIVES]  # representatives of the family of group formats
# And one member of each other family: formats that FORMATS does not list and kernels multiply.
BYTE_LEVELS = [format_of("i8_g16"), format_of("i8_g32")]  # in which a GPU holds types of ik_llama.cpp
EVERY_UNLISTED = [*EVERY_GROUP, *BYTE_LEVELS, *map(format_of, ("f8_e4m3_g128", "s7_1of2", "kbit4_f32"))]
EDGES = sm90_cost.TOKEN_TILES
LONG_K = 1024, 5120
PRODUCTS = [(fmt, activation) for fmt in TILED for activation in ("a16", "a8") if activation == "a16" or fmt.integer]
each_product = pytest.mark.parametrize(
    ("fmt", "activation"), PRODUCTS, ids=[f"{fmt.name}-{activation}" for fmt, activation in PRODUCTS]
)
gpu_settings = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))


def over_formats(formats: list[Format]):
    """Parametrise a test over formats, by name."""
    return pytest.mark.parametrize("fmt", formats, ids=lambda fmt: fmt.name)


def by_turns(choices: Sequence[T], fmt: Format, formats: list[Format]) -> T:
    """The choice of a format, in rotation: tests of all formats compile a kernel for all choices."""
    return choices[formats.index(fmt) % len(choices)]


def every_config(formats=TILED):
    """A parameter (format, config) for each of the two that meet."""
    return pytest.mark.parametrize(
        ("fmt", "config"),
        [
            pytest.param(fmt, config, id=f"{fmt.name}-{config}".replace(" ", "_"))
            for fmt in formats
            for config in dict.fromkeys(row.config for row in sm90_cost.measured(fmt))
        ],
    )


def seeds() -> st.SearchStrategy[np.random.Generator]:
    """A NumPy generator: large arrays are drawn from it in one piece, Hypothesis shrinks its seed and the shape."""
    return st.integers(0, 2**32 - 1).map(np.random.default_rng)


def raw_blocks(draw: st.DrawFn, fmt: Format, shape: tuple[int, ...]) -> np.ndarray:
    """Blocks of random bytes: every bit pattern of scales and codes, NaN and infinity included."""
    rng = draw(seeds())
    return bytes_as_blocks(fmt, shape, rng)


@st.composite
def blocks(draw: st.DrawFn, fmt: Format, max_count: int = 40) -> np.ndarray:
    """Blocks [n] of random bytes."""
    return raw_blocks(draw, fmt, (draw(st.integers(1, max_count)),))


@st.composite
def values(draw: st.DrawFn, fmt: Format, max_count: int = 40) -> np.ndarray:
    """Values [n, weights] float32 that the format can hold: float16 grid, its own grid, constants, mixed scales."""
    rng = draw(seeds())
    n = draw(st.integers(1, max_count))
    kind = draw(st.sampled_from(("half", "small integers", "own grid", "zeros", "constant", "outlier", "tiny")))
    shape = (n, fmt.weights)
    if kind == "half":
        x = rng.standard_normal(shape).astype(np.float16)
    elif kind == "small integers":
        x = rng.integers(-16, 17, shape) * 2.0 ** rng.integers(-12, 4, (n, 1))
    elif kind == "own grid":
        x = fmt.decode(tame(fmt, raw_blocks(draw, fmt, (n,)), rng))
    elif kind == "zeros":
        x = rng.choice([0.0, -0.0], shape)
    elif kind == "constant":
        x = np.repeat(rng.standard_normal((n, 1)), fmt.weights, axis=1)
    elif kind == "outlier":
        x = rng.standard_normal(shape) * np.where(rng.random(shape) < 0.05, 1000.0, 1.0)
    else:
        x = rng.standard_normal(shape) * 2.0 ** rng.integers(-149, -120, shape)
    limit = np.nextafter(np.float32(fmt.encoding.limit), np.float32(0))
    return np.clip(np.asarray(x, np.float32), -limit, limit)


@st.composite
def codebooks(draw: st.DrawFn, fmt: Format) -> np.ndarray:
    """Levels [2^bits] float32 in any order: of coarse grids, where ties and duplicates are common, or any at all."""
    rng, count = draw(seeds()), len(fmt.codebook)
    kind = draw(st.sampled_from(("grid", "wide grid", "random", "positive", "constant", "permuted", "extreme")))
    if kind == "grid":
        return rng.integers(-8, 9, count).astype(np.float32) / np.float32(8)
    if kind == "wide grid":
        return (rng.integers(-3, 4, count) * 2.0 ** rng.integers(-30, 4, count)).astype(np.float32)
    if kind == "random":
        return rng.uniform(-1, 1, count).astype(np.float32)
    if kind == "positive":
        return rng.uniform(0, 1, count).astype(np.float32)
    if kind == "constant":
        return np.full(count, rng.uniform(-1, 1), np.float32)
    if kind == "permuted":
        return rng.permutation(fmt.codebook)
    return rng.choice(np.array([0, -0.0, 1e-45, -1e-45, 1e-38, 3e38, -3e38, 1, -1], np.float32), count)


@st.composite
def weights(draw: st.DrawFn, fmt: Format, most_n: int = 150, most_blocks: int = 12) -> qgemm.Tensor:
    """A Tensor [N, K] with tame scales; N and K on both sides of the tile's 64, and in some draws a long K.

    most_blocks: of 32 weights, where K is not long. In some draws the scales of a few rows are 0.
    """
    rng = draw(seeds())
    n = draw(st.integers(1, most_n))
    short = max(3, 32 * most_blocks // fmt.weights)
    blocks = draw(st.integers(1, short) | st.integers(LONG_K[0] // fmt.weights + 1, LONG_K[1] // fmt.weights))
    tensor = qgemm.Tensor(fmt, (n, blocks * fmt.weights), tame(fmt, raw_blocks(draw, fmt, (n, blocks)), rng))
    if draw(st.booleans()):
        set_scales(fmt, tensor.blocks[:: draw(st.integers(2, 9))], 0.0)
    return tensor


@st.composite
def problems(
    draw: st.DrawFn, fmt: Format, m: st.SearchStrategy[int] | None = None, finite: bool = True
) -> tuple[np.ndarray, qgemm.Tensor]:
    """x [M, K] float32 on the float16 grid, and a Tensor [N, K]. In some draws a row of x is zero.

    finite: unless it is set, NaN or infinity stands somewhere in a row of x in some draws.
    """
    w = draw(weights(fmt))
    rows = draw(m if m is not None else st.integers(1, 20))
    x = draw(seeds()).standard_normal((rows, w.shape[1])).astype(np.float16).astype(np.float32)
    if draw(st.booleans()):
        x[draw(st.integers(0, rows - 1))] = 0
    if not finite and draw(st.booleans()):
        place = draw(st.integers(0, rows - 1)), draw(st.integers(0, w.shape[1] - 1))
        x[place] = draw(st.sampled_from((np.nan, np.inf, -np.inf)))
    return x, w

"""docs/ladder: every level multiplies, on the host, and compiles for a GPU."""

from __future__ import annotations

import harness
import helpers
import numpy as np
import pytest

import qgemm
from qgemm.cuda.jit import cache, codegen
from qgemm.cuda.layout import tile

Q4_0 = qgemm.FORMATS["q4_0"]
LEVELS = {path.stem: path for path in sorted(harness.LADDER.glob("*.cu"))}
N, K = 128, 576  # nine tiles along K: more than the warps and the stages of level 5
GRIDS = {  # level -> CTAs, threads
    "level_1_loop": (4, 32),
    "level_2_tile": (N // 64, 128),
    "level_3_subnormal": (N // 64, 128),
    "level_4_pipeline": (N // 64, 128),
    "level_5_split_k": (N // 16, 256),
}
pytestmark = pytest.mark.compiles


def test_every_level_has_a_grid():
    assert list(LEVELS) == list(GRIDS)


@harness.needs_compiler
@pytest.mark.parametrize("m", [1, 5, 8])
@pytest.mark.parametrize("level", GRIDS)
def test_a_level_is_the_product(level, m):
    """Random blocks, x on the grid of float16; y is exact to the rounding of float32 sums."""
    w = helpers.random_tensor(Q4_0, N, K, np.random.default_rng(0))
    x = helpers.normal(m, K, seed=1).astype(np.float16)
    weights = w.blocks if level == "level_1_loop" else tile.pack(Q4_0, w.blocks)
    y = harness.device_array((m, N), np.float32)
    y[...] = np.nan
    harness.Kernel(level, Q4_0)(*GRIDS[level], harness.to_device(weights), harness.to_device(x), y, N, K, m)
    wide = x.astype(np.float64)
    bound = (K + 2) * 2.0**-24 * (np.abs(wide) @ np.abs(w.dequantize(np.float64)).T)
    helpers.expected_sums(wide, w)._replace(bound=bound).check(y)


@pytest.mark.parametrize("level", GRIDS)
def test_a_level_compiles_for_a_gpu(level):
    texts = {path.name: path.read_text() for path in harness.LADDER.glob("*.cu*")}
    unit = cache.cached(codegen.compose(level, Q4_0), "sm_80", {**codegen.headers(Q4_0), **texts})
    assert unit.cubin.startswith(b"\x7fELF")

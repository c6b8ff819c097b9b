"""For tests of e4m3 kernels: operands whose sums lose nothing on any tensor core."""

from __future__ import annotations

import numpy as np

import qgemm


def exact_in_any_order(m: int, n: int, k: int, rng: np.random.Generator) -> tuple[np.ndarray, qgemm.Tensor]:
    """x [m, k] of -1, 0, 1 and one 448 a group, where W is zero, and W [n, k] in mxfp4, exponents one apart at most.

    Products are a power of two times integers up to 24, whose sums are below 2^13: a tensor core, which aligns all
    products with the largest one and cuts them there, loses no bit.
    """
    blocks = qgemm.quantize(np.ones((n, k), np.float32), "mxfp4").blocks.copy()
    blocks["e"], blocks["qs"] = rng.integers(125, 127, blocks["e"].shape), rng.integers(0, 256, blocks["qs"].shape)
    blocks["qs"][:, ::4, 0] &= 0xF0
    x = rng.integers(-1, 2, (m, k)).astype(np.float32)
    x[:, ::128] = 448
    return x, qgemm.Tensor("mxfp4", (n, k), blocks)

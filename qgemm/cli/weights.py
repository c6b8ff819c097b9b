"""Random packed weights for benchmarks, and copies of weights on a GPU with their rows in another order."""

from __future__ import annotations

import numpy as np

from qgemm.codec.format import Blocks, Format
from qgemm.cuda.copies import repeated, repeated_rows

__all__ = ["random_blocks", "repeated", "repeated_rows"]


def random_blocks(fmt: Format, n: int, k: int, rng: np.random.Generator) -> Blocks:
    """Blocks [n, k / weights] of random bytes, with scales small enough that a product stays well inside float16."""
    shape = (n, fmt.blocks_in(k))
    if fmt.plain:
        return fmt.quantize(rng.standard_normal((n, k), np.float32) / np.float32(32))
    blocks: Blocks = np.frombuffer(rng.bytes(n * shape[1] * fmt.block_bytes), fmt.dtype).reshape(shape).copy()
    for name in fmt.dtype.names or ():
        if name == fmt.zero_field:
            blocks[name] = rng.integers(*fmt.code_range, blocks.shape, endpoint=True)
        elif fmt.dtype[name].base.kind == "f":
            blocks[name] = rng.uniform(0.002, 0.01, blocks[name].shape)
        elif name in fmt.encoding.ordinary:
            blocks[name] = rng.integers(*fmt.encoding.ordinary[name], blocks[name].shape)
    if fmt.family == "f8" and fmt.levels is not None:  # codes of NaN and infinity would make the product unusable
        finite = np.isfinite(fmt.levels(blocks.reshape(-1)).codes).reshape(blocks["qs"].shape)
        blocks["qs"] *= finite.astype(np.uint8)
    if fmt.scatter_scale is not None:
        fmt.scatter_scale(blocks, rng.uniform(0.002, 0.01, blocks.shape).astype(np.float16))
    return blocks

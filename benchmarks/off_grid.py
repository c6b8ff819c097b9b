"""Move the weights of a quantized model off its grid: a source for benchmarks of quantization.

A decoded file holds numbers of its own types, which store them without any error. The model that was quantized had its
weights anywhere within half a step of these numbers, and so do the weights that this module writes, at random.

    python -m benchmarks.off_grid model-q4_k_m.gguf source-f32.gguf
"""

from __future__ import annotations

import sys

import numpy as np

import qgemm
from qgemm.codec.format import Blocks, Format
from qgemm.codec.packing import Floats

CHUNK = 1 << 16  # blocks that are decoded at a time


def moved(fmt: Format, blocks: Blocks, rng: np.random.Generator) -> Floats:
    """Blocks [n] -> weights [n, weights of a block], each within half a step of the decoded one."""
    levels = fmt.decode_levels(blocks)
    steps = rng.random(levels.codes.shape, np.float32) - np.float32(0.5)
    if levels.scale is not None:
        steps *= np.abs(levels.scale)[..., None]
    return levels.values() + steps.reshape(len(blocks), -1)


def main(source: str, target: str) -> None:
    """Write the model in float32; tensors that are not quantized stay as they are."""
    rng, tensors = np.random.default_rng(0), {}
    with qgemm.open(source) as model:
        for name, tensor in model.items():
            if tensor.format.plain:
                tensors[name] = tensor.dequantize()
                continue
            blocks = tensor.blocks.reshape(-1)
            parts = [moved(tensor.format, blocks[i : i + CHUNK], rng) for i in range(0, len(blocks), CHUNK)]
            tensors[name] = np.concatenate(parts).reshape(tensor.shape)
        qgemm.write(target, tensors, {**model.metadata, "general.file_type": np.uint32(0)})


if __name__ == "__main__":
    main(*sys.argv[1:])

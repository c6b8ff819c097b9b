"""Blocks of activations in the order in which kernels read them, by NumPy."""

from __future__ import annotations

import numpy as np

from qgemm.cuda.layout import q8_1_k_blocks


def in_k_blocks(blocks):
    """Blocks [m, k / 32] -> device activations [k / 64, m], the codes of a lane side by side; zeros beyond k."""
    m, count = blocks.shape
    padded = np.zeros((m, -(-count // q8_1_k_blocks.BLOCKS) * q8_1_k_blocks.BLOCKS), blocks.dtype)
    padded[:, :count] = blocks
    activations = np.zeros((m, padded.shape[1] // q8_1_k_blocks.BLOCKS), q8_1_k_blocks.DTYPE)
    activations["qs"] = padded["qs"].reshape(*activations["qs"].shape)[..., q8_1_k_blocks.ORDER]
    for i, name in enumerate("ds"):
        activations["ds"][..., i] = padded[name].reshape(*activations.shape, q8_1_k_blocks.BLOCKS)
    return activations.T

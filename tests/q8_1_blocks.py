"""Blocks of activations in the order in which kernels read them, by NumPy."""

from __future__ import annotations

import numpy as np

from qgemm.cuda.layout import activations


def in_k_blocks(blocks):
    """Blocks [m, k / 32] -> device activations [k / 64, m], the codes of a lane side by side; zeros beyond k."""
    m, count = blocks.shape
    padded = np.zeros((m, -(-count // activations.BLOCKS) * activations.BLOCKS), blocks.dtype)
    padded[:, :count] = blocks
    found = np.zeros((m, padded.shape[1] // activations.BLOCKS), activations.DTYPE)
    found["qs"] = padded["qs"].reshape(*found["qs"].shape)[..., activations.ORDER]
    for i, name in enumerate("ds"):
        found["ds"][..., i] = padded[name].reshape(*found.shape, activations.BLOCKS)
    return found.T

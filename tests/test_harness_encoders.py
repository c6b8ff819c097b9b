"""encode_groups on the host: the bytes of NumPy and of ggml's C code, with and without an importance."""

from __future__ import annotations

from functools import cache

import harness
import helpers
import numpy as np
import pytest
from harness import Kernel, device_array, to_device
from strategies import BLOCK_FORMATS

from qgemm.codec.format import Format
from qgemm.cuda.kernels import transforms

pytestmark = [pytest.mark.compiles, harness.needs_compiler]
GOLDEN, EDGES = (np.load(helpers.DATA / name) for name in ("ggml_encoders.npz", "ggml_edges.npz"))
GROUPS = [fmt for fmt in BLOCK_FORMATS if transforms.encodes_groups(fmt)]
CASES = [
    pytest.param(fmt, weighted, id=f"{fmt.name}-{kind}")
    for fmt in GROUPS
    for weighted, kind in ((False, "plain"), (True, "imatrix"))
    if not weighted or transforms.encodes_weighted(fmt)
]
kernel = cache(Kernel)


def encoded(fmt: Format, x: np.ndarray, importance: np.ndarray | None = None, backwards: bool = False):
    """(blocks, ENCODE_STATS of the CTAs) of values [n, weights] float32; importance repeats after its last block."""
    count, turn, ctas = len(x), transforms.blocks_per_warp(fmt), 2
    blocks, stats = device_array(-(-count // turn) * turn, fmt.dtype), device_array(ctas, transforms.ENCODE_STATS)
    transform = transforms.ENCODE_GROUPS if importance is None else transforms.ENCODE_WEIGHTED
    encode = kernel("encode_groups", fmt, **transform.template(fmt, WEIGHTED=int(importance is not None)))
    weights = np.ones(fmt.weights, np.float32) if importance is None else importance
    arguments = to_device(x), to_device(weights), weights.size // fmt.weights, blocks, stats, count
    encode(ctas, transforms.ENCODE_THREADS, *arguments, backwards=backwards)
    return blocks[:count], stats


@pytest.mark.parametrize(("fmt", "weighted"), CASES)
def test_bytes_of_ggml(fmt, weighted):
    """18 families of weights, ties, zeros, outliers and subnormals among them, and the statistics of CTAs."""
    x, imatrix = GOLDEN["x"], GOLDEN["imatrix"]
    blocks, stats = encoded(fmt, x.reshape(-1, fmt.weights), imatrix if weighted else None)
    if (name := f"{fmt.name}.{'imatrix' if weighted else 'plain'}") in GOLDEN:
        assert blocks.tobytes() == GOLDEN[name].tobytes()
    wide = x.astype(np.float64)
    assert stats["refused"].min() == len(blocks)
    assert stats["power"].sum() == pytest.approx(np.square(wide).sum(), rel=1e-5)
    error = np.square(fmt.decode(np.array(blocks)).reshape(x.shape) - wide).sum()
    assert stats["error"].sum() == pytest.approx(error, rel=1e-4)


@pytest.mark.parametrize(("fmt", "weighted"), CASES)
def test_bytes_of_ggml_where_nothing_weighs(fmt, weighted):
    """And of signed zeros, of scales at an end: tests/test_encoder_edges.py."""
    x = EDGES["x"].astype(np.float32)
    for way in ("imatrix0", "imatrix1") if weighted else ("plain",):
        imatrix = EDGES["imatrix"][int(way[-1])] if weighted else None
        blocks, stats = encoded(fmt, x.reshape(-1, fmt.weights), imatrix)
        assert helpers.digests(blocks.reshape(len(x), -1)) == list(EDGES[f"{fmt.name}.{way}"])
        assert stats["refused"].min() == len(blocks)


@pytest.mark.parametrize(("fmt", "weighted"), CASES)
def test_bytes_of_numpy(fmt, weighted):
    """Ragged counts, threads in either order; zeros, subnormals, of which 1 / scale is infinite; an importance of every
    value, groups without any among them."""
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((21, fmt.weights)) * np.exp2(rng.integers(-30, 9, (21, 1)))).astype(np.float32)
    x[4], x[5, 16:], x[6] = 0, -0.0, 0.75
    x[9:13] = rng.integers(-40, 41, (4, fmt.weights)) * 2.0**-149
    x[13:16] *= np.float32(2.0**-100)
    importance = rng.uniform(0, 3, x.shape).astype(np.float32) if weighted else None
    if importance is not None:
        importance[7, :64], importance[8] = 0, 1e-20
    with np.errstate(all="ignore"):
        want = fmt.encode(x) if importance is None else fmt.encoding.weighted(x, importance)
    blocks, stats = encoded(fmt, x, importance, backwards=True)
    refused = fmt.refused(x, want)
    assert stats["refused"].min() == (len(x) if refused is None else refused.argmax())
    held = np.flatnonzero(np.ones(len(x), bool) if refused is None else ~refused)
    assert [i for i in held if blocks[i].tobytes() != want[i].tobytes()] == []
    assert len(held) > len(x) // 2


@pytest.mark.parametrize("fmt", GROUPS, ids=str)
@pytest.mark.parametrize("value", [np.nan, -np.inf, 3e38])
def test_the_first_block_that_cannot_be_held(fmt, value):
    x = helpers.normal(40, fmt.weights)
    x[[31, 17], [3, 30]] = value
    with np.errstate(all="ignore"):
        refused = fmt.refused(x, fmt.encode(x))
    assert encoded(fmt, x)[1]["refused"].min() == (40 if refused is None else refused.argmax())

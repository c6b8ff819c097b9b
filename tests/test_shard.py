"""Tensor.shard: shares of an axis are views that put together are the tensor; products of shares are the product."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import expected_sums, random_tensor
from hypothesis import given
from hypothesis import strategies as st
from strategies import EVERY, over_formats, raw_blocks, seeds

import qgemm
from qgemm.codec.error_bound import a16_bound, magnitudes
from qgemm.cuda.upload import byte_rows
from qgemm.sharding import shares

ALL = list(qgemm.FORMATS.values())


def shards(w, world, axis, **options):
    return [w.shard(rank, world, axis, **options) for rank in range(world)]


@given(st.integers(1, 1000), st.integers(1, 300), st.integers(1, 12))
def test_shares_of_an_axis_are_whole_steps_and_even(size, step, world):
    """They follow one another from 0 to the end, and differ by one step at most, apart from the cut at the end."""
    steps = -(-size // step)
    if steps < world:
        with pytest.raises(qgemm.ShapeError, match=f"{size} cut in multiples of {step} gives"):
            shares(size, step, world)
        return
    parts = shares(size, step, world)
    assert len(parts) == world
    assert [part.start for part in parts] == [0, *[part.stop for part in parts[:-1]]]
    assert parts[-1].stop == size
    assert all(part.start % step == 0 for part in parts)
    counts = {-(-(part.stop - part.start) // step) for part in parts}
    assert max(counts) - min(counts) <= 1
    assert min(counts) >= 1


@over_formats(EVERY)
@given(data=st.data())
def test_shards_put_together_are_the_tensor(fmt, data):
    """Random bytes, along each axis of a matrix and of experts; as bytes for a GPU too."""
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 200), st.integers(1, 6)))
    blocks = raw_blocks(data.draw, fmt, shape)
    w = qgemm.Tensor(fmt, (*shape[:2], shape[2] * fmt.weights), blocks, "w")
    for axis, pieces in enumerate((shape[0], -(-shape[1] // 64), shape[2])):
        parts = shards(w, data.draw(st.integers(1, pieces)), axis - 3)
        assert np.concatenate([shard.blocks for shard in parts], axis).tobytes() == blocks.tobytes()
        for shard in parts:
            assert (shard.format, shard.name) == (fmt, "w")
            assert np.shares_memory(shard.blocks, blocks)
            assert byte_rows(shard.blocks[0]).tobytes() == np.ascontiguousarray(shard.blocks[0]).tobytes()
            assert np.shares_memory(byte_rows(shard.blocks[0]), blocks)


@over_formats(ALL)
def test_bytes_of_rows_are_copied_only_where_they_lie_apart(fmt):
    blocks = np.frombuffer(np.random.default_rng(0).bytes(6 * 5 * fmt.block_bytes), fmt.dtype).reshape(6, 5)
    for view, shared in ((blocks, True), (blocks[::2, 1:4], True), (blocks[:, 3:4], True), (blocks[:, ::2], False)):
        rows = byte_rows(view)
        assert rows.shape == (len(view), view.shape[1] * fmt.block_bytes)
        assert rows.tobytes() == np.ascontiguousarray(view).tobytes()
        assert np.shares_memory(rows, blocks) is shared


@over_formats([fmt for fmt in EVERY if fmt.levels is not None])
@given(rng=seeds(), world=st.integers(1, 3), m=st.integers(1, 5))
def test_products_of_shards_are_the_product(fmt, rng, world, m):
    """Columns of y bit for bit; sums over shares of K within the bound of a sum in float32 with more terms."""
    w = random_tensor(fmt, 64 * world - 5, max(64, 2 * fmt.weights) * world, rng)
    x = rng.standard_normal((m, w.shape[1]), np.float32)
    rows = np.concatenate([qgemm.matmul(x, shard) for shard in shards(w, world, 0)], 1)
    assert rows.tobytes() == qgemm.matmul(x, w).tobytes()
    total, start = np.zeros_like(rows), 0
    for shard in shards(w, world, 1):
        total += qgemm.matmul(x[:, start : start + shard.shape[1]], shard)
        start += shard.shape[1]
    values = x.astype(np.float64)
    sizes = magnitudes(fmt, w.blocks)
    bound = a16_bound(np.pad(values, ((0, 0), (0, world))), np.pad(sizes, ((0, 0), (0, world))))
    expected_sums(x, w)._replace(bound=bound).check(total)


def test_rows_of_a_file_are_those_of_its_mapping(tmp_path):
    """And no more is gathered of its columns than the share."""
    w = random_tensor(qgemm.FORMATS["q4_k"], 256, 1024, np.random.default_rng(0))
    qgemm.write(tmp_path / "w.gguf", {"w": w})
    with qgemm.open(tmp_path / "w.gguf") as file:
        whole = file["w"].blocks
        for axis in (0, 1):
            for rank in range(2):
                shard = file["w"].shard(rank, 2, axis)
                assert np.shares_memory(shard.blocks, whole)
                assert shard.nbytes == w.nbytes // 2


def test_pieces_of_another_size():
    """As heads are, whose rows stay together."""
    w = random_tensor(qgemm.FORMATS["q4_0"], 3 * 40, 3 * 96, np.random.default_rng(0))
    assert [shard.shape for shard in shards(w, 2, 0, multiple=40)] == [(40, 288), (80, 288)]
    assert [shard.shape for shard in shards(w, 3, 1, multiple=96)] == [(120, 96)] * 3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((0, 3, 0), "axis 0 of 100 cut in multiples of 64 gives at most 2 shares, not 3"),
        ((0, 2, 1), "axis 1 of 256 cut in multiples of 256 gives no shares, not 2"),
        ((2, 2, 0), "rank 2 of 2"),
        ((-1, 2, 0), "rank -1 of 2"),
        ((0, 2, 1, 100), "columns cut in multiples of 100 would cut blocks of 256"),
        ((0, 2, 0, 0), "a step is at least 1; got 2 and 0"),
    ],
)
def test_what_cannot_be_cut_is_refused(args, message):
    w = random_tensor(qgemm.FORMATS["q4_k"], 100, 256, np.random.default_rng(0))
    with pytest.raises(ValueError, match=message):
        w.shard(*args)
    with pytest.raises(IndexError):
        w.shard(0, 1, 2)

"""Token tiles of rows sorted by expert, on the host: their number, their choice, and shared memory of their kernels."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from strategies import EVERY_TILED, over_formats

import qgemm
from qgemm.cuda.kernels import moe_sort
from qgemm.cuda.kernels.expert_tiles import DECODE_TILE, Size, expected_tiles, max_token_tiles
from qgemm.cuda.kernels.sm90_config import SHARED, smem_bytes, stages_of
from qgemm.cuda.kernels.sm90_token_tiles import CONFIGS, GROUPED_TOKENS, config_of, token_tile

TILES = (DECODE_TILE, *GROUPED_TOKENS)
Q4_0 = qgemm.FORMATS["q4_0"]


@given(slots=st.integers(1, 3000), experts=st.sampled_from([1, 2, 8, 128]), tokens=st.sampled_from(TILES))
def test_token_tiles_that_are_expected(slots, experts, tokens):
    """The expected number is the average of random ids, and at most the largest possible number."""
    busy_experts, count = expected_tiles(slots, experts, tokens)
    assert min(1, slots) <= busy_experts <= count + 1e-9
    assert busy_experts <= min(experts, slots) + 1e-9
    assert count <= max_token_tiles(slots, experts, tokens) + 1e-9
    rng = np.random.default_rng(slots)
    loads = rng.multinomial(slots, np.full(experts, 1 / experts), size=200)
    drawn = (-(-loads // tokens)).sum(1)
    assert abs(drawn.mean() - count) <= 6 * drawn.std() / 200**0.5 + 0.05


def test_few_slots_are_not_sorted_and_tiles_grow_with_the_load():
    sizes = Size(Q4_0, 1536, 2048, True), Size(Q4_0, 2048, 768)
    assert token_tile(sizes, 8, 128) == 0
    tiles = [token_tile(sizes, 8 * t, 128) for t in (64, 512, 4096)]
    assert tiles == sorted(tiles)
    assert 0 < tiles[0] < 64 <= tiles[-1]
    assert token_tile((Size(qgemm.FORMATS["q8_0"], 64, 64),), 1 << 17, 1) in GROUPED_TOKENS


@over_formats(EVERY_TILED)
def test_a_cta_has_room_beside_its_pipeline(fmt):
    """Its static shared memory fits as well; every format has a config for every token tile."""
    assert all(config_of(fmt, tokens) for tokens in GROUPED_TOKENS)
    for config in CONFIGS:
        if config.fits(fmt):
            assert smem_bytes(fmt, config, stages_of(fmt, config)) + config.static <= SHARED


def test_a_function_is_launched_with_one_size_of_shared_memory(monkeypatch):
    """The limit is set by the last Launch, and holds for earlier launches as well."""
    sizes = []
    monkeypatch.setattr(moe_sort, "Launch", lambda function, grid, block, shared, *_: sizes.append(shared))
    monkeypatch.setattr(moe_sort, "MOE_SORT", SimpleNamespace(load=lambda *_, **__: None, types=({},)))
    for slots, experts in ((8, 4), (1 << 17, moe_sort.MAX_EXPERTS)):
        moe_sort.sort_launch.__wrapped__(0, 132, "int32", slots, experts, 16, 512, 2)
    assert sizes[0] == sizes[1] > 0

"""tools/sanitize.py without a GPU: the split-K that it forces on the prefill kernel."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import sanitize
from strategies import TILED, over_formats

from qgemm.cuda.kernels import prefill_sm90, sm90_grid
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import Problem

K = 5 * sanitize.SUPER_BLOCK


def grid(config, m, n, sms, fmt):
    row_blocks, unit = -(-n // tiles.ROWS), config.unit(fmt)
    k_blocks = config.row_blocks * unit // tiles.K_BLOCK
    return sm90_grid.grid_of(config.tiles(m, row_blocks), -(-K // unit), sms, config.single_tile, k_blocks)


@over_formats(TILED)
@pytest.mark.parametrize("sms", [78, 114, 132])
@pytest.mark.parametrize("n", sanitize.M)
def test_split_k_is_what_was_asked_for(fmt, sms, n, monkeypatch):
    """Tiles stay whole if their number leaves no SMs: kbit3 has 99 of them at N = 6336."""
    monkeypatch.setattr(sm90_grid, "SPLIT_K_COST", sanitize.costs(sanitize.SPLIT_K[n]))
    for m in (m for m in sanitize.M[n] if m > 8):
        config = prefill_sm90.PREFILL_SM90.choose(Problem(fmt, "a16", m, n, K, 90, sms=sms))
        count, split_k = config.tiles(m, -(-n // tiles.ROWS)), sanitize.SPLIT_K[n]
        tile_grid = grid(config, m, n, sms, fmt)
        if count * split_k > sms:
            assert tile_grid.cluster_split_k == 0
        elif n < sanitize.WIDE:
            assert tile_grid == (count * split_k, 0, split_k)


@over_formats(TILED)
@pytest.mark.parametrize("sms", [114, 132])
def test_a_pair_of_ctas_shares_tiles_of_several_row_blocks(fmt, sms, monkeypatch):
    """Independent of the format's own choice; the last tile lacks its second row_block."""
    monkeypatch.setattr(sm90_grid, "SPLIT_K_COST", sanitize.costs(sanitize.SPLIT_K[sanitize.WIDE]))
    config = sanitize.wide_config(fmt)
    assert sanitize.WIDE // tiles.ROWS % config.row_blocks > 0
    assert grid(config, config.tokens - 8, sanitize.WIDE, sms, fmt).cluster_split_k == 2


def test_words_are_tools_formats_and_families(monkeypatch, capsys):
    """Each tool runs in its own process, with all formats and families by default."""
    commands = []
    monkeypatch.setattr(
        sanitize.subprocess, "run", lambda command: commands.append(command) or SimpleNamespace(returncode=0)
    )
    for words in (["racecheck", "q4_0", "experts"], ["memcheck", "clusters", "q6_k"], []):
        monkeypatch.setattr("sys.argv", ["sanitize.py", *words])
        assert sanitize.main() == 0
    assert [command[command.index("--work") + 1 :] for command in commands[:2]] == [
        ["racecheck", "q4_0", "experts"],
        ["memcheck", "q6_k", "clusters"],
    ]
    assert [command[command.index("--tool") + 1] for command in commands[2:]] == list(sanitize.TOOLS)
    assert commands[-1][-len(sanitize.FAMILIES) :] == list(sanitize.FAMILIES)
    assert capsys.readouterr().out.count("clean") == 6


@over_formats(TILED)
def test_any_bytes_are_blocks(fmt):
    w = sanitize.random_tensor(fmt, (3, 8, 512), np.random.default_rng(0))
    assert (w.shape, w.format) == ((3, 8, 512), fmt)

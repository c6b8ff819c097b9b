"""The choice of a config on sm_90: every problem has a valid one, and predicted times are near the measured ones."""

from __future__ import annotations

import itertools
import json
from math import inf
from pathlib import Path

import fit_sm90
import numpy as np
import pytest
import tune_sm90
from hypothesis import given
from hypothesis import strategies as st
from kernel_batches import passes_front_end
from strategies import EDGES, EVERY_TILED, TILED, over_formats

import qgemm
from qgemm.cuda import configs
from qgemm.cuda.jit import codegen
from qgemm.cuda.kernels import sm90_config, sm90_cost
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import Problem

RESULTS = Path(__file__).parents[1] / "tools" / "results"
SMS = (78, 114, 132, 144)  # multiprocessors of an H100 PCIe, an H100 SXM, an H200, a GH100
MAX_LOSS = 0.02  # largest slowdown of a row of the results against the choice before
MAX_LOSS_ELSEWHERE = 0.1
# Largest ratio of the times of a 4096 x 4096 product with one more row of x; of q4_0.
STEEPEST, STEEPEST_SWEPT = 1.21, 1.18


def problem(fmt, m, n, k, sms=132):
    return Problem(fmt, "a16", m, n, k, 90, sms=sms)


def measured():
    """Measured rows, with the loss of the present choice against the choice before; predicted if not measured."""
    for row in fit_sm90.load(RESULTS / "tune_sm90_h200.json.gz")["rows"]:
        p = problem(qgemm.FORMATS[row["format"]], row["m"], row["n"], row["k"])
        config, us = sm90_cost.ranked(p)[0]
        yield row, row["us"].get(fit_sm90.key(config), us) / row["us"][row["before"]] - 1


@pytest.mark.slow
@over_formats(EVERY_TILED)
def test_every_problem_has_a_config(fmt):
    matrices = list(itertools.product((64, 2112, 4160, 8192, 28672, 1 << 26), (32, 8192), SMS))
    for m in (1, *EDGES, *(m + 1 for m in EDGES), 1 << 20):
        for n, k, sms in matrices:
            ranked = sm90_cost.ranked(problem(fmt, m, n, k, sms))
            config, us = ranked[0]
            assert 0 < us < inf
            assert us == min(us for _, us in ranked)
            if config.single_tile:
                assert config.tiles(m, n // tiles.ROWS) <= sms


@over_formats(EVERY_TILED)
def test_configs_fit_every_format(fmt):
    """The conditions of kernels/gemm/prefill_sm90.cu, which compiling checks for some."""
    for config, fixed_us, k_block_us in sm90_cost.measured(fmt):
        template = sm90_config.prefill_template(fmt, config, "half")
        assert config.fits(fmt)
        assert min(fixed_us, k_block_us) > 0
        assert template["SMEM_BYTES"] <= sm90_config.SHARED
        assert template["STAGES"] > config.wg_split_k  # each warpgroup may hold one stage while it waits for the next
        assert config.tokens % 16 == config.tokens % config.epi_tokens == 0
        assert config.tokens <= 256  # limit of an instruction, and of a tensor map's box
        assert config.threads <= 1024
        assert config.tokens // config.epi_tokens * config.row_blocks * max(SMS) <= sm90_config.MAX_PARTIALS


def test_four_row_blocks_are_for_one_token_tile_of_most_of_the_sms():
    """As measured: from 106 tiles of 256 rows on, for a GPU of 132 SMs."""
    config = sm90_config.Sm90Config(32, 4, 1, 4)
    for m, row_blocks, serves in ((32, 448, True), (33, 448, False), (32, 421, True), (32, 420, False)):
        assert config.serves(m, row_blocks, 132) == serves


@pytest.mark.compiles
@over_formats(TILED)
def test_shared_memory_is_what_the_kernel_lays_out(fmt):
    """smem_bytes against sizeof(Smem), of every config: one unit asserts them all."""
    lines = [f'#include "formats/{fmt.name}.cuh"', '#include "gemm/sm90/smem.cuh"']
    for config in dict.fromkeys(row.config for row in sm90_cost.measured(fmt)):
        template = sm90_config.prefill_template(fmt, config, "half")
        name = f"Config_{len(lines)}"
        lines.append(codegen.config(fmt, **template).replace("struct Config", f"struct {name}"))
        size = f"qgemm::{name}::Format<1>::TABLE_BYTES + sizeof(qgemm::Smem<qgemm::Sm90<qgemm::{name}>>)"
        lines.append(f'static_assert({size} == {template["SMEM_BYTES"]}, "{config}");')
    assert len(lines) > 3
    passes_front_end("\n".join(lines), "sm_90a", codegen.headers(fmt))


def test_a_config_whose_stages_leave_no_room_for_its_reduction_does_not_fit():
    """As the compiler found them: a static_assert of the kernel failed."""
    tall, wide = sm90_config.Sm90Config(64, 3, 1, 4, True), sm90_config.Sm90Config(128, 2, 1, 2, True)
    fitting = {name: (tall.fits(fmt), wide.fits(fmt)) for name, fmt in qgemm.FORMATS.items() if fmt.tiled}
    assert fitting["q4_0"] == (True, True)
    assert fitting["q8_0"] == (False, True)
    assert fitting["kbit5"] == (False, False)


def test_the_choice_costs_no_row_of_the_results_more():
    """Against the choice before, measured alternately with it. Elsewhere little more, and less on average."""
    rows = {
        (row["format"], row["N"], row["K"], row["M"])
        for row in json.loads((RESULTS / "h200.json").read_text())["rows"]
        if row["route"] in ("prefill", "prefill_sm90") and row["activation"] == "a16"
    }
    on_rows, elsewhere = [], []
    for row, loss in measured():
        case = row["format"], row["n"], row["k"], row["m"]
        (on_rows if case in rows else elsewhere).append(loss)
    assert len(on_rows) == len(rows)
    assert max(on_rows) <= MAX_LOSS
    assert max(elsewhere) <= MAX_LOSS_ELSEWHERE
    assert np.mean(on_rows) < 0
    assert np.mean(elsewhere) < 0


def test_predictions_are_near_what_was_measured():
    """Predicted times of the compiled configs; nine of ten within 5%."""
    errors = []
    for row in fit_sm90.load(RESULTS / "tune_sm90_h200.json.gz")["rows"]:
        ranked = sm90_cost.ranked(problem(qgemm.FORMATS[row["format"]], row["m"], row["n"], row["k"]))
        us = {fit_sm90.key(config): us for config, us in ranked}
        errors += [abs(us[name] / row["us"][name] - 1) for name in us.keys() & row["us"].keys()]
    assert np.percentile(errors, 90) < 0.05


@over_formats([fmt for fmt in TILED if fmt.integer])
def test_time_grows_evenly_with_m(fmt):
    """Predicted times of 4096 x 4096: one more row of x never costs less, nor much more."""
    us = [sm90_cost.ranked(problem(fmt, m, 4096, 4096))[0][1] for m in range(16, 513)]
    steps = [after / before for before, after in itertools.pairwise(us)]
    assert min(steps) >= 1
    assert max(steps) <= (STEEPEST_SWEPT if fmt.name == "q4_0" else STEEPEST)


@given(
    m=st.integers(1, 4096), n=st.integers(1, 1 << 16), k=st.sampled_from((256, 4096, 16384)), sms=st.sampled_from(SMS)
)
def test_work_is_all_there_is(m, n, k, sms):
    """The busiest CTA's k_blocks times CTAs are at least those of the product; CTAs are at most SMs."""
    fmt = qgemm.FORMATS["q4_k"]
    for config, _ in sm90_cost.ranked(problem(fmt, m, n, k, sms=sms)):
        work = sm90_cost.work_of(fmt, config, m, n, k, sms, 26.0)
        total = config.tiles(m, -(-n // tiles.ROWS)) * -(-k // tiles.K_BLOCK)
        assert 0 < work.busy <= 1
        assert work.k_blocks * work.busy * sms >= total * (1 - 1e-9)
        assert work.k_blocks <= total
        assert work.in_cluster + work.in_memory + work.stream_k <= 1
        assert work.partials == 0 or work.in_memory


def test_formats_that_were_not_tuned_take_the_nearest_ones_configs():
    nearest = {name: sm90_cost.nearest(qgemm.FORMATS[name]) for name in ("q8_1", "kbit3_f16", "q6_k")}
    assert nearest == {"q8_1": "q8_0", "kbit3_f16": "kbit3", "q6_k": "q6_k"}
    assert configs.read(sm90_cost.DATA)["tiles"].keys() == configs.read(sm90_cost.DATA)["formats"].keys()


@over_formats(TILED)
def test_what_is_chosen_is_among_what_is_tuned(fmt):
    """tools/tune_sm90.py."""
    timed = {config for m in (1, *EDGES, *(m + 1 for m in EDGES), 1000) for config in tune_sm90.candidates(fmt, m)}
    assert {row.config for row in sm90_cost.measured(fmt)} <= timed


def test_a_fit_predicts_the_times_that_it_was_made_of():
    """A fit of a made-up machine, whose configs have numbers of their own."""
    fmt, model, rng = qgemm.FORMATS["q4_0"], sm90_cost.model(), np.random.default_rng(0)
    tried = list(tune_sm90.candidates(fmt, 128))[:12]
    truth = {config: (rng.uniform(1, 3), rng.uniform(0.1, 0.4)) for config in tried}
    rows = []
    for n, k in itertools.product((2048, 4096, 8192), (2048, 4096, 8192)):
        us = {
            fit_sm90.key(config): model.us(*truth[config], sm90_cost.work_of(fmt, config, 128, n, k, 132, 26.0))
            for config in tried
            if not config.single_tile or config.tiles(128, n // tiles.ROWS) <= 132
        }
        rows.append({"format": "q4_0", "n": n, "k": k, "m": 128, "before": next(iter(us)), "us": us})
    table = fit_sm90.Table(fmt, rows, set(), 132)
    fitted = fit_sm90.solve(table, model, fit_sm90.begin(table), np.ones_like(table.us), rounds=100)
    predicted = table.predict(model, fitted.fixed, fitted.k_block)
    near = table.seen & (table.us <= 1.2 * np.nanmin(np.where(table.seen, table.us, np.inf), 1, keepdims=True))
    np.testing.assert_allclose(predicted[near], table.us[near], rtol=0.02)

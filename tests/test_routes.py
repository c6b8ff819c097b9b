"""Which kernel a problem goes to, and how decode is configured: whatever is chosen fits the GPU."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from strategies import FORMATS, TILED, over_formats

import qgemm
from qgemm.cuda.jit import nvrtc, sources
from qgemm.cuda.kernels import decode, decode_config, routes
from qgemm.cuda.kernels.decode import MOE_DECODE
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import Output, Problem, Routed

MULTIPLIED = [fmt for fmt in FORMATS if fmt.tiled or (fmt.plain and fmt.levels is not None)]  # formats of GPUs

MAX_VARIANTS = 40  # compiled variants of a prefill kernel, for a format on a GPU


def test_architectures():
    assert [nvrtc.arch_of(cc) for cc in ((7, 5), (8, 9), (9, 0), (10, 0), (12, 0))] == [
        "sm_75",
        "sm_89",
        "sm_90a",
        "sm_100",
        "sm_120",
    ]


@over_formats(MULTIPLIED)
@pytest.mark.parametrize("activation", ["a16", "a8"])
def test_routes(fmt, activation):
    """The first row that fits wins; a problem without a kernel is printed whole."""
    for m in (1, 8, 9, 4096):
        problem = Problem(fmt, activation, m, 64, 96, 75)
        if activation == "a8" and not fmt.integer:
            with pytest.raises(
                qgemm.UnsupportedError, match=f"no kernel for {fmt} {activation} of half M={m} N=64 K=96 on sm_75"
            ):
                routes.route(problem)
            continue
        row = routes.route(problem)
        assert row.fits(problem)
        assert row is next(r for r in routes.ROUTES if r.fits(problem))
        assert (
            row.kernel.name == "cublas"
            or (sources.kernels_dir() / sources.kernel_path(routes.source_of(row.kernel.name))).exists()
        )
    with pytest.raises(qgemm.UnsupportedError, match="on sm_70"):
        routes.route(Problem(fmt, activation, 1, 64, 96, 70))


@over_formats(MULTIPLIED)
def test_a_row_serves_what_it_says(fmt):
    """At each end of every row, and one beyond: of tokens, and of compute capabilities."""
    sizes = sorted({m + more for row in routes.ROUTES for m in row.tokens for more in (0, 1)} | {1, 4096})
    gpus = sorted({sm for row in routes.ROUTES for sm in (row.least, row.below - 1, row.below) if 75 <= sm < 1000})
    for m, sm, x, activation in itertools.product(sizes, gpus, routes.TYPES, ("a16", "a8")):
        problem = Problem(fmt, activation, m, 64, 256, sm, x)
        if activation == "a16" or fmt.integer:
            row = routes.route(problem)
            assert row.least <= sm < row.below
            assert m <= row.max_rows


@pytest.mark.slow
@over_formats(TILED)
@pytest.mark.parametrize("sm", [80, 86, 90, 100, 120])
def test_decode_fits_its_shared_memory(fmt, sm):
    """For any matrix and type of x, the pipelines and barriers of a CTA fit into the GPU's shared memory."""
    for kernel, template in routes.variants(fmt, sm):
        if kernel not in ("decode", "decode_a8", "decode_slices"):
            continue
        assert template["STAGES"] >= 2
        of_warp = template["WARP_BYTES"] + 8 * template["STAGES"]
        of_cta = decode_config.kernel_table_bytes(fmt, kernel)
        of_cta += decode_config.quantized_bytes(kernel, template["In"], template["TOKENS"])
        of_cta += template.get("SLICES_BYTES", 0)
        assert of_cta + template["WARP_SPLIT_K"] * of_warp <= decode_config.SHARED[90 if sm == 100 else sm] << 10


@pytest.mark.slow
@over_formats(TILED)
@pytest.mark.parametrize("sm", [80, 86, 89, 90, 100, 120])
def test_variants_of_a_prefill_kernel_are_limited(fmt, sm):
    counts = Counter(kernel for kernel, _ in routes.variants(fmt, sm) if kernel.startswith("prefill"))
    assert ("prefill_sm90" if sm == 90 else "prefill_sm80") in counts
    assert max(counts.values()) <= MAX_VARIANTS


@over_formats([fmt for fmt in TILED if not fmt.family])
def test_kernels_of_one_source_differ_in_their_templates(fmt):
    """Functions are cached by source and template: two records with one template would share a function."""
    names: dict[Any, str] = {}
    for sm in (75, 80, 90):
        for kernel, template in routes.variants(fmt, sm):
            if kernel in routes.SOURCES:
                unit = sm, routes.source_of(kernel), *template.values()
                assert names.setdefault(unit, kernel) == kernel


def test_all_launches_of_a_function_ask_for_the_same_memory(monkeypatch):
    """The driver has one limit for a function: a launch of a small product would lower it for a large one."""
    shared_of: dict[Any, set[int]] = {}

    def launch(function, grid, block, shared, *rest):
        shared_of.setdefault(function, set()).add(shared)
        return SimpleNamespace(enter=None)

    monkeypatch.setattr(decode, "load", lambda kernel, fmt, **template: (kernel, fmt.name, *template.items()))
    monkeypatch.setattr(decode, "Launch", launch)
    fmt = qgemm.FORMATS["q4_0"]
    rows = [row for row in routes.ROUTES if row.kernel.name in ("decode", "decode_a8") and row.formats.holds(fmt)]
    sources = {"decode": ("half", "float"), "decode_a8": ("half", "Activations")}
    for row, m, k, n in itertools.product(rows, (1, 2), (32, 4096, 16384), (64, 8192)):
        for source in sources[row.kernel.name]:
            problem = Problem(fmt, row.activations[0], m, n, k, 90, source, (Output(n),))
            row.kernel.launch(problem, row.kernel.choose(problem))
    assert len(shared_of) > 4
    assert {len(sizes) for sizes in shared_of.values()} == {1}


@pytest.mark.slow
@pytest.mark.parametrize("sm", [80, 89, 90, 120])
@pytest.mark.parametrize("tokens", [1, 8, 16])
@pytest.mark.parametrize(("name", "kernel"), [("q4_0", "decode"), ("q4_0", "decode_a8"), ("kbit5", "decode")])
def test_every_matrix_has_a_decode_config(name, kernel, tokens, sm):
    fmt = qgemm.FORMATS[name]
    rows = list(decode_config.decode_configs_for(fmt, kernel, tokens, sm))
    assert [row.row_blocks for row in rows] == sorted((row.row_blocks for row in rows), reverse=True)
    for row_blocks, k, m in itertools.product(range(1, 500), (32, 8192, 1 << 20), (max(1, tokens - 7), tokens)):
        row = decode_config.decode_ranked(fmt, kernel, tokens, m, row_blocks, k, sm)[0]
        assert row.row_blocks <= row_blocks
        assert row.k <= k


@pytest.mark.parametrize("name", ["q4_0", "q8_0", "q4_k", "q2_k", "kbit4"])
def test_the_first_row_that_fits_is_chosen(name):
    """Also where the table has the same config again, for smaller sizes."""
    fmt = qgemm.FORMATS[name]
    for kernel, tokens, sm in itertools.product(decode_config.POLICIES, (1, 8, 16), (80, 90)):
        rows = list(decode_config.decode_configs_for(fmt, kernel, tokens, sm))
        for row_blocks, k in itertools.product((8, 40, 64, 128, 300, 1300) if rows else (), (2048, 14336)):
            fitting = [row for row in rows if row_blocks >= row.row_blocks and k >= row.k and tokens >= row.m]
            ranked = decode_config.decode_ranked(fmt, kernel, tokens, tokens, row_blocks, k, sm)
            assert ranked[0] == (fitting or rows)[0]
            assert len(set(map(str, ranked))) == len(ranked) == len(set(map(str, rows)))


def test_clusters_share_long_rows_alone():
    """CTAs of a cluster read parts of x, which pays if W has few rows and many columns, as the experts of a token."""
    clustered = [
        row for row in decode_config.DECODE_CONFIGS if row.cluster_split_k > 1 and row.kernels[0] != "moe_decode_sum"
    ]
    assert clustered
    assert all(row.k >= 8192 and row.kernels == ("decode",) for row in clustered)
    for m, k in itertools.product((1, 8), (4096, 14336)):
        problem = Problem(qgemm.FORMATS["q4_0"], "a16", m, 4096, k, 90, outputs=(Output(4096),))
        assert (decode.DECODE.choose(problem).cluster_split_k > 1) == (m == 8 and k == 14336)
        experts = problem._replace(routed=Routed())
        summed = experts._replace(m=1, k=k // 4, routed=Routed(top_k=4, summed=True))
        assert MOE_DECODE.choose(summed).cluster_split_k > 1
        for p in (experts, summed):
            assert not MOE_DECODE.choose(p).prefetch


@over_formats([fmt for fmt in TILED if fmt.integer])
@pytest.mark.parametrize("tokens", [1, 8, 16])
@pytest.mark.parametrize(
    ("kernel", "source"),
    [("decode", "half"), ("decode", "float"), ("decode_a8", "half"), ("decode_a8", "Activations")],
)
def test_of_ctas_meant_to_be_alone_an_sm_holds_one(fmt, kernel, source, tokens):
    """CTAs of 16 warps: if two fit, some SMs get two while others have none."""
    for config in decode_config.decode_configs_for(fmt, kernel, tokens, 90):
        template = decode_config.decode_template(fmt, config, tokens, kernel, source, 90)
        pipelines = template["WARP_SPLIT_K"] * template["WARP_BYTES"] + decode_config.quantized_bytes(
            kernel, source, tokens
        )
        shared = max(pipelines, config.reserved) + 1024
        assert config.warp_split_k < 16 or 2 * shared > 228 << 10, config


@over_formats([fmt for fmt in TILED if fmt.needs_table])
@pytest.mark.parametrize("tokens", [1, 8, 16])
def test_two_ctas_with_a_table_fit_an_sm_where_two_are_meant(fmt, tokens):
    """An SM has 228 KB for the pipelines and barriers of its CTAs, and 1 KB of the system for each of them."""
    for config in decode_config.decode_configs_for(fmt, "decode", tokens, 90):
        template = decode_config.decode_template(fmt, config, tokens, "decode", "half", 90)
        barriers = 8 * template["WARP_SPLIT_K"] * template["STAGES"]
        pipelines = tiles.table_bytes(fmt) + template["WARP_SPLIT_K"] * template["WARP_BYTES"]
        shared = max(pipelines, config.reserved) + barriers + 1024
        assert (2 * shared <= 228 << 10) == (config.shared < 113 << 10)


@pytest.mark.slow
@over_formats(MULTIPLIED)
@pytest.mark.parametrize("sm", [80, 86, 89, 90, 100, 120])
def test_every_kernel_has_a_warp(fmt, sm):
    """Also beside a table of levels of 64 KiB, where a CTA has 99 KiB of shared memory."""
    for _, template in routes.variants(fmt, sm):
        assert int(template.get("WARP_SPLIT_K", 1)) >= 1

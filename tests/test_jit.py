"""Everything about kernels that needs no GPU: composing, compiling, caching, the route table."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from typing import Any

import compile_kernels
import ledger
import numpy as np
import pytest
from strategies import FORMATS, TILED, each

import qgemm
from qgemm.bench import results
from qgemm.cuda.jit import cache, codegen, nvrtc, sources
from qgemm.cuda.kernels import decode, routes
from qgemm.cuda.kernels import decode_config as splits
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import Q8_1, TYPES, Output, Problem


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QGEMM_CACHE_DIR", str(tmp_path / "cache"))


@each(TILED)
@pytest.mark.parametrize("arch", nvrtc.ARCHS)
def test_unpack_compiles_for_every_architecture(fmt, arch):
    """Every variant is compiled by tools/compile_kernels.py; this keeps one of each in the test run."""
    cubin, report = nvrtc.compile_cubin(codegen.compose("unpack", fmt, Out="half"), arch)
    assert cubin.startswith(b"\x7fELF")
    assert "0 bytes spill stores" in report


@pytest.mark.parametrize(
    ("kernel", "template"), [*routes.variants(qgemm.FORMATS["q5_1"], 75), *routes.common_variants()]
)
def test_every_variant_of_one_format_compiles(kernel, template):
    fmt = None if kernel.endswith("_activations") else qgemm.FORMATS["q5_1"]
    assert nvrtc.compile_cubin(codegen.compose(kernel, fmt, **template), "sm_75")[0].startswith(b"\x7fELF")


@each(TILED)
def test_header_is_the_twin_of_the_module(fmt):
    """One header a format, whose struct derives from the generated fields and opens with the module's words."""
    text = (sources.kernels_dir() / "formats" / f"{fmt.name}.cuh").read_text()
    assert ("using Encoder = " in text) == (fmt.encode is not None and fmt.integer)
    if fmt.codebook is not None:
        assert "Twin of qgemm/formats/kbit.py" in text
        assert f"struct {fmt.name} : Codebook<{fmt.name}_fields<GROUPS>, {fmt.name}_codebook>" in text
        return
    assert f"Twin of qgemm/formats/{fmt.name}.py" in text
    assert re.search(rf"struct {fmt.name} : [\w<]*<?{fmt.name}_fields<GROUPS>", text)
    assert ("HalfScales<" in text or "HalfMinimums<" in text) == (tiles.half_factors(fmt) == 1)
    assert re.search(rf"HAS_MINIMUM = {'true' if {'m', 'dmin'} & {*fmt.scale_fields} else 'false'};", text)


@each(TILED)
def test_tile_struct_has_the_size_of_its_dtype(fmt):
    """The generated static_assert is what holds the two together: a wrong size does not compile."""
    source = codegen.compose("unpack", fmt, Out="half")
    size = f"== {tiles.tile_dtype(fmt).itemsize}"
    assert size in source
    with pytest.raises(nvrtc.CompileError, match="differs from its dtype"):
        nvrtc.compile_cubin(source.replace(size, f"{size} + 16"), "sm_80")


def place_of_code(bits, pairs, step, j, r, plane):
    """(word, bit) by the rules of qgemm/cuda/layout/tile.py, as kernels/blocks.cuh has them."""
    p = max(1, 4 // bits)
    bit = bits * (2 * p * (step // p) + p * r + step % p)
    return bit // 8, 8 * j + bit % 8


def place_of_bit(bits, pairs, step, j, r, plane):
    """The same of one bit of a code that counts levels."""
    index, first = divmod(4 * step + 2 * (j % 2) + r, pairs)
    size, bit = 2 * bits * pairs, bits * (pairs * (j // 2) + first) + plane
    word, at = divmod(index, 32 // size)
    return (word, size * at + bit) if word < bits else (bit // 2, 30 + bit % 2)


@each(TILED)
def test_block_structs_lead_from_blocks_to_tiles(fmt):
    """The generated constants, with the rules of qgemm/cuda/layout/tile.py as kernels/pack.cu reads them: one tile."""
    text = codegen.block_structs(fmt)
    structs = {
        name: {key: int(value) for key, value in re.findall(r"(\w+) = (\d+)", line)}
        for name, line in re.findall(rf"struct {fmt.name}_block_(\w+) (.*)", text)
    }
    lists = [list(map(int, values.split(", "))) for values in re.findall(r"\[\] = {([\d, ]+)}", text)]
    coded = [name for name in fmt.dtype.names if name in fmt.slots]
    bits_of = dict(zip(coded, zip(lists[::2], lists[1::2], strict=True), strict=True))
    count, dtype = tiles.columns(fmt) // fmt.weights, tiles.tile_dtype(fmt)
    raw = np.frombuffer(np.random.default_rng(3).bytes(64 * count * fmt.block_bytes), np.uint8).reshape(64, -1)
    tile, span_bytes = np.zeros(dtype.itemsize, np.uint8), dtype["spans"].base.itemsize
    for name, number in structs.items():
        to = number["TO"]
        if bits := number.get("BITS"):
            (base, offset), chunk = bits_of[name], number["CHUNK"]
            planes = range(number["PLANES"])
            for row, span, step, t, j, plane in np.ndindex(64, tiles.spans(fmt), 4, 4, 4, len(planes)):
                begin = base[4 * span + t] + offset[4 * step + j] + plane * fmt.weights
                code = int(raw[row, begin // 8]) >> begin % 8 & number["MASK"]
                group, r, lane = row // 16, row // 8 % 2, 4 * (row % 8) + t
                place = place_of_code if len(planes) == 1 else place_of_bit
                word, bit = place(bits, number["PAIRS"], step, j, r, plane)
                part, word = divmod(word, chunk)
                index = ((group * number["PARTS"] + part) * 32 + lane) * chunk + word
                tile[span * span_bytes + to + 4 * index + bit // 8] |= code << bit % 8
        else:
            size, unit = number["BYTES"], number["UNIT"]
            for row, block, byte in np.ndindex(64, count, size):
                owner, r = row // 16 * 8 + row % 8, row // 8 % 2
                index = ((owner * count + block) * (size // unit) + byte // unit) * 2 + r
                tile[tiles.spans(fmt) * span_bytes + to + index * unit + byte % unit] = raw[
                    row, block * fmt.block_bytes + number["AT"] + byte
                ]
    unchanged = dataclasses.replace(fmt, to_tile=None)  # of which the format's header has a twin
    assert tile.tobytes() == tiles.pack(unchanged, raw.view(fmt.dtype)).tobytes()


def test_compile_errors_carry_the_log():
    with pytest.raises(nvrtc.CompileError, match=r"compiling for sm_80 failed[\s\S]*undefined_name"):
        nvrtc.compile_cubin("__global__ void k() { undefined_name(); }", "sm_80")


def test_cache_is_by_content(tmp_path, monkeypatch):
    compiled = []

    def counting(source, arch):
        compiled.append((source, arch))
        return f"cubin of {source} for {arch}".encode(), ""

    monkeypatch.setattr(cache, "compile_cubin", counting)
    monkeypatch.setattr(cache, "nvrtc_version", lambda: (13, 0))
    assert cache.cached_cubin("a", "sm_80") == cache.cached_cubin("a", "sm_80") == b"cubin of a for sm_80"
    assert len(compiled) == 1
    cache.cached_cubin("a", "sm_90a")
    cache.cached_cubin("b", "sm_80")
    assert len(compiled) == 3
    monkeypatch.setattr(cache, "sources_digest", lambda: "an edited header")
    cache.cached_cubin("a", "sm_80")
    monkeypatch.setattr(cache, "nvrtc_version", lambda: (13, 1))
    cache.cached_cubin("a", "sm_80")
    assert len(compiled) == 5
    assert all(path.suffix == ".cubin" for path in (tmp_path / "cache").iterdir())


def test_damaged_or_unwritable_cache_only_costs_time(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "compile_cubin", lambda source, arch: (b"good", ""))
    cache.cached_cubin("a", "sm_80")
    (entry,) = (tmp_path / "cache").iterdir()
    for damage in (b"", b"short", hashlib.sha256(b"good").digest() + b"gooe"):
        entry.write_bytes(damage)
        assert cache.cached_cubin("a", "sm_80") == b"good"
        assert entry.read_bytes().endswith(b"good")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QGEMM_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert cache.cached_cubin("a", "sm_80") == b"good"


def test_sources_digest_sees_every_header(tmp_path, monkeypatch):
    for name in ("a.cu", "b.cuh", "formats/c.cuh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(cache, "kernels_dir", lambda: tmp_path)
    seen = {cache.sources_digest.__wrapped__()}
    for name in ("a.cu", "b.cuh", "formats/c.cuh"):
        (tmp_path / name).write_text(f"{name} edited")
        seen.add(cache.sources_digest.__wrapped__())
    assert len(seen) == 4


def test_architectures():
    assert [nvrtc.arch_of(cc) for cc in ((7, 5), (8, 9), (9, 0), (10, 0), (12, 0))] == [
        "sm_75",
        "sm_89",
        "sm_90a",
        "sm_100",
        "sm_120",
    ]


@each([fmt for fmt in FORMATS if fmt.levels is not None])
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
        assert row.kernel.name == "cublas" or (sources.kernels_dir() / f"{row.kernel.name}.cu").exists()
    with pytest.raises(qgemm.UnsupportedError, match="on sm_70"):
        routes.route(Problem(fmt, activation, 1, 64, 96, 70))


def test_ci_compiles_every_variant_on_the_tuned_architecture():
    units = list(compile_kernels.units())
    tuned = {(u.kernel, u.format, u.template) for u in units if u.arch == compile_kernels.TUNED}
    asked = {(kernel, fmt.name, tuple(t.items())) for fmt in TILED for kernel, t in routes.variants(fmt, 90)}
    assert asked <= tuned
    decodes = ("decode", "decode_a8")
    compiled = {(kernel, name, dict(t)["In"], dict(t)["TOKENS"]) for kernel, name, t in asked if kernel in decodes}
    wanted = set()
    for fmt, activation, m, source in itertools.product(TILED, ("a16", "a8"), range(1, 17), TYPES):
        if activation == "a16" or fmt.integer:
            row = routes.route(Problem(fmt, activation, m, 4096, 4096, 90, source))
            inside = row.kernel.name == "decode_a8" and decode.quantizes_inside(m, 4096, 4096, 90)
            if row.kernel.name == "decode" or inside:
                wanted.add((row.kernel.name, fmt.name, source, row.tile(m)))
            if row.kernel.name == "decode_a8":  # quantized before, by the user or by a kernel
                wanted.add((row.kernel.name, fmt.name, Q8_1, row.tile(m)))
    assert compiled == wanted
    for arch in nvrtc.ARCHS:
        sm = int("".join(filter(str.isdigit, arch)))
        rows = {row.kernel.name for row in routes.ROUTES if row.runs_on(sm) and row.kernel.name != "cublas"}
        plain = {"quantize_activations", "dequantize_activations", "round_activations", "pack", "restore"}
        plain |= {"quantize_codebook", "dequantize_codebook", "encode"}
        assert {u.kernel for u in units if u.arch == arch} == rows | plain


@each(TILED)
@pytest.mark.parametrize("sm", [80, 86, 90, 100, 120])
def test_decode_fits_its_shared_memory(fmt, sm):
    """Whatever the matrix and the type of x, the rings and barriers of a CTA stay within what the GPU has."""
    for kernel, template in routes.variants(fmt, sm):
        if kernel not in ("decode", "decode_a8"):
            continue
        assert template["DEPTH"] >= 2
        of_warp = template["WARP_BYTES"] + 8 * template["DEPTH"]
        of_cta = tiles.table_bytes(fmt) + splits.quantized_bytes(kernel, template["In"], template["TOKENS"])
        assert of_cta + template["SPLITS"] * of_warp <= splits.SHARED[90 if sm == 100 else sm] << 10


def test_all_launches_of_a_function_ask_for_the_same_memory(monkeypatch):
    """The driver keeps one limit a function: a launch of a small product would lower that of a large one."""
    asked: dict[Any, set[int]] = {}

    def launch(function, grid, block, shared, *rest):
        asked.setdefault(function, set()).add(shared)

    monkeypatch.setattr(decode, "load", lambda kernel, fmt, **template: (kernel, fmt.name, *template.items()))
    monkeypatch.setattr(decode, "Launch", launch)
    fmt = qgemm.FORMATS["q4_0"]
    rows = [row for row in routes.ROUTES if row.kernel.name in ("decode", "decode_a8") and row.formats.holds(fmt)]
    sources = {"decode": ("half", "float"), "decode_a8": ("half", "Activations")}
    for row, m, k, n in itertools.product(rows, (1, 2), (32, 4096, 16384), (64, 8192)):
        for source in sources[row.kernel.name]:
            problem = Problem(fmt, row.activations[0], m, n, k, 90, source, (Output(n),))
            row.kernel.launch(problem, row.kernel.choose(problem))
    assert len(asked) > 4
    assert {len(sizes) for sizes in asked.values()} == {1}


@pytest.mark.parametrize("sm", [80, 89, 90, 120])
@pytest.mark.parametrize("tokens", [1, 8, 16])
@pytest.mark.parametrize(("name", "kernel"), [("q4_0", "decode"), ("q4_0", "decode_a8"), ("kbit5", "decode")])
def test_every_matrix_has_a_split(name, kernel, tokens, sm):
    fmt = qgemm.FORMATS[name]
    rows = list(splits.splits_for(fmt, kernel, tokens, sm))
    assert [row.strips for row in rows] == sorted((row.strips for row in rows), reverse=True)
    for strips in range(1, 500):
        for m in (max(1, tokens - 7), tokens):
            assert splits.split_of(fmt, kernel, tokens, m, strips, sm).strips <= strips


@each([fmt for fmt in TILED if fmt.integer])
@pytest.mark.parametrize("tokens", [1, 8, 16])
@pytest.mark.parametrize(
    ("kernel", "source"),
    [("decode", "half"), ("decode", "float"), ("decode_a8", "half"), ("decode_a8", "Activations")],
)
def test_of_ctas_meant_to_be_alone_an_sm_holds_one(fmt, kernel, source, tokens):
    """Those of 16 warps: where two fit, some SMs get two while others have none."""
    for split in splits.splits_for(fmt, kernel, tokens, 90):
        template = splits.decode_template(fmt, split, tokens, kernel, source, 90)
        rings = template["SPLITS"] * template["WARP_BYTES"] + splits.quantized_bytes(kernel, source, tokens)
        taken = max(rings, split.shared // 2 + splits.BARRIERS) + 1024
        assert split.splits < 16 or 2 * taken > 228 << 10, split


@each([fmt for fmt in TILED if fmt.codebook is not None])
@pytest.mark.parametrize("tokens", [1, 8, 16])
def test_two_ctas_with_a_table_fit_an_sm_where_two_are_meant(fmt, tokens):
    """Of its 228 KB a CTA takes rings, barriers and 1 KB of the system; one meant to be alone more than half."""
    for split in splits.splits_for(fmt, "decode", tokens, 90):
        template = splits.decode_template(fmt, split, tokens, "decode", "half", 90)
        barriers = 8 * template["SPLITS"] * template["DEPTH"]
        rings = tiles.table_bytes(fmt) + template["SPLITS"] * template["WARP_BYTES"]
        taken = max(rings, split.shared // 2 + splits.BARRIERS) + barriers + 1024
        assert (2 * taken <= 228 << 10) == (split.shared < 113 << 10)


def test_tuned_kernels_do_not_spill():
    """What the benchmark measures keeps all it computes with in registers."""
    for name in ("q4_0", "q4_k", "q6_k", "mxfp4", "kbit2", "kbit5"):
        fmt = qgemm.FORMATS[name]
        for kernel, tokens, source in (
            ("decode", 1, "half"),
            ("decode", 8, "half"),
            ("decode_a8", 1, "half"),
            ("decode_a8", 8, "half"),
            ("decode_a8", 16, "Activations"),
        ):
            if kernel == "decode_a8" and not fmt.integer:
                continue
            for split in splits.splits_for(fmt, kernel, tokens, 90):
                template = splits.decode_template(fmt, split, tokens, kernel, source, 90)
                _, report = nvrtc.compile_cubin(codegen.compose(kernel, fmt, **template), "sm_90a")
                assert compile_kernels.resources(report).spilled == 0, (kernel, template)


def test_spills_of_tuned_kernels_fail_the_compilation():
    """A kernel that cannot keep what it needs in its registers, as if it were tuned, and as one that is not."""
    source = """extern "C" __global__ void __launch_bounds__(1024) spills(float* x) {
        float all[100];
        #pragma unroll
        for (int i = 0; i < 100; ++i) all[i] = x[1024 * i + threadIdx.x];
        #pragma unroll 1
        for (int turn = 0; turn < 9; ++turn)
        #pragma unroll
            for (int i = 0; i < 100; ++i) all[i] += all[(7 * i + 3) % 100] * x[turn];
        #pragma unroll
        for (int i = 0; i < 100; ++i) x[1024 * i + threadIdx.x] = all[i];
    }"""
    _, report = nvrtc.compile_cubin(source, compile_kernels.TUNED)
    registers, spilled = compile_kernels.resources(report)
    assert registers <= 64
    assert spilled >= 4 * (100 - 64)
    unit = compile_kernels.Unit("decode", "q4_0", (("TOKENS", 8),), compile_kernels.TUNED)
    assert f"decode q4_0 TOKENS=8: spills {spilled} bytes" in compile_kernels.problem(unit, report, "")
    assert compile_kernels.problem(unit._replace(arch="sm_80"), report, "") == ""
    assert compile_kernels.problem(unit._replace(kernel="unpack"), report, "") == ""
    assert compile_kernels.problem(unit, report, "refused").endswith("refused")
    (line,) = compile_kernels.summary({unit: compile_kernels.resources(report)})
    assert line.endswith(f"{registers} registers, 1 of 1 spill up to {spilled} bytes")


def test_ledger_notices_a_stale_hash(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "LEDGER", tmp_path / "ledger.json")
    assert "missing" in ledger.problem()
    good = {"sources_sha256": results.sources_sha256(), "passed": 3, "failed": 0, "error": 0, "skipped": 0}
    for facts, wrong in (
        (good, None),
        ({**good, "sources_sha256": "old"}, "changed"),
        ({**good, "sources_sha256": "old", "reason": "no GPU could be had"}, None),
        ({**good, "failed": 1}, "did not pass"),
        ({**good, "passed": 0}, "did not pass"),
    ):
        ledger.LEDGER.write_text(json.dumps(facts))
        assert (ledger.problem() or "") == "" if wrong is None else wrong in ledger.problem()


def test_the_cache_is_filled_with_what_a_gpu_looks_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("QGEMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["", "--arch", "sm_90a", "--kernel", "round_activations", "--fill-cache"])
    assert compile_kernels.main() == 0
    kept = set(tmp_path.iterdir())
    assert f"3 of 3 kernels are in {tmp_path}" in capsys.readouterr().out
    cache.cached_cubin(codegen.compose("round_activations", In="half", Out="half"), "sm_90a")
    assert len(kept) == 3
    assert set(tmp_path.iterdir()) == kept

"""Compilation of kernels, and the selection of units that CI compiles."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from functools import cache

import compile_kernels
import kernel_batches
import pytest
from strategies import TILED

import qgemm
from qgemm.cuda.jit import codegen, nvrtc, sources
from qgemm.cuda.jit.cache import cached
from qgemm.cuda.kernels import decode, requantize, routes
from qgemm.cuda.kernels.gemm_sm90_s8 import NAME
from qgemm.cuda.problem import Q8_1, TYPES, Problem
from qgemm.formats.groups import REPRESENTATIVES

OF_FORMAT = compile_kernels.FORMAT_PARAMETER
OF_TYPE = re.compile("In|Out|ROW_SCALE_.*")  # the types of x and y, and parameters that follow from them


@cache
def units():
    """(all units of listed formats, the units that CI compiles); the enumeration lasts seconds."""
    every = list(compile_kernels.every_unit(names=("", *qgemm.FORMATS)))
    return every, list(compile_kernels.chosen(every))


def kind_of(unit):
    """The class of x; CI compiles one type for each class."""
    source = dict(unit.template).get("In", "")
    return compile_kernels.CLASSES.get(source, source)


@pytest.mark.compiles
@pytest.mark.parametrize("arch", nvrtc.ARCHS)
def test_a_kernel_compiles_for_every_architecture(arch):
    """tools/compile_kernels.py compiles all kernels; this test compiles one for each architecture."""
    fmt = qgemm.FORMATS["q4_0"]
    cubin, report = cached(codegen.compose("dequantize", fmt, Out="half"), arch, codegen.headers(fmt))
    assert cubin.startswith(b"\x7fELF")
    assert "0 bytes spill stores" in report


@pytest.mark.compiles
@pytest.mark.parametrize("name", ["q4_k", "q6_k", "kbit3"])
def test_shared_memory_of_a_warp_is_the_hosts(name):
    """A static_assert compares them by `==`: for scales that lanes decode for each other, with and without minimums."""
    fmt = qgemm.FORMATS[name]
    kernel, template = next(unit for unit in routes.variants(fmt, 90) if unit[0] == "decode")
    cached(codegen.compose(kernel, fmt, **template), "sm_90a", codegen.headers(fmt))


@pytest.mark.compiles
def test_compile_errors_carry_the_log():
    with pytest.raises(nvrtc.CompileError, match=r"compiling for sm_80 failed[\s\S]*undefined_name"):
        nvrtc.compile_cubin("__global__ void k() { undefined_name(); }", "sm_80")


def test_no_built_in_that_nvrtc_12_lacks():
    """NVRTC 12, which the extra cuda12 installs and the tests do not have, lacks __builtin_offsetof."""
    generated = list(codegen.headers(qgemm.FORMATS["q4_0"]).values())
    written = [path.read_text() for path in sources.kernels_dir().rglob("*.cu*") if path.name != "types.cuh"]
    assert not [text for text in generated + written if "offsetof" in text]
    types = (sources.kernels_dir() / "types.cuh").read_text()
    (guarded,) = re.findall(r"#ifdef __CUDACC_RTC__\n(.*)\n#else\n(.*)\n#endif", types)
    assert ["offsetof" in line for line in guarded] == [False, True]


def config(unit, *dropped):
    """The kernel and parameters of a unit, without types and parameters that match the patterns."""
    pairs = (pair for pair in unit.template if not any(pattern.fullmatch(pair[0]) for pattern in (OF_TYPE, *dropped)))
    return unit.kernel, *pairs


@pytest.mark.slow
def test_ci_reaches_every_kernel_of_every_format_on_every_architecture():
    every, chosen = units()
    reached = [{(unit.arch, unit.kernel, unit.format, kind_of(unit)) for unit in group} for group in (every, chosen)]
    assert reached[0] == reached[1]
    assert len(set(chosen)) == len(chosen) < len(every) / 3
    for arch in nvrtc.ARCHS:
        sm = int("".join(filter(str.isdigit, arch)))
        rows = {row.kernel.name for row in routes.ROUTES if row.runs_on(sm) and row.kernel.name != "cublas"}
        transforms = {transform.name for transform in routes.TRANSFORMS}
        other = {requantize.NAME} if NAME in rows else set()  # the second source file of a kernel
        compiled = {unit.kernel for unit in chosen if unit.arch == arch}
        assert not rows - compiled, f"a row for {arch} is never reached: rows above it serve all its problems"
        assert compiled == rows | transforms | other
    assert {routes.source_of(unit.kernel) for unit in chosen} == {
        path.stem for path in sources.kernels_dir().rglob("*.cu")
    }


@pytest.mark.slow
def test_ci_reaches_every_config():
    """On the tuned architecture with each format, each parameter with every type of x; elsewhere with one format."""

    def by_all(unit):
        return unit.arch == compile_kernels.TUNED and not compile_kernels.by_turns(unit.kernel, kind_of(unit))

    def tuned(selection):
        return {(unit.format, *config(unit)) for unit in selection if by_all(unit)}

    def elsewhere(selection):
        return {config(unit, OF_FORMAT) for unit in selection if not by_all(unit)}

    def types(selection):
        on_tuned = (unit for unit in selection if unit.arch == compile_kernels.TUNED)
        on_tuned = (unit for unit in on_tuned if unit.kernel not in compile_kernels.BY_TURNS)
        return {
            (unit.kernel, dict(unit.template).get("In"), pair) for unit in on_tuned for pair in config(unit, OF_FORMAT)
        }

    for of_config in (tuned, elsewhere, types):
        every, chosen = map(of_config, units())
        assert chosen == every


@pytest.mark.slow
def test_cubins_are_made_by_turns():
    """They cover each kernel on each architecture, and each format and config of units whose registers are judged."""
    _, chosen = units()
    sample = compile_kernels.assembled(chosen)
    assert set(sample) < set(chosen)
    assert len(set(sample)) == len(sample) < len(chosen) / 6
    assert {unit[::3] for unit in sample} == {unit[::3] for unit in chosen}  # (kernel, arch)
    tuned = [[unit for unit in units if compile_kernels.judged(unit)] for units in (sample, chosen)]
    assert {unit[:2] for unit in tuned[0]} == {unit[:2] for unit in tuned[1]}  # (kernel, format)
    configs = [{(unit.arch, *config(unit, OF_FORMAT)) for unit in units} for units in tuned]
    assert configs[0] == configs[1]


@pytest.mark.slow
def test_every_unit_has_its_turn():
    """All turns together cover every unit, judged units after half the turns. Each turn covers each kernel on each
    architecture, and each format of judged kernels.
    """
    _, chosen = units()
    judged = {unit for unit in chosen if compile_kernels.judged(unit)}
    left = set(chosen)
    for turn in range(compile_kernels.CUBINS_OF_OTHERS):
        sample = set(compile_kernels.assembled(chosen, turn))
        assert {unit[:2] for unit in sample & judged} == {unit[:2] for unit in judged}  # (kernel, format)
        assert {unit[::3] for unit in sample} == {unit[::3] for unit in chosen}  # (kernel, arch)
        left -= sample
        assert turn < compile_kernels.CUBINS_OF_TUNED - 1 or not left & judged
    assert not left


@pytest.mark.compiles
def test_units_pass_the_front_end_together(monkeypatch):
    """They pass together as they do alone: every kernel of three formats. A failing unit is named, with its log."""
    formats = [qgemm.FORMATS[name] for name in ("q4_0", "iq2_xs", "kbit4")]
    by_kind = {
        (unit[:2], kind_of(unit)): unit
        for unit in compile_kernels.every_unit(["sm_90a"], [fmt.name for fmt in formats])
    }
    programs = list(kernel_batches.batches(by_kind.values()))
    assert sum(map(len, programs)) == len(by_kind) > len(programs)
    assert not [failure for program in programs[::4] for failure in kernel_batches.check(program)]
    (wide,) = (
        unit
        for unit in by_kind.values()
        if unit.kernel == "decode" and unit.format == "q4_0" and kind_of(unit) == "float"
    )
    wrong = wide._replace(template=tuple({**dict(wide.template), "WARP_BYTES": 16}.items()))
    ((failed, log),) = kernel_batches.check([wide, wrong])
    assert failed == wrong
    assert "static assertion failed" in log


@pytest.mark.slow
def test_ci_compiles_some_of_the_family_of_group_formats():
    """Each representative with every kernel of the tuned architecture; on others a few, and each of them somewhere."""
    every = list(compile_kernels.every_unit(names=REPRESENTATIVES))
    chosen = list(compile_kernels.chosen(every))
    tuned = [{(u.kernel, u.format) for u in group if u.arch == compile_kernels.TUNED} for group in (every, chosen)]
    assert tuned[0] == tuned[1]
    assert {unit.format for unit in chosen if unit.arch != compile_kernels.TUNED} == set(REPRESENTATIVES)
    assert {unit.arch for unit in chosen} == set(nvrtc.ARCHS)
    existing = Counter(u.arch == compile_kernels.TUNED for u in {u._replace(template=()) for u in every})
    compiled = Counter(u.arch == compile_kernels.TUNED for u in chosen)
    assert compiled[True] < 2 * existing[True]  # few kernels have more than one class of x
    assert compiled[False] < existing[False] / 4


@pytest.mark.slow
def test_every_product_of_few_tokens_has_its_kernel():
    """Every kernel to which a format, activation, M and type of x is routed on the tuned architecture is compiled."""
    decodes = ("decode", "decode_a8", "decode_slices")
    tuned = [unit for unit in units()[0] if unit.arch == compile_kernels.TUNED and unit.kernel in decodes]
    compiled = {(u.kernel, u.format, dict(u.template)["In"], dict(u.template)["TOKENS"]) for u in tuned}
    routed = set()
    for fmt, activation, m, source in itertools.product(TILED, ("a16", "a8"), range(1, 17), TYPES):
        if activation == "a16" or fmt.integer:
            row = routes.route(Problem(fmt, activation, m, 4096, 4096, 90, source))
            inside = row.kernel.name == "decode_a8" and decode.quantizes(Problem(fmt, activation, m, 4096, 4096, 90))
            if row.kernel.name in ("decode", "decode_slices") or inside:
                routed.add((row.kernel.name, fmt.name, source, row.tile(m)))
            if row.kernel.name == "decode_a8":  # x was quantized by the user or by another kernel
                routed.add((row.kernel.name, fmt.name, Q8_1, row.tile(m)))
    assert compiled == routed


@pytest.mark.compiles
def test_spills_of_tuned_kernels_fail_the_compilation():
    """A kernel that spills fails if its registers are judged, and passes otherwise."""
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
    assert "spills" in compile_kernels.problem(unit._replace(arch="sm_80", kernel="prefill_sm80"), report, "")
    assert compile_kernels.problem(unit, report, "refused").endswith("refused")
    (line,) = compile_kernels.summary({unit: compile_kernels.resources(report)})
    assert line.endswith(f"{registers} registers, 1 of 1 spill up to {spilled} bytes")

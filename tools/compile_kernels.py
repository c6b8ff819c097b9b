"""Compile kernels x formats x architectures with NVRTC, without a GPU; report registers and spills.

Every kernel passes NVRTC's front end for every format and architecture: on the tuned architecture in every config (in
a few configs for BY_TURNS), on others in one config for each class of x (16 bits, float, prepared). Configs and the
types of a class rotate over formats and architectures. A few representatives stand for the family of group formats, in
one config. A sample of these units is compiled to cubins: each config of the tuned architecture for some
formats, each format in some of its configs, each kernel on each architecture; --turn N selects another sample. Units
that were compiled before come from the cache (qgemm/cuda/jit/cache.py), where products look first.

With --arch, --format or --kernel all selected units become cubins: run `--arch sm_90a` before a GPU run.

--fill-cache compiles everything that this machine's GPU, or the one of --arch, may need: for every format, for those of
--format, or for the products of a model:

    tools/compile_kernels.py --fill-cache --file model.gguf

Exits with 1 if a unit fails to compile, with the log, or if a kernel that is tuned for its architecture spills.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import fill_cache
from kernel_batches import Unit, batches, check

import qgemm
from qgemm import FORMATS
from qgemm.cuda.jit import cache, codegen, nvrtc
from qgemm.cuda.kernels.decode import DECODE, DECODE_A8, DECODE_SLICES, MOE_DECODE, MOE_DECODE_TILES
from qgemm.cuda.kernels.gemm_sm80_s8 import GEMM_SM80_S8
from qgemm.cuda.kernels.moe_prefill_sm80 import MOE_PREFILL_SM80
from qgemm.cuda.kernels.needed import needed
from qgemm.cuda.kernels.prefill_sm80 import PREFILL_SM80, PREFILL_SM80_A8
from qgemm.cuda.kernels.prefill_sm80_eight_bits import PREFILL_SM80_EIGHT_BITS
from qgemm.cuda.kernels.prefill_sm90 import MOE_PREFILL_SM90, PREFILL_SM90
from qgemm.cuda.kernels.prefill_sm90_eight_bits import PREFILL_SM90_EIGHT_BITS
from qgemm.cuda.kernels.routes import PLAIN, common_variants, source_of, variants
from qgemm.cuda.problem import TUNED_SMS
from qgemm.files.compiled import cache_dir
from qgemm.formats.groups import REPRESENTATIVES as GROUP_FORMATS

TUNED = "sm_90a"
TUNED_KERNELS = (
    DECODE.name,
    DECODE_A8.name,
    DECODE_SLICES.name,
    PREFILL_SM90.name,
)  # on TUNED, for 16-bit or Q8_1 x
# On TUNED in CONFIGS_BY_TURNS configs for each format: kernels whose main loop another kernel compiles in every config,
# kernels whose main loop hardly depends on the format, and float32 x, which is converted to 16 bits before the product.
BY_TURNS = (
    MOE_PREFILL_SM90.name, MOE_PREFILL_SM80.name, MOE_DECODE.name, MOE_DECODE_TILES.name, PREFILL_SM90_EIGHT_BITS.name,
    "float",
)  # fmt: skip
CONFIGS_BY_TURNS = 2
ALIKE = (
    MOE_DECODE.name, MOE_DECODE_TILES.name, MOE_PREFILL_SM80.name, PREFILL_SM80_EIGHT_BITS.name, GEMM_SM80_S8.name,
)  # fmt: skip
# Formats that stand for families, which FORMATS does not list.
REPRESENTATIVES = (*GROUP_FORMATS, "f8_e4m3_g128", "i8_g16", "i8_g32", "s7_1of2", "kbit4_f32")
FAMILY_ELSEWHERE = 4  # one in 4 of REPRESENTATIVES is compiled on each architecture other than TUNED
CUBINS_OF_TUNED, CUBINS_OF_OTHERS = 16, 32  # one unit in 16 becomes a cubin if its registers are judged, else in 32
NEVER_SPILLING = (
    PREFILL_SM80.name,
    PREFILL_SM80_A8.name,
    PREFILL_SM80_EIGHT_BITS.name,
    GEMM_SM80_S8.name,
)  # on any architecture
# Exception: bytes of GEMM_SM80_S8, whose accumulators and operand A have 192 registers. The bytes are constants of the
# main loop that a warp reads again once in 256 IMMA instructions.
SPILLED_BY_S8 = 64
SPILLED_BY_SIXTEENS = 24  # exception: bytes of PREFILL_SM80_A8 on sm_120 for formats with groups of 16 (q2_k)
SERIALIZED = "C75"  # ptxas' warnings C7508 to C7519: wgmma instructions are serialized
TYPE_PREFIXES = ("In", "Out", "ROW_SCALE_")  # parameters that follow from types, not from a config
FORMAT_PARAMETER = re.compile(
    "STAGES|STAGE_K_BLOCKS|WARP_SPLIT_K|.*_(STAGES|BYTES|LEVEL)"
)  # parameters that follow from a format
FORMAT_OR_TYPE_PARAMETER = re.compile(f"{FORMAT_PARAMETER.pattern}|In|Out|ROW_SCALE_.*")
CLASSES = {"half": "16 bits", "bf16": "16 bits"}  # types of x whose kernels differ only in instructions

Template = dict[str, Any]


def every_unit(
    archs: Iterable[str] = nvrtc.ARCHS, names: Collection[str] = ("", *FORMATS, *REPRESENTATIVES)
) -> Iterator[Unit]:
    """All units that a product, a conversion or an upload may need. names: formats, "" for kernels without a format."""
    formats = [fmt for name in names if name and ((fmt := FORMATS[name]).tiled or PLAIN.holds(fmt))]
    for arch in archs:
        for fmt in formats:
            yield from (Unit(kernel, fmt.name, tuple(t.items()), arch) for kernel, t in variants(fmt, sm_of(arch)))
        if "" in names:
            yield from (Unit(kernel, "", tuple(t.items()), arch) for kernel, t in common_variants(sm_of(arch)))


def by_turns(kernel: str, kind: str) -> bool:
    """Whether a format compiles only some configs of a kernel and class of x, and other formats the other configs."""
    return kernel in BY_TURNS or kind in BY_TURNS


def shares_a_main_loop(unit: Unit) -> bool:
    """Whether a unit of a family is left out because another kernel compiles the same main loop for its format."""
    return unit.arch != TUNED and FORMATS[unit.format].family and unit.kernel in ALIKE


def elsewhere(name: str, arch: str) -> bool:
    """Whether the representative of a family is compiled on other architectures instead of this one."""
    if arch == TUNED or not FORMATS[name].family:
        return False
    return (REPRESENTATIVES.index(name) + nvrtc.ARCHS.index(arch)) % FAMILY_ELSEWHERE != 0


def chosen(units: Iterable[Unit]) -> Iterator[Unit]:
    """The units that CI compiles.

    For each kernel, format and class of x: every config on the tuned architecture; on other architectures the config
    compiled least often so far, or a few of them for BY_TURNS. Then one unit for each config that is still missing. The
    types of x rotate, so that all of them are compiled over formats and architectures.
    """
    groups: dict[tuple[str, ...], dict[Any, list[Unit]]] = defaultdict(lambda: defaultdict(list))
    for unit in units:
        if unit.format and (elsewhere(unit.format, unit.arch) or shares_a_main_loop(unit)):
            continue
        source = dict(unit.template).get("In", "")
        config = tuple(pair for pair in unit.template if not pair[0].startswith(TYPE_PREFIXES))
        groups[unit.arch, unit.format, unit.kernel, CLASSES.get(source, source)][config].append(unit)
    turns: Counter[tuple[str, str]] = Counter()
    compiled: Counter[tuple[Any, ...]] = Counter()  # on other architectures, without parameters of the format
    first: dict[tuple[Any, ...], Unit] = {}  # by the same keys
    for (arch, name, kernel, kind), by_config in groups.items():
        configs = list(by_config.values())  # for each config its units by type of x
        turn, count = turns[kernel, kind], len(configs)
        if not name:  # few units: all are compiled
            yield from (unit for config in configs for unit in config)
        elif arch == TUNED and not (by_turns(kernel, kind) or FORMATS[name].family):
            yield from (config[(i + turn) % len(config)] for i, config in enumerate(configs))
        else:
            alike = [
                (kernel, kind, *(pair for pair in config if not FORMAT_PARAMETER.fullmatch(pair[0])))
                for config in by_config
            ]
            if not FORMATS[name].family:
                first = {alike_config: config[0] for alike_config, config in zip(alike, configs, strict=True)} | first
            rarest_first = sorted(range(count), key=lambda i: compiled[alike[i]])
            for least in rarest_first[: CONFIGS_BY_TURNS if by_turns(kernel, kind) and not FORMATS[name].family else 1]:
                compiled[alike[least]] += 1
                yield configs[least][(turn + turn // count) % len(configs[least])]
        turns[kernel, kind] += 1
    yield from (unit for alike_config, unit in first.items() if not compiled[alike_config])


def judged(unit: Unit) -> bool:
    """Whether a unit may not spill registers."""
    tuned = unit.arch == TUNED and unit.kernel in TUNED_KERNELS and ("In", "float") not in unit.template
    return tuned or unit.kernel in NEVER_SPILLING


def assembled(units: Iterable[Unit], turn: int = 0) -> list[Unit]:
    """The chosen units that CI compiles to cubins.

    One in CUBINS_OF_TUNED or CUBINS_OF_OTHERS units: the position shifts by one for each format, architecture and turn,
    so that after enough turns every unit was compiled. Kinds that would have no unit get one.
    """
    archs: dict[str, dict[str, int]] = defaultdict(dict)  # kernel -> architecture -> number
    formats: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)  # (architecture, kernel) -> format -> number
    configs: Counter[tuple[str, str, str]] = Counter()
    alike: dict[tuple[Any, ...], list[Unit]] = defaultdict(list)  # units by kind
    sample: dict[Unit, None] = {}
    for unit in units:
        arch_numbers, format_numbers = archs[unit.kernel], formats[unit.arch, unit.kernel]
        number = arch_numbers.setdefault(unit.arch, len(arch_numbers))
        number += format_numbers.setdefault(unit.format, len(format_numbers))
        number += configs[unit.arch, unit.kernel, unit.format] + turn
        configs[unit.arch, unit.kernel, unit.format] += 1
        for kind in kinds(unit):
            alike[kind].append(unit)
        always = not unit.format and unit.arch == TUNED
        if always or number % (CUBINS_OF_TUNED if judged(unit) else CUBINS_OF_OTHERS) == 0:
            sample[unit] = None
    for units_of_kind in alike.values():
        if not any(unit in sample for unit in units_of_kind):
            sample[units_of_kind[turn % len(units_of_kind)]] = None
    return list(sample)


def kinds(unit: Unit) -> Iterator[tuple[Any, ...]]:
    """The kinds of a unit, each of which needs a cubin: kernel and architecture; if judged also format, and config."""
    yield "arch", unit.kernel, unit.arch
    if judged(unit):
        yield "format", unit.kernel, unit.format
        config = (pair for pair in unit.template if not FORMAT_OR_TYPE_PARAMETER.fullmatch(pair[0]))
        yield "config", unit.arch, unit.kernel, *config


def compile_unit(unit: Unit) -> tuple[Unit, str, str]:
    """Compile a unit into the cache -> (unit, ptxas' report, error); one of the two texts is empty."""
    try:
        fmt = FORMATS.get(unit.format)
        source = codegen.compose(source_of(unit.kernel), fmt, **dict(unit.template))
        return unit, cache.cached(source, unit.arch, codegen.headers(fmt)).report, ""
    except nvrtc.CompileError as error:
        return unit, "", str(error)


class Resources(NamedTuple):
    """Registers of a thread of a kernel, and bytes spilled to memory."""

    registers: int
    spilled: int


def resources(report: str) -> Resources:
    """The resources in ptxas' report of a kernel."""
    (registers,) = re.findall(r"Used (\d+) registers", report)
    return Resources(int(registers), sum(map(int, re.findall(r"(\d+) bytes spill stores", report))))


def allowed_to_spill(unit: Unit) -> int:
    """Bytes of registers that a unit may spill where it is judged: 0 but for the exceptions above."""
    if unit.kernel == GEMM_SM80_S8.name:
        return SPILLED_BY_S8
    sixteens = (unit.kernel, unit.arch) == (PREFILL_SM80_A8.name, "sm_120") and FORMATS[unit.format].group == 16
    return SPILLED_BY_SIXTEENS if sixteens else 0


def problem(unit: Unit, report: str, error: str) -> str:
    """The reason why a unit fails, or ""."""
    if error:
        return f"{unit}: {error}"
    if not judged(unit):
        return ""
    if (spilled := resources(report).spilled) > allowed_to_spill(unit):
        return f"{unit}: spills {spilled} bytes of registers"
    return f"{unit}: wgmma instructions are serialized: {report}" if SERIALIZED in report else ""


def summary(by_unit: dict[Unit, Resources]) -> Iterator[str]:
    """A line for each architecture and kernel: the largest number of registers, and the spilling units."""
    for arch, kernel in sorted({(unit.arch, unit.kernel) for unit in by_unit}):
        kernel_resources = [used for unit, used in by_unit.items() if (unit.arch, unit.kernel) == (arch, kernel)]
        spills = [used.spilled for used in kernel_resources if used.spilled]
        spilling = f", {len(spills)} of {len(kernel_resources)} spill up to {max(spills)} bytes" if spills else ""
        yield f"{arch:7} {kernel:22} {max(used.registers for used in kernel_resources):3} registers{spilling}"


def options() -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*(fmt.name for fmt in FORMATS.values() if fmt.tiled), *REPRESENTATIVES]
    parser.add_argument("--arch", action="append", choices=nvrtc.ARCHS, help="only this architecture (repeatable)")
    parser.add_argument("--format", action="append", choices=names, help="only this format (repeatable)")
    parser.add_argument("--kernel", action="append", help="only this kernel (repeatable)")
    parser.add_argument("--all", action="store_true", help="every config and type on every architecture")
    parser.add_argument(
        "--turn",
        metavar="N",
        type=int,
        default=0,
        help=f"the sample of cubins; {CUBINS_OF_OTHERS} turns cover all units",
    )
    parser.add_argument("--report", metavar="PATH", type=Path, help="write registers and spilled bytes of every unit")
    filling = parser.add_argument_group("filling the cache")
    filling.add_argument("--fill-cache", action="store_true", help="compile all that a GPU may need, judge nothing")
    filling.add_argument("--file", metavar="MODEL", help="a .gguf file: only kernels for its tensors")
    filling.add_argument(
        "--sms", metavar="COUNT", type=int, default=TUNED_SMS, help="SMs of its GPU (default %(default)s)"
    )
    arguments = parser.parse_args()
    if arguments.file and not arguments.fill_cache:
        parser.error("--file selects kernels for the cache: add --fill-cache")
    if arguments.fill_cache and (arguments.all or arguments.report):
        parser.error("--fill-cache compiles all selected kernels and judges nothing: leave --all and --report out")
    if arguments.fill_cache and not arguments.arch:
        arguments.arch = (
            [here]
            if (here := fill_cache.arch_here())
            else parser.error(f"no GPU here to fill the cache for: name one by --arch, of {', '.join(nvrtc.ARCHS)}")
        )
    return arguments


def fill(arguments: argparse.Namespace) -> int:
    """--fill-cache: compile the selected kernels into the cache, print a summary; 1 if a kernel failed."""
    start = time.monotonic()
    units = [unit for arch in arguments.arch for unit in selected_units(arguments, arch)]
    units = [unit for unit in units if unit.kernel in (arguments.kernel or [unit.kernel])]
    results: list[fill_cache.Filled] = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for unit, result in zip(
            units, fill_cache.progress(pool.map(filled, units), len(units), "kernels"), strict=True
        ):
            results.append(result)
            if result.error:
                print(f"{unit}: {result.error}", file=sys.stderr)
    print(fill_cache.summary(results, time.monotonic() - start, cache_dir()))
    return 1 if not results or any(result.error for result in results) else 0


def selected_units(arguments: argparse.Namespace, arch: str) -> list[Unit]:
    """The units of an architecture for a model, for some formats, or for all formats."""
    names = ["", *(arguments.format or FORMATS)]
    if not arguments.file:
        return list(every_unit([arch], names))
    with qgemm.open(arguments.file) as model:
        tensors = [tensor for tensor in model.values() if tensor.format.name in names]
    print(f"{arguments.file}: {fill_cache.formats_of(tensors)}, for {arch}", file=sys.stderr)
    kernels = needed(tensors, sm_of(arch), arguments.sms)
    return sorted(Unit(kernel, "" if fmt is None else fmt.name, template, arch) for kernel, fmt, template in kernels)


def filled(unit: Unit) -> fill_cache.Filled:
    """Compile a unit into the cache."""
    return fill_cache.fill(unit.kernel, FORMATS.get(unit.format), dict(unit.template), unit.arch)


def sm_of(arch: str) -> int:
    """sm_90a -> 90."""
    return int("".join(filter(str.isdigit, arch)))


def main() -> int:
    """Compile, print a line per architecture and kernel; with --report write one per unit."""
    arguments = options()
    if arguments.fill_cache:
        return fill(arguments)
    archs, names = arguments.arch or nvrtc.ARCHS, arguments.format or ("", *FORMATS, *REPRESENTATIVES)
    units = every_unit(archs, names) if arguments.all else chosen(every_unit())
    units = (unit for unit in units if unit.arch in archs and unit.format in names)
    units = [unit for unit in units if unit.kernel in (arguments.kernel or [unit.kernel])]
    whole = arguments.all or arguments.arch or arguments.format or arguments.kernel
    todo, programs = (units, []) if whole else (assembled(units, arguments.turn), list(batches(units)))
    by_unit: dict[Unit, Resources] = {}
    failed = 0
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        checked = pool.map(check, programs)
        done = pool.map(compile_unit, todo, chunksize=8)
        for errors in fill_cache.progress(checked, len(programs), "programs of the front end"):
            for unit, error in errors:
                failed += 1
                print(f"{unit}: {error}", file=sys.stderr)
        for unit, report, error in fill_cache.progress(done, len(todo), "kernels"):
            if wrong := problem(unit, report, error):
                failed += 1
                print(wrong, file=sys.stderr)
            if not error:
                by_unit[unit] = resources(report)
    print(*summary(by_unit), sep="\n")
    if arguments.report:
        arguments.report.parent.mkdir(parents=True, exist_ok=True)
        lines = (f"{used.registers}\t{used.spilled}\t{unit}\n" for unit, used in by_unit.items())
        arguments.report.write_text("registers\tbytes spilled\tunit\n" + "".join(lines))
    archs = ", ".join(sorted({unit.arch for unit in todo}))
    passed = "" if whole else f"{len(units)} kernels x formats x configs pass the front end; "
    print(f"{passed}{len(by_unit)} of {len(todo)} cubins for {archs}, {failed} failures, in {cache_dir()}")
    return 1 if failed or not todo else 0


if __name__ == "__main__":
    sys.exit(main())

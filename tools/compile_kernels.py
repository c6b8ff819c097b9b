"""Compile kernels x formats x architectures with NVRTC, without a GPU; report registers and spills.

Every kernel passes NVRTC's front end for every format and architecture: on the tuned architecture in every config (of
BY_TURNS in some), elsewhere in one config for each class of x (16 bits, float, prepared); configs and the types of one
class take turns. Of the family of group formats some stand for all, in one config everywhere, and few elsewhere. Of
these units some become cubins, also by turns: each config of the tuned architecture for some formats, each format in
some of its configs, each kernel on each architecture; --turn N makes cubins of others. What was compiled before comes
from the cache (qgemm/cuda/jit/cache.py), which is where a GPU looks first.

What is named by --arch, --format or --kernel all becomes cubins: `--arch sm_90a` before a GPU run judges every config.

--fill-cache fills it with all that this machine's GPU, or that of --arch, may ask for: for every format, for those of
--format, or for the products of a model:

    tools/compile_kernels.py --fill-cache --file model.gguf

Exit 1 if anything fails to compile, with the log, or if a kernel that is tuned for its architecture spills registers.
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
from qgemm.cuda.kernels.moe_prefill_sm80 import MOE_PREFILL_SM80
from qgemm.cuda.kernels.needed import needed
from qgemm.cuda.kernels.prefill_sm80 import PREFILL_SM80, PREFILL_SM80_A8
from qgemm.cuda.kernels.prefill_sm80_eight_bits import PREFILL_SM80_EIGHT_BITS
from qgemm.cuda.kernels.prefill_sm90 import MOE_PREFILL_SM90, PREFILL_SM90
from qgemm.cuda.kernels.prefill_sm90_eight_bits import PREFILL_SM90_EIGHT_BITS
from qgemm.cuda.kernels.routes import common_variants, source_of, variants
from qgemm.cuda.problem import TUNED_SMS
from qgemm.files.compiled import cache_dir
from qgemm.formats.groups import REPRESENTATIVES as GROUPS

TUNED = "sm_90a"
TUNED_KERNELS = (DECODE.name, DECODE_A8.name, DECODE_SLICES.name, PREFILL_SM90.name)  # there; for x of 16 bits or Q8_1
# Also there, but so many configs a format: kernels whose main loop each format compiles in every config for another
# kernel, those whose main loop formats differ in little, and x of float32, which is converted and then multiplied as x
# of 16 bits.
BY_TURNS = (
    MOE_PREFILL_SM90.name, MOE_PREFILL_SM80.name, MOE_DECODE.name, MOE_DECODE_TILES.name, PREFILL_SM90_EIGHT_BITS.name,
    "float",
)  # fmt: skip
CONFIGS_BY_TURNS = 2
ALIKE = (MOE_DECODE.name, MOE_DECODE_TILES.name, MOE_PREFILL_SM80.name, PREFILL_SM80_EIGHT_BITS.name)
REPRESENTATIVES = (*GROUPS, "f8_e4m3_g128", "s7_1of2", "kbit4_f32")  # of families, which FORMATS does not list
FAMILY_ELSEWHERE = 4  # one of so many of them is compiled on an architecture that is not the tuned one
CUBINS_OF_TUNED, CUBINS_OF_OTHERS = 16, 32  # one unit of so many: where registers are judged, and elsewhere
NEVER_SPILLING = (PREFILL_SM80.name, PREFILL_SM80_A8.name, PREFILL_SM80_EIGHT_BITS.name)  # on no architecture, but for
SPILLED_BY_SIXTEENS = 24  # bytes at most, by PREFILL_SM80_A8 on sm_120, of formats with groups of 16 (q2_k)
SERIALIZED = "C75"  # ptxas' warnings C7508 to C7519: a wgmma waits for the one before
OF_TYPES = ("In", "Out", "ROW_SCALE_")  # how parameters begin that follow from types, not from a config
OF_FORMAT = re.compile(
    "STAGES|STAGE_K_BLOCKS|WARP_SPLIT_K|.*_(STAGES|BYTES|LEVEL)"
)  # parameters that follow from a format
OF_FORMAT_OR_TYPE = re.compile(f"{OF_FORMAT.pattern}|In|Out|ROW_SCALE_.*")
CLASSES = {"half": "16 bits", "bf16": "16 bits"}  # of x: types that differ in their instructions, not in what is done

Template = dict[str, Any]


def every_unit(
    archs: Iterable[str] = nvrtc.ARCHS, names: Collection[str] = ("", *FORMATS, *REPRESENTATIVES)
) -> Iterator[Unit]:
    """Everything that a product, a conversion or an upload may need; names: of formats, "" for kernels without one."""
    formats = [FORMATS[name] for name in names if name and FORMATS[name].tiled]
    for arch in archs:
        for fmt in formats:
            yield from (Unit(kernel, fmt.name, tuple(t.items()), arch) for kernel, t in variants(fmt, sm_of(arch)))
        if "" in names:
            yield from (Unit(kernel, "", tuple(t.items()), arch) for kernel, t in common_variants(sm_of(arch)))


def by_turns(kernel: str, kind: str) -> bool:
    """Whether a format compiles some configs alone of a kernel and class of x, others being left to other formats."""
    return kernel in BY_TURNS or kind in BY_TURNS


def shares_a_main_loop(unit: Unit) -> bool:
    """Whether a kernel of a family's format is not compiled beside those that ask the same of the format."""
    return unit.arch != TUNED and FORMATS[unit.format].family and unit.kernel in ALIKE


def elsewhere(name: str, arch: str) -> bool:
    """Whether a format that stands for a family is left to other architectures."""
    if arch == TUNED or not FORMATS[name].family:
        return False
    return (REPRESENTATIVES.index(name) + nvrtc.ARCHS.index(arch)) % FAMILY_ELSEWHERE != 0


def chosen(units: Iterable[Unit]) -> Iterator[Unit]:
    """What CI compiles of all units.

    Of each kernel, format and class of x every config on the tuned architecture, elsewhere the one that was compiled
    least, of BY_TURNS some such; and a unit of each config for which no format had a turn left. Of which type is a
    matter of turns, so that over formats and architectures all are compiled.
    """
    groups: dict[tuple[str, ...], dict[Any, list[Unit]]] = defaultdict(lambda: defaultdict(list))
    for unit in units:
        if unit.format and (elsewhere(unit.format, unit.arch) or shares_a_main_loop(unit)):
            continue
        source = dict(unit.template).get("In", "")
        config = tuple(pair for pair in unit.template if not pair[0].startswith(OF_TYPES))
        groups[unit.arch, unit.format, unit.kernel, CLASSES.get(source, source)][config].append(unit)
    turns: Counter[tuple[str, str]] = Counter()
    compiled: Counter[tuple[Any, ...]] = Counter()  # elsewhere, by what does not follow from a format's bytes
    first: dict[tuple[Any, ...], Unit] = {}  # of each of those
    for (arch, name, kernel, kind), by_config in groups.items():
        configs = list(by_config.values())  # each by all types that have it
        turn, count = turns[kernel, kind], len(configs)
        if not name:  # so few that none waits for its turn
            yield from (unit for config in configs for unit in config)
        elif arch == TUNED and not (by_turns(kernel, kind) or FORMATS[name].family):
            yield from (config[(i + turn) % len(config)] for i, config in enumerate(configs))
        else:
            alike = [(kernel, kind, *(pair for pair in each if not OF_FORMAT.fullmatch(pair[0]))) for each in by_config]
            if not FORMATS[name].family:
                first = {of_config: config[0] for of_config, config in zip(alike, configs, strict=True)} | first
            some = sorted(range(count), key=lambda i: compiled[alike[i]])
            for least in some[: CONFIGS_BY_TURNS if by_turns(kernel, kind) and not FORMATS[name].family else 1]:
                compiled[alike[least]] += 1
                yield configs[least][(turn + turn // count) % len(configs[least])]
        turns[kernel, kind] += 1
    yield from (unit for of_config, unit in first.items() if not compiled[of_config])


def judged(unit: Unit) -> bool:
    """Whether a unit may not spill registers."""
    tuned = unit.arch == TUNED and unit.kernel in TUNED_KERNELS and ("In", "float") not in unit.template
    return tuned or unit.kernel in NEVER_SPILLING


def assembled(units: Iterable[Unit], turn: int = 0) -> list[Unit]:
    """Of the chosen units those of which CI makes cubins.

    Of the configs of a format, and of the formats of a kernel, one in CUBINS_OF_TUNED or CUBINS_OF_OTHERS: the next
    format takes the next ones, the next architecture other formats, the next turn those that follow, until all had
    theirs. And one of each kind that would have none.
    """
    archs: dict[str, dict[str, int]] = defaultdict(dict)  # of a kernel: their numbers
    formats: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)  # of a kernel on an architecture: theirs
    configs: Counter[tuple[str, str, str]] = Counter()
    alike: dict[tuple[Any, ...], list[Unit]] = defaultdict(list)  # of a kind
    found: dict[Unit, None] = {}
    for unit in units:
        of_kernel, of_both = archs[unit.kernel], formats[unit.arch, unit.kernel]
        number = of_kernel.setdefault(unit.arch, len(of_kernel)) + of_both.setdefault(unit.format, len(of_both))
        number += configs[unit.arch, unit.kernel, unit.format] + turn
        configs[unit.arch, unit.kernel, unit.format] += 1
        for kind in kinds(unit):
            alike[kind].append(unit)
        always = not unit.format and unit.arch == TUNED
        if always or number % (CUBINS_OF_TUNED if judged(unit) else CUBINS_OF_OTHERS) == 0:
            found[unit] = None
    for some in alike.values():
        if not any(unit in found for unit in some):
            found[some[turn % len(some)]] = None
    return list(found)


def kinds(unit: Unit) -> Iterator[tuple[Any, ...]]:
    """Of what a unit is one that becomes a cubin: a kernel on an architecture, and where it is judged for a format, and
    in a config there.
    """
    yield "arch", unit.kernel, unit.arch
    if judged(unit):
        yield "format", unit.kernel, unit.format
        config = (each for each in unit.template if not OF_FORMAT_OR_TYPE.fullmatch(each[0]))
        yield "config", unit.arch, unit.kernel, *config


def compile_unit(unit: Unit) -> tuple[Unit, str, str]:
    """(unit, ptxas' report, error); one of the two texts is empty. The kernel is in the cache then."""
    try:
        fmt = FORMATS.get(unit.format)
        source = codegen.compose(source_of(unit.kernel), fmt, **dict(unit.template))
        return unit, cache.cached(source, unit.arch, codegen.headers(fmt)).report, ""
    except nvrtc.CompileError as error:
        return unit, "", str(error)


class Resources(NamedTuple):
    """What a thread of a kernel takes: registers, and bytes of them that are spilled to memory."""

    registers: int
    spilled: int


def resources(report: str) -> Resources:
    """What ptxas reports of a kernel."""
    (registers,) = re.findall(r"Used (\d+) registers", report)
    return Resources(int(registers), sum(map(int, re.findall(r"(\d+) bytes spill stores", report))))


def problem(unit: Unit, report: str, error: str) -> str:
    """Why a compiled unit is not good enough, or ""."""
    if error:
        return f"{unit}: {error}"
    if not judged(unit):
        return ""
    sixteens = (unit.kernel, unit.arch) == (PREFILL_SM80_A8.name, "sm_120") and FORMATS[unit.format].group == 16
    if (spilled := resources(report).spilled) > (SPILLED_BY_SIXTEENS if sixteens else 0):
        return f"{unit}: spills {spilled} bytes of registers"
    return f"{unit}: wgmma wait for each other: {report}" if SERIALIZED in report else ""


def summary(found: dict[Unit, Resources]) -> Iterator[str]:
    """A line for each architecture and kernel: the most registers, and how many units spill how much."""
    for arch, kernel in sorted({(unit.arch, unit.kernel) for unit in found}):
        some = [taken for unit, taken in found.items() if (unit.arch, unit.kernel) == (arch, kernel)]
        spills = [taken.spilled for taken in some if taken.spilled]
        spilling = f", {len(spills)} of {len(some)} spill up to {max(spills)} bytes" if spills else ""
        yield f"{arch:7} {kernel:22} {max(taken.registers for taken in some):3} registers{spilling}"


def options() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*(fmt.name for fmt in FORMATS.values() if fmt.tiled), *REPRESENTATIVES]
    parser.add_argument("--arch", action="append", choices=nvrtc.ARCHS, help="only this architecture (repeatable)")
    parser.add_argument("--format", action="append", choices=names, help="only this format (repeatable)")
    parser.add_argument("--kernel", action="append", help="only this kernel (repeatable)")
    parser.add_argument("--all", action="store_true", help="every config and type everywhere, not what CI compiles")
    parser.add_argument(
        "--turn", metavar="N", type=int, default=0, help=f"which become cubins: after {CUBINS_OF_OTHERS} turns all did"
    )
    parser.add_argument("--report", metavar="PATH", type=Path, help="write registers and spilled bytes of every unit")
    filling = parser.add_argument_group("filling the cache")
    filling.add_argument("--fill-cache", action="store_true", help="compile what a GPU may ask for, judge nothing")
    filling.add_argument("--file", metavar="MODEL", help="a .gguf file: only what products with its tensors ask for")
    filling.add_argument(
        "--sms", metavar="COUNT", type=int, default=TUNED_SMS, help="SMs of its GPU (default %(default)s)"
    )
    asked = parser.parse_args()
    if asked.file and not asked.fill_cache:
        parser.error("--file says what the cache is filled with: add --fill-cache")
    if asked.fill_cache and (asked.all or asked.report):
        parser.error("--fill-cache compiles all that it is asked for, and judges nothing: leave --all and --report out")
    if asked.fill_cache and not asked.arch:
        asked.arch = (
            [here]
            if (here := fill_cache.arch_here())
            else parser.error(f"no GPU here to fill the cache for: name one by --arch, of {', '.join(nvrtc.ARCHS)}")
        )
    return asked


def fill(asked: argparse.Namespace) -> int:
    """--fill-cache: put what was asked for into the cache, say what that took; 1 if something is not there."""
    start = time.monotonic()
    units = [unit for arch in asked.arch for unit in wanted(asked, arch)]
    units = [unit for unit in units if unit.kernel in (asked.kernel or [unit.kernel])]
    found: list[fill_cache.Filled] = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for unit, one in zip(units, fill_cache.progress(pool.map(filled, units), len(units), "kernels"), strict=True):
            found.append(one)
            if one.error:
                print(f"{unit}: {one.error}", file=sys.stderr)
    print(fill_cache.summary(found, time.monotonic() - start, cache_dir()))
    return 1 if not found or any(one.error for one in found) else 0


def wanted(asked: argparse.Namespace, arch: str) -> list[Unit]:
    """The units of one architecture: of a model, of some formats, or of all."""
    names = ["", *(asked.format or FORMATS)]
    if not asked.file:
        return list(every_unit([arch], names))
    with qgemm.open(asked.file) as model:
        tensors = [tensor for tensor in model.values() if tensor.format.name in names]
    print(f"{asked.file}: {fill_cache.formats_of(tensors)}, for {arch}", file=sys.stderr)
    found = needed(tensors, sm_of(arch), asked.sms)
    return sorted(Unit(kernel, "" if fmt is None else fmt.name, template, arch) for kernel, fmt, template in found)


def filled(unit: Unit) -> fill_cache.Filled:
    """A unit in the cache."""
    return fill_cache.fill(unit.kernel, FORMATS.get(unit.format), dict(unit.template), unit.arch)


def sm_of(arch: str) -> int:
    """sm_90a -> 90."""
    return int("".join(filter(str.isdigit, arch)))


def main() -> int:
    """Compile, print a line per architecture and kernel; with --report write one per unit."""
    asked = options()
    if asked.fill_cache:
        return fill(asked)
    archs, names = asked.arch or nvrtc.ARCHS, asked.format or ("", *FORMATS, *REPRESENTATIVES)
    units = every_unit(archs, names) if asked.all else chosen(every_unit())
    units = (unit for unit in units if unit.arch in archs and unit.format in names)
    units = [unit for unit in units if unit.kernel in (asked.kernel or [unit.kernel])]
    whole = asked.all or asked.arch or asked.format or asked.kernel
    todo, programs = (units, []) if whole else (assembled(units, asked.turn), list(batches(units)))
    found: dict[Unit, Resources] = {}
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
                found[unit] = resources(report)
    print(*summary(found), sep="\n")
    if asked.report:
        asked.report.parent.mkdir(parents=True, exist_ok=True)
        lines = (f"{taken.registers}\t{taken.spilled}\t{unit}\n" for unit, taken in found.items())
        asked.report.write_text("registers\tbytes spilled\tunit\n" + "".join(lines))
    archs = ", ".join(sorted({unit.arch for unit in todo}))
    passed = "" if whole else f"{len(units)} kernels x formats x configs pass the front end; "
    print(f"{passed}{len(found)} of {len(todo)} cubins for {archs}, {failed} failures, in {cache_dir()}")
    return 1 if failed or not todo else 0


if __name__ == "__main__":
    sys.exit(main())

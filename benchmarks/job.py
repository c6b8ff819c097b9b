"""`python -m benchmarks --all --out DIR`: one job that measures all rows that README's and the documents' tables show.

It compiles the kernels of all rows in processes, in the order in which rows need them, while the first rows are
measured; host times are measured once all are compiled. Rows are saved after each number of rows of x. With --merge
rows whose kernels are the present ones stay, so that a second call measures the missing rows; rows that are not in
benchmarks/plan.py are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from qgemm.backend import backends
from qgemm.cli.random_models import HEADS
from qgemm.cli.timing import ROTATE, Cublas
from qgemm.codec.float_types import float_dtype
from qgemm.cuda.kernels.needed import Key, needed
from qgemm.cuda.kernels.transforms import DEQUANTIZE_TILES, PACK
from qgemm.cuda.problem import C_TYPES
from qgemm.cuda.problem import gpu as gpu_of
from qgemm.formats import FORMATS, format_named

from . import calls, gpu, host, moe, moe_host, pack, plan, planes, results, stale, step
from .compiler import Compiler
from .moe_layers import MODELS, Model
from .result_files import Files, Item, Named
from .results import CALLS, EXPERTS, EXPERTS_HOST, MMA, STEPS, SUSTAINED, Results, Row

SAVE_S = 10  # seconds after which the rows so far are saved
EXPERT_ROWS = range(1, 200)  # rows of x of one expert, where experts are multiplied one by one


class Session(NamedTuple):
    """What tasks share on the GPU."""

    stream: Any
    cublas: Cublas
    read_gbs: float
    progress: moe.Progress
    ready: Callable[[Iterable[Key]], None]  # waits for kernels


class Task(NamedTuple):
    """Rows that are measured together: their names, all kernels that they run, and the batches of their rows."""

    names: Sequence[Named]
    kernels: Sequence[Key]
    run: Callable[[Session], Iterator[list[Item]]]


def run(out: Path, types: Sequence[str], limit: int, merging: bool) -> list[str]:
    """Measure the rows that files in the folder `out` lack -> a line for each failure.

    types: of x. limit: seconds after which no batch of rows starts; 0: no limit.
    """
    import cupy

    progress, on = moe.Progress(limit), gpu_of(cupy.cuda.Device().id)
    arch = str(backends()["cuda"].facts["arch"])
    stream = cupy.cuda.Stream(non_blocking=True)
    types, failures = usable(types)
    with Compiler(arch) as compiler:
        facts = gpu.facts(stream)
        progress.say(f"{facts['device']}, reads {facts['read_gbs']} GB/s")
        files = Files(out, facts, files_of_rows(), merging)
        pending = list(tasks(types, on.sm, on.sms, files.current))
        total = sum(len(task.names) for task in pending)
        compiler.submit(chain.from_iterable(task.kernels for task in pending))
        progress.say(f"{total} rows to measure, {len(compiler.kernels)} kernels to compile unless they are cached")
        session = Session(stream, Cublas(stream), facts["read_gbs"], progress, compiler.wait)
        for task in pending:
            if progress.late:
                break
            try:
                for batch in task.run(session):
                    failures += files.add_all(batch, progress.say)
                    files.save(SAVE_S)
                    if progress.late:
                        break
            except Exception as error:  # other tasks may succeed
                failures.append(f"{task.names[0]} and others: {error}")
                progress.say(failures[-1])
            files.save()
            cupy.get_default_memory_pool().free_all_blocks()
        if not progress.late:
            compiler.wait(compiler.kernels)
            failures += on_host(stream, files, progress)
    left = sum(not files.current(name) for task in pending for name in task.names)
    progress.say(f"{total - left} rows measured, {left} are missing" + " (measure them with --merge)" * (left > 0))
    return failures


def usable(types: Iterable[str]) -> tuple[list[str], list[str]]:
    """The types of which there are arrays here, and a line for each other: bfloat16 needs ml_dtypes."""
    there, failures = list[str](), list[str]()
    for x in types:
        try:
            float_dtype(x)
            there.append(x)
        except TypeError as error:
            failures.append(str(error))
    return there, failures


# ---------------------------------------------------------------- tasks


def files_of_rows() -> dict[Named, tuple[str, ...]]:
    """Every row of the plan with the ends of the names of its files."""
    rows: dict[Named, tuple[str, ...]] = {("rows", case): ends for case, ends in plan.files_of_cases().items()}
    others: list[Named] = [(MMA, case) for case in plan.BY_MMA]
    others += [(SUSTAINED, case) for case in plan.WITHOUT_PAUSES]
    others += [name for task in layers(results.X_TYPES, 0, 0, kernels=False) for name in task.names]
    return {**rows, **dict.fromkeys(others, (plan.PRODUCTS,))}


def tasks(
    types: Sequence[str], sm: int, sms: int, current: Callable[[Named], bool] = lambda name: False
) -> Iterator[Task]:
    """All tasks with rows that are not current, in order of importance."""
    every_task = chain(
        products(plan.by_shape(plan.COMMON), types, sm, sms, current),
        layers(types, sm, sms),
        products(plan.by_shape(plan.RARE, without=plan.COMMON), types, sm, sms, current),
    )
    return (task for task in every_task if not all(map(current, task.names)))


def products(
    shapes: Mapping[tuple[int, int], Mapping[int, Sequence[plan.Case]]], types: Sequence[str], sm: int, sms: int,
    current: Callable[[Named], bool],
) -> Iterator[Task]:  # fmt: skip
    """A task for each shape of products; in it the cases that are not current."""
    for shape, by_m in shapes.items():
        batches: dict[int, list[plan.Case]] = {}
        for m, cases in by_m.items():
            todo = [case for case in cases if case.x in types and not all(map(current, names_of(case)))]
            if todo:
                batches[m] = todo
        if batches:
            every_case = list(chain.from_iterable(batches.values()))
            kernels = {m: [key for case in cases for key in kernels_of(case, sm, sms)] for m, cases in batches.items()}
            first = list(preparing(dict.fromkeys(case.format for case in every_case)))
            yield Task(
                [name for case in every_case for name in names_of(case)],
                [*first, *chain.from_iterable(kernels.values())],
                partial(measure_products, shape, batches, first, kernels),
            )


def names_of(case: plan.Case) -> list[Named]:
    """The rows that a product gives."""
    others = {MMA: plan.BY_MMA, SUSTAINED: plan.WITHOUT_PAUSES}
    return [("rows", case), *((name, case) for name, cases in others.items() if case in cases)]


def kernels_of(case: plan.Case, sm: int, sms: int) -> Iterator[Key]:
    """The kernels of a product's rows."""
    for name, _ in names_of(case):
        with suppress(Exception):  # a product that no kernel serves fails when it is measured
            yield from stale.units(name, case.row, sm, sms)


def preparing(formats: Iterable[str]) -> Iterator[Key]:
    """The kernels that bring random weights of formats to a GPU and decode them."""
    for fmt in dict.fromkeys(format_named(name).on_device for name in formats):
        yield PACK.name, fmt, tuple(PACK.template(fmt).items())
        yield DEQUANTIZE_TILES.name, fmt, tuple(DEQUANTIZE_TILES.template(fmt, Out="float").items())


def measure_products(
    shape: tuple[int, int], batches: Mapping[int, list[plan.Case]], first: Sequence[Key],
    kernels: Mapping[int, Sequence[Key]], session: Session,
) -> Iterator[list[Item]]:  # fmt: skip
    """The batches of one shape: the products of each number of rows of x."""
    extras = gpu.Extras(plan.DEQUANTIZED, plan.BY_MMA, plan.WITHOUT_PAUSES)
    session.ready(first)
    operands = gpu.operands_of(session.stream, shape, list(chain.from_iterable(batches.values())), ROTATE)
    yield list(operands.failures)
    for m, cases in batches.items():
        session.ready(kernels[m])
        try:
            yield list(gpu.measure(session.stream, session.cublas, operands, cases, extras))
        except Exception as error:  # other numbers of rows may succeed
            yield [f"{cases[0]} and {len(cases) - 1} others: {error}"]
        session.progress.say(f"{shape[0]}x{shape[1]} M={m}: {len(cases)} products")


def layers(types: Sequence[str], sm: int, sms: int, kernels: bool = True) -> Iterator[Task]:
    """Decode steps by mixture, and layers of experts by model."""
    for mixture in HEADS:
        rows = [{"model": step.MODEL, "types": mixture, "M": m, "x": x} for m in step.M for x in types]
        keys = list(dict.fromkeys(key for row in rows if kernels for key in stale.units(STEPS, row, sm, sms)))
        if kernels:
            keys += preparing(["q4_0", "q4_k", "q6_k", "q8_0"])
        yield Task(named(STEPS, rows), keys, partial(measure_step, mixture, types, keys))
    for model in MODELS:
        pairs = [(t, skew) for t in moe.TOKENS for skew in range(1 + (t in moe.SKEWED))]
        rows = [
            {"model": model.name, "types": model.format, "M": t, "skew": s, "x": x} for t, s in pairs for x in types
        ]
        keys = list(kernels_of_experts(model, types, sm, sms)) if kernels else []
        yield Task(named(EXPERTS, rows), keys, partial(measure_experts, model, types, keys))


def named(name: str, rows: Iterable[Row]) -> list[Named]:
    """The names of rows of a list."""
    return [(name, results.key(row, results.KEYS[name])) for row in rows]


def kernels_of_experts(model: Model, types: Sequence[str], sm: int, sms: int) -> Iterator[Key]:
    """The kernels of a layer of experts, and those of its experts one by one."""
    fmt, shapes = FORMATS[model.format], ((model.f, model.k), (model.k, model.f))
    experts = [stale.Weights(fmt, (model.experts, *shape)) for shape in shapes]
    singles = [stale.Weights(fmt, shape) for shape in shapes]
    yield from needed(experts, sm, sms, moe.TOKENS, ["a16"], [C_TYPES[x] for x in types])
    yield from needed(singles, sm, sms, EXPERT_ROWS, ["a16"], ["half"])


def measure_step(mixture: str, types: Sequence[str], kernels: Sequence[Key], session: Session) -> Iterator[list[Item]]:
    """The steps of a mixture, in one batch."""
    session.ready(kernels)
    yield [(STEPS, row) for row in step.rows(session.stream, gpu.REPEATS, types, [mixture])]
    session.progress.say(f"steps of {mixture}")


def measure_experts(
    model: Model, types: Sequence[str], kernels: Sequence[Key], session: Session
) -> Iterator[list[Item]]:
    """The layers of a model, each row in a batch."""
    session.ready(kernels)
    rows = moe.rows(
        session.stream, session.read_gbs, [model], repeats=gpu.REPEATS, progress=session.progress, types=types
    )
    for row in rows:
        yield [row if isinstance(row, str) else (EXPERTS, row)]


def on_host(stream: Any, files: Files, progress: moe.Progress) -> list[str]:
    """Host times, rates of packing and planes, and sweeps, unless the file has those of the same sources."""
    formats = [FORMATS[name] for name in (*plan.MAIN, *plan.KBIT)]
    options = gpu.Options([FORMATS["q4_0"]], ["a16"], repeats=gpu.REPEATS)
    parts: dict[str, Callable[[], Results]] = {
        "host_us": lambda: host.times(("a16", "a8")),
        CALLS: lambda: {CALLS: calls.rows()},
        EXPERTS_HOST: lambda: {EXPERTS_HOST: moe_host.rows()},
        "pack": lambda: {"pack": pack.rates(stream, formats, ROTATE)},
        "planes": lambda: {"planes": list(planes.rows(stream, formats, ROTATE))},
        **{
            f"q4_0 a16 {n}x{k}": lambda shape=(n, k): {"sweep": dict(gpu.sweeps(stream, shape, options))}  # type: ignore[misc]
            for n, k in plan.SWEPT
        },
    }
    failures: list[str] = []
    for name, part in parts.items():
        if progress.late:
            return failures
        if files.has_part(name):
            continue
        try:
            files.add_part(part())
        except Exception as error:  # other parts may succeed
            failures.append(f"{name}: {error}")
        files.save()
        progress.say(name)
    return failures

"""Products on the CPU beside the CPU libraries of ggml and ik_llama.cpp, and for "a16" NumPy on dense weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from qgemm.arguments import ACTIVATIONS, Activation
from qgemm.cli.weights import random_blocks
from qgemm.errors import QgemmError
from qgemm.formats import FORMATS
from qgemm.ops import matmul
from qgemm.parallel import workers
from qgemm.tensor import Tensor
from qgemm.text import columns

from .ggml import LAYOUTS, Ggml, IkLlama
from .goals import A16_OVER_A8, FIRST_S, HOST_US, OVER_GGML, OVER_GGML_AVX2, OVER_IK, OVER_NUMPY, WARM_MS
from .turns import Calls, Worker, burst, least

COMPARED = ("q4_0", "q8_0", "q4_k", "q6_k", "q5_k", "q4_1", "q5_0", "q5_1", "mxfp4")
GRIDS = ("iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s")
OTHERS = ("q2_k", "q3_k", "iq4_nl", "iq4_xs", "nvfp4", *GRIDS)  # measured for the first shape only
NAMES = (*COMPARED, *OTHERS)
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))  # (N, K)
ROWS = ((1, "hot"), (1, "DRAM"), (16, "hot"), (512, "hot"))  # M, source of W
# Variables by which this project and NumPy's OpenBLAS use AVX2 alone.
AVX2 = {"CC": "cc -mno-avx512f -mno-avxvnni", "OPENBLAS_CORETYPE": "Haswell"}
ROTATED = 128 << 20  # bytes of weights multiplied in turn for "DRAM": more than the caches hold
MAX_COPIES = 15  # ik_llama.cpp has 64 contexts, and a copy needs two in each layout
ROUNDS = 7
# The largest difference to each library, relative to max |y|: all quantize x, in different ways. Sums of ik_llama.cpp
# saturate for the random levels of iq4_xs.
DISAGREEMENT = {Ggml.name: 0.03, IkLlama.name: 0.2}
NUMPY = "NumPy"
PACKED = " packed"  # ends the name of our products by Tensor.packed_for_cpu()
GGML, IK = (tuple(f"{library.name} {layout}" for layout in LAYOUTS) for library in (Ggml, IkLlama))


class Options(NamedTuple):
    """Folders with builds of ggml, of ik_llama.cpp; AVX2 alone, for which these are built; formats, shapes, rounds."""

    ggml: Sequence[Path]
    ik: Path | None = None
    avx2: bool = False
    names: Sequence[str] = NAMES
    shapes: Sequence[tuple[int, int]] = SHAPES
    rounds: int = ROUNDS


class Case(NamedTuple):
    """One product, by all values that determine its data."""

    format: str
    n: int
    k: int
    m: int
    where: str = "hot"  # "hot" or DRAM
    isa: str = "native"  # "native" or, in older results, AVX2

    def blocks(self) -> Any:
        """Random blocks [N, K / weights]; none of level -128, which no encoder writes and others multiply wrongly."""
        blocks = random_blocks(FORMATS[self.format], self.n, self.k, np.random.default_rng(0))
        if "qs" in (blocks.dtype.names or ()) and blocks.dtype["qs"].base.kind == "i":
            blocks["qs"] = np.maximum(blocks["qs"], -127)
        return blocks

    def x(self) -> Any:
        """Random activations [M, K]."""
        return np.random.default_rng(1).standard_normal((self.m, self.k), np.float32)

    def copies(self, nbytes: int) -> int:
        """The number of copies of W that are multiplied in turn."""
        return 1 if self.where == "hot" else min(-(-ROTATED // nbytes), MAX_COPIES)


class Row(NamedTuple):
    """A case and the least milliseconds of each call."""

    case: Case
    ms: dict[str, float]

    def goals(self) -> Iterator[tuple[str, float, float, float]]:
        """Its comparisons: a name, the measured ratio, the required ratio and the aim."""
        case, ms = self.case, self.ms
        ggml, ik = (over(ms, "a8", theirs) for theirs in (GGML, IK))
        if case.isa == "AVX2" and ggml is not None:
            yield "ggml / a8", ggml, OVER_GGML_AVX2, OVER_GGML_AVX2
        elif ggml is not None:  # its goals are of CPUs with AVX-512, where ik_llama.cpp is not measured
            yield "ggml / a8", ggml, *self._goals(OVER_GGML if ik is None else {})
        if ik is not None:
            yield "ik / a8", ik, *self._goals(OVER_IK)
        if NUMPY in ms and case.m in OVER_NUMPY:
            yield f"{NUMPY} / a16", ms[NUMPY] / time_of(ms, "a16"), *OVER_NUMPY[case.m]
        if case.m == 1 and "a16" in ms and case.where == "hot":
            yield "a8 / a16", ms["a8"] / ms["a16"], 1 / A16_OVER_A8, 1.0

    def _goals(self, goals: Mapping[str, Sequence[tuple[float, float]]]) -> tuple[float, float]:
        """The required ratio and the aim, zeros for a format or shape without."""
        case = self.case
        if case.format not in goals or (case.n, case.k) != SHAPES[0]:
            return 0.0, 0.0
        return goals[case.format][ROWS.index((case.m, case.where))]

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {**self.case._asdict(), "ms": {name: float(f"{ms:.4g}") for name, ms in self.ms.items()}}


def over(ms: Mapping[str, float], ours: str, theirs: Iterable[str]) -> float | None:
    """The least of their times over ours; None where they were not measured."""
    least_ms = min((ms[name] for name in theirs if name in ms), default=None)
    return None if least_ms is None else least_ms / time_of(ms, ours)


def time_of(ms: Mapping[str, float], activation: str) -> float:
    """Our time, by the blocks of the file or by packed weights, whichever is less."""
    return min(ms[activation], ms.get(activation + PACKED, np.inf))


def ours(activations: Sequence[Activation]) -> Callable[[Case], Calls]:
    """In a worker: qgemm.matmul, by the blocks of a file and by packed weights."""

    def prepare(case: Case) -> Calls:
        blocks, x, fmt = case.blocks(), case.x(), FORMATS[case.format]
        weights = [Tensor(fmt, (case.n, case.k), blocks.copy()) for _ in range(case.copies(blocks.nbytes))]
        layouts = {"": weights, PACKED: [w.packed_for_cpu() for w in weights]}
        names = [(name, layout) for name in activations for layout in layouts]
        outs: dict[str, Any] = {name + layout: np.empty((case.m, case.n), np.float32) for name, layout in names}
        calls: dict[str, Any] = {
            name + layout: [partial(matmul, x, w, name, out=outs[name + layout]) for w in layouts[layout]]
            for name, layout in names
        }
        return Calls(calls, lambda name: outs[name], lambda: None)

    return prepare


def of_ggml(folder: Path, threads: int, kind: type[Ggml] = Ggml) -> Callable[[Case], Calls]:
    """In a worker: the products of ggml or ik_llama.cpp, by layout."""
    library = kind(folder, threads)

    def prepare(case: Case) -> Calls:
        blocks, x, fmt = case.blocks(), case.x(), FORMATS[case.format]
        copies = case.copies(blocks.nbytes)
        variants = {
            f"{kind.name} {layout}": [library.product(fmt, blocks, x, layout) for _ in range(copies)]
            for layout in LAYOUTS
        }
        calls = {
            name: [product for product in copies_of_w if product]
            for name, copies_of_w in variants.items()
            if copies_of_w[0]
        }

        def close() -> None:
            for copies_of_w in calls.values():
                for product in copies_of_w:
                    product.free()

        return Calls(calls, lambda name: calls[name][0].y(), close)

    return prepare


def of_numpy() -> Callable[[Case], Calls]:
    """In a worker: x @ W.T of dense float32 weights."""

    def prepare(case: Case) -> Calls:
        x, w = case.x(), FORMATS[case.format].dequantize(case.blocks())
        y = np.empty((case.m, case.n), np.float32)
        return Calls({NUMPY: [lambda: np.matmul(x, w.T, out=y)]}, lambda name: y, lambda: None)

    return prepare


def run(options: Options) -> dict[str, Any]:
    """All rows as a document; the fastest of several builds of ggml counts in each row."""
    threads = workers()
    version = Ggml(options.ggml[0], threads).version()
    names = ("QGEMM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
    counts = {**dict.fromkeys(names, str(threads)), **(AVX2 if options.avx2 else {})}
    pool = {f"ggml {i}": Worker(of_ggml, (path, threads), counts) for i, path in enumerate(options.ggml)}
    if options.ik is not None:
        pool["ik"] = Worker(of_ggml, (options.ik, threads, IkLlama), counts)
    pool |= {"qgemm": Worker(ours, (ACTIVATIONS,), counts), NUMPY: Worker(of_numpy, (), counts)}
    cases = [
        Case(name, *shape, *row)
        for shape in options.shapes
        for name in options.names
        if name in COMPARED or shape == options.shapes[0]
        for row in ROWS
    ]
    rows_measured = list(measured(pool, cases, options.rounds))
    rows = [row.document() for row in rows_measured]
    cpu = {"cpu": cpu_name(), "isa": isa()}
    if options.avx2:
        cpu = {"cpu": f"{cpu_name()}, without AVX-512", "isa": "AVX2"}
    facts = {**cpu, "threads": threads, "ggml": version}
    return {**facts, **({} if options.ik is None else {"ik": built_from(options.ik)}), **host(), "rows": rows}


def measured(pool: Mapping[str, Worker], cases: Sequence[Case], rounds: int) -> Iterator[Row]:
    """A row for each case, with a bar on stderr; then the workers end. QgemmError if a product differs from ggml's."""
    for case in tqdm(cases, disable=None, leave=False):
        able = {name: worker for name, worker in pool.items() if name != NUMPY or case.m in OVER_NUMPY}
        ms: dict[str, float] = {}
        for (owner, name), seconds in least(able, case, rounds).items():
            ms[name] = min(1e3 * seconds, ms.get(name, np.inf))
            if name in (*GGML, *IK):
                limit = DISAGREEMENT[name.split()[0]]
                for mine in ("a8", "a8" + PACKED):
                    check(case, pool["qgemm"].ask("result", mine), pool[owner].ask("result", name), limit)
        yield Row(case, ms)
    for worker in pool.values():
        worker.close()


def check(case: Case, y: Any, theirs: Any, limit: float) -> None:
    """QgemmError if two products differ by more than the limit, relative to the largest number."""
    worst = float(np.abs(y - theirs).max() / np.abs(theirs).max())
    if not worst <= limit:
        raise QgemmError(f"{case}: y differs from ggml's by {worst:.3g} of its largest number")


# ---- host time of a call


def host() -> dict[str, float]:
    """Microseconds of a call on a tiny matrix; a first product: seconds from an empty cache, ms from a filled one."""
    fmt = FORMATS["q4_0"]
    w = Tensor(fmt, (32, 256), random_blocks(fmt, 32, 256, np.random.default_rng(0)))
    x, y = np.ones((1, 256), np.float32), np.empty((1, 32), np.float32)

    def seconds(activation: Activation) -> float:
        return min(burst([lambda: matmul(x, w, activation, out=y)]) for _ in range(ROUNDS))

    times = {f"host_us_{activation}": 1e6 * seconds(activation) for activation in ACTIVATIONS}
    with tempfile.TemporaryDirectory() as folder:
        first, warm = (first_use(folder) for _ in range(2))
    numbers = {**times, "first_s": first, "warm_ms": 1e3 * warm}
    return {name: float(f"{number:.3g}") for name, number in numbers.items()}


FIRST_USE = """
import time, numpy, qgemm
from benchmarks.turns import realtime
from qgemm.formats import FORMATS
fmt = FORMATS["q4_0"]
w = qgemm.Tensor(fmt, (32, 256), numpy.zeros((32, 8), fmt.dtype))
x = numpy.ones((1, 256), numpy.float32)
with realtime():
    start = time.perf_counter()
    qgemm.matmul(x, w, "a8")
    print(time.perf_counter() - start)
"""


def first_use(cache: str) -> float:
    """Seconds of the first product of a process with this cache of compiled code."""
    environment = {**os.environ, "QGEMM_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", FIRST_USE]
    return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def cpu_facts() -> dict[str, str]:
    """The lines of /proc/cpuinfo about the first CPU, by name."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def isa() -> str:
    """The widest vector instructions of the CPU, "" where they are not known."""
    flags = cpu_facts().get("flags", "").split()
    return next((name for name, flag in (("AVX-512", "avx512bw"), ("AVX2", "avx2")) if flag in flags), "")


def built_from(folder: Path) -> str:
    """The commit of the sources that CMake built a folder from."""
    lines = (folder / "CMakeCache.txt").read_text().splitlines()
    source = next(line.partition("=")[2] for line in lines if line.startswith("CMAKE_HOME_DIRECTORY"))
    command = ["git", "-C", source, "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def cpu_name() -> str:
    """The CPU, by name, family and model."""
    facts = cpu_facts()
    numbers = (f", {name.removeprefix('cpu ')} {facts[name]}" for name in ("cpu family", "model") if name in facts)
    return facts.get("model name", "a CPU without a name") + "".join(numbers)


def table(results: Mapping[str, Any]) -> str:
    """The document for a terminal, each row with its goals."""
    ours_ms = ("a8", "a8" + PACKED, "a16", "a16" + PACKED)
    head = (
        "format",
        "N x K",
        "M",
        "W",
        *(f"{name} ms" for name in ours_ms),
        *GGML,
        *IK,
        NUMPY,
        "times as fast (required, aim)",
    )
    cells = []
    for row in rows_of(results):
        case, ms = row.case, row.ms
        times = (f"{ms[name]:.3f}" if name in ms else "" for name in (*ours_ms, *GGML, *IK, NUMPY))
        goals = (f"{comparison} {ratio:.2f}" + (f" ({must:.2f}, {aim:.2f})" + "!" * (ratio < must)) * bool(must)
                 for comparison, ratio, must, aim in row.goals())  # fmt: skip
        where = case.where if case.isa == "native" else case.isa
        cells.append((case.format, f"{case.n}x{case.k}", str(case.m), where, *times, "; ".join(goals)))
    facts = (
        machine(results),
        f"us of a call: a8 {results['host_us_a8']}, a16 {results['host_us_a16']} (at most {HOST_US:g}); first product: "
        f"cache empty {results['first_s']} s ({FIRST_S:g}), filled {results['warm_ms']} ms ({WARM_MS:g})",
    )
    return "\n".join([*facts, "", columns("<<><>>>>>>>>><", [head, *cells])])


def machine(results: Mapping[str, Any]) -> str:
    """The CPU, its threads, and the versions of the libraries."""
    cpu = f"{results['cpu']}, {results['isa']}" if results["isa"] else results["cpu"]
    ik = f", ik_llama.cpp {results['ik']}" if "ik" in results else ""
    return f"{cpu}, {results['threads']} threads, ggml {results['ggml']}{ik}"


def rows_of(results: Mapping[str, Any]) -> list[Row]:
    """The rows of a results document."""
    return [Row(Case(*(row[name] for name in Case._fields)), row["ms"]) for row in results["rows"]]


def missed(results: Mapping[str, Any]) -> int:
    """The number of missed goals."""
    misses = [ratio < must for row in rows_of(results) for _, ratio, must, _ in row.goals()]
    misses += [results[f"host_us_{activation}"] > HOST_US for activation in ACTIVATIONS]
    return sum([*misses, results["first_s"] > FIRST_S, results["warm_ms"] > WARM_MS])


def runs(path: Path) -> list[dict[str, Any]]:
    """The documents of a file, one for each CPU."""
    return list(json.loads(path.read_text())["runs"])


def latest(path: Path) -> list[dict[str, Any]]:
    """The document that was added last for each kind of instructions."""
    return list({run["isa"]: run for run in runs(path)}.values())


def merged(path: Path, results: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The documents of a file with this one in it: rows of the same CPU that were not measured again stay."""
    before = runs(path) if path.is_file() else []
    same = next((run for run in before if run["cpu"] == results["cpu"]), None)
    if same is None:
        return [*before, results]
    rows = {row.case: row for row in (*rows_of(same), *rows_of(results))}
    combined = {**results, "rows": [row.document() for row in rows.values()]}
    return [combined if run is same else run for run in before]


def file_text(every_run: Iterable[Mapping[str, Any]]) -> str:
    """The JSON of a file with the documents of several CPUs."""
    texts = ",\n".join(document(results).rstrip() for results in every_run)
    return f'{{"runs": [\n{texts}\n]}}\n'


def text_with(path: Path, results: Mapping[str, Any]) -> str:
    """The JSON of a file after results were merged into it."""
    return file_text(merged(path, results))


def document(results: Mapping[str, Any]) -> str:
    """JSON with a line for each row."""
    facts = {name: value for name, value in results.items() if name != "rows"}
    rows = ",\n  ".join(json.dumps(row) for row in results["rows"])
    return f'{json.dumps(facts)[:-1]}, "rows": [\n  {rows}\n]}}\n'

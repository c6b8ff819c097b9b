"""Tune prefill_sm90: time its configs on a GPU, fit the cost model to the times, write the configs worth compiling.

Times are added to tools/results/tune_sm90_GPU.json.gz; the fit reads only that file and writes
qgemm/cuda/configs/prefill_sm90.json, so --fit needs no GPU. Timing needs compute capability 9.0: every config that fits
is compiled, checked, and replayed over weights larger than the L2 cache, alternating with the other configs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import fit_sm90
import numpy as np
from tqdm import tqdm

from benchmarks.results import file_stem
from qgemm import FORMATS, backends
from qgemm.cli.bench import formats, shapes
from qgemm.cli.common import count, counts
from qgemm.codec.format import Format
from qgemm.cuda.configs import read
from qgemm.cuda.jit import cache, codegen, nvrtc
from qgemm.cuda.kernels.prefill_sm90 import PREFILL_SM90, PrefillLaunch
from qgemm.cuda.kernels.sm90_config import MAX_PARTIALS, TALL, Sm90Config, prefill_template
from qgemm.cuda.kernels.sm90_cost import DATA
from qgemm.cuda.layout.tile import ROWS
from qgemm.cuda.problem import Output, Problem

RESULTS = Path(__file__).parent / "results"
TOKENS = (16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 224, 256)  # token tiles
WARPGROUPS, MAX_ACC = (2, 3, 4), 512  # warpgroups of a CTA; largest warpgroups x tokens whose sums fit registers
TALL_TOKENS = 80  # largest token tile with four row_blocks: 96 tokens spill, more are slower
MAX_SMS = 144  # upper limit for GPUs of sm_90
NAMES = (PREFILL_SM90.name, "prefill")  # names of the kernel in results; the second until 2026-11-23


def candidates(fmt: Format, m: int, tuned_only: bool = False) -> Iterator[Sm90Config]:
    """Configs that fit a format, whose tokens cover M rows of x in the fewest work tiles or up to twice the number.

    tuned_only: only configs in the data file for any format.
    """
    tuned = {tuple(row[:5]) for rows in read(DATA)["formats"].values() for row in rows}
    fewest = -(-m // TOKENS[-1])
    sizes = {min(size for size in TOKENS if size * tiles >= m) for tiles in range(fewest, 2 * fewest + 1)}
    ways = product(sorted(sizes), range(1, TALL + 1), range(1, WARPGROUPS[-1] + 1), (1, 2, 4), (False, True))
    for config in (Sm90Config(*way) for way in ways):
        groups = config.row_blocks * config.wg_split_k
        partials = config.tokens // config.epi_tokens * config.row_blocks * MAX_SMS
        few = groups in WARPGROUPS and groups * config.tokens <= MAX_ACC and partials <= MAX_PARTIALS
        few = few and (config.row_blocks < TALL or config.tokens <= TALL_TOKENS)
        if few and config.fits(fmt) and (not tuned_only or config[:5] in tuned):
            yield config


def compiled(unit: tuple[str, Sm90Config]) -> str:
    """Compile the kernel of a format and config into the cache -> the error, or ""."""
    name, config = unit
    fmt = FORMATS[name]
    try:
        source = codegen.compose("prefill_sm90", fmt, **prefill_template(fmt, config, "half"))
        cache.cached(source, "sm_90a", codegen.headers(fmt))
    except nvrtc.CompileError as error:
        return str(error)
    return ""


def measure(
    stream: Any, w: Any, fmt: Format, shape: tuple[int, int], m: int, configs: Sequence[Sm90Config], repeats: int,
) -> Any:  # fmt: skip
    """A row of the file of times: the current choice, and us of each config that can serve. w: an operands.Matrix."""
    import cupy

    from benchmarks import operands
    from qgemm.cli import timing
    from qgemm.cuda.problem import gpu as gpu_of

    (n, k), rng, on = shape, np.random.default_rng(0), gpu_of(cupy.cuda.Device().id)
    p = Problem(fmt, "a16", m, n, k, on.sm)
    p = p._replace(outputs=(Output(n, "float16"),), device=on.device, sms=on.sms)
    values = cupy.asarray(rng.standard_normal((m, k), np.float32)).astype(np.float16)
    y, chosen = cupy.empty((m, n), np.float16), PREFILL_SM90.choose(p)
    cupy.cuda.Device().synchronize()
    loops = {}
    for config in dict.fromkeys((chosen, *configs)):
        if not config.serves(m, -(-n // ROWS), on.sms):
            continue
        launch = PrefillLaunch(p, config)

        def multiply(_: Any, w: Any, y: Any, launch: PrefillLaunch = launch) -> None:
            launch(cupy.cuda.get_current_stream().ptr, values.data.ptr, w.pointer, y.data.ptr)

        operands.check(stream, multiply, values, w, y, operands.tolerance("a16", "float16"))
        loops[config] = timing.capture(stream, operands.products(multiply, values, w, y))
    times = timing.compare(stream, list(loops.values()), repeats)
    us = {fit_sm90.key(config): median.us for config, median in zip(loops, times, strict=True)}
    return {"format": fmt.name, "n": n, "k": k, "m": m, "before": fit_sm90.key(chosen), "us": us}


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The rows of both files; for a problem in both the new row."""
    rows = {tuple(row[name] for name in ("format", "n", "k", "m")): row for row in old.get("rows", [])}
    rows |= {tuple(row[name] for name in ("format", "n", "k", "m")): row for row in new["rows"]}
    return {**old, **new, "rows": list(rows.values())}


def fit(path: Path, results: Path, only: Sequence[str]) -> None:
    """Fit a file of times and write the data file. only: see `fit_sm90.fit`."""
    rows = json.loads(results.read_text())["rows"] if results.exists() else []
    mine = (row for row in rows if row["route"] in NAMES and row["activation"] == "a16")
    routed = {(row["format"], row["N"], row["K"], row["M"]) for row in mine}
    fit_sm90.write(fit_sm90.fit(fit_sm90.load(path), routed, only))


def main() -> int:
    """Compile the candidates on all cores and time them, or fit the times of an earlier run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", metavar="GPU", help="only fit the times of this GPU, e.g. h200, of --formats or all")
    parser.add_argument("--formats", type=formats, help="e.g. q4_0,q5_k (default q4_0)")
    parser.add_argument("--shapes", type=shapes, default="4096x4096,8192x8192", help="N x K, N a multiple of 512")
    parser.add_argument("--m", type=counts, default="16,64,256", help="rows of x (default 16,64,256)")
    parser.add_argument("--repeats", type=count, default=5, help="timed replays (default 5)")
    parser.add_argument("--kept", action="store_true", help="only configs of the data file")
    parser.add_argument("--compile", action="store_true", help="only compile")
    options = parser.parse_args()
    if options.fit:
        only = [fmt.name for fmt in options.formats or ()]
        fit(RESULTS / f"tune_sm90_{options.fit}.json.gz", RESULTS / f"{options.fit}.json", only)
        return 0
    options.formats = options.formats or [FORMATS["q4_0"]]
    if untiled := [str(fmt) for fmt in options.formats if not fmt.tiled]:
        parser.error(f"no kernel multiplies by {', '.join(untiled)} from tiles")
    cuda = backends()["cuda"]
    if not (options.compile or cuda.available):
        print(cuda.detail, file=sys.stderr)
        return 1
    units = list(
        dict.fromkeys(
            (fmt.name, config)
            for fmt, m in product(options.formats, options.m)
            for config in candidates(fmt, m, options.kept)
        )
    )
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        errors = list(filter(None, tqdm(pool.map(compiled, units, chunksize=4), total=len(units), disable=None)))
    print(*errors, f"{len(units) - len(errors)} of {len(units)} kernels are compiled", sep="\n")
    if options.compile or errors:
        return 1 if errors else 0
    path = RESULTS / f"tune_sm90_{file_stem(cuda.facts['device'])}.json.gz"
    for row in measured(options):
        old = fit_sm90.load(path) if path.exists() else {}
        facts = {"gpu": cuda.facts["device"], "sms": cuda_sms(), "rows": [row]}
        path.write_bytes(gzip.compress(json.dumps(merged(old, facts), separators=(",", ":")).encode(), mtime=0))
        for choice, name in (("chosen", row["before"]), ("fastest", min(row["us"], key=row["us"].__getitem__))):
            title = f"{row['format']} {row['n']}x{row['k']} M={row['m']}"
            print(f"{title} {choice}: {row['us'][name]:.2f} us, {fit_sm90.parse(name)}", flush=True)
    return 0


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each problem; the weights of a format and shape are packed once for all M."""
    import cupy

    from benchmarks import operands

    stream = cupy.cuda.Stream(non_blocking=True)
    for shape, fmt in product(options.shapes, options.formats):
        w = operands.matrix(stream, fmt, shape, np.random.default_rng(0), operands.ROTATE)
        for m in options.m:
            configs = list(candidates(fmt, m, options.kept))
            yield measure(stream, w, fmt, shape, m, configs, options.repeats)


def cuda_sms() -> int:
    """SMs of the current device."""
    import cupy

    return int(cupy.cuda.Device().attributes["MultiProcessorCount"])


if __name__ == "__main__":
    sys.exit(main())

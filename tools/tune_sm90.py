"""Race the configs of the prefill kernel: for each format, shape and M what SM90_CONFIGS picks against all others that
fit.

Prints the microseconds of the table's choice, and what the fastest take in units of it: that is how SM90_CONFIGS was
found. Needs a GPU of compute capability 9.0; products are checked before they are timed. With --compile the kernels
only go where such a GPU looks first (qgemm/cuda/jit/cache.py), on any machine.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import Any

import numpy as np
from tqdm import tqdm

from qgemm import FORMATS
from qgemm import backend as backends
from qgemm.cli.bench import formats, shapes
from qgemm.cli.common import count, counts
from qgemm.codec.format import Format
from qgemm.cuda.jit import cache, codegen, nvrtc
from qgemm.cuda.kernels.sm90_config import (
    MAX_PARTIALS,
    SHARED,
    TOKENS,
    Sm90Config,
    memory_bytes,
    prefill_template,
    sm90_config_for,
)
from qgemm.cuda.layout.tile import ROWS, k_blocks

WARPGROUPS, MOST_SUMS = (2, 3, 4), 512  # warpgroups of a CTA; these times tokens, for whose sums there are registers
MOST_SMS = 144  # multiprocessors of such a GPU
SHOWN = 4


def candidates(fmt: Format, m: int) -> Iterator[Sm90Config]:
    """Tilings that fit a format, of tokens for M rows of x in as few tiles as possible, or up to twice as many."""
    fewest = -(-m // TOKENS[-1])
    tokens = {min(size for size in TOKENS if size * tiles >= m) for tiles in range(fewest, 2 * fewest + 1)}
    ways = product(sorted(tokens), range(1, 4), range(1, WARPGROUPS[-1] + 1), (1, 2, 4), (False, True))
    for size, row_blocks, wg_split_k, k_blocks_per_stage, single_tile in ways:
        warpgroups, along = row_blocks * wg_split_k, k_blocks(fmt)
        config = Sm90Config(0, 0, 0, size, row_blocks, wg_split_k, k_blocks_per_stage, single_tile)
        least = wg_split_k + 1 if k_blocks_per_stage == 4 else 2 * wg_split_k  # stages
        if (
            warpgroups in WARPGROUPS
            and warpgroups * size <= MOST_SUMS
            and size // config.epi_tile * row_blocks * MOST_SMS <= MAX_PARTIALS
            and (k_blocks_per_stage % along == 0 or along % k_blocks_per_stage == 0)
            and memory_bytes(fmt, config, least) <= SHARED
        ):
            yield config


def compiled(pair: tuple[str, Sm90Config]) -> bool:
    """Compile the kernel of a format and config into the cache -> whether the kernel takes it."""
    fmt = FORMATS[pair[0]]
    try:
        source = codegen.compose("prefill_sm90", fmt, **prefill_template(fmt, pair[1], "half"))
        cache.cached_cubin(source, "sm_90a", codegen.headers(fmt))
    except nvrtc.CompileError as error:
        if "static assertion failed" not in str(error):
            raise
        return False
    return True


def compare(
    fmt: Format, shape: tuple[int, int], rows: list[int], configs: list[Sm90Config], repeats: int
) -> Iterator[str]:
    """A line for each M of `rows`: the table's choice and the fastest of these configs."""
    import cupy

    from qgemm.bench import gpu, timing
    from qgemm.cuda.kernels.prefill_sm90 import PrefillLaunch
    from qgemm.cuda.problem import Output, Problem
    from qgemm.cuda.problem import gpu as gpu_of

    (n, k), rng, device = shape, np.random.default_rng(0), cupy.cuda.Device().id
    stream, row_blocks, max_ctas = cupy.cuda.Stream(non_blocking=True), -(-n // ROWS), gpu_of(device).sms
    w = gpu.matrix(stream, fmt, shape, rng, gpu.ROTATE)
    for m in rows:
        x = cupy.asarray(rng.standard_normal((m, k), np.float32).astype(np.float16))
        y = cupy.empty((m, n), np.float16)
        cupy.cuda.Device().synchronize()
        fitting = set(candidates(fmt, m))
        chosen = sm90_config_for(fmt, m, row_blocks, k, max_ctas).plain
        loops = {}
        for config in (chosen, *(config for config in configs if config in fitting)):
            if config.single_tile and config.tiles(m, row_blocks) > max_ctas:
                continue
            launch = PrefillLaunch(
                Problem(fmt, "a16", m, n, k, 90, "half", (Output(n, "float16"),), 0, device, max_ctas), config
            )

            def multiply(x: Any, w: Any, y: Any, launch: PrefillLaunch = launch) -> None:
                launch(cupy.cuda.get_current_stream().ptr, x.data.ptr, w.pointer, y.data.ptr)

            gpu.check(stream, multiply, x, w, y, gpu.TOLERANCE["a16"])
            loops[config] = timing.capture(stream, gpu.products(multiply, x, w, y))
        times = timing.compare(stream, list(loops.values()), repeats)
        us = {config: found.us for config, found in zip(loops, times, strict=True)}
        own = us.pop(chosen)
        best = (f"{us[config] / own:.3f} {name(config)}" for config in sorted(us, key=us.__getitem__)[:SHOWN])
        yield f"{fmt.name} {n}x{k} M={m}: {own:.2f} {name(chosen)} | " + " | ".join(best)


def name(config: Sm90Config) -> str:
    """E.g. "64x2x1 stage 4 single_tile": tokens, row_blocks, wg_split_k."""
    return (
        f"{config.tokens}x{config.row_blocks}x{config.wg_split_k} stage {config.k_blocks_per_stage}"
        + " single_tile" * config.single_tile
    )


def main() -> int:
    """Compile all candidates on all cores, then race them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", type=formats, default="q4_0", help="e.g. q4_0,q5_k (default q4_0)")
    parser.add_argument("--shapes", type=shapes, default="4096x4096,8192x8192", help="N x K, N a multiple of 512")
    parser.add_argument("--m", type=counts, default="16,64,256", help="rows of x (default 16,64,256)")
    parser.add_argument("--repeats", type=count, default=5, help="replays that count (default 5)")
    parser.add_argument("--compile", action="store_true", help="only compile")
    options = parser.parse_args()
    if untiled := [str(fmt) for fmt in options.formats if not fmt.slots]:
        parser.error(f"no kernel multiplies by {', '.join(untiled)} from tiles")
    cuda = backends()["cuda"]
    if not (options.compile or cuda.available):
        print(cuda.detail, file=sys.stderr)
        return 1
    wanted = product(options.formats, options.m)
    pairs = {(fmt.name, config): None for fmt, m in wanted for config in candidates(fmt, m)}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        done = list(tqdm(pool.map(compiled, pairs, chunksize=4), total=len(pairs), delay=1, disable=None))
    taken = [pair for pair, fits in zip(pairs, done, strict=True) if fits]
    print(f"{len(taken)} of {len(pairs)} kernels are in {cache.cache_dir()}")
    if options.compile:
        return 0
    for shape, fmt in product(options.shapes, options.formats):
        configs = [config for of, config in taken if of == fmt.name]
        for line in compare(fmt, shape, options.m, configs, options.repeats):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Run every kernel family under NVIDIA's compute-sanitizer: memcheck, racecheck, initcheck, synccheck.

CuPy's memory pool is off, so that every array has its own allocation and out-of-bounds accesses are detected. Needs a
GPU and the CUDA toolkit's compute-sanitizer; exits with 1 if a tool reports anything. Arguments: tools, formats and
families, all by default: products, clusters (CTAs that share rows of W), experts (routed, sorted), eight_bits.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from typing import Any

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
FAMILIES = ("products", "clusters", "experts", "eight_bits")
SUPER_BLOCK = 256
TOKENS_OF_EXPERTS = (1, 5, 40)  # the last number also sorted by expert
# N -> M: token tiles of every kernel; tiles of two row_blocks, of which the last has only one.
M = {72: (1, 3, 9, 16, 20, 70, 130), 64 * 99: (120,)}
SPLIT_K = {72: 4, 64 * 99: 2}  # split-K of prefill's tiles: two pairs of CTAs, or one pair
WIDE = 64 * 99  # the N for which prefill is also forced to tiles of two row_blocks
PIPELINES = ((2, 3), (3, 5), (4, 6))  # splits, stages


def work(tool: str, formats: list[str], families: list[str]) -> None:
    """Run the kernels of these families for these formats.

    Under racecheck every lane of a warp releases a stage of prefill separately, see kernels/gemm/sm90/config.cuh.
    """
    import cupy
    import numpy as np

    import qgemm
    from qgemm.cuda.kernels import sm90_config

    cupy.cuda.set_allocator(None)
    sm90_config.ARRIVALS = 32 if tool == "racecheck" else 1
    rng, sm = np.random.default_rng(0), int(cupy.cuda.Device().compute_capability)
    for fmt in (qgemm.FORMATS[name] for name in formats):
        if "clusters" in families and sm >= 90:
            clusters(random_tensor(fmt, (72, 5 * SUPER_BLOCK), rng).to_device(), rng, sm)
        if "experts" in families:
            experts(fmt, rng, sm)
        if "eight_bits" in families and fmt.integer:
            eight_bits(random_tensor(fmt, (72 + 64, 5 * SUPER_BLOCK), rng).to_device(), rng, sm)
    if "products" in families:
        products(tool, formats)


def random_tensor(fmt: Any, shape: tuple[int, ...], rng: Any) -> Any:
    """Random bytes as blocks."""
    import numpy as np

    import qgemm

    blocks = (*shape[:-1], shape[-1] // fmt.weights)
    raw = np.frombuffer(rng.bytes(int(np.prod(blocks)) * fmt.block_bytes), fmt.dtype).reshape(blocks)
    return qgemm.Tensor(fmt, shape, raw if fmt.tile.digits is None else fmt.tile.digits.canonical(raw))


def clusters(w: Any, rng: Any, sm: int) -> None:
    """Decode by a config of each token tile whose CTAs share rows of W through distributed shared memory."""
    import cupy
    import numpy as np

    from qgemm.cuda.kernels.decode import DECODE, TOKEN_TILES
    from qgemm.cuda.kernels.decode_config import A16, decode_configs_for

    for tokens in TOKEN_TILES:
        configs = (row for row in decode_configs_for(w.format, A16, tokens, sm) if row.cluster_split_k > 1)
        if (config := next(configs, None)) is not None:
            x = cupy.asarray(rng.standard_normal((tokens, w.shape[1])).astype(np.float16))
            by_config(DECODE, w, x, "half", tokens, config)
    print(f"{w.format}, clusters: done", flush=True)


def eight_bits(w: Any, rng: Any, sm: int) -> None:
    """Products of eight bits of both factors, for both group sizes, by every config of each kernel of this GPU."""
    import cupy
    import numpy as np

    import qgemm
    from qgemm.codec.group_activations import GROUP_COLUMNS, INTEGER, multiplies
    from qgemm.cuda.kernels.gemm_sm80_s8 import GEMM_SM80_S8, serves
    from qgemm.cuda.kernels.gemm_sm90_s8 import GEMM_SM90_S8
    from qgemm.cuda.kernels.prefill_sm80 import Plan
    from qgemm.cuda.kernels.prefill_sm80_eight_bits import PREFILL_SM80_EIGHT_BITS
    from qgemm.cuda.kernels.prefill_sm90_eight_bits import PREFILL_SM90_EIGHT_BITS
    from qgemm.cuda.kernels.routes import can_serve
    from qgemm.cuda.problem import EIGHT_BITS, Output, Problem, gpu

    on, (n, k), m = gpu(cupy.cuda.Device().id), w.shape, 270
    x = cupy.asarray(rng.standard_normal((m, k)).astype(np.float16))
    bias, y = cupy.ones(n, np.float32), cupy.zeros((m, n), np.float32)
    stream = cupy.cuda.get_current_stream().ptr
    for kind in (group for group in GROUP_COLUMNS if multiplies(group, w.format)):
        prepared = qgemm.quantize_activations(x, kind)
        p = Problem(w.format, kind, m, n, k, sm, EIGHT_BITS, (Output(n, bias="float32"),), 0, on.device, on.sms)
        by_mma = [PREFILL_SM80_EIGHT_BITS, *[GEMM_SM80_S8] * (kind in INTEGER and serves(w.format))]
        plans = ((kernel, plan.config) for kernel in by_mma for plan in kernel.configs(p))
        runs, within = [(kernel, Plan(config, split_k)) for kernel, config in plans for split_k in (1, 3)], []
        if can_serve(GEMM_SM90_S8, p):
            ranked = [config for config, _ in GEMM_SM90_S8.ranked(p)]
            runs += [(GEMM_SM90_S8, config) for config in ranked]
            within += [(GEMM_SM90_S8, config) for config in ranked if config.requantizers]
        if can_serve(PREFILL_SM90_EIGHT_BITS, p):
            every = [(PREFILL_SM90_EIGHT_BITS, config) for config, _ in PREFILL_SM90_EIGHT_BITS.ranked(p)]
            runs, within = runs + every, within + every
        for kernel, plan in runs:
            kernel.launch(p, plan)(stream, prepared.pointer, w.pointer, y.data.ptr, bias.data.ptr, 0)
        for kernel, plan in within:
            launch = kernel.launch(p._replace(x="half"), plan)
            launch(stream, x.data.ptr, w.pointer, y.data.ptr, bias.data.ptr, 0)
        y.get()
    print(f"{w.format}, eight bits: done", flush=True)


def experts(fmt: Any, rng: Any, sm: int) -> None:
    """Products and layers, including ids without an expert: token by token, and tokens sorted by expert; ragged N.

    Tokens are sorted for wgmma, if the GPU has it, and for mma.sync; few tokens also run the kernels before sm_90.
    """
    from unittest.mock import patch

    import cupy
    import numpy as np

    import qgemm
    from qgemm.cuda.call import grouped
    from qgemm.cuda.call import plan as launches
    from qgemm.cuda.kernels import moe_prefill_sm80
    from qgemm.cuda.kernels.expert_tiles import DECODE_TILE
    from qgemm.cuda.kernels.routes import WGMMA
    from qgemm.cuda.kernels.sm90_token_tiles import GROUPED_TOKENS
    from qgemm.cuda.problem import gpu

    n, k = SUPER_BLOCK, 3 * SUPER_BLOCK
    gate, up, ragged, down = (
        random_tensor(fmt, (4, *shape), rng).to_device() for shape in ((n, k), (n, k), (72, k), (k, n))
    )
    for tokens in TOKENS_OF_EXPERTS:
        x = cupy.asarray((rng.standard_normal((tokens, k)) / 64).astype(np.float16))
        ids, weights = cupy.asarray(rng.integers(-1, 5, (tokens, 2))), cupy.full((tokens, 2), 0.5, np.float32)
        roads = [(sm, 0), (moe_prefill_sm80.MIN_SM, 0)]
        if tokens == max(TOKENS_OF_EXPERTS):
            roads += [(sm, tile) for tile in (DECODE_TILE, *GROUPED_TOKENS[:2]) if sm in range(*WGMMA)]
            roads += [(moe_prefill_sm80.MIN_SM, tile) for tile in (DECODE_TILE, *moe_prefill_sm80.TOKEN_TILES[:2])]
        for arch, tile in roads:
            kind = gpu(cupy.cuda.Device().id)._replace(sm=arch)
            with (
                patch.object(launches, "gpu", lambda device, kind=kind: kind),
                patch.object(grouped, "gpu", lambda device, kind=kind: kind),
                patch.object(grouped, "token_tile", lambda *sizes, tile=tile: tile),
            ):
                for w in (gate, up, ragged, down):
                    w.plans.clear()
                qgemm.moe_matmul(x, ragged, ids).get()
                qgemm.moe(x, (gate, up), down, ids, weights).get()
    print(f"{fmt}, experts: done", flush=True)


def products(tool: str, formats: list[str]) -> None:
    """Products that reach every kernel, with ragged shapes: every format, type of x, activation and token tile.

    initcheck and racecheck skip cuBLAS: initcheck misses the stores of its kernels, and racecheck reports hazards in
    them (nvjet_sm90, cuBLAS 13.0).
    """
    import cupy
    import numpy as np

    import qgemm
    from qgemm.cuda.kernels import prefill_sm90, sm90_grid
    from qgemm.cuda.kernels.routes import DEQUANTIZE, route
    from qgemm.cuda.problem import Problem, c_type

    rng, sm = np.random.default_rng(0), int(cupy.cuda.Device().compute_capability)
    for name, (n, counts) in product(formats, M.items()):
        fmt = qgemm.FORMATS[name]
        sm90_grid.SPLIT_K_COST = costs(SPLIT_K[n])
        k = 5 * SUPER_BLOCK
        w = random_tensor(fmt, (n, k), rng).to_device()
        w.to_host()
        w.dequantize("float16")
        if fmt.encode is not None:
            values = cupy.asarray(rng.standard_normal((n, k)).astype(np.float16))
            qgemm.quantize(values, fmt).dequantize("float16").get()
        bias = cupy.ones(n, np.float16)
        for m, dtype, activation in product(counts, ("float16", "float32"), ("a16", "a8") if fmt.integer else ("a16",)):
            x = cupy.asarray(rng.standard_normal((m, k)).astype(dtype))
            kernel = route(Problem(fmt, activation, m, n, k, sm, c_type(x.dtype))).kernel
            if kernel is DEQUANTIZE and tool in ("initcheck", "racecheck"):
                continue
            y = cupy.zeros((m, n), np.float32)
            for _ in range(2):  # the second call uses the fast path
                qgemm.matmul(x, w, activation, bias=bias, residual=y, out=y)
            qgemm.matmul_many(x, [w, w], activation)
            y.get()
        if n == min(M):
            sm80_products(w, rng)
            if sm == 90:
                pipelines(w, rng)
        if n == WIDE and sm == 90:
            config = wide_config(fmt)
            x = cupy.asarray(rng.standard_normal((config.tokens - 8, k)).astype(np.float16))
            by_config(prefill_sm90.PREFILL_SM90, w, x, "half", len(x), config)
        print(f"{fmt}, N = {n}: done", flush=True)


def costs(split_k: int) -> dict[int, int]:
    """A SPLIT_K_COST that splits each tile by `split_k` if the GPU has enough SMs, and not at all otherwise."""
    return {1: 1 << 30, split_k: 0}


def wide_config(fmt: Any) -> Any:
    """The prefill config of a format with two row_blocks and the largest number of tokens up to 128."""
    from qgemm.cuda.kernels.sm90_cost import measured

    wide = (config for config, *_ in measured(fmt) if config.row_blocks == 2 and config.tokens <= 128)
    return max(wide, key=lambda config: config.tokens)


def sm80_products(w: Any, rng: Any) -> None:
    """Products of a DeviceTensor by every config of the mma kernels; the routes of a GPU reach only a few of them."""
    import cupy
    import numpy as np

    import qgemm
    from qgemm.cuda.kernels import prefill_sm80
    from qgemm.cuda.problem import Q8_1

    m = 70
    x = cupy.asarray(rng.standard_normal((m, w.shape[1])).astype(np.float16))
    sources = {prefill_sm80.PREFILL_SM80: (x, "half")}
    if w.format.integer:
        sources[prefill_sm80.PREFILL_SM80_A8] = (qgemm.quantize_activations(x).data, Q8_1)
    for (kernel, (data, source)), config, split_k in product(sources.items(), prefill_sm80.SM80_CONFIGS, (1, 3)):
        if config.kernel == kernel.name:
            by_config(kernel, w, data, source, m, prefill_sm80.Plan(config, split_k))


def pipelines(w: Any, rng: Any) -> None:
    """Products by prefill pipelines whose number of stages is no multiple of wg_split_k, over several rounds."""
    import cupy
    import numpy as np

    from qgemm.cuda.kernels import prefill_sm90, sm90_grid
    from qgemm.cuda.kernels.sm90_config import Sm90Config

    m = 9
    x = cupy.asarray(rng.standard_normal((m, w.shape[1])).astype(np.float16))
    sm90_grid.SPLIT_K_COST = {1: 0}  # whole tiles: a CTA runs all stages
    for wg_split_k, max_stages in PIPELINES:
        config = Sm90Config(16, 1, wg_split_k, 1, max_stages=max_stages)
        by_config(prefill_sm90.PREFILL_SM90, w, x, "half", m, config)


def by_config(kernel: Any, w: Any, x: Any, source: str, m: int, config: Any) -> None:
    """A product of M rows of x by a kernel with a config."""
    import cupy

    from qgemm.cuda.call.plan import Source, problem, problem_of_launch
    from qgemm.cuda.problem import Q8_1, Output

    k, y = w.shape[1], cupy.zeros((m, w.shape[0]), "float32")
    prepared = source == Q8_1
    x_source = Source(m, k, "float32" if prepared else x.dtype.name, prepared)
    launch_problem = problem(w, x_source, "a8" if prepared else "a16")
    launch_problem = problem_of_launch(kernel, [launch_problem], [Output(w.shape[0], "float32")], source)
    launch = kernel.launch(launch_problem, config)
    launch(cupy.cuda.get_current_stream().ptr, x.data.ptr, w.pointer, y.data.ptr, 0, 0)
    y.get()


def main() -> int:
    """Run the tools in turn."""
    from qgemm import FORMATS

    tools = [name for name in sys.argv[1:] if name in TOOLS] or TOOLS
    formats = [name for name in sys.argv[1:] if name in FORMATS] or [f.name for f in FORMATS.values() if f.tiled]
    families = [name for name in sys.argv[1:] if name in FAMILIES] or FAMILIES
    failed = 0
    for tool in tools:
        command = [
            "compute-sanitizer",
            "--tool",
            tool,
            "--error-exitcode",
            "3",
            sys.executable,
            __file__,
            "--work",
            tool,
        ]
        status = subprocess.run([*command, *formats, *families]).returncode
        print(f"{tool}: {'clean' if status == 0 else f'FAILED ({status})'}", flush=True)
        failed += status != 0
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(
            sys.argv[2],
            [name for name in sys.argv[3:] if name not in FAMILIES],
            [name for name in sys.argv[3:] if name in FAMILIES],
        )
    else:
        sys.exit(main())

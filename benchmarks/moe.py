"""Layers of experts on the GPU: a whole feed-forward layer of random tokens, beside the alternatives of a user.

Each call of a loop has other random ids, so that its experts come from memory. x and y have one type; layers of each
type take turns with the alternatives: experts one by one (a gated product and a product for each, on rows that are
gathered already); the weights of each expert decoded to float16, then cuBLAS; torch's grouped_mm with bfloat16 weights.
The first two have float16 x, and stand in its rows alone. read_us: the time to read the packed bytes of the selected
experts at the speed of one large read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from qgemm.cli.timing import REPEATS, Loop, capture, compare, rotation
from qgemm.codec.float_types import float_dtype
from qgemm.preparation import prepare
from qgemm.text import columns

from . import moe_host
from .gpu import facts
from .moe_baselines import alternatives
from .moe_layers import MODELS, Model, Routing, Weights, layer, packed, rotating
from .operands import ROUNDING, poison, wide
from .results import EXPERTS, EXPERTS_HOST, X_TYPES, Results, Row, x_of

TOKENS = 1, 8, 64, 512, 4096
SKEWED = 512, 4096  # tokens; also measured with half of them routed to one expert
BESIDE = "one_by_one_us", "cublas_us", "grouped_mm_us"  # alternatives
OF_FLOAT16 = BESIDE[:2]
# Weights of three matrices, intermediate values and y are rounded: 2.2 roundings in all, 2.7 by float16 x as measured,
# 6.5 where K-quants round scales and minimums as well.
ROUNDINGS = 8


class Progress:
    """Messages on stderr with the seconds so far; `late` after `limit` seconds (0: never)."""

    def __init__(self, limit: int = 0) -> None:
        self.start, self.limit = perf_counter(), limit

    @property
    def late(self) -> bool:
        """Whether no further row should start."""
        return 0 < self.limit < perf_counter() - self.start

    def say(self, text: str) -> None:
        """Print a line."""
        print(f"{perf_counter() - self.start:6.1f} s  {text}", file=sys.stderr, flush=True)


def run(save: Callable[[Results], None], limit: int = 0, types: Sequence[str] = X_TYPES) -> tuple[Results, list[str]]:
    """Measure everything -> the machine and its rows, and a line for each layer that was wrong or unsupported.

    `save` is called with the results so far after each row. limit: seconds after which no row starts; 0: no limit.
    types: of x.
    """
    import cupy

    progress, stream = Progress(limit), cupy.cuda.Stream(non_blocking=True)
    results, failures = facts(stream), list[str]()
    progress.say(f"{results['device']}, reads {results['read_gbs']} GB/s")
    results.update({EXPERTS_HOST: moe_host.rows(), EXPERTS: []})
    progress.say(moe_host.line(results[EXPERTS_HOST]))
    save(results)
    for row in rows(stream, results["read_gbs"], progress=progress, types=types):
        if isinstance(row, str):
            failures.append(row)
            progress.say(row)
        else:
            results[EXPERTS].append(row)
            save(results)
            progress.say(summary(row))
    return results, failures


def summary(row: Row) -> str:
    """A row as a line."""
    beside = (f", {name.removesuffix('_us')} {row[name]:.1f}" for name in BESIDE if name in row)
    skewed = " skewed" * row["skew"]
    return f"{row['model']} {row['types']} {x_of(row)} T={row['M']}{skewed}: {row['us']:.1f} us{''.join(beside)}"


def table(rows: Sequence[Row]) -> str:
    """The rows for a terminal."""
    head = (
        "layer",
        "type",
        "x",
        "T",
        "us",
        "read us",
        "ratio",
        "TFLOP/s",
        *(name.removesuffix("_us") for name in BESIDE),
    )
    cells = [head]
    for row in rows:
        beside = (f"{row[name]:.1f}" if name in row else "-" for name in BESIDE)
        cells.append((
            row["model"] + " skewed" * row["skew"], row["types"], x_of(row), str(row["M"]), f"{row['us']:.1f}",
            f"{row['read_us']:.1f}", f"{row['us'] / row['read_us']:.2f}", f"{row['tflops']:.1f}", *beside,
        ))  # fmt: skip
    return columns("<<<" + ">" * (len(head) - 3), cells)


def rows(
    stream: Any, read_gbs: float, models: Sequence[Model] = MODELS, tokens: Sequence[int] = TOKENS,
    repeats: int = REPEATS, beside: bool = True, progress: Progress | None = None, types: Sequence[str] = X_TYPES,
) -> Iterator[Row | str]:  # fmt: skip
    """Rows of each model, number of tokens, routing and type of x, or its error. read_gbs: speed of a large read."""
    progress = progress or Progress()
    for model in models:
        if progress.late:
            yield f"{model.name} {model.format}: left out, {progress.limit} s are over"
            continue
        import cupy

        try:
            weights = packed(model)
            for x in types:
                ready = prepare(weights[:3], tokens, dtype=x, progress=False)
                progress.say(f"{model.name} {model.format} {x}: {ready}")
        except Exception as error:  # a model that fails costs its rows alone
            yield f"{model.name} {model.format}: {error}"
            continue
        for t in tokens:
            for skew in (False, True)[: 1 + (t in SKEWED)]:
                if progress.late:
                    yield f"{model.name} {model.format} T={t}: left out, {progress.limit} s are over"
                    continue
                yield from _rows(stream, read_gbs, model, weights, t, skew, repeats, beside and not skew, types)
        del weights
        cupy.get_default_memory_pool().free_all_blocks()


def _rows(
    stream: Any, read_gbs: float, model: Model, weights: Weights, t: int, skew: bool, repeats: int, beside: bool,
    types: Sequence[str],
) -> Iterator[Row | str]:  # fmt: skip
    import cupy

    rng = np.random.default_rng(t)
    routings = list(rotating(model, t, rng, skew))
    values = cupy.asarray(rng.standard_normal((t, model.k), np.float32) / 16)
    met = float(np.mean([len(np.unique(routing.ids)) for routing in routings]))
    turns = rotation(routings, met * model.expert_bytes, model.operations(t))
    loops: dict[str, Loop] = {}
    errors: dict[str, float] = {}
    for x_type in types:
        x = values.astype(float_dtype(x_type))
        y = cupy.empty(x.shape, x.dtype)
        cupy.cuda.Device().synchronize()
        try:
            errors[x_type] = check(stream, model, weights, x, routings[0], y)
            loops[x_type] = capture(stream, [partial(layer, model, weights, x, routing, y) for routing in turns])
        except Exception as problem:  # no layer ends the run
            yield f"{model.name} {model.format} {x_type} T={t}{' skewed' if skew else ''}: {problem}"
    if beside and loops:
        try:
            loops.update(alternatives(stream, model, weights, values.astype(np.float16), routings))
        except Exception as problem:
            yield f"{model.name} {model.format} T={t}, alternatives: {problem}"
    times = dict(zip(loops, compare(stream, list(loops.values()), repeats), strict=True))
    for x_type, error in errors.items():
        if x_type in times:
            us, names = times[x_type], [name for name in BESIDE if name in times]
            yield {
                "model": model.name, "types": model.format, "M": t, "skew": int(skew), "x": x_type, **us._asdict(),
                "error": error, "experts_met": round(met, 1),
                "read_us": round(met * model.expert_bytes / read_gbs / 1e3, 2),
                "tflops": round(model.operations(t) / us.us / 1e6, 1),
                **{name: times[name].us for name in names if x_type == "float16" or name not in OF_FLOAT16},
            }  # fmt: skip


def check(stream: Any, model: Model, w: Weights, x: Any, routing: Routing, y: Any) -> float:
    """The relative RMS error of a few tokens against float64; ArithmeticError if it is too large or y has a hole."""
    import cupy

    poison(y)
    cupy.cuda.Device().synchronize()
    with stream:
        layer(model, w, x, routing, y)
    stream.synchronize()
    limit, x, y = ROUNDINGS * ROUNDING[x.dtype.name], wide(x), wide(y)
    if int(cupy.count_nonzero(~cupy.isfinite(y))):
        raise ArithmeticError("holes in y")
    sampled_tokens = range(0, len(x), max(1, len(x) // 4))[:4]
    off = total = 0.0
    for token in sampled_tokens:
        exact: Any = 0.0
        for j, expert in enumerate(routing.ids[token].tolist()):
            exact = exact + routing.weights[token, j].astype(np.float64) * _of_expert(model, w, x[token], expert)
        off += float(((y[token].astype(np.float64) - exact) ** 2).sum())
        total += float((exact**2).sum())
    error = (off / total) ** 0.5
    if not error <= limit:
        raise ArithmeticError(f"wrong layer: relative RMS error {error:.3g}")
    return float(f"{error:.3g}")


def _of_expert(model: Model, w: Weights, x: Any, expert: int) -> Any:
    """down(gate(x) * up(x)) of one expert in float64."""
    import cupy

    x64 = x.astype(np.float64)
    g, u = (experts[expert].dequantize(np.float32).astype(np.float64) @ x64 for experts in (w.gate, w.up))
    if w.biases is not None:
        g, u = g + w.biases[0][expert], u + w.biases[1][expert]
    if model.activation == "swiglu_oai":
        g = cupy.minimum(g, 7)
        middle = g / (1 + cupy.exp(-1.702 * g)) * (cupy.clip(u, -7, 7) + 1)
    else:
        middle = g / (1 + cupy.exp(-g)) * u
    y = w.down[expert].dequantize(np.float32).astype(np.float64) @ middle
    return y if w.biases is None else y + w.biases[2][expert]

"""Layers of experts on the GPU: a whole feed-forward layer of random tokens, beside what a user could do instead.

Every call of a loop has other ids, drawn at random, so that its experts come from memory. x and y are float16. Beside
it: the experts one by one (a gated product and a product each, of rows that are gathered already); each expert's
weights decoded to float16, then cuBLAS; torch's grouped_mm of bfloat16 weights. read_us: reading the packed bytes of
the experts that the tokens meet, at the speed of one large read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.format import Format
from qgemm.cuda.experts import DeviceExperts
from qgemm.cuda.upload import tiles_nbytes
from qgemm.experts import moe
from qgemm.formats import FORMATS
from qgemm.ops import gated, matmul
from qgemm.preparation import prepare
from qgemm.routing import GATE_OF, Function
from qgemm.tensor import Tensor
from qgemm.text import columns

from . import baselines, moe_host
from .gpu import facts
from .results import EXPERTS, EXPERTS_HOST, Results, Row
from .timing import REPEATS, Call, Loop, capture, compare, rotation
from .weights import random_blocks, repeated_rows

DRAWN = 256  # rows of a matrix that are drawn, and repeated
TOKENS = 1, 8, 64, 512, 4096
ROTATE = 300_000_000  # bytes of experts that the calls of a loop meet at least
MAX_CALLS = 24  # of a loop
SKEWED = 512, 4096  # tokens of which half take one expert
BESIDE = "one_by_one_us", "cublas_us", "grouped_mm_us"  # what a user could do instead
TOLERANCE = 4e-3  # relative RMS error: weights, what is between the products and y rounded to float16
GROUPED_CALLS = 4  # of grouped_mm in a loop: its weights are larger than any cache
ALONE = 512  # tokens up to which experts are multiplied one by one, and decoded one by one


class Model(NamedTuple):
    """The layer of a model: E experts, top_k of a token, K values of a token, F between the products."""

    name: str
    format: str
    experts: int
    top_k: int
    k: int
    f: int
    activation: Function = "swiglu"
    biases: bool = False

    @property
    def expert_bytes(self) -> int:
        """Packed, of the three matrices of an expert."""
        fmt = FORMATS[self.format]
        return 3 * self.k * self.f // fmt.weights * fmt.block_bytes

    def operations(self, tokens: int) -> int:
        """Multiplications and additions of so many tokens."""
        return 6 * tokens * self.top_k * self.k * self.f


MODELS = (
    Model("gpt-oss-120b", "mxfp4", 128, 4, 2880, 2880, "swiglu_oai", True),
    Model("qwen3-30b-a3b", "q4_0", 128, 8, 2048, 768),
    Model("qwen3-30b-a3b", "q4_k", 128, 8, 2048, 768),
    Model("mixtral-8x7b", "q4_0", 8, 2, 4096, 14336),
)


class Weights(NamedTuple):
    """Experts on the GPU, and biases or None."""

    gate: DeviceExperts
    up: DeviceExperts
    down: DeviceExperts
    biases: tuple[Any, ...] | None


class Routing(NamedTuple):
    """The experts of the tokens of a call, on the host and on the GPU, and the router's weights."""

    ids: NDArray[np.int32]
    on_gpu: Any
    weights: Any


def run(save: Callable[[Results], None]) -> tuple[Results, list[str]]:
    """Measure everything -> the machine and its rows, and a line for each layer that was wrong or unsupported.

    `save` gets the results so far after each row.
    """
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    results, failures = facts(stream), list[str]()
    results.update({EXPERTS_HOST: moe_host.rows(), EXPERTS: []})
    for found in rows(stream, results["read_gbs"]):
        if isinstance(found, str):
            failures.append(found)
        else:
            results[EXPERTS].append(found)
            save(results)
    return results, failures


def table(found: Sequence[Row]) -> str:
    """The rows for a terminal."""
    head = ("layer", "type", "T", "us", "read us", "ratio", "TFLOP/s", *(name.removesuffix("_us") for name in BESIDE))
    cells = [head]
    for row in found:
        beside = (f"{row[name]:.1f}" if name in row else "-" for name in BESIDE)
        cells.append((
            row["model"] + " skewed" * row["skew"], row["types"], str(row["M"]), f"{row['us']:.1f}",
            f"{row['read_us']:.1f}", f"{row['us'] / row['read_us']:.2f}", f"{row['tflops']:.1f}", *beside,
        ))  # fmt: skip
    return columns("<<" + ">" * (len(head) - 2), cells)


def rows(
    stream: Any, read_gbs: float, models: Sequence[Model] = MODELS, tokens: Sequence[int] = TOKENS,
    repeats: int = REPEATS, beside: bool = True,
) -> Iterator[Row | str]:  # fmt: skip
    """A row for each model, number of tokens and routing, or what was wrong. read_gbs: of a large read."""
    import cupy

    for model in models:
        weights = packed(model)
        prepare(weights[:3], dtype="float16", progress=False)
        for t in tokens:
            for skew in (False, True)[: 1 + (t in SKEWED)]:
                yield from _row(stream, read_gbs, model, weights, t, skew, repeats, beside and not skew)
        del weights
        cupy.get_default_memory_pool().free_all_blocks()


def _row(
    stream: Any, read_gbs: float, model: Model, weights: Weights, t: int, skew: bool, repeats: int, beside: bool
) -> Iterator[Row | str]:
    import cupy

    rng = np.random.default_rng(t)
    routings = list(_rotating(model, t, rng, skew))
    x = cupy.asarray((rng.standard_normal((t, model.k), np.float32) / 16).astype(np.float16))
    y = cupy.empty((t, model.k), np.float16)
    cupy.cuda.Device().synchronize()
    who = f"{model.name} {model.format} T={t}{' skewed' if skew else ''}"
    try:
        error = check(stream, model, weights, x, routings[0], y)
        met = float(np.mean([len(np.unique(each.ids)) for each in routings]))
        loop = rotation(routings, met * model.expert_bytes, model.operations(t))
        loops = {"us": capture(stream, [partial(layer, model, weights, x, each, y) for each in loop])}
        if beside:
            loops.update(alternatives(stream, model, weights, x, routings))
    except (RuntimeError, ArithmeticError) as problem:
        yield f"{who}: {problem}"
        return
    taken = dict(zip(loops, compare(stream, list(loops.values()), repeats), strict=True))
    us = taken.pop("us")
    yield {
        "model": model.name, "types": model.format, "M": t, "skew": int(skew), **us._asdict(), "error": error,
        "experts_met": round(met, 1), "read_us": round(met * model.expert_bytes / read_gbs / 1e3, 2),
        "tflops": round(model.operations(t) / us.us / 1e6, 1), **{name: each.us for name, each in taken.items()},
    }  # fmt: skip


def layer(model: Model, w: Weights, x: Any, routing: Routing, y: Any) -> Any:
    """The public function."""
    return moe(
        x, (w.gate, w.up), w.down, routing.on_gpu, routing.weights, model.activation, biases=w.biases, out=y
    )  # fmt: skip


# ---------------------------------------------------------------- data


def packed(model: Model) -> Weights:
    """Random experts, the rows of each in another order."""
    import cupy

    fmt, rng = FORMATS[model.format], np.random.default_rng(0)
    gate, up, down = (
        _experts(fmt, model.experts, n, k, shift, rng)
        for shift, (n, k) in enumerate(((model.f, model.k), (model.f, model.k), (model.k, model.f)))
    )
    biases: tuple[Any, ...] | None = None
    if model.biases:
        made = [rng.standard_normal((model.experts, n), np.float32) / 8 for n in (model.f, model.f, model.k)]
        biases = tuple(cupy.asarray(bias.astype(np.float32)) for bias in made)
    cupy.cuda.Device().synchronize()
    return Weights(gate, up, down, biases)


def _experts(fmt: Format, e: int, n: int, k: int, shift: int, rng: np.random.Generator) -> DeviceExperts:
    import cupy

    base = Tensor(fmt, (DRAWN, k), random_blocks(fmt, DRAWN, k, rng)).to_device()
    data = cupy.empty((e, tiles_nbytes(fmt, n, k)), np.uint8)
    for expert in range(e):
        one = repeated_rows(base, (n, k), shift + expert)
        flat = one.data.reshape(-1).view(np.uint8)
        data[expert, : flat.size] = flat
        data[expert, flat.size :] = one.row_absmax.view(np.uint8)
    return DeviceExperts(fmt, (e, n, k), data)


def _rotating(model: Model, t: int, rng: np.random.Generator, skew: bool) -> Iterator[Routing]:
    """Routings whose experts together are more than the L2 cache holds."""
    import cupy

    met = 0
    for _ in range(MAX_CALLS):
        ids = np.argsort(rng.random((t, model.experts)), axis=1)[:, : model.top_k].astype(np.int32)
        if skew:
            ids[: t // 2][~(ids[: t // 2] == 0).any(axis=1), 0] = 0
        weights = rng.random((t, model.top_k), np.float32) + np.float32(0.1)
        weights /= weights.sum(axis=1, keepdims=True)
        yield Routing(ids, cupy.asarray(ids), cupy.asarray(weights))
        met += len(np.unique(ids))
        if met * model.expert_bytes > ROTATE:
            return


def check(stream: Any, model: Model, w: Weights, x: Any, routing: Routing, y: Any) -> float:
    """The relative RMS error of a few tokens against float64; ArithmeticError beyond the tolerance or for a hole."""
    import cupy

    y.fill(np.nan)
    cupy.cuda.Device().synchronize()
    with stream:
        layer(model, w, x, routing, y)
    stream.synchronize()
    if int(cupy.count_nonzero(~cupy.isfinite(y))):
        raise ArithmeticError("holes in y")
    some = range(0, len(x), max(1, len(x) // 4))[:4]
    off = total = 0.0
    for token in some:
        exact: Any = 0.0
        for j, expert in enumerate(routing.ids[token].tolist()):
            exact = exact + routing.weights[token, j].astype(np.float64) * _of_expert(model, w, x[token], expert)
        off += float(((y[token].astype(np.float64) - exact) ** 2).sum())
        total += float((exact**2).sum())
    error = (off / total) ** 0.5
    if not error <= TOLERANCE:
        raise ArithmeticError(f"wrong layer: relative RMS error {error:.3g}")
    return float(f"{error:.3g}")


def _of_expert(model: Model, w: Weights, x: Any, expert: int) -> Any:
    """down(gate(x) * up(x)) of one expert in float64."""
    import cupy

    g, u = (each[expert].dequantize(np.float32).astype(np.float64) @ x.astype(np.float64) for each in (w.gate, w.up))
    if w.biases is not None:
        g, u = g + w.biases[0][expert], u + w.biases[1][expert]
    if model.activation == "swiglu_oai":
        g = cupy.minimum(g, 7)
        middle = g / (1 + cupy.exp(-1.702 * g)) * (cupy.clip(u, -7, 7) + 1)
    else:
        middle = g / (1 + cupy.exp(-g)) * u
    made = w.down[expert].dequantize(np.float32).astype(np.float64) @ middle
    return made if w.biases is None else made + w.biases[2][expert]


# ---------------------------------------------------------------- what a user could do instead


def alternatives(stream: Any, model: Model, w: Weights, x: Any, routings: Sequence[Routing]) -> dict[str, Loop]:
    """Loops of the same layer: experts one by one, decoded one by one, torch's grouped product of dense weights."""
    found: dict[str, Loop] = {}
    few = routings[:4]
    if len(x) <= ALONE:
        found["one_by_one_us"] = capture(stream, [_one_by_one(model, w, x, each) for each in few])
        cublas = baselines.Cublas(stream)
        found["cublas_us"] = capture(stream, [_decoded(model, w, x, few[0], cublas)])
    if find_spec("torch"):
        made = _grouped_mm(stream, model, x, routings[0])
        if made is not None:
            found["grouped_mm_us"] = made
    return found


def _taking(model: Model, x: Any, routing: Routing) -> list[tuple[int, Any, Any, Any]]:
    """Each expert that is met, the rows of x that take it, and arrays for what is between and for its products."""
    import cupy

    found = []
    for expert in np.unique(routing.ids).tolist():
        rows = x[cupy.asarray((routing.ids == expert).any(axis=1).nonzero()[0])]
        found.append((expert, rows, cupy.empty((len(rows), model.f), np.float16), cupy.empty_like(rows)))
    cupy.cuda.Device().synchronize()
    return found


def _one_by_one(model: Model, w: Weights, x: Any, routing: Routing) -> Call:
    taking = _taking(model, x, routing)

    def call() -> None:
        for expert, rows, between, y in taking:
            gated(rows, w.gate[expert], w.up[expert], GATE_OF[model.activation], out=between)  # type: ignore[arg-type]
            matmul(between, w.down[expert], out=y)

    return call


def _decoded(model: Model, w: Weights, x: Any, routing: Routing, cublas: baselines.Cublas) -> Call:
    taking = _taking(model, x, routing)

    def call() -> None:
        for expert, rows, between, y in taking:
            for each in (w.gate, w.up):
                cublas(rows, each[expert].dequantize(np.float16), between)
            cublas(between, w.down[expert].dequantize(np.float16), y)

    return call


def _grouped_mm(stream: Any, model: Model, x: Any, routing: Routing) -> Loop | None:
    """Both products by torch's grouped_mm of bfloat16, of rows that are sorted already; None where there is none."""
    import torch

    grouped: Callable[..., Any] | None = getattr(
        torch.nn.functional, "grouped_mm", getattr(torch, "_grouped_mm", None)
    )  # fmt: skip
    if grouped is None:
        return None
    theirs = torch.cuda.ExternalStream(stream.ptr)
    e, slots = model.experts, routing.ids.size
    with torch.cuda.stream(theirs):
        made = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
        try:
            weights = made(e, model.k, 2 * model.f), made(e, model.f, model.k)
            counts = torch.from_numpy(np.bincount(routing.ids.reshape(-1), minlength=e)).cumsum(0)
            ends = counts.to(torch.int32).cuda()
            rows, between = made(slots, model.k), made(slots, model.f)
            grouped(rows, weights[0], offs=ends)
            grouped(between, weights[1], offs=ends)
            theirs.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=theirs):
                for _ in range(GROUPED_CALLS):
                    grouped(rows, weights[0], offs=ends)
                    grouped(between, weights[1], offs=ends)
        except RuntimeError:  # no kernel for this GPU, or no memory
            return None

    def replay() -> None:
        with torch.cuda.stream(theirs):
            graph.replay()

    return Loop(GROUPED_CALLS, replay, (weights, rows, between, ends))

"""What a user could do instead of a layer of experts: one by one, decoded for cuBLAS, torch's grouped product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from qgemm.cli.timing import Call, Cublas, Loop, capture
from qgemm.ops import gated, matmul
from qgemm.routing import GATE_OF

from .moe_layers import Model, Routing, Weights

GROUPED_CALLS = 4  # of grouped_mm in a loop: its weights are larger than any cache
ALONE = 512  # tokens up to which experts are multiplied one by one, and decoded one by one


def alternatives(stream: Any, model: Model, w: Weights, x: Any, routings: Sequence[Routing]) -> dict[str, Loop]:
    """Loops of the same layer: experts one by one, decoded one by one, torch's grouped product of dense weights."""
    found: dict[str, Loop] = {}
    few = routings[:4]
    if len(x) <= ALONE:
        found["one_by_one_us"] = capture(stream, [_one_by_one(model, w, x, each) for each in few])
        cublas = Cublas(stream)
        found["cublas_us"] = capture(stream, [_decoded(model, w, x, few[0], cublas)])
    if find_spec("torch"):
        made = _grouped_mm(stream, model, x, routings[0])
        if made is not None:
            found["grouped_mm_us"] = made
    return found


class Taken(NamedTuple):
    """An expert that is met: its matrices, the rows of x that take it, and arrays for what is between and for y."""

    gate: Any
    up: Any
    down: Any
    rows: Any
    between: Any
    y: Any


def _taking(model: Model, w: Weights, x: Any, routing: Routing) -> list[Taken]:
    """Each expert that is met; its matrices are looked up here, which a graph that is captured could not wait for."""
    import cupy

    found = []
    for expert in np.unique(routing.ids).tolist():
        rows = x[cupy.asarray((routing.ids == expert).any(axis=1).nonzero()[0])]
        between, y = cupy.empty((len(rows), model.f), np.float16), cupy.empty_like(rows)
        found.append(Taken(w.gate[expert], w.up[expert], w.down[expert], rows, between, y))
    cupy.cuda.Device().synchronize()
    return found


def _one_by_one(model: Model, w: Weights, x: Any, routing: Routing) -> Call:
    taking = _taking(model, w, x, routing)

    def call() -> None:
        for one in taking:
            gated(one.rows, one.gate, one.up, GATE_OF[model.activation], out=one.between)  # type: ignore[arg-type]
            matmul(one.between, one.down, out=one.y)

    return call


def _decoded(model: Model, w: Weights, x: Any, routing: Routing, cublas: Cublas) -> Call:
    taking = _taking(model, w, x, routing)

    def call() -> None:
        for one in taking:
            for each in (one.gate, one.up):
                cublas(one.rows, each.dequantize(np.float16), one.between)
            cublas(one.between, one.down.dequantize(np.float16), one.y)

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

"""Alternatives to a layer of experts: experts one by one, decoded for cuBLAS, torch's grouped product."""

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

GROUPED_CALLS = 4  # calls of grouped_mm in a loop; its weights exceed every cache
ALONE = 512  # largest number of tokens for which experts one by one are measured


def alternatives(stream: Any, model: Model, w: Weights, x: Any, routings: Sequence[Routing]) -> dict[str, Loop]:
    """Loops of the same layer: experts one by one, decoded one by one, torch's grouped product of dense weights."""
    loops: dict[str, Loop] = {}
    few = routings[:4]
    if len(x) <= ALONE:
        loops["one_by_one_us"] = capture(stream, [_one_by_one(model, w, x, routing) for routing in few])
        cublas = Cublas(stream)
        loops["cublas_us"] = capture(stream, [_decoded(model, w, x, few[0], cublas)])
    if find_spec("torch"):
        grouped = _grouped_mm(stream, model, x, routings[0])
        if grouped is not None:
            loops["grouped_mm_us"] = grouped
    return loops


class ExpertRows(NamedTuple):
    """A selected expert: its matrices, the rows of x routed to it, and arrays for intermediate values and y."""

    gate: Any
    up: Any
    down: Any
    rows: Any
    between: Any
    y: Any


def _selected(model: Model, w: Weights, x: Any, routing: Routing) -> list[ExpertRows]:
    """The selected experts; their matrices are indexed here, because that synchronizes and cannot be captured."""
    import cupy

    selected = []
    for expert in np.unique(routing.ids).tolist():
        rows = x[cupy.asarray((routing.ids == expert).any(axis=1).nonzero()[0])]
        between, y = cupy.empty((len(rows), model.f), np.float16), cupy.empty_like(rows)
        selected.append(ExpertRows(w.gate[expert], w.up[expert], w.down[expert], rows, between, y))
    cupy.cuda.Device().synchronize()
    return selected


def _one_by_one(model: Model, w: Weights, x: Any, routing: Routing) -> Call:
    selected = _selected(model, w, x, routing)

    def call() -> None:
        for expert in selected:
            gated(expert.rows, expert.gate, expert.up, GATE_OF[model.activation], out=expert.between)  # type: ignore[arg-type]
            matmul(expert.between, expert.down, out=expert.y)

    return call


def _decoded(model: Model, w: Weights, x: Any, routing: Routing, cublas: Cublas) -> Call:
    selected = _selected(model, w, x, routing)

    def call() -> None:
        for expert in selected:
            for weights in (expert.gate, expert.up):
                cublas(expert.rows, weights.dequantize(np.float16), expert.between)
            cublas(expert.between, expert.down.dequantize(np.float16), expert.y)

    return call


def _grouped_mm(stream: Any, model: Model, x: Any, routing: Routing) -> Loop | None:
    """Both products by torch's grouped_mm in bfloat16, on rows that are sorted already; None if it has no kernel."""
    import torch

    grouped: Callable[..., Any] | None = getattr(
        torch.nn.functional, "grouped_mm", getattr(torch, "_grouped_mm", None)
    )  # fmt: skip
    if grouped is None:
        return None
    torch_stream = torch.cuda.ExternalStream(stream.ptr)
    e, slots = model.experts, routing.ids.size
    with torch.cuda.stream(torch_stream):
        normal = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
        try:
            weights = normal(e, model.k, 2 * model.f), normal(e, model.f, model.k)
            counts = torch.from_numpy(np.bincount(routing.ids.reshape(-1), minlength=e)).cumsum(0)
            ends = counts.to(torch.int32).cuda()
            rows, between = normal(slots, model.k), normal(slots, model.f)
            grouped(rows, weights[0], offs=ends)
            grouped(between, weights[1], offs=ends)
            torch_stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch_stream):
                for _ in range(GROUPED_CALLS):
                    grouped(rows, weights[0], offs=ends)
                    grouped(between, weights[1], offs=ends)
        except RuntimeError:  # no kernel for this GPU, or no memory
            return None

    def replay() -> None:
        with torch.cuda.stream(torch_stream):
            graph.replay()

    return Loop(GROUPED_CALLS, replay, (weights, rows, between, ends))

"""Layers cut over the GPUs of one host, beside the same layers on one of them: `qgemm bench --shard` under torchrun.

Pairs of a column-parallel and a row-parallel layer; all linear layers of a Llama-70B's decode step with their sums;
the time to load a file. Loops are CUDA graphs with the collectives in them. Each replay begins on all GPUs together,
and its time is that of the slowest. Each of them runs the whole layers as well, and the fastest is "one GPU".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from qgemm.cli.timing import REPEATS, Loop, compare, rotation
from qgemm.cli.weights import random_blocks, repeated_rows
from qgemm.errors import UnsupportedError
from qgemm.formats import FORMATS
from qgemm.ops import matmul_many
from qgemm.preparation import prepare
from qgemm.sharding import ROWS, shares
from qgemm.tensor import Tensor
from qgemm.text import columns
from qgemm.torch import ColumnParallelLinear, QLinear, RowParallelLinear
from qgemm.torch.group import Group

from . import shard_load
from .results import Row
from .shard_load import DRAWN, HIDDEN, INNER, KEYS

FORMATS_OF_PAIRS = ("q4_0", "q8_0")
VOCABULARY, LAYERS = 128256, 80  # of a Llama-70B
M = (1, 16, 512, 4096)
STEP_FORMAT, STEP_M = "q4_0", (1,)
COLD_BYTES = 300e6  # of weights that a loop goes through, on each GPU
CLOSE = 2e-3  # relative RMS difference of a sum of rounded parts, in float16


class Host:
    """This rank's GPU, stream and group."""

    def __init__(self) -> None:
        import cupy

        local = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local)
        cupy.cuda.Device(local).use()
        self.group = Group()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.theirs = torch.cuda.ExternalStream(self.stream.ptr)
        self.device = torch.device("cuda", local)
        self.token = torch.zeros(1, device=self.device)

    def capture(self, calls: Sequence[Callable[[], Any]]) -> Loop:
        """The calls, once they have run, as a CUDA graph of torch."""
        with torch.cuda.stream(self.theirs):
            kept = [calls[0]()]
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.theirs, capture_error_mode="thread_local"):
                for call in calls:
                    kept = [call()]

        def replay() -> None:
            with torch.cuda.stream(self.theirs):
                graph.replay()

        return Loop(len(calls), replay, (calls, kept, graph))

    def compare(self, loops: Sequence[Loop], repeats: int) -> list[tuple[float, float]]:
        """Of each loop the microseconds a call on the fastest and the slowest GPU."""

        def together() -> None:
            with torch.cuda.stream(self.theirs):
                dist.all_reduce(self.token)

        mine = [times.us for times in compare(self.stream, loops, repeats, together)]
        every: list[Any] = [None] * self.group.world
        dist.all_gather_object(every, mine)
        return [(min(us), max(us)) for us in zip(*every, strict=True)]

    def normal(self, *shape: int) -> Any:
        """Standard normal float16 values, the same on all ranks."""
        values = np.random.default_rng(0).standard_normal(shape, np.float32).astype(np.float16)
        return torch.from_numpy(values).to(self.device)


# ---------------------------------------------------------------- weights


class Drawn:
    """Matrices of one format of any height, whole and as this rank's shares: rows of one that is drawn, in turn."""

    def __init__(self, name: str, group: Group) -> None:
        self.fmt, self.group = FORMATS[name], group
        self._bases: dict[tuple[int, int | None], Any] = {}

    def whole(self, n: int, k: int, shift: int = 0) -> Any:
        """[n, k]."""
        return repeated_rows(self._base(k, None), (n, k), shift)

    def of_outputs(self, n: int, k: int, shift: int = 0) -> tuple[Any, list[slice]]:
        """Rows of `whole` that are this rank's, and those of all ranks."""
        parts = shares(n, ROWS, self.group.world)
        part = parts[self.group.rank]
        made = repeated_rows(self._base(k, None), (part.stop - part.start, k), shift + part.start // ROWS)
        return made, parts

    def of_inputs(self, n: int, k: int, shift: int = 0) -> tuple[Any, list[slice]]:
        """Columns of `whole` that are this rank's, and those of all ranks."""
        base = self._base(k, self.group.rank)
        parts = shares(k, self.fmt.weights, self.group.world)
        return repeated_rows(base, (n, base.shape[1]), shift), parts

    def _base(self, k: int, rank: int | None) -> Any:
        if (k, rank) not in self._bases:
            drawn = Tensor(self.fmt, (DRAWN, k), random_blocks(self.fmt, DRAWN, k, np.random.default_rng(k)))
            self._bases[k, rank] = (drawn if rank is None else drawn.shard(rank, self.group.world, 1)).to_device()
        return self._bases[k, rank]


def prepared(host: Host, tensors: Sequence[Any], m: Sequence[int]) -> None:
    """Compiled by one rank, read from its cache by the others."""
    for first in (True, False):
        if (host.group.rank == 0) is first:
            prepare(tensors, m=m, activation="a16", dtype="float16", progress=False)
        dist.barrier()


# ---------------------------------------------------------------- pairs


def pairs(host: Host, formats: Sequence[str], m: Sequence[int], repeats: int) -> Iterator[Row]:
    """For each format and M: us of a pair of layers on one GPU and on all of them."""
    for name in formats:
        drawn = Drawn(name, host.group)
        nbytes = 2 * HIDDEN * INNER // drawn.fmt.weights * drawn.fmt.block_bytes
        copies = range(int(COLD_BYTES * host.group.world / nbytes) + 1)
        one = [
            [QLinear.from_tensor(drawn.whole(n, k, each)) for n, k in ((INNER, HIDDEN), (HIDDEN, INNER))]
            for each in copies
        ]
        outputs = [drawn.of_outputs(INNER, HIDDEN, each) for each in copies]
        inputs = [drawn.of_inputs(HIDDEN, INNER, each) for each in copies]
        prepared(host, [*[layer.packed for layer in one[0]], outputs[0][0], inputs[0][0]], m)

        every = [
            [
                ColumnParallelLinear.of_shard(up, up_parts, None, "a16", host.group),
                RowParallelLinear.of_shard(down, down_parts, None, "a16", host.group),
            ]
            for (up, up_parts), (down, down_parts) in zip(outputs, inputs, strict=True)
        ]
        part = inputs[0][1][host.group.rank]
        for rows in m:
            x, inner = host.normal(rows, HIDDEN), host.normal(rows, INNER)
            mine = inner[:, part].contiguous()
            error = _difference(every[0][1](mine), one[0][1](inner))
            loops = []
            for layers, given in ((one, inner), (every, mine)):
                turns = rotation(layers, nbytes, 4 * rows * HIDDEN * INNER)
                loops.append(host.capture([partial(_pair, up, down, x, given) for up, down in turns]))
            (single, _), (_, us) = host.compare(loops, repeats)
            what = f"{INNER}x{HIDDEN}, then {HIDDEN}x{INNER}"
            yield {"what": what, "format": name, "M": rows, "one_us": single, "us": us, "difference": error}


def _pair(up: Any, down: Any, x: Any, inner: Any) -> Any:
    with torch.no_grad():
        return up(x), down(inner)


def _difference(got: Any, want: Any) -> float:
    """Relative RMS; UnsupportedError if it is more than rounding makes."""
    found = float((got.double() - want.double()).norm() / want.double().norm())
    if not found < CLOSE:
        raise UnsupportedError(f"a sum over ranks differs from the product on one GPU by {found:.2g}")
    return float(f"{found:.2g}")


# ---------------------------------------------------------------- a decode step


def steps(host: Host, m: Sequence[int], repeats: int) -> Iterator[Row]:
    """us of all linear layers of a Llama-70B, and of their sums, in one CUDA graph."""
    one, every = Step(host, whole=True), Step(host, whole=False)
    for rows in m:
        prepared(host, [*one.tensors, *every.tensors], [rows])
        loops = [host.capture([partial(step, Arrays.of(host, rows, step))]) for step in (one, every)]
        (single, _), (_, us) = host.compare(loops, repeats)
        yield {
            "what": f"decode step of a Llama-70B, {LAYERS} layers and head", "format": STEP_FORMAT, "M": rows,
            "one_us": single, "us": us, "one_bytes": one.nbytes, "bytes": every.nbytes,
        }  # fmt: skip


class Arrays(NamedTuple):
    """Inputs of the layers of a step, float16 [M, ...], and the outputs that are not new tensors."""

    hidden: Any
    mixed: Any
    inner: Any
    qkv: list[Any]
    gate_up: list[Any]

    @classmethod
    def of(cls, host: Host, m: int, step: Step) -> Arrays:
        """Random inputs of M tokens, of the widths of a step's layers."""
        qkv, output, gate_up, down = step.layers[0]
        outs = [
            [torch.empty((m, w.shape[0]), dtype=torch.float16, device=host.device) for w in some]
            for some in (qkv, gate_up)
        ]
        return cls(host.normal(m, HIDDEN), host.normal(m, output.in_features), host.normal(m, down.in_features), *outs)


class Step:
    """The weights of a model, whole or this rank's shares: for each layer Q, K, V; output; gate, up; down; the head."""

    def __init__(self, host: Host, whole: bool) -> None:
        self.drawn, self.group, self.whole = Drawn(STEP_FORMAT, host.group), host.group, whole
        self.layers = [
            (
                [self._outputs(n, HIDDEN, layer) for n in (HIDDEN, KEYS, KEYS)],
                self._inputs(HIDDEN, HIDDEN, layer),
                [self._outputs(INNER, HIDDEN, layer) for _ in range(2)],
                self._inputs(HIDDEN, INNER, layer),
            )
            for layer in range(LAYERS)
        ]
        self.head: Any
        if whole:
            self.head = QLinear.from_tensor(self.drawn.whole(VOCABULARY, HIDDEN))
        else:
            shard, parts = self.drawn.of_outputs(VOCABULARY, HIDDEN)
            self.head = ColumnParallelLinear.of_shard(shard, parts, None, "a16", self.group, whole=True)

    def _outputs(self, n: int, k: int, shift: int) -> Any:
        return self.drawn.whole(n, k, shift) if self.whole else self.drawn.of_outputs(n, k, shift)[0]

    def _inputs(self, n: int, k: int, shift: int) -> Any:
        if self.whole:
            return QLinear.from_tensor(self.drawn.whole(n, k, shift))
        return RowParallelLinear.of_shard(*self.drawn.of_inputs(n, k, shift), None, "a16", self.group)

    @property
    def tensors(self) -> list[Any]:
        """Of each kind one."""
        qkv, output, gate_up, down = self.layers[0]
        return [*qkv, output.packed, *gate_up, down.packed, self.head.packed]

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights here."""
        *layer, head = (int(w.nbytes) for w in self.tensors)
        return LAYERS * sum(layer) + head

    def __call__(self, arrays: Arrays) -> Any:
        """All products of a step, and their sums."""
        with torch.no_grad():
            for qkv, output, gate_up, down in self.layers:
                matmul_many(arrays.hidden, qkv, outs=arrays.qkv)
                output(arrays.mixed)
                matmul_many(arrays.hidden, gate_up, outs=arrays.gate_up)
                made = down(arrays.inner)
            return made, self.head(arrays.hidden)


# ---------------------------------------------------------------- all of it


def run(
    formats: Sequence[str] = FORMATS_OF_PAIRS,
    m: Sequence[int] = M,
    repeats: int = REPEATS,
    keep: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """All rows, on every rank; `keep` is called with those so far, on rank 0. UnsupportedError outside of torchrun."""
    if "LOCAL_RANK" not in os.environ or torch.cuda.device_count() < 2:
        raise UnsupportedError(
            "this benchmark runs on at least two GPUs: torchrun --nproc-per-node 2 -m qgemm bench --shard"
        )
    import cupy

    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    host = Host()
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "gpus": host.group.world, "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())), "pairs": [], "steps": [], "loads": [],
    }  # fmt: skip
    parts: dict[str, Callable[[], Iterator[Row]]] = {
        "pairs": lambda: pairs(host, formats, m, repeats),
        "steps": lambda: steps(host, STEP_M, repeats),
        "loads": lambda: shard_load.rows(host.group),
    }
    for name, rows in parts.items():
        for row in rows():
            found[name].append({**row, "speedup": round(row["one_us"] / row["us"], 3)})
            if host.group.rank == 0:
                print(name, found[name][-1], flush=True)
                keep(found)
        cupy.get_default_memory_pool().free_all_blocks()
    dist.destroy_process_group()
    return {**found, "rank": host.group.rank}


def table(found: dict[str, Any]) -> str:
    """The rows for a terminal."""
    head = ("what", "format", "M", "one GPU us", f"{found['gpus']} GPUs us", "times")
    cells = [head]
    for name in ("pairs", "steps", "loads"):
        for row in found[name]:
            numbers = f"{row['one_us']:.1f}", f"{row['us']:.1f}", f"{row['speedup']:.2f}"
            cells.append((row["what"], row["format"], str(row.get("M", "")), *numbers))
    return columns("<<>>>>", cells)

"""Layers sharded over the GPUs of one host, beside the same layers on one GPU: `-m benchmarks --shard` under torchrun.

Pairs of a column-parallel and a row-parallel layer; all linear layers of a Llama-70B's decode step with their sums;
the time to load a file. Loops are CUDA graphs that include the collectives. Each replay starts on all GPUs together,
and the slowest GPU counts. Each GPU runs the whole layers as well, and the fastest counts as "one GPU".
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
VOCABULARY, LAYERS = 128256, 80  # Llama-70B
M = (1, 16, 512, 4096)
STEP_FORMAT, STEP_M = "q4_0", (1,)
COLD_BYTES = 300e6  # bytes of weights that a loop reads on each GPU
CLOSE = 2e-3  # bound on the relative RMS difference of a sum of parts that are rounded to float16


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
        """The calls as a CUDA graph of torch, after one call has run."""
        with torch.cuda.stream(self.theirs):
            outputs = [calls[0]()]
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.theirs, capture_error_mode="thread_local"):
                for call in calls:
                    outputs = [call()]

        def replay() -> None:
            with torch.cuda.stream(self.theirs):
                graph.replay()

        return Loop(len(calls), replay, (calls, outputs, graph))

    def compare(self, loops: Sequence[Loop], repeats: int) -> list[tuple[float, float]]:
        """Microseconds a call on the fastest and on the slowest GPU, for each loop."""

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
    """Matrices of one format and any height, whole or as this rank's shares; they repeat a few random rows."""

    def __init__(self, name: str, group: Group) -> None:
        self.fmt, self.group = FORMATS[name], group
        self._bases: dict[tuple[int, int | None], Any] = {}

    def whole(self, n: int, k: int, shift: int = 0) -> Any:
        """The whole matrix [n, k]."""
        return repeated_rows(self._base(k, None), (n, k), shift)

    def of_outputs(self, n: int, k: int, shift: int = 0) -> tuple[Any, list[slice]]:
        """This rank's rows of `whole`, and the rows of every rank."""
        parts = shares(n, ROWS, self.group.world)
        part = parts[self.group.rank]
        share = repeated_rows(self._base(k, None), (part.stop - part.start, k), shift + part.start // ROWS)
        return share, parts

    def of_inputs(self, n: int, k: int, shift: int = 0) -> tuple[Any, list[slice]]:
        """This rank's columns of `whole`, and the columns of every rank."""
        base = self._base(k, self.group.rank)
        parts = shares(k, self.fmt.weights, self.group.world)
        return repeated_rows(base, (n, base.shape[1]), shift), parts

    def _base(self, k: int, rank: int | None) -> Any:
        if (k, rank) not in self._bases:
            drawn = Tensor(self.fmt, (DRAWN, k), random_blocks(self.fmt, DRAWN, k, np.random.default_rng(k)))
            self._bases[k, rank] = (drawn if rank is None else drawn.shard(rank, self.group.world, 1)).to_device()
        return self._bases[k, rank]


def prepared(host: Host, tensors: Sequence[Any], m: Sequence[int]) -> None:
    """Compile on one rank; the other ranks read its cache."""
    for first in (True, False):
        if (host.group.rank == 0) is first:
            prepare(tensors, m=m, activation="a16", dtype="float16", progress=False)
        dist.barrier()


# ---------------------------------------------------------------- pairs


def pairs(host: Host, formats: Sequence[str], m: Sequence[int], repeats: int) -> Iterator[Row]:
    """us of a pair of layers on one GPU and on all GPUs, for each format and M."""
    for name in formats:
        drawn = Drawn(name, host.group)
        nbytes = 2 * HIDDEN * INNER // drawn.fmt.weights * drawn.fmt.block_bytes
        copies = range(int(COLD_BYTES * host.group.world / nbytes) + 1)
        single_layers = [
            [QLinear.from_tensor(drawn.whole(n, k, copy)) for n, k in ((INNER, HIDDEN), (HIDDEN, INNER))]
            for copy in copies
        ]
        outputs = [drawn.of_outputs(INNER, HIDDEN, copy) for copy in copies]
        inputs = [drawn.of_inputs(HIDDEN, INNER, copy) for copy in copies]
        prepared(host, [*[layer.packed for layer in single_layers[0]], outputs[0][0], inputs[0][0]], m)

        sharded_layers = [
            [
                ColumnParallelLinear.of_shard(up, up_parts, None, "a16", host.group),
                RowParallelLinear.of_shard(down, down_parts, None, "a16", host.group),
            ]
            for (up, up_parts), (down, down_parts) in zip(outputs, inputs, strict=True)
        ]
        part = inputs[0][1][host.group.rank]
        for rows in m:
            x, inner = host.normal(rows, HIDDEN), host.normal(rows, INNER)
            inner_share = inner[:, part].contiguous()
            error = _difference(sharded_layers[0][1](inner_share), single_layers[0][1](inner))
            loops = []
            for layers, inner_input in ((single_layers, inner), (sharded_layers, inner_share)):
                turns = rotation(layers, nbytes, 4 * rows * HIDDEN * INNER)
                loops.append(host.capture([partial(_pair, up, down, x, inner_input) for up, down in turns]))
            (single, _), (_, us) = host.compare(loops, repeats)
            name = f"{INNER}x{HIDDEN}, then {HIDDEN}x{INNER}"
            yield {"what": name, "format": name, "M": rows, "one_us": single, "us": us, "difference": error}


def _pair(up: Any, down: Any, x: Any, inner: Any) -> Any:
    with torch.no_grad():
        return up(x), down(inner)


def _difference(actual: Any, expected: Any) -> float:
    """The relative RMS difference; UnsupportedError if it is larger than rounding explains."""
    difference = float((actual.double() - expected.double()).norm() / expected.double().norm())
    if not difference < CLOSE:
        raise UnsupportedError(f"a sum over ranks differs from the product on one GPU by {difference:.2g}")
    return float(f"{difference:.2g}")


# ---------------------------------------------------------------- a decode step


def steps(host: Host, m: Sequence[int], repeats: int) -> Iterator[Row]:
    """us of all linear layers of a Llama-70B and of their sums, in one CUDA graph."""
    whole, sharded = Step(host, whole=True), Step(host, whole=False)
    for rows in m:
        prepared(host, [*whole.tensors, *sharded.tensors], [rows])
        loops = [host.capture([partial(step, Arrays.random(host, rows, step))]) for step in (whole, sharded)]
        (single, _), (_, us) = host.compare(loops, repeats)
        yield {
            "what": f"decode step of a Llama-70B, {LAYERS} layers and head", "format": STEP_FORMAT, "M": rows,
            "one_us": single, "us": us, "one_bytes": whole.nbytes, "bytes": sharded.nbytes,
        }  # fmt: skip


class Arrays(NamedTuple):
    """Inputs of the layers of a step, float16 [M, ...], and the outputs that are not new tensors."""

    hidden: Any
    mixed: Any
    inner: Any
    qkv: list[Any]
    gate_up: list[Any]

    @classmethod
    def random(cls, host: Host, m: int, step: Step) -> Arrays:
        """Random inputs of M tokens, of the widths of a step's layers."""
        qkv, output, gate_up, down = step.layers[0]
        outs = [
            [torch.empty((m, w.shape[0]), dtype=torch.float16, device=host.device) for w in weights]
            for weights in (qkv, gate_up)
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
        """One tensor of each kind."""
        qkv, output, gate_up, down = self.layers[0]
        return [*qkv, output.packed, *gate_up, down.packed, self.head.packed]

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights on this GPU."""
        *layer, head = (int(w.nbytes) for w in self.tensors)
        return LAYERS * sum(layer) + head

    def __call__(self, arrays: Arrays) -> Any:
        """All products of a step, and their sums."""
        with torch.no_grad():
            for qkv, output, gate_up, down in self.layers:
                matmul_many(arrays.hidden, qkv, outs=arrays.qkv)
                output(arrays.mixed)
                matmul_many(arrays.hidden, gate_up, outs=arrays.gate_up)
                y = down(arrays.inner)
            return y, self.head(arrays.hidden)


# ---------------------------------------------------------------- all rows


def run(
    formats: Sequence[str] = FORMATS_OF_PAIRS,
    m: Sequence[int] = M,
    repeats: int = REPEATS,
    save: Callable[[dict[str, Any]], None] = lambda results: None,
) -> dict[str, Any]:
    """All rows, on every rank; rank 0 calls `save` with the rows so far. UnsupportedError outside of torchrun."""
    if "LOCAL_RANK" not in os.environ or torch.cuda.device_count() < 2:
        raise UnsupportedError(
            "this benchmark runs on at least two GPUs: torchrun --nproc-per-node 2 -m benchmarks --shard"
        )
    import cupy

    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    host = Host()
    results: dict[str, Any] = {
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
            results[name].append({**row, "speedup": round(row["one_us"] / row["us"], 3)})
            if host.group.rank == 0:
                print(name, results[name][-1], flush=True)
                save(results)
        cupy.get_default_memory_pool().free_all_blocks()
    dist.destroy_process_group()
    return {**results, "rank": host.group.rank}


def table(results: dict[str, Any]) -> str:
    """The rows for a terminal."""
    head = ("what", "format", "M", "one GPU us", f"{results['gpus']} GPUs us", "times")
    cells = [head]
    for name in ("pairs", "steps", "loads"):
        for row in results[name]:
            numbers = f"{row['one_us']:.1f}", f"{row['us']:.1f}", f"{row['speedup']:.2f}"
            cells.append((row["what"], row["format"], str(row.get("M", "")), *numbers))
    return columns("<<>>>>", cells)

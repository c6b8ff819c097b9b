"""qgemm bench: time products on this machine, beside cuBLAS on a GPU or NumPy on a CPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from qgemm.arguments import ACTIVATIONS, KINDS
from qgemm.backend import backends
from qgemm.codec.format import Format
from qgemm.codec.group_activations import multiplies
from qgemm.cuda.driver.device import reason_without_cupy
from qgemm.errors import QgemmError, UnsupportedError
from qgemm.files.gguf.reader import open as open_gguf
from qgemm.formats import format_named
from qgemm.ops import matmul
from qgemm.tensor import Tensor
from qgemm.text import columns, json_lines, json_text, printable

from . import bench_model, timing
from .common import Command, UsageError, add_json, add_pattern, count, counts, need_gguf, random_tokens, selected
from .weights import random_blocks, repeated_rows

FORMATS = "q4_0", "q8_0", "q4_k", "q6_k"
SHAPE = 4096, 4096  # (N, K)
M = 1, 16, 512  # rows of x
DRAWN = 512  # rows of random weights; a larger matrix repeats them
CPU_REPEATS = 7

Activation = Any  # one of KINDS


class Case(NamedTuple):
    """A matrix to multiply by, and its name in the table."""

    name: str
    w: Tensor


class Row(NamedTuple):
    """One product: microseconds by qgemm and by the dense library, None where there is none."""

    tensor: str
    format: str
    n: int
    k: int
    m: int
    activation: str
    us: float
    dense_us: float | None
    gbs: float  # packed bytes of W a second, in 1e9

    @property
    def ratio(self) -> float | None:
        """Speed relative to the dense product."""
        return None if self.dense_us is None else self.dense_us / self.us


Measure = Callable[[Case, Sequence[Activation], Sequence[int], int], Iterator[Row]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """[FILE [--tensors REGEX] | --formats F,... --shapes NxK,...] [--gpu | --cpu] [--activations A,...] [--m M,...]."""
    parser.add_argument("file", metavar="FILE", nargs="?", help="a .gguf file: its matrices, each shape and type once")
    add_pattern(parser)
    parser.add_argument(
        "--formats", metavar="F,...", type=formats, help=f"of random weights, by default {','.join(FORMATS)}"
    )
    parser.add_argument("--shapes", metavar="NxK,...", type=shapes, help="of random weights, by default 4096x4096")
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--gpu", action="store_true", help="on the GPU, beside cuBLAS (default where there is a GPU)")
    device.add_argument("--cpu", action="store_true", help="on the CPU, beside NumPy (default elsewhere)")
    parser.add_argument("--activations", metavar="A,...", type=activations, help=f"of {', '.join(KINDS)} (a16,a8)")
    parser.add_argument("--m", metavar="M,...", type=counts, default=M, help="rows of x (default 1,16,512)")
    parser.add_argument("--repeats", metavar="R", type=count, help="runs of each product; their median counts")
    add_json(parser, "the table")
    bench_model.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure each matrix or a whole model, print the table; 1 if a product failed."""
    bench_model.refuse_without_model(args)
    if args.model is not None:
        if args.file or args.tensors or args.formats or args.shapes or args.activations:
            raise UsageError("--model measures a whole model: leave out FILE and options of products")
        return bench_model.run(args)
    if args.file is None and args.tensors is not None:
        raise UsageError("--tensors selects tensors of a FILE, and none is named")
    if args.file is not None and (args.formats or args.shapes):
        raise UsageError("--formats and --shapes describe random weights: leave them out, or FILE")
    cuda = backends()["cuda"]
    reason = reason_without_cupy(cuda, "timing a GPU")
    if args.gpu and reason:
        raise QgemmError(reason)
    backend = "cpu" if reason or args.cpu else "cuda"
    measure = gpu_rows() if backend == "cuda" else cpu_rows
    repeats = args.repeats or (timing.REPEATS if backend == "cuda" else CPU_REPEATS)
    rows: list[Row] = []
    failures = []
    for case in tqdm(cases(args), disable=None, leave=False):
        kinds = [kind for kind in args.activations or ACTIVATIONS if multiplies(kind, case.w.format)]
        try:
            rows += measure(case, kinds, args.m, repeats)
        except (QgemmError, RuntimeError) as error:
            failures.append(f"{case.name} {case.w.format} {case.w.shape}: {error}")
    if not rows and not failures:
        raise QgemmError("no matrix can be multiplied with these activations")
    if args.json:
        print(*json_lines(document(backend, rows)), sep="\n")
    else:
        print(table(backend, rows))
    for failure in failures:
        print(f"qgemm: {printable(failure)}", file=sys.stderr)
    return int(bool(failures))


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """The matrices of the file, one for each format and shape, or random ones."""
    if args.file is None:
        for n, k in args.shapes or [SHAPE]:
            for fmt in args.formats or map(format_named, FORMATS):
                yield Case("random", random_tensor(fmt, n, k))
        return
    need_gguf(args.file)
    with open_gguf(args.file, copy=True) as file:
        alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        for name in selected(file, args.tensors):
            w = file[name]
            if len(w.shape) == 2 and w.format.levels is not None:
                alike.setdefault((w.format.name, w.shape), []).append(name)
        if not alike:
            raise QgemmError(f"{printable(args.file)}: holds no matrix of a format with a codec")
        for first, *others in alike.values():
            yield Case(f"{first} (+{len(others)})" if others else first, file[first])


def random_tensor(fmt: Format, n: int, k: int) -> Tensor:
    """Random weights [n, k]; a large matrix repeats a few rows."""
    blocks = random_blocks(fmt, min(n, DRAWN), k, np.random.default_rng(0))
    return Tensor(fmt, (n, k), np.resize(blocks, (n, blocks.shape[1])))


def cpu_rows(case: Case, activations: Sequence[Activation], m_values: Sequence[int], repeats: int) -> Iterator[Row]:
    """Products by the CPU backend, by the blocks and by the copy that layers make, beside NumPy's by float32 weights.

    NumPy multiplies last: its threads spin for a while after each product, on the cores that others need.
    """
    packed = case.w.packed_for_cpu()
    layouts = {"": case.w} if packed is case.w else {"": case.w, " packed": packed}
    xs = [random_tokens(m, case.w.shape[1], 0) for m in m_values]
    times = []
    for x in xs:
        calls = {
            f"{activation}{layout}": partial(matmul, x, w, activation)
            for activation in activations
            for layout, w in layouts.items()
        }
        times.append(dict(zip(calls, timing.alternate(*calls.values(), repeats=repeats), strict=True)))
    dense = case.w.dequantize()
    for x, by_name in zip(xs, times, strict=True):
        (dense_ms,) = timing.alternate(partial(np.matmul, x, dense.T), repeats=repeats)
        for name, ms in by_name.items():
            yield row(case, len(x), name, 1e3 * ms, 1e3 * dense_ms)


def gpu_rows() -> Measure:
    """Products by the current GPU beside cuBLAS in float16, on weights that come from memory and not from a cache."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    try:
        cublas = timing.Cublas(stream)
    except (ImportError, OSError, RuntimeError):  # not installed
        cublas = None

    def measure(case: Case, activations: Sequence[Activation], m_values: Sequence[int], repeats: int) -> Iterator[Row]:
        (n, k), nbytes = case.w.shape, case.w.nbytes
        base = case.w.to_device()
        packed_copies, dense_copies = (timing.copies_of(size, timing.ROTATE) for size in (nbytes, 2 * n * k))
        packed = [base, *(repeated_rows(base, (n, k), shift) for shift in range(1, packed_copies))]
        dense = [cupy.ones((n, k), np.float16) for _ in range(dense_copies if cublas else 0)]
        for m in m_values:
            x, y = cupy.asarray(random_tokens(m, k, 0).astype(np.float16)), cupy.empty((m, n), np.float16)
            cupy.cuda.Device().synchronize()
            turns = timing.rotation(packed, nbytes, 2 * m * n * k)
            products: list[list[timing.Call]]
            products = [[partial(matmul, x, w, activation, out=y) for w in turns] for activation in activations]
            if cublas:
                products.append([partial(cublas, x, w, y) for w in timing.rotation(dense, 2 * n * k, 2 * m * n * k)])
            loops = [timing.capture(stream, calls) for calls in products]
            medians = [times.us for times in timing.compare(stream, loops, repeats)]
            dense_us = medians.pop() if cublas else None
            for activation, us in zip(activations, medians, strict=True):
                yield row(case, m, activation, us, dense_us)

    return measure


def row(case: Case, m: int, activation: str, us: float, dense_us: float | None) -> Row:
    """The row of one product."""
    n, k = case.w.shape
    return Row(case.name, case.w.format.name, n, k, m, activation, us, dense_us, case.w.nbytes / us / 1e3)


def table(backend: str, rows: Sequence[Row]) -> str:
    """The machine, and a line for each product."""
    dense = "cuBLAS us" if backend == "cuda" else "NumPy us"
    cells = [("tensor", "format", "N x K", "M", "x", "us", "GB/s", dense, "ratio")]
    for row in rows:
        dense_us, ratio = ("-", "-") if row.dense_us is None else (f"{row.dense_us:.1f}", f"{row.ratio:.2f}")
        cells.append((
            printable(row.tensor), row.format, f"{row.n}x{row.k}", str(row.m), row.activation, f"{row.us:.1f}",
            f"{row.gbs:.4g}", dense_us, ratio,
        ))  # fmt: skip
    return f"{printable(backends()[backend].detail)}\n\n{columns('<<<><>>>>', cells)}"


def document(backend: str, rows: Sequence[Row]) -> dict[str, Any]:
    """The table of `text`, for JSON."""
    return {
        "backend": {"name": backend, **backends()[backend]._asdict()},
        "dense": "cuBLAS float16" if backend == "cuda" else "NumPy float32",
        "rows": [{**row._asdict(), "tensor": json_text(row.tensor), "ratio": row.ratio} for row in rows],
    }


def formats(text: str) -> list[Format]:
    """An argument: names of formats separated by commas."""
    try:
        return [format_named(word) for word in text.split(",")]
    except UnsupportedError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def activations(text: str) -> list[str]:
    """An argument: names of KINDS separated by commas."""
    words = text.split(",")
    if not set(words) <= set(KINDS):
        raise argparse.ArgumentTypeError(f"{text!r}: activations are {', '.join(KINDS)}")
    return words


def shapes(text: str) -> list[tuple[int, int]]:
    """An argument: shapes N x K separated by commas, e.g. 4096x4096,8192x8192."""
    sizes = [tuple(counts(word.replace("x", ","))) for word in text.split(",")]
    if any(len(size) != 2 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r}: shapes are NxK, separated by commas")
    return [(n, k) for n, k in sizes]


COMMAND = Command(
    "bench",
    "time products on this machine",
    """\
Time y = x @ w.T for the matrices of a .gguf file or for random weights, and the same product of dense weights: by
cuBLAS in float16 on a GPU, by NumPy in float32 on a CPU.

On a GPU the weights come from memory, not from a cache, and x and y are float16. GB/s counts the packed bytes of w. On
a CPU "packed" is by a copy of w in the order of the CPU's vectors, which layers of qgemm.torch make.

With --model, time prompts and generated tokens of a whole model by transformers, beside the same model with dense
weights in the same process, in turns.""",
    "qgemm bench model.gguf --m 1,16,512",
    add_arguments,
    run,
)

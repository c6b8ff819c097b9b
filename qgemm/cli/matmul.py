"""qgemm matmul: a product on one tensor of a file, its error and its time."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from math import inf, sqrt
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.arguments import KINDS, Activation, check_weights
from qgemm.backend import backends
from qgemm.codec.format import floats
from qgemm.cuda.devices import synchronize
from qgemm.cuda.kernels.routes import route
from qgemm.cuda.problem import Problem, c_type
from qgemm.errors import QgemmError
from qgemm.files.atomic import replacing
from qgemm.files.gguf.reader import open as open_gguf
from qgemm.files.kinds import LONGEST, hint
from qgemm.files.npy import MAGIC
from qgemm.files.outputs import check_output
from qgemm.files.paths import shown, shown_path
from qgemm.ops import matmul
from qgemm.tensor import Tensor
from qgemm.text import columns, json_lines, json_text, json_value, printable

from .abilities import cpu_kernel, cuda_sm
from .common import Command, Progress, UsageError, add_file, add_json, counts, need_gguf, random_tokens

RUNS, SECONDS = 7, 2.0  # timed calls, whose median counts; fewer if they last longer than SECONDS
TILE = 1 << 20  # weights that the reference decodes at once: 8 MiB of float64


class Product(NamedTuple):
    """y [..., N] float32 on the host, the seconds of the product, the name of the kernel."""

    y: NDArray[np.float32]
    seconds: float
    kernel: str


class Line(NamedTuple):
    """One product: rows of x, its error against float64, the median time, the kernel."""

    m: int
    relative: float
    largest: float
    seconds: float
    kernel: str

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "m": self.m, "relative_rms": json_value(self.relative), "max_abs": json_value(self.largest),
            "ms": 1000 * self.seconds, "kernel": self.kernel,
        }  # fmt: skip


Multiply = Callable[[NDArray[Any]], Product]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """FILE TENSOR [--x X.npy | --m M,...] [--seed S] [--out Y.npy] [--activation KIND] [--backend NAME] [--json]."""
    add_file(parser)
    parser.add_argument("tensor", metavar="TENSOR", help="the name of a matrix in it")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--x", metavar="X.npy", help="activations [..., K] of any float type")
    source.add_argument(
        "--m", metavar="M,...", type=counts, default=[1, 16, 512],
        help="random activations of M rows, a product for each M (default 1,16,512)",
    )  # fmt: skip
    parser.add_argument("--seed", metavar="S", type=_seed, help="seed of the random activations (default 0)")
    parser.add_argument("--out", metavar="Y.npy", help="write y [..., N] as float32; needs --x or a single M")
    parser.add_argument(
        "--activation",
        choices=KINDS,
        default="a16",
        help="a16: x as it is; a8: as Q8_1; a8_g256: both in 8 bits; e4m3_g256: both in e4m3 (mxfp4)",
    )
    parser.add_argument("--backend", choices=tuple(BACKENDS), default="cpu", help="default cpu")
    add_json(parser, "the table")


def run(args: argparse.Namespace) -> int:
    """Multiply each x, compare with float64, print the result."""
    if args.out is not None and args.x is None and len(args.m) > 1:
        raise UsageError("--out needs one product: --x, or --m with a single number")
    if args.seed is not None and args.x is not None:
        raise UsageError("--seed is for random activations, and --x names others")
    args.seed = args.seed or 0
    need_gguf(args.file)
    with open_gguf(args.file, copy=True) as file:
        if args.out is not None:
            check_output(args.out, [*file.paths, *([] if args.x is None else [args.x])])
        w = file[args.tensor]
        check_weights(w, args.activation)
        loaded = None if args.x is None else load(args.x)
        drawn = (random_tokens(m, w.shape[1], args.seed) for m in args.m)
        inputs: Iterator[NDArray[Any]] = drawn if loaded is None else iter([loaded])
        multiply = BACKENDS[args.backend](w, args.activation)
        lines = []
        with Progress("matmul", w.nbytes * (len(args.m) if loaded is None else 1)) as progress:
            for x in inputs:
                y, seconds, kernel = multiply(x)
                lines.append(Line(y.size // w.shape[0], *errors(x, w, y, progress), seconds, kernel))
    if args.out is not None:
        save(args.out, y)
    if args.json:
        print(*json_lines(document(args, w, loaded, lines)), sep="\n")
    else:
        print(report(args, w, loaded, lines))
    return 0


def report(args: argparse.Namespace, w: Tensor, x: NDArray[Any] | None, lines: list[Line]) -> str:
    """The inputs and the backend, and a row for each product. x: None if it was random."""
    source = f"standard normal, seed {args.seed}" if x is None else f"{printable(args.x)}, {x.dtype} {x.shape}"
    facts = [
        ("w", f"{printable(w.name)}, {w.format} {w.shape}"),
        ("x", f"{source}, as {args.activation}"),
        ("on", f"{args.backend}: {printable(backends()[args.backend].detail)}"),
    ]
    rows = [("M", "relative RMS error", "max abs error", "ms", "kernel")]
    for line in lines:
        ms = f"{1000 * line.seconds:.3f}"
        rows.append((str(line.m), f"{line.relative:.3g}", f"{line.largest:.3g}", ms, line.kernel))
    return f"{columns('<<', facts)}\n\n{columns('>>>><', rows)}"


def document(args: argparse.Namespace, w: Tensor, x: NDArray[Any] | None, lines: list[Line]) -> dict[str, Any]:
    """The facts and the table, for JSON."""
    drawn = {"distribution": "standard normal", "seed": args.seed}
    return {
        "path": json_text(args.file),
        "w": {"name": json_text(w.name), "type": str(w.format), "shape": w.shape},
        "x": drawn if x is None else {"path": json_text(args.x), "dtype": str(x.dtype), "shape": x.shape},
        "activation": args.activation,
        "backend": {"name": args.backend, **backends()[args.backend]._asdict()},
        "products": [line.document() for line in lines],
    }


def load(path: str) -> NDArray[Any]:
    """The array of floats in a .npy file."""
    with open(path, "rb") as file:
        head = file.read(LONGEST)
    if not head.startswith(MAGIC):
        rule = f"it starts with {shown(head[: len(MAGIC)])}{hint(head)}"
        raise QgemmError(f"{shown_path(path)}: is not a .npy file of floats: {rule}")
    try:
        return floats(np.load(path, allow_pickle=False))
    except (OSError, MemoryError):
        raise
    except Exception as error:  # NumPy raises many types for damaged files
        raise QgemmError(f"{shown_path(path)}: is not a .npy file of floats: {error}") from error


def save(path: str, y: NDArray[np.float32]) -> None:
    """Write a .npy file; it replaces an old file only once it is complete."""
    with replacing(path) as fd, open(fd, "wb", closefd=False) as file:
        np.save(file, y)


def errors(x: NDArray[Any], w: Tensor, y: NDArray[Any], progress: Progress) -> tuple[float, float]:
    """Errors of y against x @ w.T in float64: RMS relative to that of the product, and the largest."""
    x = x.reshape(-1, w.shape[1]).astype(np.float64)
    y = y.reshape(-1, w.shape[0])
    step = max(1, TILE // w.shape[1])
    error = size = largest = 0.0
    with np.errstate(all="ignore"):  # NaN and infinity are data; they show in the result
        for start in range(0, w.shape[0], step):
            part = w[start : start + step]
            want = x @ part.dequantize(np.float64).T
            off = y[:, start : start + step] - want
            error += float(np.sum(off**2))
            size += float(np.sum(want**2))
            largest = float(np.maximum(largest, np.abs(off).max(initial=0)))
            progress.advance(part.nbytes)
    return sqrt(error / size) if size else inf if error else 0.0, largest


def on_cpu(w: Tensor, activation: Activation) -> Multiply:
    """Products by the CPU backend."""

    def multiply(x: NDArray[Any]) -> Product:
        y, seconds = timed(lambda: matmul(x, w, activation, dtype=np.float32))
        return Product(y, seconds, cpu_kernel(w, activation))

    return multiply


def on_cuda(w: Tensor, activation: Activation) -> Multiply:
    """Products by the current GPU; the time excludes the transfers of x and y."""
    state = backends()["cuda"]
    sm = cuda_sm(state)
    if sm is None:
        raise QgemmError(f"cuda is not available: {state.detail}")
    packed = w.to_device()
    (n, k), library, device = packed.shape, packed.library, packed.device

    def multiply(x: NDArray[Any]) -> Product:
        there = library.uploaded(x, device)
        product, seconds = timed(lambda: matmul(there, packed, activation), lambda: synchronize(library.stream(device)))
        y = library.host(product)
        problem = Problem(w.format, activation, y.size // n, n, k, sm, c_type(x.dtype))
        return Product(y, seconds, route(problem).kernel.name)

    return multiply


BACKENDS: dict[str, Callable[[Tensor, Activation], Multiply]] = {"cpu": on_cpu, "cuda": on_cuda}


def timed(call: Callable[[], Any], wait: Callable[[], object] = lambda: None) -> tuple[Any, float]:
    """The result of a call followed by `wait`, and the median time of further calls; the first warms up."""
    result = call()
    wait()
    times: list[float] = []
    while not times or (len(times) < RUNS and sum(times) < SECONDS):
        begin = perf_counter()
        result = call()
        wait()
        times.append(perf_counter() - begin)
    return result, median(times)


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


COMMAND = Command(
    "matmul",
    "multiply by one tensor: result, error, time",
    """\
Multiply activations by one matrix of a .gguf file: y [..., N] = x [..., K] @ w [N, K].T on its packed blocks.

For each x: the error of y against a float64 product with the exact weights (for a8 it includes the rounding of
x to Q8_1), and the median time of a few runs.""",
    "qgemm matmul model.gguf blk.0.attn_q.weight --m 1,16,512 --activation a8",
    add_arguments,
    run,
)

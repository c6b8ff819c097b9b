"""Helpers of several test modules: arrays of the GPU, random tensors, bounds of products, converters, processes.

tests/strategies.py draws with Hypothesis; here nothing is drawn.
"""

from __future__ import annotations

import gc
import hashlib
import os
import re
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from measured_errors import Expected, noise_of, of_integer_dots, weight_loss

import qgemm
from qgemm.codec.error_bound import TINY, a8_exact, a16_bound, magnitudes
from qgemm.codec.format import Format, float_dtype
from qgemm.converter import Options, open_source
from qgemm.converter.job import convert
from qgemm.cuda.layout import row_scale
from qgemm.cuda.layout import tile as tiles
from qgemm.formats import format_named

DATA = Path(__file__).parent / "data"
CHILD_SECONDS = 300  # until a forked process is killed, below the time limit of a test
EXCERPT = DATA / "minilm_excerpt.gguf"  # matrices of a trained model, a type each
LARGEST_HALF = float(np.finfo(np.float16).max)
ROUNDING = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # relative error of one conversion to the type
FEW_ROWS = 16  # the most rows of x that a decode kernel multiplies at once


# ---------------------------------------------------------------- tensors


def extreme(k: int) -> np.ndarray:
    """[7, K] float32: normal rows, times 1e-6, 1e-30 and 1e30, with a spike of 66,000, times 1e-30 to 1e30 by value and
    by block."""
    x, rng = normal(7, k, seed=7), np.random.default_rng(8)
    x[1:4] *= np.float32([[1e-6], [1e-30], [1e30]])
    x[4, -5] = 66000
    x[5] *= 10.0 ** rng.uniform(-30, 30, k)
    x[6] *= np.repeat(10.0 ** rng.uniform(-30, 30, k // 32), 32)
    return x


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Standard normal float32."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tame(fmt: Format, blocks: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Random blocks with scales drawn from the ordinary range of trained weights, so that products stay finite."""
    blocks = blocks.copy()
    for name in fmt.dtype.names or ():
        if name == fmt.zero_field:
            if fmt.dtype[name].kind == "f":
                blocks[name] = rng.uniform(0, fmt.code_range[1], blocks.shape).astype(np.float16)
        elif fmt.dtype[name].kind == "f":
            blocks[name] = rng.uniform(-0.05, 0.05, blocks.shape).astype(np.float16)
        elif name in fmt.encoding.ordinary:
            blocks[name] = rng.integers(*fmt.encoding.ordinary[name], blocks[name].shape)
    if fmt.scatter_scale is not None:
        fmt.scatter_scale(blocks, rng.uniform(-0.05, 0.05, blocks.shape).astype(np.float16))
    if fmt.family == "f8":  # codes of NaN and infinity
        blocks["qs"][~np.isfinite(fmt.levels(blocks.reshape(-1)).codes).reshape(blocks["qs"].shape)] = 0
    if fmt.plain:
        blocks[...] = fmt.encode(rng.standard_normal((blocks.size, 1)).astype(np.float32)).reshape(blocks.shape)
    return blocks


def set_scales(fmt: Format, blocks: np.ndarray, scale: float) -> None:
    """Scales and minimums of floats of blocks [n, ...] become `scale`, of every second row minus that; others stay."""
    signed = np.full(blocks.shape, scale, np.float16)
    signed[1::2] *= -1
    for name in fmt.dtype.names or ():
        if fmt.dtype[name].kind == "f" and name != fmt.zero_field:
            blocks[name] = signed
    if fmt.scatter_scale is not None:
        fmt.scatter_scale(blocks, signed)


def bytes_as_blocks(fmt: Format, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Blocks of random bytes; of digits to the base 3 the ones that encoders write, which tiles give back."""
    raw = np.frombuffer(rng.bytes(int(np.prod(shape)) * fmt.block_bytes), fmt.dtype).reshape(shape)
    return raw if fmt.tile.digits is None else fmt.tile.digits.canonical(raw)


def random_blocks(fmt: Format, n: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Blocks [n, b] of random bytes, of K columns or, if these end inside a block, up to its end."""
    return bytes_as_blocks(fmt, (n, -(-k // fmt.weights)), rng)


def random_tensor(fmt: Format, n: int, k: int, rng: np.random.Generator) -> qgemm.Tensor:
    """[N, K'] of random bytes with tame scales; K' is K rounded up to whole blocks."""
    blocks = random_blocks(fmt, n, k, rng)
    return qgemm.Tensor(fmt, (n, blocks.shape[1] * fmt.weights), tame(fmt, blocks, rng))


# ---------------------------------------------------------------- arrays of the GPU


def cupy() -> Any:
    """The package, imported where a test needs it: a machine without a GPU collects the tests as well."""
    import cupy

    return cupy


def on_sm_90() -> bool:
    """Whether the current GPU has compute capability 9.0; false without a GPU."""
    return qgemm.backends()["cuda"].available and cupy().cuda.Device().compute_capability == "90"


def poisoned(shape: tuple[int, ...], dtype: Any = "float32") -> Any:
    """An output filled with NaN: whatever is not written shows."""
    return cupy().full(shape, np.nan, np.float32).astype(dtype)


def guarded(m: int, n: int, dtype: Any = "float32") -> tuple[Any, Any]:
    """An output [m, n] between two rows of guards, NaN everywhere: (all rows, those of the output)."""
    rows = poisoned((m + 2, n), dtype)
    return rows, rows[1:-1]


def assert_same_bits(first: Any, call: Callable[[], Any], times: int = 200) -> None:
    """call() returns the bits of `first` every time. The host reads one count from the GPU, after all calls."""
    wrong = cupy().zeros((), np.int64)
    for _ in range(times):
        wrong += cupy().count_nonzero(call() != first)
    assert int(wrong) == 0


# ---------------------------------------------------------------- products and their bounds


def exact(x: np.ndarray, w: qgemm.Tensor) -> np.ndarray:
    """x @ w.T in float64 from the exactly decoded weights."""
    with np.errstate(invalid="ignore", over="ignore"):  # raw blocks hold NaN and infinity
        return x.astype(np.float64) @ w.dequantize(np.float64).T


def subnormal_loss(w: qgemm.Tensor) -> np.ndarray:
    """The largest rounding error of a weight where halves are subnormal, for each row. [N]

    Rounding to a subnormal half is off by at most 2^-25. The prefill kernels round minimum, weight and scale in the
    row's unit, and a level multiplies the error of the scale. The error is zero where all three are multiples of 2^-24.
    """
    if w.format.plain:
        return np.full(w.shape[0], 2.0**-25)
    unit = row_scale.range_of(w.format)
    weights = np.array([unit.weight(bound) for bound in tiles.row_absmax(w.format, w.blocks)])
    loss = 2.0 ** (weights - 25) * (2 + float(tiles.largest_code(w.format)) * 2.0**unit.level)
    return np.where((weights <= 0) & (tiles.scale_factors(w.format) in (1, 2)), 0, loss)


def product_bound(x: np.ndarray, w: qgemm.Tensor, dtype: np.dtype) -> np.ndarray:
    """Sums in float32; weights rounded to x's type in panels, with scale and minimum in the prefill kernel."""
    sizes, loss = magnitudes(w.format, w.blocks), ROUNDING[dtype.name]
    tiny = subnormal_loss(w) * np.abs(x).sum(axis=1, keepdims=True) if loss else 0.0
    return a16_bound(x, sizes) + 3 * loss * (np.abs(x) @ sizes.T) + tiny


@np.errstate(invalid="ignore")  # x may be NaN or infinite
def expected_sums(x: np.ndarray, w: qgemm.Tensor) -> Expected:
    """The product of exact factors by float32 sums on a CPU."""
    x, sizes = x.astype(np.float64), magnitudes(w.format, w.blocks)
    return Expected(exact(x, w), a16_bound(x, sizes), noise_of(x, sizes, 0.0, tensor_cores=False))


@np.errstate(invalid="ignore")  # x may be NaN or infinite
def expected_product(x: np.ndarray, w: qgemm.Tensor, dtype: Any, levels_alone: bool = False) -> Expected:
    """The product by a GPU kernel that multiplies weights of this type, or by one that rounds no more than those.

    Kernels for up to FEW_ROWS rows of x sum codes with their offset from zero, which dominates the error of two bits.
    """
    x, dtype = x.astype(np.float64), float_dtype(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    bound = product_bound(x, w, dtype)
    if not w.format.plain:
        bound = bound + level_loss(x, w, dtype.name)
    loss = weight_loss(w.format, w.blocks, dtype.name, levels_alone)
    if w.format.needs_table:  # kernels for few rows round the levels alone, to the type of x
        loss = np.maximum(loss, weight_loss(w.format, w.blocks, dtype.name, levels_alone=True))
    sizes = magnitudes(w.format, w.blocks)
    offset = len(x) <= FEW_ROWS and not w.format.plain
    noise = noise_of(x, sizes, loss, summed=raw_magnitudes(w, bias=0) if offset else None)
    return Expected(exact(x, w), bound, noise)


def raw_magnitudes(w: qgemm.Tensor, bias: int = 128) -> np.ndarray:
    """The terms of a weight in the decode kernel: scale * (code + its offset from zero) + minimum.

    bias: the largest offset of signed bytes.
    """
    levels = w.format.decode_levels(w.blocks.reshape(-1))
    if isinstance(levels.zero, np.ndarray):
        return magnitudes(w.format, w.blocks)
    codes = np.abs(levels.codes.astype(np.float64) - levels.zero) + 2 * max(
        levels.zero, bias if levels.codes.dtype == np.int8 else 0
    )
    sizes = np.abs(levels.scale[..., None]) * codes
    if levels.minimum is not None:
        sizes = sizes + np.abs(levels.minimum[..., None])
    return sizes.reshape(w.shape)


@np.errstate(invalid="ignore")  # x may be NaN or infinite
def expected_decode(x: np.ndarray, w: qgemm.Tensor) -> Expected:
    """The product of exact x and weights, except for the levels of a codebook."""
    x, dtype, raw = x.astype(np.float64), x.dtype.name, raw_magnitudes(w)
    bound = 2 * a16_bound(x, raw) + level_loss(x, w, dtype)
    return Expected(exact(x, w), bound, noise_of(x, raw, weight_loss(w.format, w.blocks, dtype, levels_alone=True)))


def level_magnitudes(w: qgemm.Tensor) -> np.ndarray:
    """The magnitude of each weight of a codebook, to multiply by the relative error of its level. [N, K]

    Kernels hold levels times 2^-e in half, which has 11 bits from 2^-14 on: smaller levels count as 2^-14.
    """
    fmt = w.format
    least = fmt.variant(np.full_like(fmt.codebook, 2.0 ** (tiles.level_exponent(fmt) - 14)), None)
    return np.maximum(magnitudes(fmt, w.blocks), magnitudes(least, w.blocks))


def level_loss(x: np.ndarray, w: qgemm.Tensor, dtype: str) -> np.ndarray | float:
    """The error of a product from rounding a codebook's levels to x's type."""
    lost = level_loss_of(w.format, dtype)
    return lost * (np.abs(x) @ level_magnitudes(w).T) if lost else 0.0


def level_loss_of(fmt: Format, dtype: str) -> float:
    """The error of rounding a level to x's type, relative to the level's magnitude."""
    return {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-9}[dtype] if fmt.needs_table else 0.0


@np.errstate(invalid="ignore")  # x may be NaN or infinite
def expected_a8(x: np.ndarray, w: qgemm.Tensor) -> Expected:
    """The a8 formula, for kernels of integer dots and for those that multiply the decoded blocks of x in half."""
    blocks = qgemm.quantize_activations(x)
    y, _ = a8_exact(blocks.blocks, w.format, w.blocks)
    decoded, dense = blocks.dequantize(np.float64), w.dequantize(np.float64)
    # Decoded blocks sum d * q where the formula takes the stored s: they differ by 2^-10 of the largest |s| there is.
    largest = np.abs(dense).max() + 16 * np.abs(w.format.decode_levels(w.blocks.reshape(-1)).scale).max()
    sums = np.abs(decoded) @ np.abs(dense).T
    bound = 2 * a16_bound(decoded, dense) + 2.0**-9 * (np.abs(decoded).sum(axis=1, keepdims=True) * largest + sums)
    halves = np.clip(decoded, -LARGEST_HALF, LARGEST_HALF).astype(np.float16).astype(np.float64)
    sizes = magnitudes(w.format, w.blocks)
    noise = noise_of(halves, sizes, weight_loss(w.format, w.blocks, "float16"))
    # The noise is a difference's value and its RMS: it may be small by chance, or large where x has spikes.
    spread = np.sqrt(decoded**2 @ (sizes**2).T) + TINY
    differences = [(values @ dense.T - y) / spread for values in (halves, decoded)]
    finite = np.isfinite(differences).all(axis=0)
    rms = max(np.sqrt((part[finite] ** 2).mean()) for part in differences) if finite.any() else 0.0
    largest = np.abs(differences).max(axis=0)
    return Expected(y, bound + 1e-30, np.hypot(noise, spread * np.hypot(rms, np.where(finite, largest, 0))))


def assert_a8(y: np.ndarray, x: np.ndarray, w: qgemm.Tensor) -> None:
    """y is the a8 product of x and W, by any kernel."""
    expected_a8(x, w).check(y)


def expected_on_gpu(x: np.ndarray, w: Any, activation: str = "a16") -> Expected:
    """The product by any kernel of a GPU of x [..., K], whose type weights are rounded to, and of W or a view of it."""
    kind, values, factor = x.dtype.name, x.astype(np.float32).reshape(-1, w.shape[1]), None
    if isinstance(w, qgemm.Reordered):
        values, w = values[:, w.columns], w.tensor
    elif isinstance(w, qgemm.Scaled):
        factor, w = 1 / np.float64(w.factor) if w.divides else np.float64(w.factor), w.tensor
    if activation == "a8":
        expected = expected_a8(values, w)
    else:
        expected = expected_product(values, w, kind if kind in ROUNDING else "float32")
    return expected if factor is None else expected.times(factor)


def check_product(y: np.ndarray, x: np.ndarray, w: Any, *addends: Any, activation: str = "a16") -> None:
    """y [..., N], of any type, is expected_on_gpu of x [..., K] and w plus addends, within its bound and RMS error."""
    expected = expected_on_gpu(x, w, activation)
    shape = expected.y.shape
    expected = expected.plus(*(np.broadcast_to(part, y.shape).reshape(shape) for part in addends))
    expected.rounded(y.dtype if y.dtype.name in ROUNDING else "float32").check(y.reshape(shape))


def prepared_product(x: np.ndarray, w: qgemm.Tensor, kind: str) -> tuple[qgemm.Tensor, np.ndarray]:
    """x [M, K] prepared for an activation, and its product y [M, N], float32 and finite; x itself gives the same y."""
    prepared = qgemm.quantize_activations(x, kind)
    y = qgemm.matmul(x, w, kind)
    np.testing.assert_array_equal(qgemm.matmul(prepared, w), y)
    assert y.dtype == np.float32
    assert np.isfinite(y).all()
    return prepared, y


def assert_a8_formula(
    got: np.ndarray, x: np.ndarray, w: qgemm.Tensor, worst_case: bool = False, **kernel: bool
) -> None:
    """Finite, and off by no more than float32 sums of the formula's terms, also where x is extreme.

    worst_case: by the bound alone, where a sum has a few terms, or a kernel rounds otherwise than the formula. kernel:
    levels_first and partial_dots of `a8_terms`.
    """
    expected = of_integer_dots(qgemm.quantize_activations(x).blocks, w, **kernel)
    assert np.isfinite(got[np.isfinite(expected.y)]).all()
    (expected.check_worst_case if worst_case else expected.check)(got)


# ---------------------------------------------------------------- programs


WEIGHT = "blk.2.attn_q.q4_0"  # a tensor [96, 384] in EXCERPT


def lines_of(out: str, start: str) -> dict[str, list[str]]:
    """The table under the header that begins with `start`: first cell -> cells, cut where two blanks are."""
    lines = out.split("\n")
    begin = next(i for i, line in enumerate(lines) if line.split()[:1] == [start])
    table = lines[begin + 1 : lines.index("", begin)]
    return {cells[0]: cells for cells in (re.split(r"  +", line.strip()) for line in table)}


def mixed_model(path: Path, large: bool = True) -> Path:
    """Tensors of every kind: plain ones of each type, quantized ones, some that are kept."""
    rng = np.random.default_rng(11)
    x = rng.standard_normal((70, 96)).astype(np.float32)
    tensors = {
        "blk.0.attn_q.weight": x.astype(np.float16),
        "blk.0.attn_k.weight": x.astype(float_dtype("bfloat16")),
        "blk.0.attn_v.weight": rng.standard_normal((2100, 2048) if large else (96, 2048)).astype(np.float32),
        "blk.0.attn_norm.weight": x[0],
        "blk.0.ffn_up.weight": qgemm.quantize(x, "q4_0"),
        "blk.0.ffn_down.weight": qgemm.quantize(x, "q5_1"),
        "blk.0.ffn_gate.weight": x.astype(np.float64),
    }
    qgemm.write(path, tensors)
    return path


def converted(source: Path, target: Path, fmt: str, **options: Any) -> dict[str, Any]:
    """Convert with options of either kind, over an old file; the lines by tensor."""
    own = {key: options.pop(key) for key in ("dry_run", "threads", "max_error", "backend", "advance") if key in options}
    own.setdefault("force", options.pop("force", True))
    with open_source(source) as opened:
        lines = convert(opened, target, Options(format_named(fmt), **options), **own)
    return {line.name: line for line in lines}


def left_over(folder: Path) -> list[str]:
    """Temporary files of a writer that are still in a folder."""
    return [name for name in os.listdir(folder) if name.startswith(".qgemm-")]


def views_of_streams() -> list[Any]:
    """Living views from BytesIO.getbuffer(); Python 3.12 crashes when the collector frees one with its stream."""
    return [item for item in gc.get_objects() if type(item).__name__ == "_BytesIOBuffer"]


def at_once(work: Callable[..., Any], *arguments: Iterable[Any]) -> None:
    """Call work with each set of arguments, as map does, at the same time: each call has a thread of its own."""
    threads = [threading.Thread(target=work, args=args) for args in zip(*arguments, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def forked(work: Any) -> int:
    """A child process, which may be killed, that does `work` and ends, with status 1 if it raises.

    One that hangs is killed after CHILD_SECONDS.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns about a fork beside BLAS's idle threads
        child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the parent's handler would only raise, which work may catch
        signal.alarm(CHILD_SECONDS)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def digests(rows: np.ndarray) -> list[int]:
    """The first 8 bytes of the SHA-256 of each row's bytes, as ggml_edges.npz has them."""
    return [int.from_bytes(hashlib.sha256(row.tobytes()).digest()[:8], "little") for row in rows]

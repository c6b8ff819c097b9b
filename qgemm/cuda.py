"""The CUDA backend: takes arrays from CuPy or through DLPack, picks a route, launches on the caller's stream."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from . import activations, jit, prefill, tiles
from .activations import DeviceActivations
from .block import Format, float_dtype
from .device import DeviceTensor
from .errors import UnsupportedError
from .formats.q8_1 import FORMAT as Q8_1
from .launch import Launch
from .matmul import check_shapes, check_weights, like, on_cuda
from .routes import C_TYPES, SPLITS, Problem, Route, c_type, decode_template, ring_bytes, route, split_of

WORKSPACE = 256 << 20  # bytes of dense weights at a time


def matmul(x: Any, w: Any, activation: str, *, out: Any = None, dtype: DTypeLike | None = None) -> Any:
    """`qgemm.matmul` for x on a CUDA device and a DeviceTensor w."""
    if type(w) is DeviceTensor and dtype is None and _again(x, w, activation, out):
        return out
    prepared = isinstance(x, DeviceActivations)
    if not isinstance(w, DeviceTensor):
        raise UnsupportedError(f"x is on a CUDA device, w on the host ({w!r}); multiply by w.to_device()")
    if not prepared and not on_cuda(x):
        raise UnsupportedError(f"w is on a CUDA device ({w!r}), x is not ({type(x).__name__}); upload x first")
    if prepared and activation != "a8":
        raise UnsupportedError(f"prepared activations are Q8_1 for activation 'a8', got {activation!r}")
    import cupy

    check_weights(w)
    source = x.like if prepared else x
    with _on_stream_of(source, w.data.device):
        values = x if prepared else _as_cupy(x)
        check_shapes(values.shape, w)
        y = _output(out, (*values.shape[:-1], w.shape[0]), dtype)
        if out is not None and not prepared and cupy.may_share_memory(values, y):
            values = values.copy()
        if y.size:
            _multiply(values, w, activation, y)
        return out if out is not None else like(source, y)


def quantize_activations(x: Any) -> DeviceActivations:
    """`qgemm.quantize_activations` for x on a CUDA device."""
    with _on_stream_of(x, None):
        return _quantize(_as_cupy(x), x)


def dequantize(w: DeviceTensor, dtype: DTypeLike) -> Any:
    """The weights of w as a CuPy array [N, K] of float32, float16 or bfloat16 (float64: from float32)."""
    found = float_dtype(dtype)
    if w.format.levels is None:
        raise UnsupportedError(f"{w!r}: {w.format} has no decoder")
    kernel_dtype = found if found.name in C_TYPES else np.dtype(np.float32)
    with w.data.device:
        return _dense(w, slice(0, w.shape[0]), kernel_dtype, 0).astype(found, copy=False)


def _multiply(x: Any, w: DeviceTensor, activation: str, y: Any) -> None:
    import cupy

    (n, k), shape, dtype = w.shape, x.shape, getattr(x, "dtype", None)
    if k == 0:
        y.fill(0)
        return
    m = y.size // n
    direct = y.flags.c_contiguous and y.dtype.name in C_TYPES
    flat = y.reshape(m, n) if direct else cupy.empty((m, n), np.float32)
    kind = "float" if isinstance(x, DeviceActivations) else c_type(x.dtype)
    problem = Problem(w.format, activation, m, n, k, int(w.data.device.compute_capability), kind)
    row = route(problem)
    prepared = isinstance(x, DeviceActivations)
    if activation == "a8" and not prepared:
        x = _quantize(x, x, _workspace(_stream(), k, m) if row.kernel == "decode_a8" else None)
    elif activation == "a16":
        x = _rows(x, k)
    made = LAUNCH[row.kernel](row, x, w, flat)
    if not direct:
        y[...] = flat.reshape(y.shape)
    if row.kernel in ("decode", "decode_a8") and direct and not prepared:
        launch: Callable[..., None] = _decode_launch(row, w.device, w.format, w.shape, m, c_type(y.dtype))
        if activation == "a8":
            launch = _after_quantizing(_quantize_launch(w.device, kind, k, m), launch, k, m)
        w.ready[activation, shape, dtype, y.shape, y.dtype] = launch


def _after_quantizing(
    quantize: Launch, decode: Callable[..., None], k: int, m: int
) -> Callable[[int, int, int, int], None]:
    """Both launches of an "a8" product, to be called like the launch of decode alone."""

    def launch(stream: int, w: int, x: int, y: int) -> None:
        workspace = _workspace(stream, k, m).data.ptr
        quantize(stream, x, workspace)
        decode(stream, w, workspace, y)

    return launch


_workspaces: dict[tuple[int, int, int, int], Any] = {}


def _workspace(stream: int, k: int, m: int) -> Any:
    """Where a stream's "a8" products of this size keep their quantized x, one after the other.

    It is never freed (16 rows of 16384 take 320 KB), so that a captured graph may be replayed whenever its stream's
    other work is done.
    """
    import cupy

    key = (cupy.cuda.runtime.getDevice(), stream, k, m)
    if key not in _workspaces:
        _workspaces[key] = cupy.empty((-(-k // tiles.SPAN), m, activations.DTYPE.itemsize), np.uint8)
    return _workspaces[key]


def _decode(row: Route, x: Any, w: DeviceTensor, y: Any) -> None:
    """x [M, K] of half, or its Q8_1 blocks, times tiles at memory speed; few tokens."""
    if x.data.ptr % 16:  # a view into an array: the kernel copies 16 bytes at a time
        x = x.copy()
    launch = _decode_launch(row, w.device, w.format, w.shape, len(y), c_type(y.dtype))
    launch(_stream(), w.pointer, x.data.ptr, y.data.ptr)


def _decode_a8(row: Route, x: DeviceActivations, w: DeviceTensor, y: Any) -> None:
    """Q8_1 activations times tiles at memory speed; few tokens."""
    _decode(row, x.data, w, y)


@cache
def _decode_launch(row: Route, device: int, fmt: Format, shape: tuple[int, int], m: int, out: str) -> Launch:
    """The decode kernel of a route for every matrix of this shape and M rows of x."""
    (n, k), tokens = shape, _tokens(row, m)
    split = split_of(row.kernel, tokens, -(-n // tiles.ROWS))
    template = decode_template(fmt, split, tokens, row.kernel)
    rows = 16 * split.groups
    rings = split.splits * ring_bytes(fmt, split.groups, tokens, int(template["DEPTH"]), row.kernel)
    sums = split.splits * tokens * (rows + 4) * 4  # they take the rings' place at the end
    types: jit.Template = {"In": "half", "Out": out} if row.kernel == "decode" else {"Out": out}
    function = jit.load(row.kernel, fmt, **types, **template)
    sizes = ctypes.c_int64(n), ctypes.c_int64(k), ctypes.c_int(m)
    return Launch(function, -(-n // rows), 32 * split.splits, max(rings, sums), 3, *sizes)


def _again(x: Any, w: DeviceTensor, activation: str, out: Any) -> bool:
    """Compute a product like one before, if x and out are CuPy arrays that the decode kernel takes as they are.

    Checks nothing that the first product of these shapes and types has checked: of 30 us of Python 5 remain.
    """
    import cupy

    if type(x) is not cupy.ndarray or type(out) is not cupy.ndarray:
        return False
    launch = w.ready.get((activation, x.shape, x.dtype, out.shape, out.dtype))
    if launch is None or not (x.flags.c_contiguous and out.flags.c_contiguous):
        return False
    source = x.data
    if source.ptr < out.data.ptr + out.nbytes and out.data.ptr < source.ptr + x.nbytes:
        return False  # y onto x: x must be copied first
    if source.ptr % 16 or not (source.device_id == out.data.device_id == cupy.cuda.runtime.getDevice() == w.device):
        return False
    launch(_stream(), w.pointer, source.ptr, out.data.ptr)
    return True


def _stream() -> int:
    import cupy

    handle: int = cupy.cuda.get_current_stream().ptr
    return handle


def _fused(row: Route, x: Any, w: DeviceTensor, y: Any) -> None:
    """x [M, K] times tiles; few tokens."""
    _launch_strips(row, x, w, y, {"In": c_type(x.dtype)})


def _fused_a8(row: Route, x: DeviceActivations, w: DeviceTensor, y: Any) -> None:
    """Q8_1 activations times tiles; few tokens."""
    _launch_strips(row, x.data, w, y, {})


def _launch_strips(row: Route, x: Any, w: DeviceTensor, y: Any, template: jit.Template) -> None:
    """One CTA a strip of tiles; the smallest token tile that holds y's rows."""
    (n, k), m = w.shape, len(y)
    tokens = _tokens(row, m)
    kernel = jit.load(row.kernel, w.format, **template, Out=c_type(y.dtype), TOKENS=tokens, SPLITS=SPLITS)
    threads = SPLITS * tiles.WARPS * tiles.LANES
    kernel((len(w.data),), (threads,), (w.data, x, y, np.int64(n), np.int64(k), np.int32(m)))


def _tokens(row: Route, m: int) -> int:
    return next(tokens for tokens in row.tokens if tokens >= m)


def _panels(row: Route, x: Any, w: DeviceTensor, y: Any) -> None:
    """Decode panels of W in bounded workspace, multiply each by cuBLAS; any number of tokens.

    The panel has x's type where that is exact enough: float16 (scaled by a power of two, so that nothing overflows)
    or bfloat16 for the same activations, float32 for the rest and for A8, whose activations are decoded first.
    """
    import cupy

    if isinstance(x, DeviceActivations):
        x = _decode_activations(x)
    dtype = x.dtype
    if w.format.plain and w.data.dtype != dtype:
        x, dtype = x.astype(np.float32), np.dtype(np.float32)
    exponent = w.exponent if dtype == np.float16 else 0
    target = y if y.dtype.name in ("float32", dtype.name) else cupy.empty(y.shape, np.float32)
    step = max(1, WORKSPACE // (w.shape[1] * dtype.itemsize) // tiles.ROWS) * tiles.ROWS
    for start in range(0, w.shape[0], step):
        rows = slice(start, min(start + step, w.shape[0]))
        _gemm(x, _dense(w, rows, dtype, exponent), target[:, rows], 2.0**exponent)
    if target is not y:
        y[...] = target


LAUNCH: dict[str, Callable[[Route, Any, DeviceTensor, Any], None]] = {
    "decode": _decode,
    "decode_a8": _decode_a8,
    "prefill": prefill.multiply,
    "fused": _fused,
    "fused_a8": _fused_a8,
    "unpack": _panels,
    "cublas": _panels,
}


def _dense(w: DeviceTensor, rows: slice, dtype: np.dtype[Any], exponent: int) -> Any:
    """Rows of w (from a multiple of 64) times 2^-exponent as a CuPy array of dtype."""
    import cupy

    if w.format.plain:
        return w.data[rows].astype(dtype, copy=False)
    n, k = rows.stop - rows.start, w.shape[1]
    dense = cupy.empty((n, k), dtype)
    if dense.size:
        strips = w.data[rows.start // tiles.ROWS : -(-rows.stop // tiles.ROWS)]
        kernel = jit.load("unpack", w.format, Out=c_type(dtype))
        factor = np.float32(2.0**-exponent)
        for first in range(0, len(strips), MOST_GRID_Y):
            some = strips[first : first + MOST_GRID_Y]
            at = dense[first * tiles.ROWS :]
            kernel(
                (some.shape[1] * tiles.spans(w.format), len(some)),
                (tiles.WARPS * tiles.LANES,),
                (some, at, np.int64(len(at)), np.int64(k), factor),
            )
    return dense


MOST_GRID_Y = 65535  # CUDA's limit on the second axis of a grid


def _gemm(x: Any, w: Any, y: Any, alpha: float) -> None:
    """y [M, N] (rows may be strided) = alpha * x [M, K] @ w [N, K].T, float32 sums, on the current stream."""
    import cupy
    from cupy.cuda import cublas, runtime

    kinds = {"float32": runtime.CUDA_R_32F, "float16": runtime.CUDA_R_16F, "bfloat16": runtime.CUDA_R_16BF}
    scalars = np.array([alpha, 0], np.float32)
    handle = cupy.cuda.device.get_cublas_handle()
    cublas.setStream(handle, cupy.cuda.get_current_stream().ptr)
    (m, k), n = x.shape, len(w)
    at = scalars.ctypes.data
    cublas.gemmEx(
        handle, cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N, n, m, k,
        at, w.data.ptr, kinds[w.dtype.name], k, x.data.ptr, kinds[x.dtype.name], k,
        at + 4, y.data.ptr, kinds[y.dtype.name], y.strides[0] // y.itemsize,
        cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_GEMM_DEFAULT,
    )  # fmt: skip


def _quantize(x: Any, source: Any, data: Any = None) -> DeviceActivations:
    """CuPy array [..., K] -> its Q8_1 blocks, in `data` or in a new array."""
    import cupy

    k = x.shape[-1]
    Q8_1.blocks_in(k, "activations")
    x = _rows(x, k)
    if data is None:
        data = cupy.empty((-(-k // tiles.SPAN), len(x), activations.DTYPE.itemsize), np.uint8)
    if data.size:
        launch = _quantize_launch(x.data.device_id, c_type(x.dtype), k, len(x))
        launch(_stream(), x.data.ptr, data.data.ptr)
    return DeviceActivations((*source.shape[:-1], k), data, source)


@cache
def _quantize_launch(device: int, source: str, k: int, m: int) -> Launch:
    """The kernel that quantizes M rows of K activations."""
    warps = 4
    blocks = -(-k // tiles.SPAN) * activations.BLOCKS
    function = jit.load("quantize_activations", In=source)
    sizes = ctypes.c_int64(k), ctypes.c_int(m)
    return Launch(function, (-(-blocks // warps), m), 32 * warps, 0, 2, *sizes)


def _decode_activations(x: DeviceActivations) -> Any:
    """d * q of the blocks, [rows, K] float32."""
    import cupy

    along, rows = x.data.shape[:2]

    def field(name: str) -> Any:
        dtype, offset = activations.DTYPE.fields[name][:2]  # type: ignore[index]
        raw = cupy.ascontiguousarray(x.data[..., offset : offset + dtype.itemsize])
        return raw.view(dtype.base).reshape(along, rows, *dtype.shape).astype(np.float32)

    codes = cupy.empty((along, rows, activations.BLOCKS, Q8_1.weights), np.float32)
    codes[..., activations.ORDER] = field("qs")
    values = (codes * field("ds")[..., :1]).transpose(1, 0, 2, 3).reshape(rows, along * tiles.SPAN)
    return cupy.ascontiguousarray(values[:, : x.shape[-1]])


def _rows(x: Any, k: int) -> Any:
    """x [..., K] as contiguous rows [M, K] of a type that the kernels read; float64 becomes float32."""
    import cupy

    if x.dtype.name not in C_TYPES:
        x = x.astype(np.float32)
    return cupy.ascontiguousarray(x).reshape(x.size // k if k else 0, k)


def _output(out: Any, shape: tuple[int, ...], dtype: DTypeLike | None) -> Any:
    import cupy

    if out is None:
        return cupy.empty(shape, float_dtype(np.float32 if dtype is None else dtype))
    if not on_cuda(out):
        raise UnsupportedError(f"out must be on the CUDA device of w, got {type(out).__name__}")
    out = _as_cupy(out)
    if out.shape != shape:
        raise UnsupportedError(f"out has shape {out.shape}, y has {shape}")
    if dtype is not None and float_dtype(dtype) != out.dtype:
        raise UnsupportedError(f"out is {out.dtype}, dtype asks for {float_dtype(dtype)}; give one of them")
    return out


def _as_cupy(x: Any) -> Any:
    """A CUDA array of any library as a CuPy array, without a copy."""
    import cupy

    if not isinstance(x, cupy.ndarray):
        x = cupy.from_dlpack(x.detach() if hasattr(x, "detach") else x)
    if x.ndim == 0 or (x.dtype.kind != "f" and x.dtype.name != "bfloat16"):
        raise TypeError(f"expected [..., K] of float16, float32, float64 or bfloat16, got {x.dtype} of shape {x.shape}")
    return x


@contextmanager
def _on_stream_of(x: Any, device: Any) -> Iterator[None]:
    """Make x's device and the stream its library works on current: torch's own stream, else CuPy's.

    Other libraries order their stream with ours themselves, when DLPack hands the array over.
    """
    import cupy

    at = cupy.cuda.Device(int(x.__dlpack_device__()[1]))
    if device is not None and at != device:
        raise UnsupportedError(f"x is on cuda:{at.id}, w on cuda:{device.id}; they must share a device")
    torch = sys.modules.get("torch")
    with at:
        if torch is not None and isinstance(x, torch.Tensor):
            with cupy.cuda.Stream.from_external(_TorchStream(torch.cuda.current_stream(x.device).cuda_stream)):
                yield
        else:
            yield


class _TorchStream:
    """A raw stream handle behind the CUDA stream protocol, which older torch streams do not speak themselves."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

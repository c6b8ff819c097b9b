"""The CUDA backend: takes arrays from CuPy or through DLPack, picks a route, launches on the caller's stream."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise, zip_longest
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from qgemm.codec.format import Format, float_dtype
from qgemm.cuda.driver.launch import Launch
from qgemm.cuda.kernels.activations import dequantize_launch, quantize_launch, round_launch, workspace
from qgemm.cuda.kernels.decode import Shape, decode_launch
from qgemm.cuda.kernels.prefill_sm90 import prefill_launch
from qgemm.cuda.kernels.products import MOST
from qgemm.cuda.kernels.routes import C_TYPES, PREPARED, SPLITS, Problem, Route, c_type, quantizes_inside, route
from qgemm.cuda.layout.activations import DeviceActivations
from qgemm.errors import UnsupportedError
from qgemm.formats.q8_1 import FORMAT as Q8_1
from qgemm.ops import NOTHING, Addends, check_addends, check_shapes, check_weights, like, on_cuda

from .jit.codegen import Template
from .jit.load import load
from .kernels import prefill_sm80 as prefill_mma
from .layout import activations
from .layout import tile as tiles
from .tensor import DeviceTensor

WORKSPACE = 256 << 20  # bytes of dense weights at a time


def matmul(
    x: Any, w: Any, activation: str, addends: Addends, *, out: Any = None, dtype: DTypeLike | None = None
) -> Any:
    """`qgemm.matmul` for x on a CUDA device and a DeviceTensor w."""
    if addends is NOTHING and type(w) is DeviceTensor and dtype is None and _again(x, w, activation, out):
        return out
    return matmul_many(x, [w], activation, [addends], outs=[out], dtype=dtype)[0]


def matmul_many(
    x: Any,
    weights: Sequence[Any],
    activation: str,
    addends: Sequence[Addends],
    *,
    outs: Sequence[Any],
    dtype: DTypeLike | None = None,
) -> list[Any]:
    """`qgemm.matmul_many` for x on a CUDA device and DeviceTensors."""
    if not weights:
        return []
    if dtype is None and type(weights[0]) is DeviceTensor and _many_again(x, weights, activation, addends, outs):
        return list(outs)
    prepared = isinstance(x, DeviceActivations)
    for w in weights:
        if not isinstance(w, DeviceTensor):
            raise UnsupportedError(f"x is on a CUDA device, w on the host ({w!r}); multiply by w.to_device()")
        if not prepared and not on_cuda(x):
            raise UnsupportedError(f"w is on a CUDA device ({w!r}), x is not ({type(x).__name__}); upload x first")
        check_weights(w)
    if prepared and activation != "a8":
        raise UnsupportedError(f"prepared activations are Q8_1 for activation 'a8', got {activation!r}")
    source = x.like if prepared else x
    with _on_stream_of(source, [w.data.device for w in weights]):
        values = x if prepared else _as_cupy(x)
        ys = []
        for w, out in zip(weights, outs, strict=True):
            check_shapes(values.shape, w)
            ys.append(_output(out, (*values.shape[:-1], w.shape[0]), dtype))
        products = [_on_device(_Product(*p), ys) for p in zip(weights, ys, addends, strict=True)]
        _multiply(values, products, activation)
        return [like(source, p.y) if out is None else out for p, out in zip(products, outs, strict=True)]


def quantize_activations(x: Any) -> DeviceActivations:
    """`qgemm.quantize_activations` for x on a CUDA device."""
    with _on_stream_of(x, []):
        return _quantize(_as_cupy(x), x)


def dequantize(w: DeviceTensor, dtype: DTypeLike) -> Any:
    """The weights of w as a CuPy array [N, K] of float32, float16 or bfloat16 (float64: from float32)."""
    found = float_dtype(dtype)
    if w.format.levels is None:
        raise UnsupportedError(f"{w!r}: {w.format} has no decoder")
    kernel_dtype = found if found.name in C_TYPES else np.dtype(np.float32)
    with w.data.device:
        return _dense(w, slice(0, w.shape[0]), kernel_dtype, 0).astype(found, copy=False)


class _Product(NamedTuple):
    """One product of a call: its weights, its output, and what is added to it."""

    w: DeviceTensor
    y: Any
    addends: Addends


def _multiply(x: Any, products: Sequence[_Product], activation: str) -> None:
    """All products of x, those of weights of one format and few rows in one launch."""
    import cupy

    k, m, prepared = x.shape[-1], prod(x.shape[:-1]), isinstance(x, DeviceActivations)
    if m == 0:
        return
    if not prepared and any(x.size and y.size and cupy.may_share_memory(x, y) for _, y, _ in products):
        x = x.copy()
    if k == 0:
        for p in products:
            _add_after(p, lambda sums: sums.fill(0))
        return
    like, kind = x, c_type(x.dtype)
    jobs = _jobs([p for p in products if p.w.shape[0]], activation, m, kind)
    few = all(row.kernel in DECODES for row, _ in jobs)
    sm, weights = int(products[0].w.data.device.compute_capability), sum(p.w.shape[0] * k for p in products)
    inside = few and len(jobs) == 1 and quantizes_inside(m, k, weights, sm)
    if activation == "a16" or (inside and not prepared):
        x = _rows(x, k)
    elif not prepared:
        blocks = any(row.kernel in TAKES_BLOCKS for row, _ in jobs)
        x = _quantize(x, x, workspace(_stream(), k, m) if few else None) if blocks else _rounded(_rows(x, k))
    if isinstance(x, DeviceActivations) and any(row.kernel == "prefill" for row, _ in jobs):
        x = _dequantize_activations(x)
    launches = [_launch(row, x, k, m, some) for row, some in jobs]
    again = all(row.kernel in DECODES or (row.kernel in ADDING and activation == "a16") for row, _ in jobs)
    ready = not prepared and again and like.dtype.name in C_TYPES and all(_direct(p.y) for p in products)
    if ready and all(a is b for a, b in zip_longest(products, (p for _, some in jobs for p in some))):
        ws, outs, addends = zip(*products, strict=True)
        key = _key(like, activation, ws, addends, outs)
        quantize = quantize_launch(x.data.device.id, kind, k, m) if isinstance(x, DeviceActivations) else None
        if len(ws[0].ready) >= MOST_READY:
            ws[0].ready.clear()
        ws[0].ready[key] = _all_of(launches, [len(some) for _, some in jobs], quantize, k, m)


Job = tuple[Route, list[_Product]]


def _jobs(products: Sequence[_Product], activation: str, m: int, kind: str) -> list[Job]:
    """The products by route and format: as many in a job as a launch of it takes."""
    groups: dict[tuple[Route, Format], list[_Product]] = {}
    for p in products:
        sm = int(p.w.data.device.compute_capability)
        row = route(Problem(p.w.format, activation, m, *p.w.shape, sm, kind))
        groups.setdefault((row, p.w.format), []).append(p)
    jobs = []
    for (row, _), some in groups.items():
        most = MOST if row.kernel in DECODES else 1
        jobs += [(row, some[start : start + most]) for start in range(0, len(some), most)]
    return jobs


def _launch(row: Route, x: Any, k: int, m: int, products: list[_Product]) -> Any:
    """Computes a job, and gives its launch if it can be used again."""
    if row.kernel not in ADDING:
        (p,) = products
        _add_after(p, lambda sums: LAUNCH[row.kernel](row, x, p.w, sums))
        return None
    import cupy

    prepared = isinstance(x, DeviceActivations)
    data = _aligned(x.data if prepared else x)
    flats = [p.y if _direct(p.y) else cupy.empty(p.y.shape, np.float32) for p in products]
    shapes = tuple(
        Shape(p.w.shape[0], flat.dtype.name, *("" if a is None else a.dtype.name for a in p.addends))
        for p, flat in zip(products, flats, strict=True)
    )
    first = products[0].w
    source = PREPARED if prepared else c_type(x.dtype)
    if row.kernel == "prefill":
        launch: Any = prefill_launch(first.device, first.format, first.shape, m, source, *shapes)
    else:
        launch = decode_launch(row, first.device, first.format, k, m, source, shapes)
    pointers: list[int] = []
    for p, flat in zip(products, flats, strict=True):
        pointers += [p.w.pointer, flat.data.ptr, *(0 if a is None else a.data.ptr for a in p.addends)]
    launch(_stream(), data.data.ptr, *pointers)
    for p, flat in zip(products, flats, strict=True):
        if flat is not p.y:
            p.y[...] = flat
    return launch


def _direct(y: Any) -> bool:
    """Whether kernels can store into y as it is."""
    return bool(y.flags.c_contiguous) and y.dtype.name in C_TYPES


def _add_after(p: _Product, multiply: Callable[[Any], None]) -> None:
    """y = a product + addends, by a kernel that does not add."""
    import cupy

    n = p.w.shape[0]
    direct = _direct(p.y) and not p.addends.given
    sums = p.y.reshape(-1, n) if direct else cupy.empty((p.y.size // n if n else 0, n), np.float32)
    if sums.size:
        multiply(sums)
    if not direct:
        total = sums.reshape(p.y.shape)
        for addend in p.addends:
            if addend is not None:
                total += addend
        p.y[...] = total


def _all_of(
    launches: Sequence[Any], counts: Sequence[int], quantize: Launch | None, k: int, m: int
) -> Callable[..., None]:
    """A call's launches as one, on a stream and pointers to x and to each product's arrays."""
    if quantize is None and len(launches) == 1:
        only: Callable[..., None] = launches[0]
        return only
    ends = np.cumsum([0, *(4 * count for count in counts)]).tolist()
    parts = [slice(*pair) for pair in pairwise(ends)]

    def launch(stream: int, x: int, *pointers: int) -> None:
        if quantize is not None:
            blocks = workspace(stream, k, m).data.ptr
            quantize(stream, x, blocks)
            x = blocks
        for one, part in zip(launches, parts, strict=True):
            one(stream, x, *pointers[part])

    return launch


def _again(x: Any, w: DeviceTensor, activation: str, out: Any) -> bool:
    """Compute a product without addends like one before, if x and out are CuPy arrays that the decode kernels take.

    Checks nothing that the first product of these shapes and types has checked: of 30 us of Python 5 remain.
    """
    import cupy

    array = cupy.ndarray
    if type(x) is not array or type(out) is not array:
        return False
    launch = w.ready.get((activation, x.shape, x.dtype, out.shape, out.dtype))
    if launch is None or not (x.flags.c_contiguous and out.flags.c_contiguous):
        return False
    source, target, device = x.data, out.data, w.device
    start, to = source.ptr, target.ptr
    if start % 16 or (start < to + out.nbytes and to < start + x.nbytes):
        return False  # y onto x: x must be copied first
    if not source.device_id == target.device_id == cupy.cuda.runtime.getDevice() == device:
        return False
    launch(cupy.cuda.get_current_stream().ptr, start, w.pointer, to, 0, 0)
    return True


def _many_again(
    x: Any, weights: Sequence[Any], activation: str, addends: Sequence[Addends], outs: Sequence[Any]
) -> bool:
    """The same for several products, and with addends."""
    import cupy

    array, device = cupy.ndarray, weights[0].device
    if type(x) is not array or not all(type(y) is array for y in outs):
        return False
    launch = weights[0].ready.get(_key(x, activation, weights, addends, outs))
    if launch is None or not x.flags.c_contiguous:
        return False
    pointers: list[int] = []
    for w, y, added in zip(weights, outs, addends, strict=True):
        if _overlap(x, y) or not y.flags.c_contiguous or not y.data.device_id == w.device == device:
            return False
        pointers += (w.pointer, y.data.ptr)
        for addend in added:
            if addend is None:
                pointers.append(0)
            elif addend.flags.c_contiguous and not _clash(addend, y, outs):
                pointers.append(addend.data.ptr)
            else:
                return False
    source = x.data.ptr
    if source % 16 or not x.data.device_id == cupy.cuda.runtime.getDevice() == device:
        return False
    launch(_stream(), source, *pointers)
    return True


def _key(x: Any, activation: str, weights: Sequence[Any], addends: Sequence[Addends], outs: Sequence[Any]) -> Any:
    """What the launches of a call depend on, but for its first weights, and pointers."""
    if len(weights) == 1 and addends[0] is NOTHING:
        return activation, x.shape, x.dtype, outs[0].shape, outs[0].dtype
    key = [activation, x.shape, x.dtype]
    for w, added, y in zip(weights, addends, outs, strict=True):
        key += (w.shape, w.format, w.exponent, y.shape, y.dtype)
        if added is not NOTHING:
            key += [None if addend is None else (type(addend), addend.shape, addend.dtype) for addend in added]
    return tuple(key)


def _overlap(a: Any, b: Any) -> bool:
    """Whether two contiguous arrays share memory, or two others may."""
    start, other = a.data.ptr, b.data.ptr
    return bool(start < other + b.nbytes and other < start + a.nbytes)


def _clash(addend: Any, y: Any, outs: Sequence[Any]) -> bool:
    """Whether an output would overwrite an addend before it is read; a residual may be its own y."""
    same = addend.data.ptr == y.data.ptr and addend.dtype == y.dtype and addend.shape == y.shape
    return any(_overlap(addend, other) for other in outs if not (same and other is y))


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


def _launch_strips(row: Route, x: Any, w: DeviceTensor, y: Any, template: Template) -> None:
    """One CTA a strip of tiles; the smallest token tile that holds y's rows."""
    (n, k), m = w.shape, len(y)
    tokens = row.tile(m)
    kernel = load(row.kernel, w.format, **template, Out=c_type(y.dtype), TOKENS=tokens, SPLITS=SPLITS)
    threads = SPLITS * tiles.WARPS * tiles.LANES
    kernel((len(w.data),), (threads,), (w.data, x, y, np.int64(n), np.int64(k), np.int32(m)))


def _prefill_mma(row: Route, x: Any, w: DeviceTensor, y: Any) -> None:
    """x [M, K] of half or bf16, or Q8_1 activations, times tiles by mma.sync; many tokens."""
    prepared = isinstance(x, DeviceActivations)
    data, source = (x.data, PREPARED) if prepared else (x, c_type(x.dtype))
    prefill_mma.multiply(data, w, y, source, c_type(y.dtype), _stream())


def _panels(row: Route, x: Any, w: DeviceTensor, y: Any) -> None:
    """Decode panels of W in bounded workspace, multiply each by cuBLAS; any number of tokens.

    The panel has x's type where that is exact enough: float16 (scaled by a power of two, so that nothing overflows)
    or bfloat16 for the same activations, float32 for the rest. Those of A8 are decoded first.
    """
    import cupy

    if isinstance(x, DeviceActivations):
        x = _dequantize_activations(x)
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


DECODES = ("decode", "decode_a8")  # they take several products
TAKES_BLOCKS = ("decode_a8", "fused_a8", "prefill_a8")  # of "a8"; the others take what blocks of x decode to
ADDING = (*DECODES, "prefill")  # they add bias and residual, and their launches can be used again
MOST_READY = 256  # launches that a tensor remembers
LAUNCH: dict[str, Callable[[Route, Any, DeviceTensor, Any], None]] = {
    "fused": _fused,
    "fused_a8": _fused_a8,
    "prefill_mma": _prefill_mma,
    "prefill_a8": _prefill_mma,
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
        kernel = load("unpack", w.format, Out=c_type(dtype))
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
    x = _aligned(_rows(x, k))
    if data is None:
        data = cupy.empty((-(-k // tiles.SPAN), len(x), activations.DTYPE.itemsize), np.uint8)
    if data.size:
        launch = quantize_launch(x.data.device_id, c_type(x.dtype), k, len(x))
        launch(_stream(), x.data.ptr, data.data.ptr)
    return DeviceActivations((*source.shape[:-1], k), data, source, x.dtype)


def _rounded(x: Any) -> Any:
    """Rows of x as their Q8_1 blocks decode: `_dequantize_activations` of `_quantize`, in one pass."""
    import cupy

    rows, k = x.shape
    Q8_1.blocks_in(k, "activations")
    values = cupy.empty(x.shape, np.float16 if x.dtype == np.float16 else np.float32)
    if values.size:
        x = _aligned(x)
        launch = round_launch(x.data.device_id, c_type(x.dtype), c_type(values.dtype), k, rows)
        launch(_stream(), x.data.ptr, values.data.ptr)
    return values


def _dequantize_activations(x: DeviceActivations) -> Any:
    """d * q of the blocks, [rows, K] of x.dtype."""
    import cupy

    k, rows = x.shape[-1], x.data.shape[1]
    values = cupy.empty((rows, k), x.dtype)
    if values.size:
        launch = dequantize_launch(x.data.device.id, c_type(x.dtype), k, rows)
        launch(_stream(), x.data.data.ptr, values.data.ptr)
    return values


def _rows(x: Any, k: int) -> Any:
    """x [..., K] as contiguous rows [M, K] of a type that the kernels read; float64 becomes float32."""
    import cupy

    if x.dtype.name not in C_TYPES:
        x = x.astype(np.float32)
    return cupy.ascontiguousarray(x).reshape(x.size // k if k else 0, k)


def _aligned(x: Any) -> Any:
    """x, copied if it is a view into an array that starts where kernels cannot read 16 bytes at a time."""
    return x.copy() if x.data.ptr % 16 else x


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


def _on_device(p: _Product, outs: Sequence[Any]) -> _Product:
    """The product with its addends as contiguous CuPy arrays that no output overwrites too early."""
    import cupy

    def fetched(addend: Any) -> Any:
        if addend is None:
            return None
        addend = _as_cupy(addend)
        if addend.dtype.name not in C_TYPES:
            addend = addend.astype(np.float32)
        addend = cupy.ascontiguousarray(addend)
        return addend.copy() if _clash(addend, p.y, outs) else addend

    if not p.addends.given:
        return p
    check_addends(p.addends, p.y.shape)
    return p._replace(addends=Addends(*map(fetched, p.addends)))


def _as_cupy(x: Any) -> Any:
    """A CUDA array of any library as a CuPy array, without a copy."""
    import cupy

    if not isinstance(x, cupy.ndarray):
        x = cupy.from_dlpack(x.detach() if hasattr(x, "detach") else x)
    if x.ndim == 0 or (x.dtype.kind != "f" and x.dtype.name != "bfloat16"):
        raise TypeError(f"expected [..., K] of float16, float32, float64 or bfloat16, got {x.dtype} of shape {x.shape}")
    return x


@contextmanager
def _on_stream_of(x: Any, devices: Sequence[Any]) -> Iterator[None]:
    """Make x's device and the stream its library works on current: torch's own stream, else CuPy's.

    Other libraries order their stream with ours themselves, when DLPack hands the array over.
    """
    import cupy

    at = cupy.cuda.Device(int(x.__dlpack_device__()[1]))
    for device in devices:
        if at != device:
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

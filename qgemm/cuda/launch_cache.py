"""The short way of a call: the launches of an earlier one of the same shapes and types, on other pointers.

A DeviceTensor remembers them (`launch_cache`); of 30 us of Python some 5 remain, because nothing is checked again that
the first call checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from qgemm.arguments import NO_EPILOGUE, Epilogue
from qgemm.arrays import current_stream

from .kernels.kernel import Launchable
from .tensor import DeviceTensor

MAX_LAUNCHES = 256  # that a tensor remembers


def try_cached(x: Any, w: DeviceTensor, activation: str, out: Any) -> bool:
    """Compute a product without an epilogue like one before, if x and out are CuPy arrays that kernels take as is."""
    import cupy

    array = cupy.ndarray
    if type(x) is not array or type(out) is not array:
        return False
    launch = w.launch_cache.get((activation, x.shape, x.dtype, out.shape, out.dtype))
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


def try_cached_many(
    x: Any, weights: Sequence[Any], activation: str, epilogues: Sequence[Epilogue], outs: Sequence[Any]
) -> bool:
    """Launch several products of one x, with their epilogues, if all of it was launched before."""
    import cupy

    array, device = cupy.ndarray, weights[0].device
    if type(x) is not array or not all(type(y) is array for y in outs):
        return False
    launch = weights[0].launch_cache.get(_key(x, activation, weights, epilogues, outs))
    if launch is None or not x.flags.c_contiguous:
        return False
    if any(overlap(a, b) for a, b in combinations(outs, 2)):
        return False  # what of them is refused, the long way knows
    pointers: list[int] = []
    for w, y, epilogue in zip(weights, outs, epilogues, strict=True):
        if overlap(x, y) or not y.flags.c_contiguous or not y.data.device_id == w.device == device:
            return False
        pointers += (w.pointer, y.data.ptr)
        for added in epilogue:
            if added is None:
                pointers.append(0)
            elif added.flags.c_contiguous and not clash(added, y, outs):
                pointers.append(added.data.ptr)
            else:
                return False
    source = x.data.ptr
    if source % 16 or not x.data.device_id == cupy.cuda.runtime.getDevice() == device:
        return False
    launch(current_stream(), source, *pointers)
    return True


def remember(
    launch: Launchable,
    x: Any,
    weights: Sequence[DeviceTensor],
    activation: str,
    epilogues: Sequence[Epilogue],
    outs: Sequence[Any],
) -> None:
    """Keep the launch of a call with its first weights."""
    known = weights[0].launch_cache
    if len(known) >= MAX_LAUNCHES:
        known.clear()
    known[_key(x, activation, weights, epilogues, outs)] = launch


def overlap(a: Any, b: Any) -> bool:
    """Whether two contiguous arrays share memory, or two others may."""
    start, other = a.data.ptr, b.data.ptr
    return bool(start < other + b.nbytes and other < start + a.nbytes)


def clash(added: Any, y: Any, outs: Sequence[Any]) -> bool:
    """Whether an output would overwrite a bias or residual before it is read; a residual may be its own y."""
    same = added.data.ptr == y.data.ptr and added.dtype == y.dtype and added.shape == y.shape
    return any(overlap(added, other) for other in outs if not (same and other is y))


def _key(
    x: Any, activation: str, weights: Sequence[Any], epilogues: Sequence[Epilogue], outs: Sequence[Any]
) -> tuple[Any, ...]:
    """What the launches of a call depend on, but for its first weights, and pointers."""
    if len(weights) == 1 and epilogues[0] is NO_EPILOGUE:
        return activation, x.shape, x.dtype, outs[0].shape, outs[0].dtype
    key = [activation, x.shape, x.dtype]
    for w, epilogue, y in zip(weights, epilogues, outs, strict=True):
        key += (w.shape, w.format, w.exponent, y.shape, y.dtype)
        if epilogue is not NO_EPILOGUE:
            key += [None if added is None else (type(added), added.shape, added.dtype) for added in epilogue]
    return tuple(key)

"""The short way of a call: the plan of an earlier one of the same weights, shapes and types, on other pointers.

A DeviceTensor remembers plans (`plans`). Nothing is checked again that its key holds: of a call remain the pointers,
their device and order in memory, whether they overlap, the stream and the launches. Arrays of CuPy and torch are read
by their own functions (libraries.py). Whatever does not fit returns None, and the long way says why or copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qgemm.arguments import NO_EPILOGUE, Epilogue, Gated

from .activations import DeviceActivations
from .libraries import LIBRARIES, Library
from .plan import Plan
from .problem import C_TYPES
from .tensor import DeviceTensor

MAX_PLANS = 256  # that a tensor remembers
PREPARED = "prepared"  # x is DeviceActivations
ELSEWHERE = "of another library"  # an array, in what no plan is kept for
ALIGNMENT = 16  # bytes that kernels read of x at a time

Key = tuple[Any, ...]


def again(
    w: DeviceTensor,
    x: Any,
    activation: str | None,
    bias: Any,
    residual: Any,
    out: Any,
    dtype: Any,
    gated: Gated | None = None,
) -> Any:
    """y of `qgemm.matmul`, computed as before; None if there is no plan for these arguments.

    gated: what the product by w gates, for y of `qgemm.gated`.
    """
    values, library = x, LIBRARIES.get(type(x))
    if library is None:
        if type(x) is not DeviceActivations or activation == "a16" or x.library is None:
            return None
        library, values, activation = x.library, x.data, PREPARED
    elif activation is None:
        activation = "a16"
    if out is None:
        key: Key = (activation, x.shape, x.dtype, dtype)
    elif dtype is None and LIBRARIES.get(type(out)) is library:
        key = (activation, x.shape, x.dtype, out.shape, out.dtype)
    else:
        return None
    if bias is not None or residual is not None:
        key += (_kind(bias, library), _kind(residual, library))
    if gated is not None:
        key += _gated_key(gated, library)
    plan = w.plans.get(key)
    if plan is None:
        return None
    device, pointer = w.device, library.pointer
    if library.device(values) != device or (library.current_device is not None and library.current_device() != device):
        return None
    if not library.contiguous(values):
        values = library.copy(values)
    source = pointer(values)
    if out is None:
        y = plan.new[0]()
        target = pointer(y)
    else:
        y, target = out, pointer(out)
        if not library.contiguous(out) or library.device(out) != device or (library.grad and out.requires_grad):
            return None  # a copy or an error
        if source < target + plan.y_nbytes[0] and target < source + plan.x_nbytes:
            values = library.copy(values)
            source = pointer(values)
    if source % ALIGNMENT:
        values = library.copy(values)
        source = pointer(values)
    bias_at = residual_at = 0
    if bias is not None:
        bias = _readable(bias, library, device)
        if bias is None:
            return None
        bias_at = pointer(bias)
        if out is not None and _meet(bias_at, bias.nbytes, target, plan.y_nbytes[0]):
            return None
    if residual is not None:
        residual = _readable(residual, library, device)
        if residual is None:
            return None
        residual_at = pointer(residual)
        same = residual_at == target and out is not None and residual.dtype == out.dtype
        if out is not None and not same and _meet(residual_at, residual.nbytes, target, plan.y_nbytes[0]):
            return None
    if gated is None:
        plan.enter(library.stream(device), source, w.pointer, target, bias_at, residual_at)
        return y
    keep: list[Any] = []
    pointers = [w.pointer, target, bias_at, 0, gated.up.pointer, target]
    if not _add(pointers, keep, Epilogue(gated.bias), y, () if out is None else [out], library, device):
        return None
    plan.enter(library.stream(device), source, *pointers)
    return y


def again_many(
    x: Any,
    weights: Sequence[Any],
    activation: str | None,
    epilogues: Sequence[Epilogue] | None,
    outs: Sequence[Any] | None,
    dtype: Any,
) -> list[Any] | None:
    """The list of `qgemm.matmul_many`, computed as before; None if there is no plan for these arguments.

    epilogues: None if nothing is added to any product.
    """
    values, library = x, LIBRARIES.get(type(x))
    if library is None and type(x) is DeviceActivations and activation != "a16":
        library, values = x.library, x.data
    if library is None:
        return None
    key = key_of(x, weights, activation, epilogues, outs, dtype, library)
    plan = None if key is None else weights[0].plans.get(key)
    if plan is None:
        return None
    device, pointer = weights[0].device, library.pointer
    if library.device(values) != device or (library.current_device is not None and library.current_device() != device):
        return None
    if not library.contiguous(values) or pointer(values) % ALIGNMENT:
        values = library.copy(values)
    source = pointer(values)
    if outs is None:
        ys = [new() for new in plan.new]
        targets = [pointer(y) for y in ys]
    else:
        ys, targets = list(outs), []
        contiguous, number, grad, x_end = library.contiguous, library.device, library.grad, source + plan.x_nbytes
        spans: list[tuple[int, int]] = []
        for y, size in zip(ys, plan.y_nbytes):  # noqa: B905  as many as the key says; `strict` takes longer than the loop
            if not contiguous(y) or number(y) != device or (grad and y.requires_grad):
                return None  # a copy or an error
            start = pointer(y)
            end = start + size
            for other, other_end in spans:
                if start < other_end and other < end:
                    return None  # refused
            if source < end and start < x_end:
                values = library.copy(values)
                source = pointer(values)
                x_end = source + plan.x_nbytes
            spans.append((start, end))
            targets.append(start)
    pointers: list[int] = []
    if epilogues is None:
        for w, target in zip(weights, targets):  # noqa: B905
            pointers += (w.pointer, target, 0, 0)
    else:
        keep: list[Any] = []
        for w, target, epilogue, y in zip(weights, targets, epilogues, ys, strict=True):
            pointers += (w.pointer, target)
            if not _add(pointers, keep, epilogue, y, ys if outs else (), library, device):
                return None
    plan.enter(library.stream(device), source, *pointers)
    return ys


def remember(
    plan: Plan,
    x: Any,
    weights: Sequence[DeviceTensor],
    activation: str,
    epilogues: Sequence[Epilogue],
    outs: Sequence[Any],
    dtype: Any,
    library: Library,
    gated: Gated | None = None,
) -> None:
    """Keep the plan of a call with its first weights, unless kernels got a bias or residual in another type."""
    given = None if all(one is NO_EPILOGUE for one in epilogues) else epilogues
    targets = None if all(out is None for out in outs) else outs
    key = key_of(x, weights, activation, given, targets, dtype, library)
    added = [array for epilogue in epilogues for array in epilogue if array is not None]
    if gated is not None:
        more = _gated_key(gated, library)
        key = None if key is None or ELSEWHERE in more else key + more
        added += [] if gated.bias is None else [gated.bias]
    if key is None or not all(library.name(array.dtype) in C_TYPES for array in added):
        return
    plans = weights[0].plans
    if len(plans) >= MAX_PLANS:
        plans.clear()
    plans[key] = plan


def key_of(
    x: Any,
    weights: Sequence[Any],
    activation: str | None,
    epilogues: Sequence[Epilogue] | None,
    outs: Sequence[Any] | None,
    dtype: Any,
    library: Library,
) -> Key | None:
    """What the plan of a call depends on, besides its first weights; None if an array is of another library.

    That of one product is what `again` looks up, which is written out there.
    """
    if activation is None:
        activation = "a16"
    key: list[Any] = [PREPARED if type(x) is DeviceActivations else activation, x.shape, x.dtype]
    if len(weights) != 1:
        for w in weights:
            key.append(getattr(w, "serial", None))
    if outs is None:
        key.append(dtype)
    elif dtype is not None:
        return None
    else:
        for out in outs:
            if LIBRARIES.get(type(out)) is not library:
                return None
            key += (out.shape, out.dtype)
    if epilogues is not None:
        key += [_kind(added, library) for epilogue in epilogues for added in epilogue]
        if ELSEWHERE in key:
            return None
    return tuple(key)


def _gated_key(gated: Gated, library: Library) -> Key:
    """What the plan of a gated product depends on besides its gate's."""
    return gated.function, getattr(gated.up, "serial", None), _kind(gated.bias, library)


def _kind(added: Any, library: Library) -> Any:
    """What a plan depends on of a bias or residual."""
    if added is None:
        return None
    return (added.shape, added.dtype) if LIBRARIES.get(type(added)) is library else ELSEWHERE


def _readable(added: Any, library: Library, device: int) -> Any:
    """A bias or residual in C order; None if it is elsewhere."""
    if library.device(added) != device:
        return None
    return added if library.contiguous(added) else library.copy(added)


def _add(
    pointers: list[int],
    keep: list[Any],
    added: Epilogue,
    y: Any,
    outs: Sequence[Any],
    library: Library,
    device: int,
) -> bool:
    """Append the pointers of bias and residual, 0 for none; keep holds what must live until the launch.

    False if an output lies where one of them is, unless it is its own residual, the same elements.
    """
    for array in added:
        if array is None:
            pointers.append(0)
            continue
        array = _readable(array, library, device)
        if array is None:
            return False
        keep.append(array)
        at = library.pointer(array)
        pointers.append(at)
        for out in outs:
            same = out is y and at == library.pointer(y) and array.dtype == y.dtype and array.shape == y.shape
            if not same and _meet(at, array.nbytes, library.pointer(out), out.nbytes):
                return False
    return True


def _meet(a: int, a_nbytes: int, b: int, b_nbytes: int) -> bool:
    """Whether two contiguous arrays have a byte in common."""
    return a < b + b_nbytes and b < a + a_nbytes

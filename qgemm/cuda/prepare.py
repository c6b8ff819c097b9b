"""Kernels of a model before its first product: compiled, or read from the cache, and loaded.

NVRTC compiles without the GIL: threads of one process take about as long as as many processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from qgemm.packed import Packed

from .jit.load import load
from .kernels.needed import Key, needed
from .problem import C_TYPES, gpu


def tasks(
    tensors: Iterable[Packed], rows: Sequence[int], activations: Sequence[str], dtypes: Sequence[str]
) -> list[Callable[[], object]]:
    """A call for each kernel that products by these weights ask for on the current device."""
    import cupy

    on = gpu(cupy.cuda.runtime.getDevice())
    types = list(dict.fromkeys(C_TYPES.get(name, "float") for name in dtypes))
    found = needed(tensors, on.sm, on.sms, rows, activations, types)
    return [partial(_load, on.device, key) for key in sorted(found, key=_slowest_first)]


def _slowest_first(key: Key) -> tuple[bool, str, str]:
    """The prefill kernels take longest to compile: begun last, they would keep one core busy at the end."""
    kernel, fmt, template = key
    return not kernel.startswith("prefill"), kernel, str((fmt and fmt.name, template))


def _load(device: int, key: Key) -> None:
    import cupy

    kernel, fmt, template = key
    with cupy.cuda.Device(device):
        load(kernel, fmt, **dict(template))

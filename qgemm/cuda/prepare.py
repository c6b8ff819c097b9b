"""Kernels of a model before its first product: compiled, or read from the cache, and loaded.

NVRTC compiles without the GIL and holds no lock of its own: threads of one process take about as long as as many
processes (of 24 kernels on 8 threads, 41 times one waited for another).

Kernels are loaded here, not at their first launch: a CUDA graph may be what launches them first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from qgemm.packed import Packed

from .jit.load import compiles
from .kernels.needed import Key, needed
from .kernels.routes import source_of
from .problem import C_TYPES, gpu
from .tensor import DeviceTensor


def tasks(
    tensors: Iterable[Packed], rows: Sequence[int], activations: Sequence[str], dtypes: Sequence[str]
) -> list[Callable[[], bool]]:
    """A call for each kernel that products by these weights ask for, those of the host on the current device.

    It returns whether it compiled the kernel.
    """
    import cupy

    types = list(dict.fromkeys(C_TYPES.get(name, "float") for name in dtypes))
    by_device = defaultdict[int, list[Packed]](list)
    for each in tensors:
        by_device[each.device if isinstance(each, DeviceTensor) else cupy.cuda.runtime.getDevice()].append(each)
    found = [
        (device, key)
        for device, some in by_device.items()
        for key in needed(some, gpu(device).sm, gpu(device).sms, rows, activations, types)
    ]
    return [partial(_load, device, key) for device, key in sorted(found, key=lambda each: _slowest_first(each[1]))]


def _slowest_first(key: Key) -> tuple[bool, str, str]:
    """The prefill kernels take longest to compile: begun last, they would keep one core busy at the end."""
    kernel, fmt, template = key
    return not kernel.startswith("prefill"), kernel, str((fmt and fmt.name, template))


def _load(device: int, key: Key) -> bool:
    import cupy

    kernel, fmt, template = key
    with cupy.cuda.Device(device):
        return compiles(source_of(kernel), fmt, dict(template))

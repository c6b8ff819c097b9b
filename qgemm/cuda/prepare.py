"""Kernels of a model before its first product: compiled, or read from the cache, and loaded.

NVRTC compiles without the GIL and holds no lock of its own: threads of one process are about as fast as processes of
the same number (24 kernels on 8 threads: a thread waited for another 41 times).

Kernels are loaded here, not at their first launch: that may come from a CUDA graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from qgemm.packed import Packed

from .driver.tuned import times_of
from .jit.load import compiles
from .kernels.needed import Key, needed
from .kernels.routes import source_of
from .libraries import current_device, default_library
from .problem import C_TYPES, gpu
from .tensor import DeviceTensor


def tasks(
    tensors: Iterable[Packed], rows: Sequence[int], activations: Sequence[str], dtypes: Sequence[str]
) -> list[Callable[[], bool]]:
    """A call for every kernel that products by these weights need; weights of the host count for the current device.

    The call returns whether it compiled the kernel.
    """
    types = list(dict.fromkeys(C_TYPES.get(name, "float") for name in dtypes))
    current = current_device(default_library())
    by_device = defaultdict[int, list[Packed]](list)
    for w in tensors:
        by_device[w.device if isinstance(w, DeviceTensor) else current].append(w)
    keys = [
        (device, key)
        for device, weights in by_device.items()
        for key in needed(weights, gpu(device).sm, gpu(device).sms, rows, activations, types, times_of(device))
    ]
    return [partial(_load, device, key) for device, key in sorted(keys, key=lambda pair: _slowest_first(pair[1]))]


def _slowest_first(key: Key) -> tuple[bool, str, str]:
    """The prefill kernels are the slowest to compile: if they came last, they would keep one core busy at the end."""
    kernel, fmt, template = key
    return "prefill" not in kernel, kernel, str((fmt and fmt.name, template))


def _load(device: int, key: Key) -> bool:
    kernel, fmt, template = key
    with default_library().on_device(device):
        return compiles(source_of(kernel), fmt, dict(template))

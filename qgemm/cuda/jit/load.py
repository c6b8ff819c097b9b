"""A kernel as a function on the current device, compiled at first use."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from qgemm.codec.format import Format

from .cache import cached_cubin
from .codegen import compose, headers
from .nvrtc import arch_of

_loaded: dict[Any, Any] = {}
_loading: dict[Any, threading.Lock] = {}  # of each kernel: threads that need the same do not compile it each


def load(kernel: str, fmt: Format | None = None, **template: str | int) -> Any:
    """The kernel as a CuPy function on the current device, compiled at first use."""
    import cupy

    device = cupy.cuda.runtime.getDevice()
    key = (device, kernel, fmt, *template.values())
    if key in _loaded:
        return _loaded[key]
    with _loading.setdefault(key, threading.Lock()):
        if key not in _loaded:
            properties: Mapping[str, Any] = cupy.cuda.runtime.getDeviceProperties(device)
            arch = arch_of((properties["major"], properties["minor"]))
            module = cupy.cuda.function.Module()
            module.load(cached_cubin(compose(kernel, fmt, **template), arch, headers(fmt)))
            _loaded[key] = module.get_function(kernel)
    return _loaded[key]

"""A kernel as a function on the current device, compiled at first use; different ones by several threads at once."""

from __future__ import annotations

from time import perf_counter

from qgemm.codec.format import Format
from qgemm.cuda.devices import Function, current_device, facts
from qgemm.log import logger
from qgemm.once import Once

from .cache import fetched
from .codegen import Template, compose, headers
from .nvrtc import arch_of

_functions: Once[Function] = Once()
# For every GPU of an architecture, and where no folder keeps them: 55 KB each, 15 MB of a Llama-8B.
_cubins: Once[bytes] = Once()


def load(kernel: str, fmt: Format | None = None, **template: str | int) -> Function:
    """The kernel as a function on the current device, compiled at first use."""
    return _function(kernel, fmt, template)[0]


def compiles(kernel: str, fmt: Format | None, template: Template) -> bool:
    """Load a kernel on the current device; whether this call compiled it, rather than another or one before."""
    return _function(kernel, fmt, template)[1]


def _function(kernel: str, fmt: Format | None, template: Template) -> tuple[Function, bool]:
    device, new = current_device(), False

    def make() -> Function:
        nonlocal new
        cubin, new = _cubin(kernel, fmt, template, arch_of(facts(device).capability))
        return Function(cubin, kernel, device)

    return _functions.get((device, kernel, fmt, *template.values()), make), new


def _cubin(kernel: str, fmt: Format | None, template: Template, arch: str) -> tuple[bytes, bool]:
    new = False

    def make() -> bytes:
        nonlocal new
        start = perf_counter()
        unit, new = fetched(compose(kernel, fmt, **template), arch, headers(fmt))
        source, seconds = "compiled" if new else "read from the cache", perf_counter() - start
        logger.info("%s%s for %s: %s in %.2f s", kernel, f" of {fmt}" if fmt else "", arch, source, seconds)
        return unit.cubin

    return _cubins.get((arch, kernel, fmt, *template.values()), make), new

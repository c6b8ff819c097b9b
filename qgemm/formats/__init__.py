"""The folder is the registry: every Format that a module here defines is in FORMATS.

GGML_TYPES adds, by name and size only, the ggml types that have no module yet, so that their tensors can be listed
and copied.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType

import numpy as np
from gguf.constants import GGML_QUANT_SIZES

from qgemm.codec.format import Format
from qgemm.errors import UnsupportedError

NUMBERS = {"i8": "i1", "i16": "<i2", "i32": "<i4", "i64": "<i8", "f64": "<f8"}  # plain types without a codec


def _defined() -> dict[str, Format]:
    found: dict[str, Format] = {}
    for module in iter_modules(__path__):
        values = vars(import_module(f"{__name__}.{module.name}")).values()
        found.update((value.name, value) for value in values if isinstance(value, Format))
    return dict(sorted(found.items()))


def _opaque(ggml_type: int, name: str, weights: int, size: int) -> Format:
    return Format(name, weights, np.dtype(NUMBERS.get(name, [("bytes", "u1", size)])), ggml_type=ggml_type)


FORMATS = MappingProxyType(_defined())

_with_codec = {fmt.ggml_type: fmt for fmt in FORMATS.values()}
GGML_TYPES = MappingProxyType(
    {
        int(kind): _with_codec.get(kind) or _opaque(int(kind), kind.name.lower(), *sizes)
        for kind, sizes in GGML_QUANT_SIZES.items()
    }
)


def format_named(name: str | Format, to_write: bool = False) -> Format:
    """The format of this name, in any case; UnsupportedError lists the names that fit: all, or what has an encoder."""
    if isinstance(name, Format):
        return name
    try:
        return FORMATS[name.lower()]
    except KeyError:
        known = f"known: {', '.join(map(str, FORMATS.values()))}"
        fitting = f"those that can be written: {written()}" if to_write else known
        raise UnsupportedError(f"there is no format {name!r}; {fitting}") from None


def written() -> str:
    """The formats that have an encoder, for a message."""
    return ", ".join(str(fmt) for fmt in FORMATS.values() if fmt.encode is not None)

"""The folder is the registry: every Format that a module here defines is in FORMATS.

FORMATS also finds members of families (groups.py, f8.py, ...) by name, but does not list them. GGML_TYPES adds, by name
and size only, the ggml types that no module defines, so that their tensors can be listed and copied.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES

from qgemm.codec.format import Format
from qgemm.errors import NameNotFoundError, UnsupportedError

from . import f8, groups, i8_levels, ik, kbit, s7_1of2

FAMILIES: tuple[Callable[[str], Format | None], ...] = (
    groups.named, f8.named, i8_levels.named, ik.named, s7_1of2.named, kbit.named,
)  # fmt: skip
NUMBERS = {"i8": "i1", "i16": "<i2", "i32": "<i4", "i64": "<i8", "f64": "<f8"}  # plain types without a codec


def of_family(name: str) -> Format | None:
    """The member of a family with this name; None if there is none."""
    return next((fmt for family in FAMILIES if (fmt := family(name)) is not None), None)


class Formats(Mapping[str, Format]):
    """Formats by name in any case: FORMATS["Q4_0"] is FORMATS["q4_0"]. Iteration lists no members of families."""

    def __init__(self, formats: Mapping[str, Format]) -> None:
        self._formats = dict(formats)

    def __getitem__(self, name: str) -> Format:
        fmt = self._find(name)
        if fmt is None:
            names = [str(fmt) for fmt in self.values()]
            raise NameNotFoundError("there is no format", name, names, f"; there are {', '.join(names)}")
        return fmt

    def __contains__(self, name: object) -> bool:
        return self._find(name) is not None

    def _find(self, name: object) -> Format | None:
        if not isinstance(name, str):
            return None
        fmt = self._formats.get(name.lower())
        return of_family(name) if fmt is None else fmt

    def __iter__(self) -> Iterator[str]:
        return iter(self._formats)

    def __len__(self) -> int:
        return len(self._formats)

    def __repr__(self) -> str:
        return f"<FORMATS: {', '.join(map(str, self.values()))}>"


def _defined() -> dict[str, Format]:
    formats: dict[str, Format] = {}
    for module in iter_modules(__path__):
        values = vars(import_module(f"{__name__}.{module.name}")).values()
        formats.update((value.name, value) for value in values if isinstance(value, Format))
    return dict(sorted(formats.items()))


def _opaque(ggml_type: int, name: str, weights: int, size: int) -> Format:
    return Format(name, weights, np.dtype(NUMBERS.get(name, [("bytes", "u1", size)])), ggml_type=ggml_type)


FORMATS = Formats(_defined())

_with_codec = {fmt.ggml_type: fmt for fmt in FORMATS.values() if fmt.ggml_type is not None}
_of_ik = {fmt.ggml_type: fmt for fmt in ik.TYPES.values() if fmt.ggml_type is not None}
_by_size = {int(kind): _opaque(int(kind), kind.name.lower(), *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
GGML_TYPES = MappingProxyType({**_by_size, **_with_codec, **_of_ik})


def _registered(name: str) -> Format | None:
    listed = {fmt.name: fmt for fmt in (*GGML_TYPES.values(), *FORMATS.values())}
    return listed.get(name) or of_family(name)


def _of_registry(name: str, codebook: bytes | None) -> Format:
    """The registered format of a pickled or copied one, or its variant with this codebook."""
    fmt = _registered(name)
    assert fmt is not None
    if codebook is None:
        return fmt
    assert fmt.variant is not None
    return fmt.variant(np.frombuffer(codebook, np.float32), None)


def _reduced(fmt: Format) -> str | tuple[Any, ...]:
    """Pickles a registered format by its name, because its functions cannot be pickled."""
    registered = _registered(fmt.name)
    if registered == fmt:
        return _of_registry, (fmt.name, None)
    if registered is not None and registered.variant is not None and fmt.codebook is not None:
        return _of_registry, (fmt.name, fmt.codebook.tobytes())
    return object.__reduce_ex__(fmt, 2)


copyreg.pickle(Format, _reduced)


def format_of(name: str) -> Format:
    """The format of this name, in any case; NameNotFoundError lists similar names."""
    return FORMATS[name]


def format_named(name: str | Format, to_write: bool = False) -> Format:
    """The format of this name, in any case; UnsupportedError lists similar names, or all formats with an encoder."""
    if isinstance(name, Format):
        return name
    try:
        return FORMATS[name]
    except NameNotFoundError as error:
        fitting = f"there is no format {name!r}; those that can be written: {written()}"
        raise UnsupportedError(fitting if to_write else str(error)) from None


def written() -> str:
    """The formats that have an encoder, for a message."""
    return ", ".join(str(fmt) for fmt in FORMATS.values() if fmt.encode is not None)

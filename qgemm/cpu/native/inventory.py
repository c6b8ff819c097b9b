"""All libraries of kernels/cpu/ that this package asks for: what a wheel brings, and what is checked on other CPUs."""

from __future__ import annotations

from collections.abc import Iterable

from qgemm.codec.format import Format
from qgemm.formats import FORMATS

from . import encoders, libraries, products
from .calls import POOL
from .sources import Source


def sources(formats: Iterable[Format] = FORMATS.values()) -> list[Source]:
    """The pool, activations, the encoders' fits, and the library of each format that has one; each once."""
    of_formats = (libraries.source(fmt) for fmt in formats)
    each = (POOL, products.QUANTIZER, *encoders.SOURCES, *of_formats)
    return list(dict.fromkeys(source for source in each if source is not None))

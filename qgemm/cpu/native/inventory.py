"""All libraries of kernels/cpu/ that this package asks for: what a wheel brings, and what is checked on other CPUs."""

from __future__ import annotations

from collections.abc import Iterable

from qgemm.codec.format import Format
from qgemm.formats import FORMATS

from . import encoders, libraries, products
from .calls import POOL
from .sources import Source


def sources(formats: Iterable[Format] = FORMATS.values()) -> list[Source]:
    """Those of no format: the pool, activations, "a8_g256", encoders; and of each format that has one. Each once."""
    of_formats = (libraries.source(fmt) for fmt in formats)
    each = (POOL, products.QUANTIZER, products.EIGHT_BITS, *encoders.SOURCES, *of_formats)
    return list(dict.fromkeys(source for source in each if source is not None))

"""All libraries of kernels/cpu/ that this package uses; a wheel brings them, and tests check them on other CPUs."""

from __future__ import annotations

from collections.abc import Iterable

from qgemm.codec.format import Format
from qgemm.formats import FORMATS

from . import encoders, libraries, products
from .calls import POOL
from .sources import Source


def sources(formats: Iterable[Format] = FORMATS.values()) -> list[Source]:
    """The sources of no format (pool, activations, "a8_g256", encoders) and those of formats, without repetition."""
    of_formats = (libraries.source(fmt) for fmt in formats)
    every = (POOL, products.QUANTIZER, products.EIGHT_BITS, *encoders.SOURCES, *of_formats)
    return list(dict.fromkeys(source for source in every if source is not None))

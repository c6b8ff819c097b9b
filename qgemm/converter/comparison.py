"""Compare a converted tensor with its source: gives the converter's report afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.parallel import workers
from qgemm.tensor import Tensor

from .job import ordered_results
from .range_encoding import range_size, ranges, squared_norm
from .report import DIFFERENT, SCALES, Line, relative, report_line
from .rules import Step
from .weight import Weight, pack_groups, weight_from_tensor

RANGE_FRACTION = 8  # ranges are 1/8 of the converter's: a comparison need not be fast, but saves memory


class Comparison(NamedTuple):
    """Whether the bytes are equal, and the converter's line; its error is None if a type has no decoder."""

    identical: bool
    line: Line


class _RangeResult(NamedTuple):
    """Result of one range: whether the blocks equal the source's or those of its codes, and the sums for the error."""

    identical: bool
    same_codes: bool
    error: float
    power: float


def compare(weight: Weight, tensor: Tensor) -> Comparison:
    """Compare a tensor with the weight of the same shape that is taken for its source."""
    step = Step(weight, tensor.format)
    source_values, converted_values = _numbers(weight), _numbers(weight_from_tensor(tensor))

    def compare_range(part: tuple[int, int]) -> _RangeResult:
        start, stop = part
        fmt = tensor.format
        blocks = tensor.read(start // fmt.weights, stop // fmt.weights)
        identical = same_codes = False
        error = power = 0.0
        with np.errstate(all="ignore"):  # files may hold any bits
            if step.copied:
                assert weight.tensor is not None
                identical = blocks.tobytes() == weight.tensor.read(start // fmt.weights, stop // fmt.weights).tobytes()
            if step.by_codes:
                assert weight.codes is not None
                same_codes = blocks.tobytes() == pack_groups(fmt, weight.codes.read(start, stop)).tobytes()
            if source_values is not None and converted_values is not None:
                x = source_values(start, stop)
                error, power = squared_norm(converted_values(start, stop) - x), squared_norm(x)
        return _RangeResult(identical, same_codes, error, power)

    parts = ranges(step, range_size(RANGE_FRACTION * workers()))
    results = [result for _, result in ordered_results(compare_range, parts, workers())]
    identical, same_codes = (all(getattr(result, name) for result in results) for name in ("identical", "same_codes"))
    error = None
    if identical:
        error = 0.0
    elif source_values is not None and converted_values is not None:
        error = relative(sum(result.error for result in results), sum(result.power for result in results))
    new_line = report_line(step, error)
    if (step.copied and error != 0) or (new_line.how == SCALES and not same_codes):
        new_line = new_line._replace(how=DIFFERENT)
    return Comparison(identical, new_line)


def _numbers(weight: Weight) -> Callable[[int, int], NDArray[np.floating]] | None:
    """Reads the weights as numbers, integers included; None if the type has no decoder."""
    tensor = weight.tensor
    if weight.values is not None or tensor is None or not tensor.format.plain:
        return weight.values
    return lambda start, stop: tensor.read(start, stop).astype(np.float64)

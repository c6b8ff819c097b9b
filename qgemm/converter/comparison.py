"""A converted tensor beside the one it was made from: what the converter reports, found out afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.parallel import workers
from qgemm.tensor import Tensor

from .job import in_order
from .range_encoding import ranges, share, squares
from .report import DIFFERENT, SCALES, Line, line, relative
from .rules import Step
from .weight import Weight, of_tensor, packed

SHARE = 8  # of the converter's ranges: nobody waits for a comparison, memory counts


class Comparison(NamedTuple):
    """Whether the bytes are the same, and the converter's line; its error is None if a type has no decoder."""

    identical: bool
    line: Line


class _Seen(NamedTuple):
    """One range compared: whether the blocks are the source's or made of its codes, and the sums for the error."""

    identical: bool
    same_codes: bool
    error: float
    power: float


def compared(weight: Weight, tensor: Tensor) -> Comparison:
    """A tensor of the same shape as the weight that it may have been made from."""
    step = Step(weight, tensor.format)
    want, have = _numbers(weight), _numbers(of_tensor(tensor))

    def see(part: tuple[int, int]) -> _Seen:
        start, stop = part
        fmt = tensor.format
        blocks = tensor.read(start // fmt.weights, stop // fmt.weights)
        identical = same_codes = False
        error = power = 0.0
        with np.errstate(all="ignore"):  # whatever files hold is data here
            if step.copied:
                assert weight.tensor is not None
                identical = blocks.tobytes() == weight.tensor.read(start // fmt.weights, stop // fmt.weights).tobytes()
            if step.by_codes:
                assert weight.codes is not None
                same_codes = blocks.tobytes() == packed(fmt, weight.codes.read(start, stop)).tobytes()
            if want is not None and have is not None:
                x = want(start, stop)
                error, power = squares(have(start, stop) - x), squares(x)
        return _Seen(identical, same_codes, error, power)

    parts = ranges(step, share(SHARE * workers()))
    seen = [found for _, found in in_order(see, parts, workers())]
    identical, same_codes = (all(getattr(each, name) for each in seen) for name in ("identical", "same_codes"))
    error = None
    if identical:
        error = 0.0
    elif want is not None and have is not None:
        error = relative(sum(each.error for each in seen), sum(each.power for each in seen))
    found = line(step, error)
    if (step.copied and error != 0) or (found.how == SCALES and not same_codes):
        found = found._replace(how=DIFFERENT)
    return Comparison(identical, found)


def _numbers(weight: Weight) -> Callable[[int, int], NDArray[np.floating]] | None:
    """The weights as numbers, integers too."""
    tensor = weight.tensor
    if weight.values is not None or tensor is None or not tensor.format.plain:
        return weight.values
    return lambda start, stop: tensor.read(start, stop).astype(np.float64)

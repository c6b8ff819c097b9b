"""tune: time the configs of a model's products on the GPU at hand, so that products use the fastest from then on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

from .arguments import ACTIVATIONS, KINDS, Activation, unknown_activation
from .backend import Tuned, backend
from .codec.float_types import DType
from .codec.format import float_name
from .packed import Packed
from .preparation import rows_of, weights_of

DTYPES = ("float16", "bfloat16")  # types of x that are tuned without a choice
MINUTES = 5.0


def tune(
    tensors: Mapping[str, Packed] | Iterable[Packed] | Packed,
    m: int | Iterable[int] | None = None,
    *,
    activation: Activation | Iterable[Activation] | None = None,
    dtype: DType | Iterable[DType] | None = None,
    minutes: float = MINUTES,
    progress: bool | None = None,
) -> Tuned:
    """Time the configs of the kernels that multiply by these weights on the current GPU, and keep the times.

    >>> with qgemm.open("model.gguf") as model:
    ...     print(qgemm.tune(model, m=(1, 16, 512)))

    Products of this GPU then use the fastest kernel and config, in this process and in later ones: the times lie
    beside the compiled kernels, and hold for one GPU name, driver and version of the kernels. A call goes on where an
    earlier one ended, by the limit of `minutes` or by Ctrl-C. Without times a cost model chooses, fitted on another
    GPU.

    tensors: of an opened file, or any Tensors and DeviceTensors; matrices are tuned, one of each format and shape.
    m: the number of rows of x, or several numbers; without it from 1 to 4096. A number serves those below it, down to
    the next. activation: one or several of qgemm.matmul; without it "a16" and "a8". dtype: of x and y, one or several;
    without it float16 and bfloat16. progress: whether a bar is drawn on stderr; without a choice where stderr is a
    terminal.

    Raises TypeError unless all are tensors, UnsupportedError without a GPU, for a number of rows below 1, or an unknown
    activation or dtype, ValueError unless `minutes` is positive.
    """
    weights, kinds = weights_of(tensors), list(map(str, _several(activation))) or list(ACTIVATIONS)
    for kind in kinds:
        if kind not in KINDS:
            raise unknown_activation(kind)
    if not (minutes > 0 and isfinite(minutes)):
        raise ValueError(f"minutes must be a positive number, got {minutes!r}")
    names = (float_name(name) for name in _several(dtype) or DTYPES)
    dtypes = list(dict.fromkeys("float32" if name == "float64" else name for name in names))  # as kernels read x
    return backend("cuda").tune(weights, rows_of(m), kinds, dtypes, 60 * minutes, progress)


def _several(choice: Any) -> list[Any]:
    if choice is None:
        return []
    return list(choice) if isinstance(choice, Iterable) and not isinstance(choice, str) else [choice]

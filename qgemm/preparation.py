"""prepare: compile the kernels of a model's products on all cores, before the first product needs them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import NamedTuple

from .arguments import KINDS, Activation, unknown_activation
from .backend import backend, backends
from .codec.float_types import DType
from .codec.format import float_name
from .errors import UnsupportedError
from .packed import Packed
from .parallel import run_all
from .tensor import Tensor
from .views import View

DTYPES = ("float16", "bfloat16", "float32")  # types of x


class Prepared(NamedTuple):
    """The result of `prepare`: the number of kernels that are ready, the number that it compiled, and its seconds.

    On a CPU a library of C counts as a kernel.
    """

    kernels: int
    compiled: int
    seconds: float

    def __str__(self) -> str:
        """E.g. "267 kernels are ready, 12 of them compiled now, in 1.3 s"."""
        return f"{self.kernels} kernels are ready, {self.compiled} of them compiled now, in {self.seconds:.1f} s"


def prepare(
    tensors: Mapping[str, Packed] | Iterable[Packed] | Packed,
    m: int | Iterable[int] | None = None,
    *,
    activation: Activation | None = None,
    dtype: DType | None = None,
    progress: bool | None = None,
) -> Prepared:
    """Compile and load the kernels of products by these weights now, on all cores, instead of at their first use.

    >>> with qgemm.open("model.gguf") as model:
    ...     qgemm.prepare(model, m=(1, 512), dtype="float16")

    tensors: of an opened file, or any Tensors and DeviceTensors. Kernels are for the GPU on which a DeviceTensor lies,
    for Tensors the current one if this machine has any, else the CPU.
    m: the number of rows of x, or several numbers; without it any from 1 to 4096. activation: "a16", the default of
    products, or another of qgemm.matmul. dtype: of x; without it float16, bfloat16 and float32.
    progress: whether a bar is drawn on stderr; without a choice where stderr is a terminal.

    The first error of a compiler is raised; compilations that have not begun then do not. Raises TypeError unless all
    are tensors, UnsupportedError for a number of rows below 1 or an unknown activation or dtype.
    """
    start = time.perf_counter()
    weights = weights_of(tensors)
    if activation is not None and activation not in KINDS:
        raise unknown_activation(activation)
    on_gpu = any(not isinstance(w, Tensor) for w in weights) or backends()["cuda"].available
    tasks = backend("cuda" if on_gpu else "cpu").preparation(
        weights,
        rows_of(m),
        ("a16" if activation is None else activation,),
        DTYPES if dtype is None else (float_name(dtype),),
    )
    compiled = run_all(tasks, progress)
    return Prepared(len(tasks), compiled, time.perf_counter() - start)


def weights_of(tensors: Mapping[str, Packed] | Iterable[Packed] | Packed) -> list[Packed]:
    """The tensors of an argument, views as the tensors that they show; TypeError for anything else."""
    values = tensors.values() if isinstance(tensors, Mapping) else tensors
    weights = list(values if isinstance(values, Iterable) and not isinstance(values, Packed) else [values])
    weights = [w.tensor if isinstance(w, View) else w for w in weights]
    for w in weights:
        if not isinstance(w, Packed):
            raise TypeError(f"tensors must be Tensors or DeviceTensors, got {type(w).__name__}")
    return weights


def rows_of(m: int | Iterable[int] | None) -> Sequence[int] | None:
    """The numbers of rows of an argument m, in order; None for all. UnsupportedError for one below 1."""
    if m is None:
        return None
    try:
        rows = sorted({index(number) for number in (m if isinstance(m, Iterable) else [m])})
    except TypeError:
        rows = []
    if not rows or rows[0] < 1:
        raise UnsupportedError(f"m is a number of rows of x from 1 on, or several, got {m!r}")
    return rows

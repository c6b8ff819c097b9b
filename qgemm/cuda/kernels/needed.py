"""Which kernels a model's products ask for: what is compiled before the first token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

from qgemm.arguments import ACTIVATIONS
from qgemm.codec.format import Format
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.problem import TUNED_SMS, TYPES, Output, Problem

from .kernel import Kernel
from .panels import DEQUANTIZE
from .routes import TYPE_NAMES, common_variants, route
from .transforms import DEQUANTIZE_TILES, PACK

# Rows of x that are asked for: where few change the kernel each, then where a cost model may choose another config.
ROWS = (*range(1, 129), *range(136, 513, 8), *range(576, 4097, 64))

Key = tuple[str, Format | None, tuple[tuple[str, Any], ...]]  # kernel, the format that it is for, template


def needed(
    tensors: Iterable[Any],
    sm: int,
    sms: int = TUNED_SMS,
    rows: Sequence[int] = ROWS,
    activations: Sequence[str] = ACTIVATIONS,
    types: Sequence[str] = TYPES,
) -> set[Key]:
    """Every kernel that uploading these tensors, and products with so many rows of x, ask for.

    tensors: of the host or on a GPU. sm, sms: compute capability (90 is 9.0) and multiprocessors of the GPU. types:
    kernels' names of those of x; y is of any type.
    """
    matrices = {(each.format, *each.shape[-2:]) for each in tensors if each.ndim > 1 and each.format.slots}
    asked = _Asked()
    asked.found |= {(name, None, tuple(template.items())) for name, template in common_variants()}
    for fmt in {fmt for fmt, *_ in matrices}:
        asked.found |= {(PACK.name, fmt, tuple(template.items())) for template in PACK.variants(fmt)}
    for (fmt, n, k), activation, x, m in product(matrices, activations, types, rows):
        if activation == "a16" or fmt.integer:
            asked.add(Problem(fmt, activation, m, n, k, sm, x, sms=sms))
    return asked.found


class _Asked:
    """The kernels of problems. A config is chosen once for all that it depends on, which the activation is not part of
    where x is brought into the same form."""

    def __init__(self) -> None:
        self.found: set[Key] = set()
        self._configs: dict[Any, Any] = {}
        self._seen: set[Any] = set()

    def add(self, p: Problem) -> None:
        """The kernels of a problem."""
        kernel = route(p).kernel
        if kernel is DEQUANTIZE:
            key = p.format, kernel
            if key not in self._seen:
                self._seen.add(key)
                for template in DEQUANTIZE_TILES.variants(p.format):
                    self.found.add((DEQUANTIZE_TILES.name, p.format, tuple(template.items())))
            return
        for source in kernel.reads(p):
            asked = p._replace(x=source)
            for config in self._chosen(kernel, asked):
                self._templates(kernel, asked, config)

    def _chosen(self, kernel: Kernel, p: Problem) -> Iterable[Any]:
        """The config of a problem, or all where products may be fused."""
        if kernel.products > 1:
            return kernel.configs(p)
        key = kernel, p.format, p.x, p.m, p.n, p.k
        if key not in self._configs:
            self._configs[key] = kernel.choose(p)
        return (self._configs[key],)

    def _templates(self, kernel: Kernel, p: Problem, config: Any) -> None:
        """Those of a config for each type of y, once for all problems with the same token tile."""
        key = kernel, p.format, p.x, config, p.m if kernel.products > 1 else 0
        if key in self._seen:
            return
        self._seen.add(key)
        for template in _of_types(kernel, p, config):
            self.found.add((kernel.name, p.format, tuple(template.items())))


def _of_types(kernel: Kernel, p: Problem, config: Any) -> Iterator[Template]:
    for out in TYPE_NAMES if kernel.out_in_template else TYPE_NAMES[:1]:
        yield kernel.template(p._replace(outputs=(Output(p.n, out),)), config)

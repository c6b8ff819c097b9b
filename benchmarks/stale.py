"""Digests of the kernels that rows of results ran, and the rows whose kernels have changed since (`make stale`).

A digest covers the translation units of a row's kernels, with all headers and the generated text, but not the compiler.
Comments and line breaks do not count. Rows of host times name no kernels.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from qgemm.cli.random_models import HEADS, types_of
from qgemm.codec.format import Format
from qgemm.codec.group_activations import GROUP_COLUMNS
from qgemm.cuda.jit.codegen import Template, compose, headers
from qgemm.cuda.jit.sources import closure
from qgemm.cuda.kernels.needed import Key, needed
from qgemm.cuda.kernels.prefill_sm80 import PREFILL_SM80, PREFILL_SM80_A8
from qgemm.cuda.kernels.routes import route, source_of
from qgemm.cuda.kernels.transforms import (
    DEQUANTIZE_CODEBOOK,
    PACK,
    QUANTIZE_ACTIVATIONS,
    QUANTIZE_ACTIVATIONS_GROUPS,
    QUANTIZE_CODEBOOK,
    ROUND_ACTIVATIONS,
    SCALE_ROWS,
    Transform,
)
from qgemm.cuda.problem import C_TYPES, Q8_1, SCALED_ROWS, TUNED_SMS, Output, Problem
from qgemm.errors import QgemmError, UnsupportedError
from qgemm.formats import format_named
from qgemm.text import columns

from . import step
from .moe_layers import MODELS
from .results import EXPERTS, KEYS, MMA, STEPS, Results, Row, load, x_of

DIGEST = "kernels"  # the field of a row
DIGITS = 12  # hexadecimal digits of SHA-256 that are kept
TUNED_SM = 90  # the compute capability where a file names none
HOST_TIMES = ("calls", "experts_host")
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# The kernels that bring x into the form of an activation.
QUANTIZING: dict[str, tuple[Transform, ...]] = {
    "a8": (QUANTIZE_ACTIVATIONS, ROUND_ACTIVATIONS),
    **dict.fromkeys(GROUP_COLUMNS, (QUANTIZE_ACTIVATIONS_GROUPS,)),
}
OF_EXPERTS = "moe_"  # the first letters of kernels that only layers of experts launch


class Weights(NamedTuple):
    """A matrix or experts without their blocks."""

    format: Format
    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)


class Count(NamedTuple):
    """Rows of a list: all, those of kernels that have changed, those without a digest."""

    rows: int
    changed: int
    unknown: int


def stamped(results: Results) -> Results:
    """The results with the digest of the present kernels in each row that lacks one."""
    return {
        **results,
        **{name: [_stamped(name, row, results) for row in results.get(name, [])] for name in _lists(results)},
    }


def _stamped(name: str, row: Row, results: Results) -> Row:
    return row if DIGEST in row else {**row, DIGEST: digest_of(name, row, results)}


def counts(results: Results) -> dict[str, Count]:
    """For each list of a file that is not empty, how many of its rows are stale."""
    return {name: _count(name, results) for name in _lists(results) if results[name]}


def is_stale(name: str, row: Row, results: Results) -> bool:
    """Whether a row of a list ran other kernels than the present ones, or does not say which."""
    measured = row.get(DIGEST)
    return not measured or measured != digest_of(name, row, results)


def sentence(results: Results) -> str:
    """A sentence that counts the stale rows of products; empty if none is stale."""
    count = counts(results).get("rows", Count(0, 0, 0))
    stale = count.changed + count.unknown
    if not stale:
        return ""
    share = "All" if stale == count.rows else f"{stale} of {count.rows}"
    return f"{share} rows were measured with other kernels than the present ones."


def table(paths: Sequence[Path]) -> str:
    """A row for each list of each file of GPU results that has stale rows."""
    cells: list[tuple[str, ...]] = [("file", "list", "rows", "of changed kernels", "of unknown sources")]
    for path in paths:
        for name, count in counts_in(path).items():
            if count.changed or count.unknown:
                cells.append((path.name, name, *map(str, count)))
    return columns("<<>>>", cells) if len(cells) > 1 else "no row is stale"


def counts_in(path: Path) -> dict[str, Count]:
    """The counts of a file; none if it has other results, or those of another library."""
    try:
        results = load(path)
    except QgemmError:
        return {}
    return {} if any("library" in row for row in results.get("rows", [])) else counts(results)


def _lists(results: Results) -> list[str]:
    return [name for name in KEYS if name in results and name not in HOST_TIMES]


def _count(name: str, results: Results) -> Count:
    rows = results[name]
    unknown = sum(not row.get(DIGEST) for row in rows)
    return Count(len(rows), sum(is_stale(name, row, results) for row in rows) - unknown, unknown)


# ---------------------------------------------------------------- digests


def digest_of(name: str, row: Row, results: Results) -> str:
    """The digest of the kernels that a row of a list would run now; empty if there is none."""
    try:
        keys = set(units(name, row, results.get("sm", TUNED_SM), results.get("sms", TUNED_SMS)))
    except (UnsupportedError, StopIteration, KeyError):  # the kernel, format or model is no more
        return ""
    return _digest(sorted(unit_digest(key) for key in keys)) if keys else ""


def units(name: str, row: Row, sm: int, sms: int) -> Iterator[Key]:
    """The kernels that a row of a list runs on a GPU of this compute capability with this number of SMs."""
    if name == "planes":
        yield _of_planes(row)
    elif name == MMA:
        yield from _of_mma(row, sm, sms)
    elif name == EXPERTS:
        model = next(model for model in MODELS if (model.name, model.format) == (row["model"], row["types"]))
        e, f, k = model.experts, model.f, model.k
        yield from _of_model(model.format, [(e, f, k), (e, k, f)], row, sm, sms, experts=True)
    elif name == STEPS:
        for fmt, shapes in _shapes_of_step(row["types"]).items():
            yield from _of_model(fmt, shapes, row, sm, sms)
    else:
        yield from _of_product(row, sm, sms)


def _of_product(row: Row, sm: int, sms: int) -> Iterator[Key]:
    """The kernel that the route table names for a row, with the parts that it needs, and those that quantize x."""
    fmt, activation, (m, n, k) = format_named(row["format"]), row["activation"], (row[name] for name in "MNK")
    x = C_TYPES[x_of(row)]
    p = Problem(fmt, activation, m, n, k, sm, x, (Output(n, x_of(row)),), sms=sms)
    kernel = route(p).kernel
    for source in kernel.reads(p):
        if source == SCALED_ROWS:
            yield from (_key(SCALE_ROWS.name, None, template) for template in SCALE_ROWS.variants())
        form = p._replace(x=source)
        config = kernel.choose(form)
        configs = kernel.chosen(form, (m,)) if config is None else (config,)
        yield from (_key(kernel.name, fmt, kernel.template(form, config)) for config in configs)
    for of_format in (fmt, None):
        yield from (
            _key(name, of_format, template) for name, template in kernel.extra_units(of_format, sm, (activation,))
        )
    for transform in QUANTIZING.get(activation, ()):
        yield from (_key(transform.name, None, template) for template in transform.variants() if template["In"] == x)


def _of_model(
    name: str, shapes: Sequence[tuple[int, ...]], row: Row, sm: int, sms: int, experts: bool = False
) -> Iterator[Key]:
    """The kernels of all products of a row that layers with these matrices, or with these experts, may launch."""
    weights = [Weights(format_named(name), shape) for shape in shapes]
    for key in needed(weights, sm, sms, [row["M"]], ["a16"], [C_TYPES[x_of(row)]]):
        kernel, fmt, _ = key
        if kernel.startswith(OF_EXPERTS) == experts and kernel != PACK.name and (experts or fmt is not None):
            yield key


def _key(kernel: str, fmt: Format | None, template: Template) -> Key:
    return kernel, fmt, tuple(template.items())


def _of_planes(row: Row) -> Key:
    transform = {t.name: t for t in (QUANTIZE_CODEBOOK, DEQUANTIZE_CODEBOOK)}[row["kernel"]]
    fmt, side = format_named(row["format"]), "In" if transform is QUANTIZE_CODEBOOK else "Out"
    return transform.name, fmt, tuple(transform.template(fmt, **{side: C_TYPES[row["dtype"]]}).items())


def _of_mma(row: Row, sm: int, sms: int) -> Iterator[Key]:
    by_activation, x = {"a16": PREFILL_SM80, "a8": PREFILL_SM80_A8}, C_TYPES[x_of(row)]
    kernel, fmt, (m, n, k) = by_activation[row["activation"]], format_named(row["format"]), (row[i] for i in "MNK")
    kind = Q8_1 if kernel is PREFILL_SM80_A8 else x if x == "half" else SCALED_ROWS
    if kind == SCALED_ROWS:
        yield from (_key(SCALE_ROWS.name, None, template) for template in SCALE_ROWS.variants())
    p = Problem(fmt, row["activation"], m, n, k, sm, kind, (Output(n, x_of(row)),), sms=sms)
    yield _key(kernel.name, fmt, kernel.template(p, kernel.choose(p)))


def _shapes_of_step(mixture: str) -> dict[str, list[tuple[int, int]]]:
    """The matrices of benchmarks.step by their format."""
    shapes: dict[str, list[tuple[int, int]]] = {HEADS[mixture]: [(step.VOCABULARY, step.HIDDEN)]}
    for layer in range(step.LAYERS):
        base, v, down = types_of(mixture, layer, step.LAYERS)
        square, key = (step.HIDDEN, step.HIDDEN), (step.KEYS, step.HIDDEN)
        wide, narrow = (step.INNER, step.HIDDEN), (step.HIDDEN, step.INNER)
        matrices = (base, square), (base, key), (base, wide), (v, key), (down, narrow)
        for fmt, shape in matrices:
            if shape not in shapes.setdefault(fmt, []):
                shapes[fmt].append(shape)
    return shapes


@lru_cache(maxsize=1 << 14)
def unit_digest(key: Key) -> str:
    """The digest of a kernel's translation unit and of all that it includes."""
    kernel, fmt, template = key
    source, texts = compose(source_of(kernel), fmt, **dict(template)), headers(fmt)
    included = closure(source, texts)
    return _digest([source, *(f"{name}\n{_code(text)}" for name, text in included.items())])


@lru_cache(maxsize=1 << 12)
def _code(text: str) -> str:
    """The SHA-256 of a source without comments and line breaks."""
    return hashlib.sha256(" ".join(COMMENT.sub(" ", text).split()).encode()).hexdigest()


def _digest(parts: Sequence[Any]) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:DIGITS]


if __name__ == "__main__":
    print(table(sorted((Path(__file__).parents[1] / "tools" / "results").glob("*.json"))))

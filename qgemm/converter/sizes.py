"""Types for a size: measure what each type would cost each tensor, choose, and show the plan (`qgemm convert --size`).

A recipe is the result as text: a line NAME = TYPE for each tensor that no rule and no other option decides.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from qgemm.codec.format import Format
from qgemm.codec.super_blocks import WEIGHTS as SUPER_BLOCK
from qgemm.errors import QgemmError
from qgemm.files.gguf.writer import file_nbytes
from qgemm.files.imatrix_sums import Sensitivities
from qgemm.files.paths import PathLike, path_string, shown, shown_path
from qgemm.formats import FORMATS
from qgemm.tensor import Tensor
from qgemm.text import binary_size, columns, printable

from .metadata import metadata
from .mixture import FILE_TYPES
from .rules import Options, Step, candidate_steps, free_weights, plan
from .size_choice import Alternative, Choice, choose
from .size_costs import costs
from .type_names import format_and_mixture, one_format
from .weight import Source, Weight

OBJECTIVES = ("mse", "kl")
Measure = Callable[[Mapping[str, Sequence[Step]]], dict[str, list[Alternative]]]
# Candidates without --types: those that llama.cpp computes with fast, of every size. In rows of whole super-blocks the
# types of BLOCKS have larger errors than those of the same size, but for Q8_0.
SUPER_BLOCKS = (
    "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "q2_k", "iq3_xxs", "iq3_s", "q3_k", "iq4_xs", "q4_k", "q5_k",
    "q6_k", "q8_0",
)  # fmt: skip
BLOCKS = ("iq4_nl", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0")
FIRST = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0")  # are encoded fast, and measured before the others
NEAR = 0.45, 2.5  # bits per weight of a candidate, relative to those that the size leaves
UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "k": 1 << 10,
    "m": 1 << 20, "g": 1 << 30,
}  # fmt: skip
SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) *(bpw|[kmg]i?b?|b)?", re.IGNORECASE)
LONGEST_RECIPE = 1 << 24  # bytes


class SizePlan(NamedTuple):
    """The chosen types by tensor name, and the table to print."""

    recipe: dict[str, Format]
    text: str


class _Budget(NamedTuple):
    """The bytes for tensors, and the same as bits per weight."""

    nbytes: int
    bpw: float


def check_size(text: str) -> None:
    """QgemmError for a text that is no size."""
    match = SIZE.fullmatch(text.strip())
    if match is None and format_name(text) not in FILE_TYPES:
        raise QgemmError(f"{shown(text)} is no size: 4.25bpw, 12GiB, 900MB, or a file type such as q4_k_m")


def format_name(text: str) -> str:
    """The file type of llama-quantize that a text names, "" if it names none."""
    try:
        return format_and_mixture(text)[1]
    except QgemmError:
        return ""


def plan_size(
    source: Source,
    options: Options,
    size: str,
    *,
    types: Sequence[str | Format] = (),
    objective: str = "",
    sensitivities: Sensitivities | None = None,
    threads: int | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> SizePlan:
    """Choose the types of a source's tensors for a size.

    size: "4.25bpw" (bits per weight of all tensors), "12GiB" (the whole file), "q4_k_m" (the bytes that this file type
    needs). types: the candidates; by default TYPES. objective: "kl" where sensitivities are known, else "mse".
    progress: called with the number of measured types, and of all. QgemmError if the smallest types are too large.
    """
    check_size(size)
    sensitivities = sensitivities or Sensitivities()
    objective = objective or ("kl" if sensitivities.fisher else "mse")
    if objective not in OBJECTIVES:
        raise QgemmError(f"the objective is {' or '.join(OBJECTIVES)}, not {shown(objective)}")
    if objective == "kl" and not sensitivities.fisher:
        raise QgemmError("--objective kl needs sensitivities: an --imatrix of `qgemm imatrix --sensitivity`")
    weights = free_weights(source, options)
    if not weights:
        raise QgemmError(f"{shown_path(source.path)}: rules and options decide the type of every tensor")
    budget = _budget(source, options, size)
    names = [weight.name for weight in weights]
    formats = [one_format(fmt) for fmt in types]
    candidates = {
        weight.name: candidate_steps(weight, formats or _near(weight, budget.bpw), options) for weight in weights
    }
    fixed = _nbytes(source, options, {name: candidates[name][0].format for name in names})
    fixed -= sum(candidates[name][0].nbytes for name in names)
    least = fixed + sum(min(step.nbytes for step in steps) for steps in candidates.values())
    if least > budget.nbytes:
        raise QgemmError(_too_small(source, options, size, least, budget.nbytes))
    total, done = sum(map(len, candidates.values())), 0

    def measure(steps: Mapping[str, Sequence[Step]]) -> dict[str, list[Alternative]]:
        def advance(count: int) -> None:
            nonlocal done
            done += count
            progress(done, total)

        return costs(steps, options, objective, sensitivities, threads, advance)

    candidates, measured = _measured(candidates, budget.nbytes - fixed, measure)
    progress(total, total)
    choice = choose([measured[name] for name in names], budget.nbytes - fixed)
    chosen = {name: candidates[name][index] for name, index in zip(names, choice.indices, strict=True)}
    recipe = {name: step.format for name, step in chosen.items()}
    text = _table(list(chosen.values()), [measured[name] for name in names], choice, objective)
    weight_count = sum(weight.size for weight in source.weights.values())
    bits = 8 * (choice.nbytes + fixed) / weight_count
    text += f"\n{binary_size(choice.nbytes + fixed)} of tensor data for --size {size}, {bits:.4g} bits per weight"
    return SizePlan(recipe, text)


def _measured(
    candidates: dict[str, list[Step]], nbytes: int, measure: Measure
) -> tuple[dict[str, list[Step]], dict[str, list[Alternative]]]:
    """The measured candidates of each tensor, and the cost of each.

    Those of FIRST precede, among which a choice is made; then come the others whose size is between those of the
    neighbours of the chosen type. All are measured of a tensor that has fewer than two of FIRST, and where FIRST is
    too large.
    """
    steps = {}
    for name, possible in candidates.items():
        first = [step for step in possible if step.format.name in FIRST]
        steps[name] = first if len(first) > 1 else possible
    if sum(min(step.nbytes for step in first) for first in steps.values()) > nbytes:
        return candidates, measure(candidates)
    measured = measure(steps)
    choice = choose(list(measured.values()), nbytes)
    others = {}
    for (name, first), index in zip(steps.items(), choice.indices, strict=True):
        chosen = first[index].nbytes
        least = max((step.nbytes for step in first if step.nbytes < chosen), default=0)
        greatest = min((step.nbytes for step in first if step.nbytes > chosen), default=chosen)
        others[name] = [step for step in candidates[name] if step not in first and least <= step.nbytes <= greatest]
    more = measure({name: rest for name, rest in others.items() if rest})
    return (
        {name: [*first, *others[name]] for name, first in steps.items()},
        {name: [*costs, *more.get(name, [])] for name, costs in measured.items()},
    )


def _too_small(source: Source, options: Options, size: str, least: int, nbytes: int) -> str:
    """The error for a size below that of the smallest types, with the option that allows smaller ones."""
    left = f"leaves {binary_size(nbytes)}" if nbytes > 0 else "is less than the header, and leaves nothing"
    text = f"--size {size} {left} for tensors; even the smallest types need {binary_size(least)}"
    if options.allow_requantize or not any(weight.quantized for weight in source.weights.values()):
        return text
    return f"{text}, since tensors that are quantized keep their types without --allow-requantize"


def _budget(source: Source, options: Options, size: str) -> _Budget:
    weights = sum(weight.size for weight in source.weights.values())
    match = SIZE.fullmatch(size.strip())
    if match is None:
        default, mixture = format_and_mixture(size)
        nbytes = sum(step.nbytes for step in plan(source, options._replace(type=default, mixture=mixture)))
    elif (match[2] or "").lower() == "bpw":
        nbytes = int(float(match[1]) * weights / 8)
    else:
        nbytes = int(float(match[1]) * UNITS[(match[2] or "").lower()]) - _overhead(source, options)
    return _Budget(nbytes, 8 * nbytes / max(weights, 1))


def _overhead(source: Source, options: Options) -> int:
    """The bytes of a file besides its tensors' data: its header, and the padding of each tensor at its largest."""

    def none() -> None:
        raise AssertionError("only shapes are read")

    steps = plan(source, options._replace(type=FORMATS["f16"], mixture=""))
    tensors = {step.weight.name: Tensor(step.format, step.weight.shape, none) for step in steps}  # type: ignore[arg-type]
    header = file_nbytes(tensors, metadata(source, steps, options)) - sum(step.nbytes for step in steps)
    return header + 32 * len(steps)


def _nbytes(source: Source, options: Options, recipe: Mapping[str, Format]) -> int:
    """The bytes of all tensors with the types of a recipe."""
    return sum(step.nbytes for step in plan(source, with_recipe(options, recipe)))


def with_recipe(options: Options, recipe: Mapping[str, Format]) -> Options:
    """The options with a type for each of these tensors; the file's own type is that of most tensors."""
    commonest = Counter(fmt.name for fmt in recipe.values()).most_common(1)
    fmt = FORMATS[commonest[0][0]] if commonest else options.type
    return options._replace(type=fmt, mixture="", recipe=recipe)


def _near(weight: Weight, bpw: float) -> list[Format]:
    """The candidates for a tensor whose bits per weight are near the target's; all if there is none."""
    formats = [FORMATS[name] for name in (BLOCKS if weight.shape[-1] % SUPER_BLOCK else SUPER_BLOCKS)]
    least, greatest = (factor * bpw for factor in NEAR)
    return [fmt for fmt in formats if least <= fmt.bpw <= greatest] or formats


def _table(steps: Sequence[Step], alternatives: Sequence[Sequence[Alternative]], choice: Choice, objective: str) -> str:
    """The plan: a row for each tensor, with its share of the cost."""
    head = ("tensor", "shape", "from", "to", "bpw", "size", f"cost ({objective})", "share")
    rows = [
        (
            printable(step.weight.name), "x".join(map(str, step.weight.shape)), step.weight.type, str(step.format),
            f"{step.format.bpw:g}", binary_size(step.nbytes), f"{measured[index].cost:.3g}",
            f"{measured[index].cost / choice.cost if choice.cost else 0:.1%}",
        )
        for step, measured, index in zip(steps, alternatives, choice.indices, strict=True)
    ]  # fmt: skip
    noun = "expected KL divergence" if objective == "kl" else "sum of relative squared errors"
    gap = f"{noun} {choice.cost:.4g}; no choice of the measured types is below {choice.bound:.4g}"
    return "\n".join([columns("<<<<>>>>", [head, *rows]), "", gap])


# ---------------------------------------------------------------- recipes


def recipe_text(recipe: Mapping[str, Format], title: str) -> str:
    """A recipe as text."""
    return "\n".join([f"# {printable(title)}", *(f"{name} = {fmt.name}" for name, fmt in recipe.items()), ""])


def read_recipe(path: PathLike) -> dict[str, Format]:
    """The types of a recipe; QgemmError, with the line, for anything but NAME = TYPE, comments (#) and empty lines."""
    where = shown_path(path_string(path))
    with open(path_string(path), "rb") as file:
        raw = file.read(LONGEST_RECIPE + 1)
    if len(raw) > LONGEST_RECIPE:
        raise QgemmError(f"{where}: has more than {LONGEST_RECIPE} bytes, which no recipe needs")
    recipe: dict[str, Format] = {}
    for number, line in enumerate(map(str.strip, raw.decode("utf-8", "replace").splitlines()), 1):
        if not line or line.startswith("#"):
            continue
        name, kind = (part.strip() for part in line.rpartition("=")[::2])
        if not name or not kind:
            raise QgemmError(f"{where}:{number}: {shown(line)} is not NAME = TYPE")
        if name in recipe:
            raise QgemmError(f"{where}:{number}: {shown(name)} has a type already")
        try:
            recipe[name] = one_format(kind)
        except QgemmError as error:
            raise QgemmError(f"{where}:{number}: {error}") from None
    return recipe


def check_recipe(source: Source, options: Options, recipe: Mapping[str, Format], path: PathLike) -> None:
    """Refuse a recipe of another model: it must name exactly the tensors that no rule and no other option decides."""
    free = {weight.name for weight in free_weights(source, options)}
    where = shown_path(path_string(path))
    for name in recipe:
        if name not in source.weights:
            raise QgemmError(f"{where}: {shown_path(source.path)} has no tensor {shown(name)}")
        if name not in free:
            raise QgemmError(f"{where}: a rule or another option decides the type of {shown(name)}")
    for name in free - recipe.keys():
        raise QgemmError(f"{where}: has no type for {shown(name)}")

"""Sections of docs/recipes.md: the text of an example, and its speed in the last results file."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.report import models, tables

EXAMPLES = tables.ROOT / "examples"
SPEEDS: dict[str, Callable[[], str]] = {  # example -> its sentence
    "generate_static": lambda: models.recipe("generate"),
    "cuda_graph": lambda: models.recipe("graph"),
    "compiled_step": lambda: models.recipe("compile"),
    "long_prompt": lambda: models.recipe("a8_g256"),
    "train_lora": lambda: models.recipe("train"),
    "save_packed": models.loading,
}


def section(name: str) -> str:
    """The program of an example, and its speed."""
    program = (EXAMPLES / f"{name}.py").read_text()
    return f"```python\n{program}```\n\n{SPEEDS[name]()}"

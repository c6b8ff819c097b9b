"""The keys of transformers' config classes, and those that the converter reads or has a rule for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from class_folders import CLASSES as CLASSES_MADE
from gguf import GGUFWriter
from hf_folders import CONFIG, FOLDERS

from qgemm.converter.architecture_record import letters
from qgemm.converter.architectures import ARCHITECTURES
from qgemm.converter.config_rules import NO_EFFECT, READ_ELSEWHERE
from qgemm.converter.hyperparameters import Config

WHERE = "config.json"

# Architecture -> key of its config class in transformers 5.24 -> its default; objects and lists have null.
CLASSES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "config_keys.json").read_text(encoding="utf-8")
)


def keys_read(architecture: str) -> set[str]:
    """The keys that become metadata or shapes of the .gguf file."""
    record = ARCHITECTURES[architecture]
    extra = FOLDERS.get(architecture.replace("ForConditionalGeneration", "ForCausalLM"), ({},))[0]
    values = CLASSES_MADE[architecture]["config"] if architecture in CLASSES_MADE else {**CONFIG, **extra}
    names: set[str] = set()

    def recorded(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(config: Config, *keys: str) -> Any:
            if config.where == WHERE:
                names.update(keys)
            return method(config, *keys)

        return call

    with (
        patch.object(Config, "value", recorded(Config.value)),
        patch.object(Config, "section", recorded(Config.section)),
    ):
        config = record.config(WHERE, values)
        record.keys(config, GGUFWriter(None, "llama"))
        letters(config, 40)
        record.shapes(config, 0, False)
    return {*names, *record.aliases}


def classified(architecture: str) -> set[str]:
    """The keys that are written, that have a rule, or that have no effect."""
    return {*keys_read(architecture), *ARCHITECTURES[architecture].rules, *NO_EFFECT, *READ_ELSEWHERE}

"""The keys of transformers' config classes, and those that the converter reads or has a rule for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gguf import GGUFWriter
from hf_folders import CONFIG, FOLDERS

from qgemm.converter.architectures import ARCHITECTURES, letters
from qgemm.converter.config_rules import NO_EFFECT, READ_ELSEWHERE
from qgemm.converter.hyperparameters import Config

# Architecture -> key of its config class in transformers 5.24 -> its default; objects and lists have null.
CLASSES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "config_keys.json").read_text(encoding="utf-8")
)


class Recorded(dict):
    """An object that remembers which of its keys were read."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.keys_read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        return super().get(key, default)


def keys_read(architecture: str) -> set[str]:
    """The keys that become metadata or shapes of the .gguf file."""
    record = ARCHITECTURES[architecture]
    extra = FOLDERS[architecture.replace("ForConditionalGeneration", "ForCausalLM")][0]
    values = Recorded({**record.defaults, **CONFIG, **extra})
    config = Config("config.json", values)
    record.keys(config, GGUFWriter(None, "llama"))
    letters(config, 40)
    return values.keys_read


def classified(architecture: str) -> set[str]:
    """The keys that are written, that have a rule, or that have no effect."""
    return {*keys_read(architecture), *ARCHITECTURES[architecture].rules, *NO_EFFECT, *READ_ELSEWHERE}

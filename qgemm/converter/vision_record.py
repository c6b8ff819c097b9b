"""The record of a vision encoder with its projector, and the letters of its shapes.

Shapes are written in letters: E hidden size, F feed-forward size, T hidden size of the text model, C channels, K the
width of a patch, P positions, M features that are merged into one token; I, O and V projector sizes of Llama 4.
Every tensor listed must exist and have its shape, except those of `optional`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from gguf import GGUFWriter

from .config_rules import Rules
from .fused_weights import Refusal
from .hyperparameters import Config
from .weight import Weight

Tensors = Mapping[str, tuple[str, str]]  # name in the folder -> name in the file, shape in letters
Modules = Mapping[str, str]  # name in the folder -> name in the file and shape, separated by spaces
ViewParts = Callable[[Weight, Refusal], list[Weight]]
LAYER = "{}"  # the number of a layer in the names of Tensors


EMPTY: Mapping[str, Any] = MappingProxyType({})


NO_EFFECT = {  # keys of vision_config: settings of training, of videos, and of a head that no model uses
    "initializer_range", "attention_dropout", "projector_dropout", "tokens_per_second", "vision_use_head",
}  # fmt: skip


class Projector(NamedTuple):
    """How the vision part of a class of models becomes a projector for llama.cpp.

    type: its name in llama.cpp. tensors: names with LAYER exist once per layer. keys: writes the hyperparameters that
    only some encoders have. inherited: keys of the model's config that are read as the vision part's.
    rules, model_rules: values that other keys of the vision part's config and of the model's must have.
    tensors_by_config: further tensors. optional: tensors that may be missing. split: the tensors that a fused tensor
    becomes, under names of the folder.
    aliases: name of a config key -> its name here. defaults: values for keys that configs omit.
    derived: values that follow from others. rotary_pairs: whether rows of queries and keys move into llama.cpp's
    rotary order. plus_one: norms that the checkpoint stores minus one. tokens: text of a token -> name of the tensor
    that is its row of the text model's embedding. types: tensors that have one type in every file.
    """

    type: str
    tensors: Tensors
    keys: Callable[[Config, GGUFWriter], None]
    rules: Rules
    model_rules: Rules = EMPTY
    inherited: tuple[str, ...] = ()
    tensors_by_config: Callable[[Config], Tensors] = lambda config: {}
    optional: Tensors = EMPTY
    split: ViewParts = lambda weight, refusal: [weight]
    aliases: Mapping[str, str] = EMPTY
    defaults: Mapping[str, Any] = EMPTY
    derived: Callable[[Config], Mapping[str, Any]] = lambda config: {}
    rotary_pairs: bool = False
    plus_one: tuple[str, ...] = ()
    tokens: Mapping[str, str] = EMPTY
    types: Mapping[str, str] = EMPTY

    def config(self, where: str, values: Mapping[str, Any], model: Config) -> Config:
        """The config of the vision part, with defaults and derived values, under the names that are used here."""
        values = {**{key: model.value(key) for key in self.inherited}, **values}
        text_size = model.need("hidden_size")
        own = {self.aliases.get(key, key): value for key, value in values.items() if value is not None}
        config = Config(where, {**self.defaults, **own, "text_size": text_size})
        return config.replaced(**self.derived(config))


def biased(modules: Modules) -> Tensors:
    """The weight and the bias of each module."""
    tensors: dict[str, tuple[str, str]] = {}
    for module, text in modules.items():
        name, shape = text.split(maxsplit=1)
        tensors[f"{module}.weight"] = f"{name}.weight", shape
        tensors[f"{module}.bias"] = f"{name}.bias", shape.split()[0]
    return tensors


def unbiased(modules: Modules) -> Tensors:
    """The weight of each module."""
    return {name: tensor for name, tensor in biased(modules).items() if name.endswith(".weight")}


def in_layers(stem: str, tensors: Tensors) -> Tensors:
    """The tensors of every layer, with the names of the layers in the folder and in the file."""
    return {f"{stem}.{LAYER}.{name}": (f"v.blk.{LAYER}.{new}", shape) for name, (new, shape) in tensors.items()}


def letters(config: Config) -> dict[str, int]:
    """The value of each letter of a shape."""
    size, patch = config.need("hidden_size"), config.need("patch_size")
    merge = config.integer("spatial_merge_size") or 1
    inputs, outputs, whole = (
        config.integer(name) or 0 for name in ("projector_input_dim", "projector_output_dim", "vision_output_dim")
    )
    return {
        "E": size, "3E": 3 * size, "F": config.need("mlp_size", "intermediate_size"), "T": config.need("text_size"),
        "C": CHANNELS, "K": patch, "CKK": CHANNELS * patch * patch, "P": config.integer("positions") or 0,
        "M": size * merge * merge, "I": inputs, "O": outputs, "V": whole,
    }  # fmt: skip


CHANNELS = 3  # every encoder that llama.cpp knows reads colours

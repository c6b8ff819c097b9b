"""The keys of vision_config of transformers' classes are those that the converter reads or has rules for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any
from unittest.mock import patch

import pytest
from gguf import GGUFWriter

from qgemm.converter.config_rules import NO_EFFECT, READ_ELSEWHERE
from qgemm.converter.hyperparameters import Config
from qgemm.converter.vision_architectures import PROJECTORS
from qgemm.converter.vision_record import NO_EFFECT as NO_EFFECT_ON_IMAGES
from qgemm.converter.vision_record import letters

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

COMMON = {
    "image_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
}  # VisionPart reads them for every encoder
PROJECTION = {  # keys of the model's own config that change a projector
    "mm_tokens_per_image", "projector_hidden_act", "vision_feature_layer", "multimodal_projector_bias",
    "spatial_merge_size", "vision_feature_select_strategy", "image_seq_length",
}  # fmt: skip


def keys_read(projector: Any, values: dict[str, Any]) -> set[str]:
    """The keys that become metadata or shapes."""
    names: set[str] = set()

    def recorded(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(config: Config, *keys: str) -> Any:
            names.update(keys)
            return method(config, *keys)

        return call

    with patch.object(Config, "value", recorded(Config.value)):
        config = projector.config("config.json", values, Config("config.json", {"hidden_size": 64}))
        projector.keys(config, GGUFWriter(None, "clip"))
        letters(config)
        projector.tensors_by_config(config)
    return names


@pytest.mark.parametrize("name", PROJECTORS)
def test_every_key_is_classified(name):
    projector = PROJECTORS[name]
    config = getattr(transformers, name).config_class()
    if name == "LlavaForConditionalGeneration":
        config.vision_config = transformers.PixtralVisionConfig()
    vision = config.vision_config
    names = {*vision.to_dict(), *(field.name for field in fields(type(vision)) if field.init)}
    read = keys_read(projector, {key: value for key, value in vision.to_dict().items() if key != "rope_parameters"})
    classified = {*read, *projector.rules, *projector.aliases, *COMMON, *READ_ELSEWHERE}
    classified |= {*NO_EFFECT, *NO_EFFECT_ON_IMAGES}
    assert names - classified == set()
    assert PROJECTION & {*config.to_dict()} <= {*projector.model_rules, *projector.inherited}

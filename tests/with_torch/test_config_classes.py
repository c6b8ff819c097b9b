"""The keys of transformers' config classes are those for which the converter has rules."""

from __future__ import annotations

from dataclasses import fields

import pytest
from config_classes import CLASSES, classified
from model_configs import STAND_INS

from qgemm.converter.architectures import ARCHITECTURES

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in STAND_INS])
def test_every_field_is_classified(architecture):
    config = getattr(transformers, architecture).config_class()
    text = config.get_text_config()
    names = {*config.to_dict(), *text.to_dict()}
    names |= {field.name for kind in (type(config), type(text)) for field in fields(kind) if field.init}
    assert names - classified(architecture) == set()
    if transformers.__version__.startswith("5.24."):
        assert names == set(CLASSES[architecture])

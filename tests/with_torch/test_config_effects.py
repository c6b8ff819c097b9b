"""A change of a config that changes transformers' logits changes the converted file, or is refused."""

from __future__ import annotations

import json
from contextlib import suppress

import numpy as np
import pytest
from class_folders import converted, digest
from config_sweep import changed, changes, document_of, logits, model, save, shapes, written
from model_configs import STAND_INS

from qgemm.converter.architectures import ARCHITECTURES
from qgemm.converter.encoder_architectures import ENCODERS
from qgemm.errors import CheckpointError

SAME_TEXT = {"Gemma3nForConditionalGeneration"}  # its text part is Gemma3nForCausalLM, its vision part needs timm
GELU_TABLE = 2e-3  # the difference of GELU and of its tanh form, which llama.cpp computes for both


@pytest.mark.slow
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES.keys() - STAND_INS - SAME_TEXT))
@pytest.mark.filterwarnings("ignore")  # transformers warns of odd values
def test_no_value_is_ignored_in_silence(architecture, tmp_path):
    """Each value of each key, with the checkpoint of the first config."""
    document = document_of(architecture)
    base = model(architecture, document)
    save(base, document, tmp_path / "m")
    expected, tensors, keys = logits(architecture, base), shapes(base), written(document)
    assert keys is not None
    file = digest(converted(tmp_path / "m", tmp_path / "y.gguf")[0])
    silent = []
    for place, value in changes(architecture, document):
        new = changed(document, place, value)
        if written(new) != keys:  # it is refused, or written
            continue
        try:
            other = model(architecture, new)
            result = logits(architecture, other)
        except Exception:  # transformers has no such model
            continue
        as_many = architecture in ENCODERS or shapes(other) == tensors  # an encoder's head is left out
        if as_many and np.allclose(result, expected, rtol=0, atol=GELU_TABLE):
            continue
        (tmp_path / "m" / "config.json").write_text(json.dumps(new))
        with suppress(CheckpointError):
            if digest(converted(tmp_path / "m", tmp_path / "y.gguf")[0]) == file:
                silent.append((".".join(place), value))
    assert not silent

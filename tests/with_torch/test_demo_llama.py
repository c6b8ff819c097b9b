"""tools/llama.py against transformers, which reads the same .gguf file."""

from __future__ import annotations

import llama
import numpy as np
import pytest
from torch_layers import torch
from torch_models import VOCABULARY, random_model, transformers, write_gguf

import qgemm

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # raised in transformers


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_transformers(tied, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, random_model("llama", tied), "f32")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 12)
    with torch.no_grad():
        expected = reference(torch.tensor(ids)[None]).logits[0].double().numpy()
    with qgemm.open(path) as file:
        model = llama.load(file, file.metadata, llama.DECODED)
        logits = model.forward(list(ids), model.cache(len(ids)))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)

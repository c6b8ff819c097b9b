"""qgemm imatrix of latent attention: the sums are those of llama.cpp's products by k_b and v_b."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from class_folders import TOKENS, folder
from torch_layers import torch
from torch_models import transformers

from qgemm.evaluation.imatrix import collect
from qgemm.evaluation.models import TextModel
from qgemm.files.imatrix import read_imatrix
from qgemm.files.imatrix_sums import SumsFile, read_sums

NAME = "DeepseekV3ForCausalLM"
# Sums that llama-imatrix's rule gives for the products of llama.cpp 0c1e57098 with the file of the folder.
EXPECTED = json.loads((Path(__file__).parent.parent / "data" / "latent_imatrix.json").read_text(encoding="utf-8"))


def sums_of(path, out, **options):
    kind = getattr(transformers, NAME)
    model = kind.from_pretrained(folder(path, NAME), dtype=torch.float32, experts_implementation="eager").eval()
    collect(TextModel(str(path), model, None, "deepseek2"), [np.array(TOKENS)], out, SumsFile(), **options)
    return read_sums(out).sums


def test_sums_of_llama_cpp(tmp_path):
    sums = sums_of(tmp_path / "m", tmp_path / "out.gguf")
    for name, expected in EXPECTED.items():
        assert sums[name].tokens.tolist() == [expected["tokens"]]
        np.testing.assert_allclose(sums[name].squares[0], expected["squares"], rtol=1e-3, atol=1e-6)
    assert not any("kv_b" in name for name in sums)
    for name, expected in EXPECTED.items():
        assert read_imatrix(tmp_path / "out.gguf").importance(name).size == len(expected["squares"])


def test_sensitivity_is_that_of_keys_and_of_the_attention(tmp_path):
    """Input and gradient of k_b have the product of those of the keys' expansion."""
    sums = sums_of(tmp_path / "m", tmp_path / "out.gguf", sensitivity=True)
    model = getattr(transformers, NAME).from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    tensors = {}

    def keeper(name):
        def keep(module, inputs, y):
            tensors[name] = inputs[0], y
            inputs[0].retain_grad()
            y.retain_grad()

        return keep

    modules = ("q_b_proj", "kv_b_proj", "o_proj")
    for layer, attention in enumerate(layer.self_attn for layer in model.model.layers):
        for name in modules:
            getattr(attention, name).register_forward_hook(keeper((layer, name)))
    logits = model(torch.tensor([TOKENS])).logits[0]
    labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=torch.Generator().manual_seed(0))[:, 0]
    torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    config = model.config
    for layer in range(2):
        (_, q), (c, expanded), (attended, _) = (tensors[layer, name] for name in modules)
        queries = q.view(len(TOKENS), config.num_attention_heads, -1)[..., : config.qk_nope_head_dim]
        keys = expanded.grad.view(len(TOKENS), config.num_attention_heads, -1)[..., : config.qk_nope_head_dim]
        share = c.square().mean() / queries.square().mean()
        by_token = keys.square().mean((1, 2)) * share
        expected = by_token @ queries.detach().flatten(1).square()
        np.testing.assert_allclose(sums[f"blk.{layer}.attn_k_b.weight"].fisher[0], expected.detach().numpy(), rtol=1e-3)
        mean = sums[f"blk.{layer}.attn_v_b.weight"]
        assert (mean.fisher <= attended.grad[0].square().mean(1).max().item() * 1.001 * mean.squares).all()
        assert mean.fisher.sum() > 0

"""`python -m benchmarks --model`, with a model small enough for a CPU."""

from __future__ import annotations

import time

import pytest
from torch_layers import torch
from torch_models import transformers

import qgemm
from benchmarks import model
from qgemm.torch import QEmbedding, QLinear

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # raised by transformers
TINY = {
    "llama": model.Sizes("llama", 256, 512, 8, 4, 2, 64, 512, 1e4),
    "qwen3": model.Sizes("qwen3", 256, 512, 8, 4, 2, 128, 512, 1e6),
}


@pytest.mark.parametrize("sizes", TINY.values(), ids=TINY)
def test_the_file_is_the_model(sizes, tmp_path):
    """It has the architecture and sizes of the dense one, with every matrix packed, in the types of a mixture."""
    path = tmp_path / "model.gguf"
    assert model.write_file(path, sizes, "q4_k_m") == path.stat().st_size
    packed, dense = model.loaded(path, "cpu", packed=True), model.dense(sizes, "cpu")
    for field in ("model_type", *sizes._fields[1:-1]):
        assert getattr(packed.config, field) == getattr(dense.config, field)
    assert packed.config.rope_parameters["rope_theta"] == dense.config.rope_parameters["rope_theta"]
    kinds = {
        name: str(layer.format) for name, layer in packed.named_modules() if isinstance(layer, (QLinear, QEmbedding))
    }
    matrices = {
        name for name, layer in dense.named_modules() if isinstance(layer, (torch.nn.Linear, torch.nn.Embedding))
    }
    assert kinds.keys() == matrices
    assert {kinds["lm_head"], kinds["model.layers.0.mlp.down_proj"], kinds["model.layers.0.self_attn.v_proj"]} == {
        "Q6_K"
    }
    assert kinds["model.embed_tokens"] == kinds["model.layers.1.mlp.down_proj"] == "Q4_K"
    assert sizes.weights == sum(dense.get_submodule(name).weight.numel() for name in matrices)


@pytest.mark.compiles
def test_a_row_for_each_road_and_case(monkeypatch):
    monkeypatch.delenv("QGEMM_CPU")  # NumPy is five times slower
    monkeypatch.setattr(model, "FEW_WORDS", 256)
    rows = list(model.rows("tiny", TINY["llama"], "q4_0", [(1, 8), (2, 3)], "cpu", time.perf_counter() + 600))
    loads, cases = ([row for row in rows if bool(row["batch"]) is timed] for timed in (False, True))
    assert [(row["road"], row["layers"]) for row in loads] == [
        (model.PACKED, 8), (model.DENSE, 8), (model.GGUF, 2), (model.PACKED, 2),
    ]  # fmt: skip
    assert [(row["road"], row["batch"], row["prompt"]) for row in cases] == [
        (road, *case) for road in (model.PACKED, model.DENSE) for case in ((1, 8), (2, 3))
    ]
    assert all(row["prompt_tokens_s"] > 0 and row["tokens_s"] > 0 for row in cases)
    assert len(model.table(rows).splitlines()) == 1 + len(rows)
    assert list(model.rows("tiny", TINY["llama"], "q4_0", [(1, 8)], "cpu", time.perf_counter() - 1)) == []


def test_a_step_says_what_the_model_says_next():
    """A step computes the last token alone, after the cached ones."""
    tiny, ids = model.dense(TINY["llama"], "cpu").eval(), torch.randint(512, (2, 9))
    with torch.no_grad():
        want = tiny(ids).logits[:, -1].argmax(-1, keepdim=True)
        cache = transformers.DynamicCache(config=tiny.config)
        model.step(tiny, ids[:, :-1], cache)
        assert torch.equal(model.step(tiny, ids[:, -1:], cache), want)


def test_the_types_are_those_of_llama_quantize():
    assert {model.types_of("q4_k_m", layer, 8).down for layer in (0, 7)} == {"q6_k"}
    assert model.types_of("q8_0", 0, 8).v == "q8_0"
    assert qgemm.FORMATS["q4_k"].weights == 256

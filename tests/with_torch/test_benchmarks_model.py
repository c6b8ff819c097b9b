"""`qgemm bench --model`, with models small enough for a CPU. Times are not checked."""

from __future__ import annotations

import gc
import json
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from torch_layers import torch
from torch_models import transformers

import qgemm
from benchmarks import model as results_file
from qgemm.cli import bench_model, model_bench, model_variants, random_models
from qgemm.cli.random_models import Sizes
from qgemm.torch import QEmbedding, QExperts, QLinear

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # raised by transformers
TINY = {
    "llama": Sizes("llama", 256, 512, 8, 4, 2, 64, 512, 1e4),
    "qwen3": Sizes("qwen3", 256, 512, 8, 4, 2, 128, 512, 1e6),
    "qwen3moe": Sizes("qwen3moe", 256, 768, 8, 4, 2, 64, 512, 1e6, 8, 8),
}


@pytest.fixture(autouse=True)
def tiny_models(monkeypatch):
    """Tiny models by their names, few tokens."""
    monkeypatch.setattr(random_models, "MODELS", TINY)
    monkeypatch.setattr(bench_model, "MODELS", TINY)
    monkeypatch.setattr(model_variants, "REPEATS", 1)
    monkeypatch.setattr(model_bench, "REPEATS", 1)
    monkeypatch.setattr(model_bench.Options, "__new__", with_few_steps(model_bench.Options.__new__))


def with_few_steps(new):
    """The constructor of Options with 3 steps."""
    return lambda kind, *args, **kwargs: new(kind, *args, **{"steps": 3, **kwargs})


@pytest.mark.parametrize("name", TINY)
def test_the_file_is_the_model(name, tmp_path):
    """Every matrix is packed in the types of a mixture, and a dense model of the file's config has the same layers."""
    path, sizes = tmp_path / "model.gguf", TINY[name]
    assert random_models.write_file(path, sizes, "q4_k_m") == path.stat().st_size
    packed = model_bench.loaded(path, "cpu", "bfloat16")
    dense = model_bench.dense_like(packed.config, "cpu", "bfloat16")
    for field in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"):
        assert getattr(packed.config, field) == getattr(sizes, field)
    assert packed.config.rope_parameters["rope_theta"] == sizes.rope_theta
    layers = dict(packed.named_modules())
    kinds = {key: str(layer.format) for key, layer in layers.items() if isinstance(layer, (QLinear, QEmbedding))}
    matrices = {key for key, layer in dense.named_modules() if type(layer) in (torch.nn.Linear, torch.nn.Embedding)}
    assert matrices == kinds.keys()
    assert {kinds["lm_head"], kinds["model.layers.0.self_attn.v_proj"]} == {"Q6_K"}
    assert kinds["model.embed_tokens"] == kinds["model.layers.1.self_attn.v_proj"] == "Q4_K"
    assert (sizes.num_experts > 0) == any(isinstance(layer, QExperts) for layer in layers.values())
    routers = sum(parameter.numel() for key, parameter in dense.named_parameters() if key.endswith("mlp.gate.weight"))
    assert sizes.weights + routers == sum(p.numel() for p in dense.parameters() if p.dim() > 1)
    with torch.no_grad():
        assert torch.isfinite(packed.half()(torch.arange(16)[None]).logits).all()


@pytest.mark.compiles
def test_a_row_for_each_model_and_variant(monkeypatch, run):
    monkeypatch.delenv("QGEMM_CPU")  # NumPy is five times slower
    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: original(function, backend="eager"))
    words = (
        "bench --model llama --types q4_k_m --layers 1 --prompts 8,3 --batches 2,1 --dtypes float16 --json --minutes 9"
    )
    status, out, _ = run(*words.split())
    rows = json.loads(out)["rows"]
    assert status == 0
    assert {row["layers"] for row in rows} == {1}
    loads, cases = rows[:2], rows[2:]
    assert [(row["variant"], row["road"], row["load_s"] > 0) for row in loads] == [
        ("load", road, True) for road in (model_bench.PACKED, model_bench.DENSE)
    ]
    cheap, once = (
        ["a16", "a8", "a8_g256", "eager", "eager_a8", "no_products", "graph"],
        ["compile", "generate", "train"],
    )
    order = [(1, 3, cheap), (1, 8, cheap), (1, 3, once), (2, 3, cheap), (2, 8, cheap)]
    assert [(row["batch"], row["prompt"], row["variant"], row["road"]) for row in cases] == [
        (batch, prompt, variant, road)
        for batch, prompt, variants in order
        for variant in variants
        for road in (model_bench.PACKED, model_bench.DENSE)
    ]
    skipped = {(row["variant"], row["road"]): row["skipped"] for row in cases if "skipped" in row}
    assert skipped == {
        ("graph", "qgemm"): "UnsupportedError: needs a GPU",
        ("graph", "dense"): "UnsupportedError: needs a GPU",
        ("no_products", "dense"): "UnsupportedError: the model has no packed layers",
    }
    assert all(row["tokens_s"] > 0 for row in cases if "skipped" not in row)
    table = model_bench.table(rows).splitlines()
    assert len(table) == 1 + len(rows) // 2


def test_no_variant_starts_after_the_time(run):
    status, out, _ = run(
        *["bench", "--model", "llama", "--layers", "1", "--types", "q8_0", "--minutes", "0.0001", "--json"]
    )
    rows = json.loads(out)["rows"]
    assert status == 0
    assert {row["variant"] for row in rows[:2]} == {"load"}
    assert {row["skipped"] for row in rows[2:]} == {"no time left"}


def test_a_file_of_the_user(run, tmp_path):
    path = tmp_path / "own.gguf"
    random_models.write_file(path, TINY["llama"]._replace(num_hidden_layers=1), "q4_0")
    status, out, _ = run(
        "bench", "--model", path, *["--variants", "a16", "--batches", "1", "--prompts", "4", "--dtypes", "bfloat16"]
    )
    assert status == 0
    lines = [line.split() for line in out.splitlines()[2:]]
    assert [line[:5] for line in lines[1:]] == [["own.gguf", "file", "1", "bfloat16", name] for name in ("load", "a16")]


def test_a_prompt_by_an_activation_leaves_the_layers_as_they_were(tmp_path):
    """The layers multiply by it during the sample alone; other values come out than by a16."""
    path = tmp_path / "model.gguf"
    random_models.write_file(path, TINY["llama"]._replace(num_hidden_layers=1), "q4_0")
    model, ids = model_bench.loaded(path, "cpu", "bfloat16"), torch.arange(16)[None]
    activations = []
    layer = model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda layer, x, y: activations.append(layer.activation))
    with torch.no_grad():
        assert model_variants.prompt_sample(model, ids, "a8_g256")() > 0
    assert (activations, layer.activation) == (["a8_g256"], "a16")


def test_steps_by_a8_and_without_products_leave_the_layers_as_they_were(tmp_path):
    """Without products a layer returns zeros, and nothing multiplies."""
    path = tmp_path / "model.gguf"
    random_models.write_file(path, TINY["llama"]._replace(num_hidden_layers=1), "q4_0")
    model, ids = model_bench.loaded(path, "cpu", "float32"), torch.arange(4)[None]
    layer = model.model.layers[0].mlp.up_proj
    calls = []
    layer.register_forward_hook(lambda layer, x, y: calls.append((layer.activation, bool(y.any()))))
    with torch.no_grad():
        for variant in ("eager_a8", "no_products", "eager"):
            assert model_variants.SAMPLES[variant](model, ids, 1)() > 0
    assert calls == [("a8", True)] * 2 + [("a16", False)] * 2 + [("a16", True)] * 2
    assert "forward" not in vars(layer)


def test_a_graph_keeps_the_memory_that_its_kernels_read(monkeypatch):
    """A graph has addresses alone, so the cache and the token live as long as the sample that replays it."""
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=512
    )
    model = model_bench.dense_like(config, "cpu", "float32").eval()
    alive, step = [], model_variants.step
    stream = SimpleNamespace(wait_stream=lambda other: None)
    graph = SimpleNamespace(replay=lambda: alive.append([memory() is not None for memory in memories]))
    for name, stand_in in (
        ("Stream", lambda: stream), ("current_stream", lambda: stream), ("CUDAGraph", lambda: graph),
        ("stream", nullcontext), ("graph", nullcontext),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    memories = []

    def first_step(model, ids, cache):
        token = step(model, ids, cache)
        memories.extend([] if memories else map(weakref.ref, (cache, token)))
        return token

    monkeypatch.setattr(model_variants, "step", first_step)
    with torch.no_grad():
        sample = model_variants.graph_sample(model, torch.arange(8)[None], 3)
    gc.collect()
    assert sample() > 0
    assert alive == [[True, True]] * 3


def test_lora_is_taken_off_after_its_training(tmp_path):
    path = tmp_path / "model.gguf"
    random_models.write_file(path, TINY["llama"]._replace(num_hidden_layers=1), "q8_0")
    model = model_bench.loaded(path, "cpu", "float32")
    names = [name for name, _ in model.named_modules()]
    assert model_variants.train_sample(model, torch.arange(8)[None], 1)() > 0
    assert [name for name, _ in model.named_modules()] == names


def test_a_step_says_what_the_model_says_next(tmp_path):
    """A step computes the last token alone, after the cached ones."""
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=512
    )
    tiny, ids = model_bench.dense_like(config, "cpu", "float32").eval(), torch.randint(512, (2, 9))
    with torch.no_grad():
        want = tiny(ids).logits[:, -1].argmax(-1, keepdim=True)
        cache = transformers.DynamicCache(config=tiny.config)
        model_variants.step(tiny, ids[:, :-1], cache)
        assert torch.equal(model_variants.step(tiny, ids[:, -1:], cache), want)


def test_the_types_are_those_of_llama_quantize():
    assert {random_models.types_of("q4_k_m", layer, 8).down for layer in (0, 7)} == {"q6_k"}
    assert random_models.types_of("q8_0", 0, 8).v == "q8_0"
    assert qgemm.FORMATS["q4_k"].weights == 256


def test_rows_of_a_results_file_stay_beside_new_ones(tmp_path, monkeypatch):
    """Each new row has the digest of its sources; rows of other variants keep theirs; another GPU starts anew."""
    fields = {"model": "m", "types": "t", "layers": 1, "road": "qgemm", "dtype": "float16", "batch": 1, "prompt": 8}
    measured = [{**fields, "variant": "eager", "tokens_s": 2.0}]
    monkeypatch.setattr(results_file.bench_model, "model_rows", lambda args, device: iter(measured))
    cuda = qgemm.backends()["cuda"]._replace(facts={"device": "GPU"})
    monkeypatch.setattr(results_file, "backends", lambda: {"cuda": cuda})
    path = tmp_path / "model.json"
    old = [{**fields, "variant": variant, "tokens_s": 1.0, "kernels_sha256": "old"} for variant in ("a16", "eager")]
    results_file.results.write(path, {"device": "GPU", "rows": old})
    results_file.run(None, path)
    rows = results_file.load(path)["rows"]
    digest = results_file.results.sources_sha256()
    assert [(row["variant"], row["tokens_s"], row["kernels_sha256"]) for row in rows] == [
        ("a16", 1.0, "old"), ("eager", 2.0, digest),
    ]  # fmt: skip
    results_file.results.write(path, {"device": "other", "rows": old})
    results_file.run(None, path)
    assert [row["tokens_s"] for row in results_file.load(path)["rows"]] == [2.0]
    path.write_text(json.dumps({"device": "GPU", "rows": [{"M": 1}]}))
    with pytest.raises(qgemm.QgemmError, match="holds no results of whole models"):
        results_file.load(path)


def test_layers_that_fit(monkeypatch):
    """Weights of both models fit into 85% of the free memory; on a CPU the model is whole."""
    sizes = Sizes("llama", 4096, 14336, 32, 32, 8, 128, 128256, 5e5)
    assert bench_model.fitting_layers(sizes, "q4_k_m", "cpu") == 32
    monkeypatch.setattr(model_bench, "free_memory", lambda device: 20e9)
    layers = bench_model.fitting_layers(sizes, "q4_k_m", "cuda")
    weights = sizes._replace(num_hidden_layers=layers).weights
    assert 0.8 * 17e9 < weights * 2.62 <= 17e9
    assert np.isclose(sizes.weights, 8.03e9, rtol=1e-3)

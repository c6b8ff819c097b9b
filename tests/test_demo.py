"""The demo: its llama against a plain one, its tokenizer and template, both of its roads end to end."""

from __future__ import annotations

import importlib.util
from math import sqrt

import numpy as np
import pytest
from numpy.testing import assert_allclose

import qgemm

llama, demo = pytest.importorskip("llama"), pytest.importorskip("demo")
for package in ("tokenizers", "jinja2"):
    pytest.importorskip(package, reason="a package of the extra demo")

import tiny_llama_file as tiny  # noqa: E402
from gguf_tokenizer import chat_prompt, tokenizer_from  # noqa: E402
from llama import DECODED, PACKED  # noqa: E402

IDS = [5, 17, 200, 3, 3, 90, 41]


@pytest.fixture
def path(tmp_path):
    return tiny.write(tmp_path / "tiny.gguf", "q8_0")


def plain_logits(weights, ids):
    """Logits [T, vocabulary] of the llama architecture, one position and one head at a time in float64."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    size = tiny.WIDTH // tiny.HEADS

    def norm(x, name):
        return x / np.sqrt(np.mean(x * x) + 1e-5) * w[name]

    def rotate(x, position):
        turned = x.copy()
        for pair in range(size // 2):
            angle = position / 10000 ** (2 * pair / size)
            a, b = x[2 * pair], x[2 * pair + 1]
            turned[2 * pair] = a * np.cos(angle) - b * np.sin(angle)
            turned[2 * pair + 1] = a * np.sin(angle) + b * np.cos(angle)
        return turned

    xs = [w["token_embd.weight"][token] for token in ids]
    for block in range(tiny.BLOCKS):
        name = f"blk.{block}".__add__
        hidden = [norm(x, name(".attn_norm.weight")) for x in xs]
        q, k, v = ([w[name(f".attn_{kind}.weight")] @ x for x in hidden] for kind in "qkv")
        for i, x in enumerate(xs):
            heads = []
            for head in range(tiny.HEADS):
                kv = slice(head // 2 * size, (head // 2 + 1) * size)  # two heads share keys and values
                query = rotate(q[i][head * size : (head + 1) * size], i)
                e = np.exp([query @ rotate(k[j][kv], j) / sqrt(size) for j in range(i + 1)])
                heads.append(sum(share * v[j][kv] for j, share in enumerate(e / e.sum())))
            x = x + w[name(".attn_output.weight")] @ np.concatenate(heads)
            y = norm(x, name(".ffn_norm.weight"))
            gate = w[name(".ffn_gate.weight")] @ y
            xs[i] = x + w[name(".ffn_down.weight")] @ (gate / (1 + np.exp(-gate)) * (w[name(".ffn_up.weight")] @ y))
    return np.array([w["token_embd.weight"] @ norm(x, "output_norm.weight") for x in xs])


# ---- the model


@pytest.mark.parametrize("products", [PACKED, DECODED], ids=lambda products: products.name)
def test_logits_are_those_of_the_plain_model(path, products):
    with qgemm.open(path) as file:
        decoded = {name: tensor.dequantize() for name, tensor in file.items()}
        model = llama.load(file, file.metadata, products)
        logits = model.forward(IDS, model.cache(len(IDS)))
    assert_allclose(logits, plain_logits(decoded, IDS), rtol=0, atol=2e-4)


def test_a_cache_gives_what_all_positions_at_once_give(path):
    with qgemm.open(path) as file:
        model = llama.load(file, file.metadata, PACKED)
        at_once, cache = model.forward(IDS, model.cache(8)), model.cache(8)
        parts = [
            model.forward(IDS[:3], cache),
            model.forward(IDS[3:4], cache),
            model.forward(IDS[4:], cache, last=True),
        ]
    assert_allclose(np.concatenate(parts[:2]), at_once[:4], rtol=0, atol=1e-5)
    assert_allclose(parts[2], at_once[-1:], rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="9 positions, the cache has 8"):
        model.forward(IDS[:2], cache)


def test_other_models_are_refused():
    with pytest.raises(ValueError, match="architecture is 'bert'"):
        llama.Config.from_metadata({"general.architecture": "bert"})
    with pytest.raises(ValueError, match="positions are scaled \\('yarn'\\)"):
        llama.Config.from_metadata(tiny.metadata() | {"llama.rope.scaling.type": "yarn"})


def test_perplexity_of_likelihoods_that_are_known():
    """Every next token has the probability 1/4: perplexity 4."""

    class Model:
        def cache(self, capacity):
            return None

        def forward(self, ids, cache):
            return np.log(np.full((len(ids), 4), 0.25, np.float32))

    assert demo.perplexity(Model(), [0, 3, 1, 2]) == pytest.approx(4)


# ---- text


def test_tokenizer_merges_splits_digits_and_comes_back():
    tokenizer = tokenizer_from(tiny.metadata())
    tokens = tokenizer.encode("the th 42<|im_end|>").tokens
    assert tokens == ["the", "Ġ", "th", "Ġ", "4", "2", "<|im_end|>"]
    text = "Ünïcode, the 7 things"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    with pytest.raises(ValueError, match="'gpt2' with rules 'llama-bpe'"):
        tokenizer_from(tiny.metadata() | {"tokenizer.ggml.pre": "llama-bpe"})


def test_template_of_the_file_renders_in_a_sandbox():
    from jinja2.exceptions import SecurityError

    message = {"role": "user", "content": "Hi"}
    assert chat_prompt(tiny.metadata(), [message]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(SecurityError):
        chat_prompt({"tokenizer.chat_template": "{{ messages.__class__.__base__.__subclasses__() }}"}, [message])


# ---- both roads


def assert_readable(text):
    body = text.split("\n\n", 1)[1]  # below the backends, whose lines are the library's
    assert max(map(len, body.splitlines())) <= 100


def test_model_road(path, tmp_path, monkeypatch, capsys):
    """With random weights: the road, not the text that trained weights write."""
    monkeypatch.setattr(demo, "CONVERSIONS", {"q8_0": 1.2, "q4_0": 2})
    options = ["--model", str(path), "--keep", str(tmp_path / "kept"), "--tokens", "4"]
    assert demo.main(options) == 0
    out = capsys.readouterr().out
    assert_readable(out)
    assert "Passed." in out
    rows = [line.split() for line in out.splitlines() if line.startswith(("Q", "q"))]
    assert [row[0] for row in rows if "cpu" in row] == ["Q8_0", "q8_0", "q4_0"]
    assert sorted(p.name for p in (tmp_path / "kept").iterdir()) == ["tiny-q4_0.gguf", "tiny-q8_0.gguf"]

    monkeypatch.setattr(demo, "CONVERSIONS", {"q4_0": 0.5})
    assert demo.main(options) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.slow
def test_excerpt_road(capsys, monkeypatch):
    assert demo.main(["--excerpt"]) == 0
    out = capsys.readouterr().out
    assert_readable(out)
    for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
        assert out.count(f"  {name}  ") == 2, name  # one line for each of two matrices
    lines = [line.split() for line in out.splitlines() if "  cpu  " in line]
    assert len(lines) > 20
    assert all("-" not in words for words in lines)  # every type by both activations

    monkeypatch.setitem(demo.LIMITS, "a8", 1e-9)
    assert demo.main(["--excerpt"]) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.slow
def test_without_the_model_it_says_so_and_runs_on_the_excerpt(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert demo.main([]) == 0
    out = capsys.readouterr().out
    assert "The trained model cannot be had (No module named" in out
    assert "tests/data/minilm_excerpt.gguf" in out


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec(demo.PACKAGE) is None, reason=f"not installed: {demo.PACKAGE}")
def test_trained_model():
    """It answers, and knows English: the paragraph has a perplexity near 8."""
    with qgemm.open(demo.packaged_model()) as file:
        answer = demo.ask(file, PACKED, demo.PROMPT, 12)
    assert "Paris" in answer.text
    assert 6 < answer.perplexity < 10

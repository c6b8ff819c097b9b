"""The demo: its BERT against a plain one, its files against the gguf package, both of its roads end to end."""

from __future__ import annotations

import importlib.util
from math import erf, sqrt

import bert
import demo
import gguf
import numpy as np
import pytest
import tiny_bert
from bert import Bert
from numpy.testing import assert_allclose, assert_array_equal
from tiny_bert import BLOCK, TINY

import qgemm

NEEDED = ("tokenizers", "safetensors", demo.PACKAGE)
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]


@pytest.fixture
def checkpoint():
    return tiny_bert.checkpoint()


@pytest.fixture
def weights():
    return tiny_bert.weights()


@pytest.fixture
def tokens():
    return tiny_bert.tokens()


def plain_bert(a, sentence):
    """The embedding of one sentence of token ids from a checkpoint's arrays, a token at a time in float64."""
    a = {name: value.astype(np.float64) for name, value in a.items()}

    def linear(x, name):
        return a[f"{name}.weight"] @ x + a[f"{name}.bias"]

    def norm(x, name):
        return (x - np.mean(x)) / np.sqrt(np.var(x) + 1e-12) * a[f"{name}.weight"] + a[f"{name}.bias"]

    words, positions, types = (a[f"embeddings.{n}_embeddings.weight"] for n in ("word", "position", "token_type"))
    xs = [norm(words[t] + positions[i] + types[0], "embeddings.LayerNorm") for i, t in enumerate(sentence)]
    for block in range(TINY.blocks):
        at = f"encoder.layer.{block}"
        q, k, v = ([linear(x, f"{at}.attention.self.{n}") for x in xs] for n in ("query", "key", "value"))
        for i, x in enumerate(xs):
            mixed = []
            for head in (slice(start, start + 16) for start in range(0, 64, 16)):
                e = np.exp([q[i][head] @ key[head] / sqrt(16) for key in k])
                mixed.append(sum(share * value[head] for share, value in zip(e / e.sum(), v, strict=True)))
            x = norm(
                x + linear(np.concatenate(mixed), f"{at}.attention.output.dense"), f"{at}.attention.output.LayerNorm"
            )
            up = [u * (1 + erf(u / sqrt(2))) / 2 for u in linear(x, f"{at}.intermediate.dense")]
            xs[i] = norm(x + linear(np.array(up), f"{at}.output.dense"), f"{at}.output.LayerNorm")
    mean = sum(xs) / len(xs)
    return mean / sqrt(mean @ mean)


# ---- the model


def test_erf_is_as_exact_as_its_formula():
    x = np.linspace(-6, 6, 10_001)
    assert_allclose(bert.erf(x), [erf(value) for value in x], rtol=0, atol=1.5e-7)


def test_bert_is_the_plain_one_and_padding_changes_nothing(checkpoint, weights, tokens):
    embeddings = Bert(TINY, weights, multiply=lambda x, w: x @ w.T).embed(*tokens)
    assert embeddings.dtype == np.float32
    expected = [plain_bert(checkpoint, ids[mask > 0]) for ids, mask in zip(*tokens, strict=True)]
    assert_allclose(embeddings, expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("fmt", ["q8_0", "q5_1", "q4_0"])
def test_packed_weights_give_what_their_decoded_ones_give(weights, tokens, fmt):
    packed = bert.pack(weights, fmt)
    decoded = {name: w.dequantize() if isinstance(w, qgemm.Tensor) else w for name, w in packed.items()}
    expected = Bert(TINY, decoded, multiply=lambda x, w: x @ w.T).embed(*tokens)
    assert_allclose(Bert(TINY, packed).embed(*tokens), expected, rtol=0, atol=5e-6)
    a8 = Bert(TINY, packed, prepare=qgemm.quantize_activations).embed(*tokens)
    assert (a8 * expected).sum(1).min() > 0.999


# ---- the files


def test_names_are_those_of_gguf(checkpoint, weights):
    kinds = ("weight", "bias")
    expected = {"token_embd.weight", "position_embd.weight", "token_types.weight"}
    expected |= {f"token_embd_norm.{kind}" for kind in kinds}
    expected |= {f"blk.{i}.{name}.{kind}" for i in range(2) for name, _ in BLOCK.values() for kind in kinds}
    assert set(weights) == expected
    assert_array_equal(weights["blk.1.attn_k.bias"], checkpoint["encoder.layer.1.attention.self.key.bias"])


@pytest.mark.parametrize("fmt", demo.FLOORS)
def test_the_gguf_package_reads_what_the_demo_writes(weights, tmp_path, fmt):
    path = tmp_path / "model.gguf"
    demo.write_model(path, demo.Checkpoint(TINY, weights, '{"a": "ü"}'), fmt)
    reader = gguf.GGUFReader(path)

    keys = {key: (field.types, field.contents()) for key, field in reader.fields.items()}
    text, u32, f32 = gguf.GGUFValueType.STRING, gguf.GGUFValueType.UINT32, gguf.GGUFValueType.FLOAT32
    assert keys["general.architecture"] == ([text], "bert")
    assert keys["general.name"] == ([text], demo.NAME)
    assert keys["general.file_type"] == ([u32], gguf.LlamaFileType[f"MOSTLY_{fmt}"])
    assert keys["general.quantization_version"] == ([u32], gguf.GGML_QUANT_VERSION)
    assert keys["bert.block_count"] == ([u32], 2)
    assert keys["bert.attention.head_count"] == ([u32], 4)
    assert keys["bert.attention.layer_norm_epsilon"] == ([f32], np.float32(1e-12))
    assert keys["bert.attention.causal"] == ([gguf.GGUFValueType.BOOL], False)
    assert keys["bert.pooling_type"] == ([u32], gguf.PoolingType.MEAN)
    assert keys[demo.TOKENIZER] == ([text], '{"a": "ü"}')

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert list(tensors) == list(weights)
    for name, tensor in tensors.items():
        linear = name.split(".")[-2] in {n for n, shape in BLOCK.values() if len(shape) == 2}
        matrix = name == bert.TOKENS or (linear and name.endswith("weight"))
        assert tensor.tensor_type.name == (fmt if matrix else "F32"), name
        assert tuple(tensor.shape[::-1]) == weights[name].shape
        if not matrix:
            assert_array_equal(tensor.data, weights[name])


def test_keys_are_spelled_as_gguf_spells_them():
    groups = [group for group in vars(gguf.Keys).values() if isinstance(group, type)]
    named = {value for group in groups for value in vars(group).values() if isinstance(value, str)}
    ours = {key.replace("bert.", "{arch}.") for key in bert.metadata(TINY, "q8_0")} | {demo.TOKENIZER}
    assert ours <= named


# ---- both roads


def assert_readable(text):
    assert text.isascii()
    body = text.split("\n\n", 1)[1]  # below the backends, whose lines are the library's
    assert max(map(len, body.splitlines())) <= 100


def test_model_road(weights, tokens, tmp_path, monkeypatch, capsys):
    """With random weights: the road, not the numbers that trained weights reach."""
    monkeypatch.setattr(demo, "tokenize", lambda text, config: tokens)
    monkeypatch.setattr(demo, "load_checkpoint", lambda: demo.Checkpoint(TINY, weights, "{}"))
    monkeypatch.setattr(demo, "FLOORS", {"Q8_0": 0.99, "Q4_0": 0.5})
    assert demo.main(["--keep", str(tmp_path / "kept")]) == 0
    out = capsys.readouterr().out
    assert_readable(out)
    assert "Passed." in out
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [
        f"{demo.NAME}-{fmt}.gguf" for fmt in ("Q4_0", "Q8_0")
    ]

    monkeypatch.setattr(demo, "FLOORS", {"Q4_0": 0.99999})
    assert demo.main([]) == 1
    assert "FAILED: below 0.99999" in capsys.readouterr().out


@pytest.mark.slow
def test_excerpt_road(capsys, monkeypatch):
    assert demo.main(["--excerpt"]) == 0
    out = capsys.readouterr().out
    assert_readable(out)
    for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
        assert out.count(f"  {name}  ") == 2, name  # a line for each of two matrices
    lines = [line.split() for line in out.splitlines() if "  cpu  " in line]
    assert len(lines) > 20
    assert all("-" not in words for words in lines)  # each type by both kinds of activations

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


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_trained_model():
    """Numbers that are known of it, and the meaning of its similarities: alike above 0.6, unrelated below 0.3."""
    config, weights, tokenizer = demo.load_checkpoint()
    model = Bert(config, weights, multiply=lambda x, w: x @ w.T)
    example = model.embed(*demo.tokenize(tokenizer, config, ["This is an example sentence"]))
    assert_allclose(example[0, :3], [6.7657e-02, 6.3496e-02, 4.8713e-02], rtol=0, atol=1e-6)
    y = model.embed(*demo.tokenize(tokenizer, config))
    same = np.arange(6)[:, None] // 2 == np.arange(6) // 2
    assert (y @ y.T)[same].min() > 0.6
    assert (y @ y.T)[~same].max() < 0.3


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_demo_of_the_trained_model(capsys):
    assert demo.main([]) == 0
    assert_readable(capsys.readouterr().out)

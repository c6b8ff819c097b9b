"""qgemm compare: perplexity and KL divergence are those of float64 logits; how models that differ are refused."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import tiny_llama_file
from text_models import TEXT, folder_of, tiny_llama
from torch_layers import torch
from torch_models import transformers

import qgemm
from qgemm.evaluation import models

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # raised by transformers
SIZE, CHUNKS = 32, 3  # tokens of a chunk, chunks


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return ["--text", path, "--chunk-size", SIZE, "--chunks", CHUNKS]


def log_probabilities(path):
    """[chunks, counted tokens, vocabulary] of the decoded model in float64, and the tokens that come next."""
    load = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**load, dtype=torch.float64).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(**load)(TEXT).input_ids[: SIZE * CHUNKS]
    chunks = torch.tensor(tokens).reshape(CHUNKS, SIZE)
    with torch.no_grad():
        logits = model(input_ids=chunks).logits[:, SIZE // 2 : -1]
    return logits.log_softmax(-1).reshape(-1, logits.shape[-1]).numpy(), chunks[:, SIZE // 2 + 1 :].reshape(-1).numpy()


def test_numbers_are_those_of_the_logits(run, tmp_path, text):
    source, other = tiny_llama(tmp_path), tiny_llama(tmp_path, "q4_0")
    status, out, _ = run("compare", source, other, *text, "--json")
    (model,) = json.loads(out)["models"]
    (p, following), (q, _) = map(log_probabilities, (source, other))
    rows = np.arange(len(p))
    divergence = (np.exp(p) * (p - q)).sum(1)
    difference = np.exp(q[rows, following]) - np.exp(p[rows, following])
    assert (status, model["tokens"]) == (0, len(p)) == (0, CHUNKS * (SIZE // 2 - 1))
    for name, expected in {
        "perplexity": np.exp(-q[rows, following].mean()),
        "base_perplexity": np.exp(-p[rows, following].mean()),
        "divergence": divergence.mean(),
        "divergence_error": divergence.std() / np.sqrt(len(p) - 1),
        "greatest_divergence": divergence.max(),
        "difference": difference.mean(),
        "same_top": (p.argmax(1) == q.argmax(1)).mean(),
    }.items():
        assert model[name] == pytest.approx(expected, 1e-3), name
    assert model["divergences"]["99%"] == pytest.approx(np.percentile(divergence, 99), 1e-3)


def test_a_model_is_its_own_folder(run, tmp_path, text, capsys):
    path = tiny_llama(tmp_path)
    folder = folder_of(path, tmp_path / "folder")
    capsys.readouterr()  # transformers' bars are no output of the command
    out = run("compare", path, folder, *text)[1]
    assert "Mean    KLD:    0.000000 ± 0.000000\n" in out
    assert "Same top p: 100.000 ± 0.000 %\n" in out
    assert "99.0%   KLD:" in out


def test_several_files_are_rows_and_points_of_a_plot(run, tmp_path, text):
    """More bits, a larger file and a smaller divergence."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra convert)")
    source, *others = (tiny_llama(tmp_path, fmt) for fmt in ("f32", "q4_0", "q5_0", "q8_0"))
    _, out, _ = run("compare", source, *others, *text, "--plot", tmp_path / "sizes.png")
    rows = [line.split() for line in out.splitlines()[1:]]
    assert [row[0] for row in rows] == [str(path) for path in others]
    divergences = [float(row[5]) for row in rows]
    assert all(more > less for more, less in pairwise(divergences))
    assert (tmp_path / "sizes.png").read_bytes().startswith(b"\x89PNG")


def test_models_with_other_tokens_are_refused(refused, tmp_path, text):
    path = tiny_llama(tmp_path)
    metadata = tiny_llama_file.metadata()
    metadata["tokenizer.ggml.merges"] = ["t h"]
    qgemm.write(tmp_path / "other.gguf", tiny_llama_file.weights(), metadata)
    message = refused("compare", path, tmp_path / "other.gguf", *text)
    assert "its tokenizer cuts the text into other tokens than" in message


def test_a_file_without_merges_has_the_tokenizer_of_its_folder(tmp_path):
    """transformers cannot read that of the file. examples/tiny_llama.py writes such files beside the model."""
    folder, metadata = folder_of(tiny_llama(tmp_path), tmp_path / "folder"), tiny_llama_file.metadata()
    del metadata["tokenizer.ggml.merges"]
    for place in (folder, tmp_path):
        qgemm.write(place / "bare.gguf", tiny_llama_file.weights(), metadata)
    tokens = models.load(folder / "bare.gguf").tokens(TEXT)
    np.testing.assert_array_equal(tokens, models.load(folder).tokens(TEXT))
    with pytest.raises(qgemm.QgemmError, match="transformers does not load it"):
        models.load(tmp_path / "bare.gguf")


def test_a_text_without_a_chunk_is_refused(refused, tmp_path, text):
    path = tiny_llama(tmp_path)
    message = refused("compare", path, path, *text[:2], "--chunk-size", 1 << 20)
    assert "tokens, a chunk has 1048576" in message

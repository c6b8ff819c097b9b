"""qgemm imatrix: the sums are those of hooks on a float64 model, for dense, packed and mixed layers."""

from __future__ import annotations

import signal
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from text_models import TEXT, folder_of, mixture, tiny_llama
from torch_layers import torch
from torch_models import random_model, transformers

import qgemm
from qgemm.evaluation import imatrix, models
from qgemm.files.imatrix import read_imatrix
from qgemm.files.imatrix_sums import SumsFile, read_sums

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # raised by transformers
SIZE, CHUNKS = 32, 3  # tokens of a chunk, chunks
LINEARS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    return folder_of(tiny_llama(tmp_path), tmp_path / "folder")


def collected(path, out, **options):
    """The file that a run over the first chunks writes."""
    model = models.load(path)
    imatrix.collect(model, model.chunks(TEXT, SIZE)[:CHUNKS], out, SumsFile(), **options)
    return read_sums(out)


def reference(folder):
    """Sums of squares by name from hooks on the linear layers of a float64 model, and those of experts by routing."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    ).eval()
    sums, tokens = defaultdict(float), defaultdict(float)

    def add(name, x, rows=slice(None), experts=1, expert=0):
        squares, count = np.zeros((experts, x.shape[-1])), np.zeros(experts)
        x = x.reshape(-1, x.shape[-1])[rows]
        squares[expert], count[expert] = x.square().sum(0).detach().numpy(), len(x)
        sums[name], tokens[name] = sums[name] + squares, tokens[name] + count

    def linear(name):
        return lambda module, inputs: add(name, inputs[0])

    def experts(layer):
        def hook(module, inputs):
            x, ids, _ = inputs
            for expert in range(module.num_experts):
                rows = torch.where(ids == expert)[0]
                gate, up = (x[rows] @ module.gate_up_proj[expert].T).chunk(2, -1)
                for part, values in (("gate", x[rows]), ("up", x[rows]), ("down", module.act_fn(gate) * up)):
                    add(f"blk.{layer}.ffn_{part}_exps.weight", values, experts=module.num_experts, expert=expert)

        return hook

    for name, module in model.named_modules():
        words = name.split(".")
        if len(words) > 3 and (part := LINEARS.get(".".join(words[3:]))):
            module.register_forward_pre_hook(linear(f"blk.{words[2]}.{part}.weight"))
        if words[-1] == "experts":
            module.register_forward_pre_hook(experts(words[2]))
    with torch.no_grad():
        for chunk in models.load(folder).chunks(TEXT, SIZE)[:CHUNKS]:
            model(input_ids=torch.from_numpy(chunk)[None])
    return sums, tokens


def assert_sums(file, expected, rtol):
    sums, tokens = expected
    assert file.sums.keys() == sums.keys()
    for name, entry in file.sums.items():
        np.testing.assert_array_equal(entry.tokens, tokens[name], name)
        np.testing.assert_allclose(entry.squares, sums[name], rtol, 1e-6 * sums[name].max(), err_msg=name)


def test_sums_of_a_folder(folder, tmp_path):
    assert_sums(collected(folder, tmp_path / "out.gguf"), reference(folder), 1e-4)


def test_sums_of_packed_weights(tmp_path):
    path = tiny_llama(tmp_path, "q8_0")
    file = collected(path, tmp_path / "out.gguf")
    assert_sums(file, reference(folder_of(path, tmp_path / "folder")), 1e-4)


def test_sums_of_experts_one_by_one(folder, tmp_path):
    """Some expert has no token, and its sums are zeros; the packed layer computes all of them in one call."""
    mixed = mixture(tmp_path / "mixture", folder)
    expected = reference(mixed)
    assert_sums(collected(mixed, tmp_path / "out.gguf"), expected, 1e-4)
    qgemm.convert(mixed, tmp_path / "mixture.gguf", "q8_0", pure=True)
    packed = collected(tmp_path / "mixture.gguf", tmp_path / "packed.gguf")
    dense = reference(folder_of(tmp_path / "mixture.gguf", tmp_path / "decoded"))
    assert_sums(packed, dense, 1e-3)
    with pytest.raises(qgemm.QgemmError, match="no gradient flows through packed experts"):
        collected(tmp_path / "mixture.gguf", tmp_path / "out.gguf", sensitivity=True)


def test_the_sensitivity_is_the_fisher_information_of_columns(folder, tmp_path):
    """The mean over rows of squared gradients of weights by token, in a float64 model, for the labels drawn."""
    file = collected(folder, tmp_path / "out.gguf", sensitivity=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    sums = defaultdict(float)

    def hook(name):
        def add(module, inputs, y):
            x = inputs[0].detach()
            y.register_hook(
                lambda gradient: sums.update(
                    {name: sums[name] + torch.einsum("btn,btk->tnk", gradient, x).square().mean(1).sum(0).numpy()}
                )
            )

        return add

    for name, module in model.named_modules():
        words = name.split(".")
        if len(words) > 3 and (part := LINEARS.get(".".join(words[3:]))):
            module.register_forward_hook(hook(f"blk.{words[2]}.{part}.weight"))
    model.lm_head.register_forward_hook(hook("token_embd.weight"))
    loaded = models.load(folder)
    for number, chunk in enumerate(loaded.chunks(TEXT, SIZE)[:CHUNKS]):
        with torch.no_grad():
            shares = loaded.logits(chunk).softmax(-1)
        labels = torch.multinomial(shares, 1, generator=torch.Generator().manual_seed(number))[:, 0]
        logits = model(input_ids=torch.from_numpy(chunk)[None]).logits[0]
        torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    assert file.sums.keys() == sums.keys()
    for name, entry in file.sums.items():
        np.testing.assert_allclose(entry.fisher[0], sums[name], 1e-3, 1e-6 * sums[name].max(), err_msg=name)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_lookups_are_gradients_of_rows_of_the_table(kind, tmp_path):
    """Gemma multiplies its rows by a number, which an error of a row passes too. Every token is another row."""
    model = random_model(kind)
    text_model = models.TextModel("model", model, None, kind)
    imatrix.collect(text_model, [np.arange(3, 35)], tmp_path / "out.gguf", SumsFile(), sensitivity=True)
    table = model.get_input_embeddings().weight.requires_grad_()
    logits = model(input_ids=torch.arange(3, 35)[None]).logits[0]
    labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=torch.Generator().manual_seed(0))[:, 0]
    torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    expected = table.grad.square().mean(-1).sum().item()
    assert read_sums(tmp_path / "out.gguf").lookups == pytest.approx(expected, 1e-3)


def test_an_interrupted_run_is_continued(folder, tmp_path, run, refused, monkeypatch):
    """Ctrl-C during the first chunk ends the run after it; --resume adds the others and nothing twice."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    words = ["imatrix", folder, "--text", text, "--chunk-size", SIZE, "--chunks", CHUNKS]
    assert run(*words, "-o", tmp_path / "whole.gguf")[0] == 0
    logits = models.TextModel.logits

    def interrupted(self, chunk):
        signal.raise_signal(signal.SIGINT)
        return logits(self, chunk)

    with monkeypatch.context() as patched:
        patched.setattr(models.TextModel, "logits", interrupted)
        status, out, _ = run(*words, "-o", tmp_path / "parts.gguf")
    assert (status, read_sums(tmp_path / "parts.gguf").chunks) == (130, 1)
    assert "interrupted; --resume continues: 1 of 3 chunks" in out
    assert "--force replaces it, --resume continues it" in refused(*words, "-o", tmp_path / "parts.gguf")
    other = [*words[:-1], CHUNKS, "--process-output", "-o", tmp_path / "parts.gguf", "--resume"]
    assert "is the file of another run" in refused(*other)
    assert run(*words, "-o", tmp_path / "parts.gguf", "--resume")[0] == 0
    whole, parts = (read_imatrix(tmp_path / f"{name}.gguf") for name in ("whole", "parts"))
    assert whole.origin[1:] == parts.origin[1:] == ("text.txt", CHUNKS)
    assert dict(whole).keys() == dict(parts).keys()
    for name in whole:
        np.testing.assert_allclose(whole[name], parts[name], 1e-6)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_chunks_before_an_exception_are_kept(error, folder, tmp_path, monkeypatch):
    """As after a second Ctrl-C; a sum that is half added is not written."""
    model = models.load(folder)
    chunks, logits, merge = model.chunks(TEXT, SIZE)[:CHUNKS], models.TextModel.logits, SumsFile.merge

    def failing(self, chunk):
        if chunk is chunks[2]:
            raise error
        return logits(self, chunk)

    def half(self, other, path):
        merge(self, other, path)
        if self.chunks == 2:
            raise error

    for name, owner, function, count in (("logits", models.TextModel, failing, 2), ("merge", SumsFile, half, None)):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, function)
            with pytest.raises(error):
                imatrix.collect(model, chunks, tmp_path / f"{name}.gguf", SumsFile())
        path = tmp_path / f"{name}.gguf"
        assert (read_sums(path).chunks if path.exists() else None) == count


def test_sums_are_those_of_llama_cpp(tmp_path):
    """Golden values of its evaluation of the .gguf file: the inputs of each ggml_mul_mat of the same tokens, summed."""
    path = tiny_llama(tmp_path)
    model = models.load(path)
    chunks = model.chunks(TEXT, SIZE)[:CHUNKS]
    imatrix.collect(model, chunks, tmp_path / "out.gguf", SumsFile())
    with np.load(Path(__file__).parents[1] / "data" / "llama_imatrix.npz") as golden:
        assert (golden["tokens"] == np.concatenate(chunks)).all()
        sums = read_sums(tmp_path / "out.gguf").sums
        assert sums.keys() == set(golden) - {"tokens"}
        for name, entry in sums.items():
            assert entry.tokens.tolist() == [CHUNKS * SIZE]
            np.testing.assert_allclose(entry.squares, golden[name], 1e-4, err_msg=name)


def test_a_converter_reads_the_file(folder, tmp_path):
    collected(folder, tmp_path / "imatrix.gguf")
    done = qgemm.convert(folder, tmp_path / "model.gguf", "q4_0", imatrix=tmp_path / "imatrix.gguf")
    assert "14 of 15 quantized tensors took importances, not token_embd.weight" in done.notes

"""What examples/ shows runs as it stands, with less training."""

from __future__ import annotations

import math
import runpy
import sys
from pathlib import Path

import pytest
from torch_layers import torch
from torch_models import transformers

import qgemm
from qgemm.torch import QLinear
from qgemm.torch.peft import patch as peft_patch
from qgemm.torch.transformers import patch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # raised by transformers
def test_tiny_llama(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("QGEMM_CPU")  # compiled code, as users run it: NumPy is ten times slower
    monkeypatch.setattr(sys, "argv", ["tiny_llama.py", "--steps", "30", "--folder", str(tmp_path)])
    with patch():  # undoes the patch of the example at its end
        example = runpy.run_path(str(EXAMPLES / "tiny_llama.py"), run_name="__main__")
    table = [line.split() for line in capsys.readouterr().out.partition("type ")[2].partition("---")[0].splitlines()]
    numbers = {line[0]: [float(word) for word in line[1:]] for line in table[1:] if line}
    assert list(numbers) == ["float32", *example["TYPES"]]
    _, _, whole = numbers.pop("float32")
    assert math.isfinite(whole)
    assert whole < 200  # chance would give 257
    for kind, (_, bpw, perplexity) in numbers.items():
        assert abs(math.log(perplexity / whole)) < 0.02
        assert bpw < {"q8_0": 8.6, "q4_0": 4.7, "q4_k_m": 5}[kind]
        with qgemm.open(tmp_path / f"{kind}.gguf") as file, patch():
            assert file["blk.0.attn_q.weight"].format.name == {"q4_k_m": "q4_k"}.get(kind, kind)
            model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=f"{kind}.gguf")
        assert type(model.model.layers[0].self_attn.q_proj) is QLinear


RECIPES = {
    "generate_static": [], "cuda_graph": [], "compiled_step": [], "long_prompt": ["text.txt"],
    "train_lora": ["text.txt", "6"], "save_packed": ["packed"],
}  # fmt: skip


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A folder with a tiny llama of random weights: model.gguf in q4_k_m, its tokenizer; a text."""
    folder = tmp_path_factory.mktemp("model")
    example = runpy.run_path(str(EXAMPLES / "tiny_llama.py"))
    words = example["tokenizer"]()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(words), hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False,
        bos_token_id=len(words) - 1, eos_token_id=len(words) - 1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    words.save_pretrained(folder)
    qgemm.convert(folder, folder / "model.gguf", "q4_k_m")
    (folder / "text.txt").write_text((EXAMPLES / "save_packed.py").read_text())
    return folder


@pytest.fixture
def recipe(model_folder, monkeypatch, capsys):
    """Runs an example on the tiny model in its folder -> the lines that it prints."""
    monkeypatch.delenv("QGEMM_CPU")
    monkeypatch.chdir(model_folder)
    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, mode: original(function, backend="eager"))

    def run(name):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "model.gguf", *RECIPES[name]])
        with patch(), peft_patch():
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"tiny_llama", *RECIPES}


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_recipes_that_generate_print_the_same_text(recipe):
    """A static cache, a step whose token stays in place, and a compiled step give the tokens of plain generate."""
    texts = [recipe(name) for name in ("generate_static", "cuda_graph", "compiled_step")]
    assert texts[0] == texts[1] == texts[2]
    assert len("\n".join(texts[0])) > len("def matmul(")


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_recipe_of_long_prompts(recipe, monkeypatch):
    activations = set()
    forward = QLinear.forward

    def spy(layer, x):
        activations.add((x.shape[-2] > 1, layer.activation))
        return forward(layer, x)

    monkeypatch.setattr(QLinear, "forward", spy)
    assert recipe("long_prompt")
    assert (True, "a8_g256") in activations
    assert {activation for many, activation in activations if not many} >= {"a16"}


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_recipe_of_training(recipe, model_folder):
    first, last = (float(line.split()[-1]) for line in recipe("train_lora") if line.startswith("step "))
    assert last < first
    assert (model_folder / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_recipe_of_saving(recipe, model_folder):
    assert recipe("save_packed") == ["True"]
    assert (model_folder / "packed" / "model.safetensors").exists()

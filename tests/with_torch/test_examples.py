"""What examples/ shows runs as it stands, with less training."""

from __future__ import annotations

import math
import runpy
import sys
from pathlib import Path

import pytest
from torch_models import transformers

import qgemm
from qgemm.torch import QLinear
from qgemm.torch.transformers import patch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # raised by transformers
def test_tiny_llama(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("QGEMM_CPU")  # compiled code, as users run it: NumPy is ten times slower
    monkeypatch.setattr(sys, "argv", ["tiny_llama.py", "--steps", "30", "--folder", str(tmp_path)])
    with patch():  # also undoes the patch of the example
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

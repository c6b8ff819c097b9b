"""The demo's model on a GPU and on the CPU."""

from __future__ import annotations

import demo
import pytest
import tiny_bert
from numpy.testing import assert_allclose

import qgemm


@pytest.mark.parametrize("fmt", demo.FLOORS)
def test_the_gpu_gives_what_the_cpu_gives(tmp_path, monkeypatch, fmt):
    weights, tokens = tiny_bert.weights(), tiny_bert.tokens()
    monkeypatch.setattr(demo, "tokenize", lambda text, config: tokens)
    demo.write_model(tmp_path / "model.gguf", demo.Checkpoint(tiny_bert.TINY, weights, "{}"), fmt)
    with qgemm.open(tmp_path / "model.gguf") as file:
        y = {(run.backend, run.activation): run.embeddings for run in demo.embed_from(file)}
    assert_allclose(y["cuda", "a16"], y["cpu", "a16"], rtol=0, atol=1e-5)
    assert_allclose(y["cuda", "a8"], y["cpu", "a8"], rtol=0, atol=5e-3)  # a rounding that falls otherwise is a code

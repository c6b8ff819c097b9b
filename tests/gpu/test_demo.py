"""The demo's model on a GPU and on the CPU."""

from __future__ import annotations

import demo
import llama
import pytest
from measured_errors import check_rms

import qgemm

pytest.importorskip("tokenizers", reason="a package of the extra demo")


@pytest.mark.parametrize("fmt", ["q8_0", "q4_1", "q4_0"])
def test_the_gpu_gives_what_the_cpu_gives(tmp_path, fmt):
    """A prompt of nine tokens, then one token on the cache."""
    import tiny_llama_file

    with qgemm.open(tiny_llama_file.write(tmp_path / "model.gguf", fmt)) as file:
        logits = []
        for products in (llama.PACKED, llama.packed_on_gpu()):
            model = llama.load(file, file.metadata, products)
            cache = model.cache(10)
            logits.append([demo.host(model.forward(ids, cache)) for ids in (list(range(3, 12)), [40])])
    for cpu, gpu in zip(*logits, strict=True):
        check_rms(gpu, cpu, "float32")

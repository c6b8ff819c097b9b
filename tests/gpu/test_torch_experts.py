"""QExperts on the GPU: the bits of qgemm.moe, eager, compiled and in a CUDA graph; moved there and back."""

from __future__ import annotations

import numpy as np
import pytest
from experts import random_experts, routed

import qgemm

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("torch finds no GPU", allow_module_level=True)

from qgemm.torch import QExperts  # noqa: E402

E, F, K, TOP_K, ACTIVATION = 9, 192, 256, 3, "swiglu_oai"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("t", [1, 150])
def test_a_layer_where_torch_puts_it(t, dtype):
    """Few tokens and many, of experts of two formats with biases; ids change between replays of a graph."""
    rng = np.random.default_rng(6)
    shapes = (F, K), (F, K), (K, F)
    formats = [qgemm.FORMATS[name] for name in ("mxfp4", "mxfp4", "q8_0")]
    weights = [random_experts(fmt, E, *shape, rng) for fmt, shape in zip(formats, shapes, strict=True)]
    gate, up, down = (w.to_device() for w in weights)
    biases = [torch.randn(E, n, generator=torch.Generator().manual_seed(n)) / 8 for n, _ in shapes]
    layer = QExperts.from_tensors(*weights, biases, ACTIVATION).to("cuda")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = (torch.randn(t, K, generator=torch.Generator().manual_seed(0)) / 64).to(dtype).cuda()
    ids, factors = torch.zeros((t, TOP_K), dtype=torch.int64, device="cuda"), torch.ones(t, TOP_K, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.stream(stream):
        layer(x, ids, factors)  # compiles
        with torch.cuda.graph(graph, stream=stream):
            y = layer(x, ids, factors)
    for seed in range(2):
        chosen, new = routed(np.random.default_rng(seed), t, TOP_K, E, skewed=bool(seed))
        ids.copy_(torch.from_numpy(chosen))
        factors.copy_(torch.from_numpy(new))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        on_gpu = [bias.cuda() for bias in biases]
        want = qgemm.moe(x, (gate, up), down, ids, factors, ACTIVATION, biases=on_gpu, dtype=dtype)
        with torch.no_grad():
            for output in (y, layer(x, ids, factors), compiled(x, ids, factors)):
                assert torch.equal(output, want)
    for part, w in zip(layer.to("cpu").parts, weights, strict=True):
        assert part.packed.blocks.tobytes() == w.blocks.tobytes()

"""Shared by the tests of serving engines: tensors as their loaders yield them, and expected products."""

from __future__ import annotations

import vllm_like
from torch_layers import normal, torch
from vllm_like import RANKS

import qgemm
from qgemm.formats import GGML_TYPES

NUMBERS = {fmt.name: number for number, fmt in GGML_TYPES.items()}
E, F, K = 4, 512, 256
IDS, FACTORS = torch.tensor([[0, 3], [2, 1], [3, 2]], dtype=torch.int32), normal(3, 2, seed=9).abs()


def raw(w: qgemm.Tensor) -> torch.Tensor:
    """A tensor as vllm-gguf-plugin yields it: bytes [..., N, bytes per row], or floats [..., N, K]."""
    if w.format.plain:
        return torch.from_numpy(w.dequantize()).to(getattr(torch, {"f16": "float16", "f32": "float32"}[w.format.name]))
    return torch.from_numpy(w.blocks.view("u1").reshape(*w.shape[:-1], -1).copy())


def product(x, w) -> torch.Tensor:
    return x.double() @ torch.from_numpy(w.dequantize()).double().T


def assert_near(y, expected) -> None:
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def routed(x, tensors, ids, factors, columns=slice(None)):
    """The layer in float64; columns: the part of F of a rank."""
    gate, up, down = (torch.from_numpy(tensors[part].dequantize()).double() for part in ("w1", "w3", "w2"))
    y = torch.zeros(len(x), K, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for expert, factor in zip(ids[token].tolist(), factors[token].double(), strict=True):
            between = torch.nn.functional.silu(gate[expert] @ row) * (up[expert] @ row)
            y[token] += factor * (down[expert][:, columns] @ between[columns])
    return y


def load(layer, w: qgemm.Tensor, place=None, prefix: str = "") -> None:
    """Load a tensor as a model of vLLM does: its type, then its bytes; floats under their own name."""
    rest = () if place is None else (place,)
    if w.format.plain:
        parameter = getattr(layer, f"{prefix}weight")
    else:
        parameter = getattr(layer, f"{prefix}qweight_type")
        parameter.weight_loader(parameter, torch.tensor(int(NUMBERS[w.format.name])), *rest)
        parameter = getattr(layer, f"{prefix}qweight")
    parameter.weight_loader(parameter, raw(w), *rest)


def linear(methods, kind, tensors, k=None, floats=False, formats=(), activation="a16"):
    """A layer with these tensors by their place, after loading; k: the whole layer's columns."""
    sizes = tuple(w.shape[0] for w in tensors.values())
    layer = vllm_like.LinearBase(kind, sizes)
    method = methods.PackedLinearMethod("model.layers.0.x", activation, floats, formats)
    first = next(iter(tensors.values()))
    columns = first.shape[1]
    method.create_weights(
        layer, columns // (RANKS.size if kind == "row" else 1), [n // RANKS.size for n in sizes], columns, sum(sizes),
        torch.float32, weight_loader=None,
    )  # fmt: skip
    for place, w in sorted(tensors.items(), key=lambda item: str(item[0])):  # v comes after k, q in the middle
        load(layer, w, place)
    method.process_weights_after_loading(layer)
    return method, layer

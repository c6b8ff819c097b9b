"""Products and rows of packed weights: plain Python for eager calls, registered ops for what traces a graph.

    qgemm::linear(x [..., K], weight bytes, bias, format, N, K, activation, wide) -> [..., N] of x's dtype, or float32
    qgemm::linear_backward(grad [..., N], weight bytes, format, N, K)       -> grad @ W, [..., K]
    qgemm::embedding(index, weight bytes, format, N, K, dtype)              -> rows of W, [*index.shape, K]
    qgemm::moe(x [T, K], ids, weights [T, top_k], bytes of gate, up and down, biases, formats, [E, F, K], activation)
        -> [T, K] of x's dtype, without a gradient

An op takes the bytes themselves and says in text and numbers what they are, so that graphs can be copied, exported and
replayed. Of a weight no gradient is taken; a backward decodes it panel by panel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from qgemm.cuda.layout.tile import ROWS
from qgemm.experts import moe
from qgemm.ops import matmul

from .rows import decoded, selected
from .storage import packed_of

PANEL = 1 << 22  # weights that a backward decodes at a time: 16 MiB of float32
PLAIN = (torch.Tensor, torch.nn.Parameter)

_library = torch.library.Library("qgemm", "DEF")
_library.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, str format, int n, int k, str activation, bool wide) -> Tensor"
)
_library.define("linear_backward(Tensor grad, Tensor weight, str format, int n, int k) -> Tensor")
_library.define("embedding(Tensor index, Tensor weight, str format, int n, int k, ScalarType dtype) -> Tensor")
_library.define(
    "moe(Tensor x, Tensor ids, Tensor weights, Tensor[] experts, Tensor?[] biases, str[] formats, int[] shape, "
    "str activation) -> Tensor"
)
traced_moe = torch.ops.qgemm.moe.default
traced_linear = torch.ops.qgemm.linear.default
traced_linear_backward = torch.ops.qgemm.linear_backward.default
traced_embedding = torch.ops.qgemm.embedding.default


tracing = torch._C._is_tracing  # what torch.jit.is_tracing asks


def traced(x: Any) -> bool:
    """Whether x stands for a tensor of a graph that is being made, and only an op can be put there."""
    return type(x) not in PLAIN or x.is_meta or torch.compiler.is_compiling() or tracing()


def product(x: Any, packed: Any, bias: Any, activation: Any, wide: bool = False) -> Any:
    """y [..., N] = x [..., K] @ W.T + bias in x's dtype, if wide in float32, as a new tensor of torch; no gradient."""
    return matmul(x, packed, activation, bias=bias, dtype=torch.float32 if wide else x.dtype)


def dense(weight: Any, format: str, shape: tuple[int, int], dtype: Any) -> Any:
    """The weights as a new tensor [N, K] of `dtype` on their device, some rows at a time."""
    packed, made = packed_of(weight, format, shape), torch.empty(shape, dtype=dtype, device=weight.device)
    for part in panels(shape):
        made[part] = decoded(packed, weight, part.start, part.stop)
    return made


def panels(shape: tuple[int, int]) -> Iterator[slice]:
    """Rows of a weight that are decoded at a time: whole row blocks of a GPU's tiles."""
    step = max(ROWS, PANEL // max(1, shape[1]) // ROWS * ROWS)
    return (slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step))


# ---------------------------------------------------------------- what the ops do


def linear(x: Any, weight: Any, bias: Any, format: str, n: int, k: int, activation: str, wide: bool) -> Any:
    """x @ W.T + bias."""
    return product(x, packed_of(weight, format, (n, k)), bias, activation, wide)


def linear_backward(grad: Any, weight: Any, format: str, n: int, k: int) -> Any:
    """grad @ W, W decoded some rows at a time and summed over them in float32.

    On a GPU the panels of a grad of 16 bits are multiplied in its type, by tensor cores.
    """
    packed, half = packed_of(weight, format, (n, k)), grad.is_cuda and grad.dtype in (torch.float16, torch.bfloat16)
    flat = grad.reshape(-1, n) if half else grad.reshape(-1, n).float()
    total = flat.new_zeros((len(flat), k), dtype=torch.float32)
    for part in panels((n, k)) if total.numel() else ():
        rows = decoded(packed, weight, part.start, part.stop)
        if half:
            total += flat[:, part] @ rows.to(grad.dtype)
        else:
            total.addmm_(flat[:, part], rows)
    return total.to(grad.dtype).reshape(*grad.shape[:-1], k)


def embedding(index: Any, weight: Any, format: str, n: int, k: int, dtype: Any) -> Any:
    """Rows of W."""
    return selected(packed_of(weight, format, (n, k)), weight, index, dtype)


def experts(x: Any, ids: Any, weights: Any, of: Any, biases: Any, formats: Any, shape: Any, activation: Any) -> Any:
    """A layer of experts."""
    e, f, k = shape
    shapes = (e, f, k), (e, f, k), (e, k, f)
    gate, up, down = (packed_of(weight, fmt, each) for weight, fmt, each in zip(of, formats, shapes, strict=True))
    return moe(x, (gate, up), down, ids, weights, activation, biases=biases, dtype=x.dtype)


def _fake_experts(
    x: Any, ids: Any, weights: Any, of: Any, biases: Any, formats: Any, shape: Any, activation: Any
) -> Any:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_linear(x: Any, weight: Any, bias: Any, format: str, n: int, k: int, activation: str, wide: bool) -> Any:
    torch._check(x.dim() > 0 and x.shape[-1] == k, lambda: f"x has shape {tuple(x.shape)}, the weight needs K = {k}")
    return x.new_empty((*x.shape[:-1], n), dtype=torch.float32 if wide else x.dtype)


def _fake_linear_backward(grad: Any, weight: Any, format: str, n: int, k: int) -> Any:
    return grad.new_empty((*grad.shape[:-1], k))


def _fake_embedding(index: Any, weight: Any, format: str, n: int, k: int, dtype: Any) -> Any:
    return index.new_empty((*index.shape, k), dtype=dtype)


for _name, _function, _fake in (
    ("linear", linear, _fake_linear),
    ("linear_backward", linear_backward, _fake_linear_backward),
    ("embedding", embedding, _fake_embedding),
    ("moe", experts, _fake_experts),
):
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _function, _device)
    torch.library.register_fake(f"qgemm::{_name}", _fake, lib=_library)


# ---------------------------------------------------------------- their gradients in a graph


def _setup_linear(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, ctx.weight, bias, ctx.format, ctx.n, ctx.k, _, _ = inputs
    ctx.x_dtype = x.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward_of_linear(ctx: Any, grad: Any) -> tuple[Any, ...]:
    """Of x, and of the bias; activations that are quantized count as exact."""
    of_x = of_bias = None
    if ctx.needs_input_grad[0]:
        of_x = traced_linear_backward(grad, ctx.weight, ctx.format, ctx.n, ctx.k).to(ctx.x_dtype)
    if ctx.needs_input_grad[2]:
        of_bias = bias_gradient(grad, ctx.bias_dtype)
    return of_x, None, of_bias, None, None, None, None, None


def bias_gradient(grad: Any, dtype: Any) -> Any:
    """Of y [..., N] -> of the bias [N]."""
    return grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32).to(dtype)


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.weight, ctx.format, ctx.n, ctx.k = inputs


def _backward_of_backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
    return traced_linear(grad, ctx.weight, None, ctx.format, ctx.n, ctx.k, "a16", False), None, None, None, None


torch.library.register_autograd("qgemm::linear", _backward_of_linear, setup_context=_setup_linear, lib=_library)
torch.library.register_autograd(
    "qgemm::linear_backward", _backward_of_backward, setup_context=_setup_backward, lib=_library
)

"""Products and rows of packed weights: plain Python for eager calls, registered ops for traced graphs.

    qgemm::linear(x [..., K], weight bytes, bias, format, N, K, activation, wide) -> [..., N] of x's dtype, or float32
    qgemm::linear_forward(x, weight bytes, bias, product)                   -> the same, without a gradient
    qgemm::linear_backward(grad [..., N], weight bytes, format, N, K)       -> grad @ W, [..., K]
    qgemm::embedding(index, weight bytes, format, N, K, dtype)              -> rows of W, [*index.shape, K]
    qgemm::moe(x [T, K], ids, weights [T, top_k], bytes of gate, up and down, biases, formats, [E, F, K], activation)
        -> [T, K] of x's dtype, without a gradient

An op takes the bytes, and format and shape as text and numbers, so that graphs can be copied, exported and replayed. A
weight takes no gradient; a backward decodes it panel by panel.

torch.compile gets linear_forward where nothing needs a gradient. Its dispatch costs 3 us: no Python kernel of autograd,
which costs 8 us more, and one text in place of five scalars, which cost 2. Elsewhere a graph gets linear
(qgemm/torch/gradients.py), which tracing below autograd replaces by linear_forward and linear_backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

from qgemm.cuda.layout.tile import ROWS
from qgemm.experts import moe
from qgemm.ops import matmul
from qgemm.packed import Packed
from qgemm.placement import described

from .rows import decoded, selected
from .storage import packed_of

# Weights decoded at a time by a backward. On a GPU they are all those of a layer of 14336 x 4096, 128 MiB in 16 bits:
# small panels cost the host more time than the GPU.
PANEL_WEIGHTS = {"cpu": 1 << 22, "cuda": 1 << 26}
PLAIN = (torch.Tensor, torch.nn.Parameter)

library = torch.library.Library("qgemm", "DEF")
library.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, str format, int n, int k, str activation, bool wide) -> Tensor"
)
library.define("linear_forward(Tensor x, Tensor weight, Tensor? bias, str product) -> Tensor")
library.define("linear_backward(Tensor grad, Tensor weight, str format, int n, int k) -> Tensor")
library.define("embedding(Tensor index, Tensor weight, str format, int n, int k, ScalarType dtype) -> Tensor")
library.define(
    "moe(Tensor x, Tensor ids, Tensor weights, Tensor[] experts, Tensor?[] biases, str[] formats, int[] shape, "
    "str activation) -> Tensor"
)
traced_moe = torch.ops.qgemm.moe.default
traced_linear = torch.ops.qgemm.linear.default
traced_linear_forward = torch.ops.qgemm.linear_forward.default
traced_linear_backward = torch.ops.qgemm.linear_backward.default
traced_embedding = torch.ops.qgemm.embedding.default

is_compiling = torch.compiler.is_compiling
tracing = torch._C._is_tracing  # the test of torch.jit.is_tracing


def traced(x: torch.Tensor) -> bool:
    """Whether x stands for a tensor of a graph being traced, where only ops are allowed."""
    return is_compiling() or type(x) not in PLAIN or x.is_meta or tracing()


def one_line(layer: torch.nn.Module) -> str:
    """A layer for an error, without the lines of the modules in it."""
    return f"{type(layer).__name__}({layer.extra_repr()})"


def check_tensor(x: object, layer: torch.nn.Module) -> None:
    """TypeError for an input of a layer that is no tensor."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{one_line(layer)} takes a tensor, got {described(x)}")


def product(
    x: torch.Tensor, packed: Packed, bias: torch.Tensor | None, activation: str, wide: bool = False
) -> torch.Tensor:
    """y [..., N] = x [..., K] @ W.T + bias as a new tensor, in x's dtype or, if wide, in float32; no gradient."""
    return matmul(x, packed, activation, bias=bias, dtype=torch.float32 if wide else x.dtype)  # type: ignore[call-overload]


def dense(weight: torch.Tensor, format: str, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """The weights as a new tensor [N, K] of `dtype` on their device, decoded panel by panel."""
    packed, weights = packed_of(weight, format, shape), torch.empty(shape, dtype=dtype, device=weight.device)
    for part in panels(shape, weight.device):
        weights[part] = decoded(packed, weight, part.start, part.stop)
    return weights


def panels(shape: tuple[int, int], device: torch.device) -> Iterator[slice]:
    """Ranges of rows to decode at a time: whole row blocks of a GPU's tiles."""
    step = max(ROWS, PANEL_WEIGHTS[device.type] // max(1, shape[1]) // ROWS * ROWS)
    return (slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step))


# ---------------------------------------------------------------- implementations of the ops


def linear_forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, spec: str) -> torch.Tensor:
    """x @ W.T + bias."""
    format, n, k, activation, wide = parsed(spec)
    return product(x, packed_of(weight, format, (n, k)), bias, activation, wide)


def product_spec(format: str, n: int, k: int, activation: str, wide: bool) -> str:
    """The text that describes a product to linear_forward, e.g. "q4_0 4096 14336 a16"."""
    return f"{format} {n} {k} {activation}{' wide' if wide else ''}"


@lru_cache(1024)
def parsed(spec: str) -> tuple[str, int, int, str, bool]:
    """The inverse of `product_spec`."""
    format, n, k, activation, *wide = spec.split()
    return format, int(n), int(k), activation, bool(wide)


def linear_backward(grad: torch.Tensor, weight: torch.Tensor, format: str, n: int, k: int) -> torch.Tensor:
    """grad @ W; W is decoded panel by panel, and products are summed in float32.

    On a GPU W is decoded into the type of a 16-bit grad, and multiplied in it on tensor cores.
    """
    packed, half = packed_of(weight, format, (n, k)), grad.is_cuda and grad.dtype in (torch.float16, torch.bfloat16)
    flat = grad.reshape(-1, n).to(grad.dtype if half else torch.float32)
    parts = list(panels((n, k), grad.device)) if len(flat) else []
    if half and len(parts) == 1:
        return (flat @ decoded(packed, weight, 0, n, flat.dtype)).reshape(*grad.shape[:-1], k)
    total = flat.new_zeros((len(flat), k), dtype=torch.float32)
    for part in parts:
        rows = decoded(packed, weight, part.start, part.stop, flat.dtype)
        if half:
            total += flat[:, part] @ rows
        else:
            total.addmm_(flat[:, part], rows)
    return total.to(grad.dtype).reshape(*grad.shape[:-1], k)


def embedding(
    index: torch.Tensor, weight: torch.Tensor, format: str, n: int, k: int, dtype: torch.dtype
) -> torch.Tensor:
    """Rows of W."""
    return selected(packed_of(weight, format, (n, k)), weight, index, dtype)


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    parts: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    formats: Sequence[str],
    shape: Sequence[int],
    activation: str,
) -> torch.Tensor:
    """A layer of experts."""
    e, f, k = shape
    shapes = (e, f, k), (e, f, k), (e, k, f)
    gate, up, down = (packed_of(part, fmt, size) for part, fmt, size in zip(parts, formats, shapes, strict=True))
    return moe(x, (gate, up), down, ids, weights, activation, biases=biases, dtype=x.dtype)  # type: ignore[arg-type]


def _fake_experts(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_linear_forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, spec: str) -> torch.Tensor:
    _, n, k, _, wide = parsed(spec)
    torch._check(x.dim() > 0 and x.shape[-1] == k, lambda: f"x has shape {tuple(x.shape)}, the weight needs K = {k}")
    return x.new_empty((*x.shape[:-1], n), dtype=torch.float32 if wide else x.dtype)


def _fake_linear_backward(grad: torch.Tensor, weight: torch.Tensor, format: str, n: int, k: int) -> torch.Tensor:
    return grad.new_empty((*grad.shape[:-1], k))


def _fake_embedding(
    index: torch.Tensor, weight: torch.Tensor, format: str, n: int, k: int, dtype: torch.dtype
) -> torch.Tensor:
    return index.new_empty((*index.shape, k), dtype=dtype)


for _name, _function, _fake in (
    ("linear_forward", linear_forward, _fake_linear_forward),
    ("linear_backward", linear_backward, _fake_linear_backward),
    ("embedding", embedding, _fake_embedding),
    ("moe", experts, _fake_experts),
):
    for _device in ("CPU", "CUDA"):
        library.impl(_name, _function, _device)
    torch.library.register_fake(f"qgemm::{_name}", _fake, lib=library)

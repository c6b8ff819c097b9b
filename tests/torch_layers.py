"""Shared by the tests of qgemm.torch: layers of random weights, their float64 products, tensors of every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import check_product, expected_sums, random_tensor

import qgemm
from qgemm.codec.format import float_dtype
from qgemm.cuda.layout import tile as tiles

torch = pytest.importorskip("torch", reason="torch is not installed; qgemm.torch is tested where it is (extra torch)")

DTYPES = ("float16", "bfloat16", "float32")
MATRICES = [
    qgemm.FORMATS[name] for name in ("q4_0", "q4_k", "q6_k", "q8_0", "kbit3", "mxfp4", "iq4_nl", "f16", "iq4_xs")
]
LAYOUTS = (
    "contiguous",
    "transposed",
    "every other",
    "broadcast",
    "window",
    "parameter",
    "inference",
    "vector",
    "empty",
)


def normal(*shape: int, dtype: str = "float32", seed: int = 0) -> Any:
    """Standard normal values in a type of torch."""
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return torch.from_numpy(values).to(getattr(torch, dtype))


def assert_same(got: Any, want: Any) -> None:
    """Equal tensors of one type and shape, where a NaN equals a NaN: random scales of some formats make them."""
    torch.testing.assert_close(got.detach(), want.detach(), rtol=0, atol=0, equal_nan=True)


def weights(name: str = "q4_0", n: int = 40, blocks: int = 2, seed: int = 0) -> qgemm.Tensor:
    """A random Tensor [n, blocks of weights, at least 64]."""
    fmt = qgemm.FORMATS[name]
    return random_tensor(fmt, n, blocks * max(64, fmt.weights), np.random.default_rng(seed))


def tiled(w: qgemm.Tensor) -> torch.Tensor:
    """The bytes that a GPU holds for a Tensor: tiles, followed by the bounds of their rows."""
    packed = tiles.pack(w.format, w.blocks)
    bounds = np.zeros(len(packed) * tiles.ROWS, np.float32)
    bounds[: len(w)] = tiles.row_absmax(w.format, w.blocks)
    return torch.from_numpy(np.concatenate([packed.reshape(-1).view(np.uint8), bounds.view(np.uint8)]))


def laid_out(x: Any, layout: str) -> Any:
    """Values [a, b, K] in one of LAYOUTS; of other values and shapes where the layout asks for it."""
    if layout == "transposed":
        return x.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    if layout == "every other":
        return x.repeat_interleave(2, dim=-1)[..., ::2]
    if layout == "broadcast":
        return x[:1].expand_as(x)
    if layout == "window":
        return torch.nn.functional.pad(x, (3, 1, 1, 2, 2, 0))[2:, 1:-2, 3:-1]
    if layout == "parameter":
        return torch.nn.Parameter(x)
    if layout == "inference":
        with torch.inference_mode():
            return x.clone()
    return x[0, 0] if layout == "vector" else x[:0] if layout == "empty" else x


def assert_product(y: Any, x: Any, w: qgemm.Tensor, bias: Any = None) -> None:
    """y is x @ w.T + bias within the bound of float32 sums, rounded once to its dtype."""
    values = x.detach().double().numpy().reshape(-1, w.shape[1])
    added = np.zeros(w.shape[0]) if bias is None else bias.detach().double().numpy()
    expected = expected_sums(values, w).plus(added).rounded(str(y.dtype).removeprefix("torch."))
    assert tuple(y.shape) == (*x.shape[:-1], w.shape[0])
    expected.check(y.detach().double().numpy().reshape(expected.y.shape))


def on_host(tensor: Any) -> np.ndarray:
    """The values of a tensor of any device, as an array of its type."""
    name = str(tensor.dtype).removeprefix("torch.")
    return tensor.detach().cpu().double().numpy().astype(float_dtype(name) if name in DTYPES else np.float64)


def assert_gpu_product(y: Any, x: Any, w: qgemm.Tensor, *addends: Any, activation: str = "a16") -> None:
    """`helpers.check_product` of tensors on a GPU; addends that are None count as zeros."""
    added = [on_host(part) for part in addends if part is not None]
    assert tuple(y.shape) == (*x.shape[:-1], w.shape[0])
    check_product(on_host(y), on_host(x), w, *added, activation=activation)

"""Differentiated eager products: backward, forward-mode tangents, and the transforms of torch.func.

Product is x @ W.T + bias, Transposed is grad @ W; each is the derivative of the other. The weight takes no gradient,
and quantized activations count as exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from qgemm.errors import UnsupportedError

from . import ops


def differentiated(x: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether a product of x takes part in a derivative or a transform, and must be recorded."""
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return True
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()  # type: ignore[no-any-return]


def _batched(
    function: type[torch.autograd.Function], dims: tuple[Any, ...], inputs: tuple[Any, ...]
) -> tuple[Any, int]:
    """A product of x with a batch axis, which is moved to the front."""
    if any(dim is not None for dim in dims[1:]):
        raise UnsupportedError("vmap takes x of a QLinear alone along an axis; its weight and bias have none to give")
    return function.apply(inputs[0].movedim(dims[0], 0), *inputs[1:]), 0


class Product(torch.autograd.Function):
    """`ops.linear` of (x, weight bytes, bias, format, N, K, activation, wide)."""

    @staticmethod
    def forward(*inputs: Any) -> torch.Tensor:
        return ops.linear(*inputs)

    @staticmethod
    def setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.weight_args, ctx.wide, ctx.x_dtype = (inputs[1], *inputs[3:6]), inputs[7], inputs[0].dtype
        ctx.bias_dtype = None if inputs[2] is None else inputs[2].dtype

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[Any, ...]:
        x_grad = Transposed.apply(grad, *ctx.weight_args).to(ctx.x_dtype) if ctx.needs_input_grad[0] else None
        bias_grad = ops.bias_gradient(grad, ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return x_grad, None, bias_grad, None, None, None, None, None

    @staticmethod
    def jvp(
        ctx: torch.autograd.function.FunctionCtx,
        x: torch.Tensor | None,
        weight: None,
        bias: torch.Tensor | None,
        *_: Any,
    ) -> torch.Tensor | None:
        fmt, n, k = ctx.weight_args[1:]
        return _tangent(x, bias, ctx.weight_args[0], fmt, n, k, ctx.wide)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, int]:
        return _batched(Product, in_dims, inputs)


class Transposed(torch.autograd.Function):
    """`ops.linear_backward` of (grad, weight bytes, format, N, K)."""

    @staticmethod
    def forward(*inputs: Any) -> torch.Tensor:
        return ops.linear_backward(*inputs)

    @staticmethod
    def setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.weight_args = inputs[1:]

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[Any, ...]:
        return _tangent(grad, None, *ctx.weight_args), None, None, None, None

    @staticmethod
    def jvp(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor, *_: Any) -> torch.Tensor | None:
        return Transposed.apply(grad, *ctx.weight_args)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, int]:
        return _batched(Transposed, in_dims, inputs)


def _tangent(
    x: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight: torch.Tensor,
    format: str,
    n: int,
    k: int,
    wide: bool = False,
) -> torch.Tensor | None:
    """The exact product of a tangent of x, plus the tangent of the bias."""
    y = None if x is None else Product.apply(x, weight, None, format, n, k, "a16", wide)
    return bias if y is None else y if bias is None else y + bias

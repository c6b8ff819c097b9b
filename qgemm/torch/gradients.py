"""Differentiated products, eager and in graphs: backward, forward-mode tangents, and the transforms of torch.func.

Product is x @ W.T + bias, Transposed is grad @ W; each is the derivative of the other. The weight takes no gradient,
and quantized activations count as exact. In a graph they call the ops of qgemm/torch/ops.py, which have no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad

from qgemm.errors import UnsupportedError

from .ops import (
    library,
    linear_backward,
    product,
    product_spec,
    traced,
    traced_linear,
    traced_linear_backward,
    traced_linear_forward,
)
from .storage import packed_of

is_dynamo_compiling, is_grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)  # torch 2.7 or later


def differentiated(x: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether a product of x takes part in a derivative or a transform, and must be recorded."""
    return recorded(x, bias) or transformed()


def recorded(x: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether autograd must record a product of x."""
    return is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))


def transformed() -> bool:
    """Whether forward-mode differentiation or a transform of torch.func is active."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()  # type: ignore[no-any-return]


def is_exporting() -> bool:
    """Whether torch.export traces; torch.compile of torch 2.11 takes its own function of this name for true."""
    return _is_exporting()


# torch.compile calls both once while it traces, and guards the state of transforms itself. The attribute is that of
# torch.compiler.assume_constant_result, which would import torch._dynamo here.
transformed._dynamo_marked_constant = is_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _batched(
    function: type[torch.autograd.Function], dims: tuple[Any, ...], inputs: tuple[Any, ...]
) -> tuple[Any, int]:
    """A product of x with a batch axis, which is moved to the front."""
    if any(dim is not None for dim in dims[1:]):
        raise UnsupportedError("vmap takes x of a QLinear alone along an axis; its weight and bias have none to give")
    return function.apply(inputs[0].movedim(dims[0], 0), *inputs[1:]), 0


class _Function(torch.autograd.Function):
    """A function without the part of torch's `apply` that reads the signature of `forward`: 15 us at every call.

    Tensors that a transform of torch.func left behind are unwrapped as there.
    """

    @classmethod
    def apply(cls, *inputs: Any) -> Any:
        """The output, recorded for a backward."""
        if transformed():
            return super().apply(*inputs)
        return super(torch.autograd.Function, cls).apply(*unwrap_dead_wrappers(inputs))


class Product(_Function):
    """`product` of (x, weight bytes, bias, format, N, K, activation, wide)."""

    @staticmethod
    def forward(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, format: str, n: int, k: int, activation: str,
        wide: bool,
    ) -> torch.Tensor:  # fmt: skip
        if traced(x):
            return traced_linear_forward(x, weight, bias, product_spec(format, n, k, activation, wide))
        return product(x, packed_of(weight, format, (n, k)), bias, activation, wide)

    @staticmethod
    def setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.weight_args, ctx.wide, ctx.x_dtype = (inputs[1], *inputs[3:6]), inputs[7], inputs[0].dtype
        ctx.bias_dtype = None if inputs[2] is None else inputs[2].dtype

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[Any, ...]:
        x_grad = Transposed.apply(grad, *ctx.weight_args).to(ctx.x_dtype) if ctx.needs_input_grad[0] else None
        bias_grad = _bias_gradient(grad, ctx.bias_dtype) if ctx.needs_input_grad[2] else None
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


class Transposed(_Function):
    """`ops.linear_backward` of (grad, weight bytes, format, N, K)."""

    @staticmethod
    def forward(*inputs: Any) -> torch.Tensor:
        backward = traced_linear_backward if traced(inputs[0]) else linear_backward
        return backward(*inputs)

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


def _bias_gradient(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gradient of the bias [N] from that of y [..., N]."""
    return grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32).to(dtype)


# ---------------------------------------------------------------- products in a graph


def graph_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, format: str, n: int, k: int, activation: str,
    wide: bool,
) -> torch.Tensor:  # fmt: skip
    """A product in a graph: a compiled one, whose guards repeat the question, has a gradient only where one is needed.

    Names are globals of this module, because torch.compile checks each path of attributes at every call.
    """
    if is_dynamo_compiling() and not is_exporting() and not differentiated(x, bias):
        return traced_linear_forward(x, weight, bias, product_spec(format, n, k, activation, wide))
    return traced_linear(x, weight, bias, format, n, k, activation, wide)


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, format: str, n: int, k: int, activation: str,
    wide: bool,
) -> torch.Tensor:  # fmt: skip
    """The op qgemm::linear in terms of the others."""
    if differentiated(x, bias):
        return Product.apply(x, weight, bias, format, n, k, activation, wide)
    return traced_linear_forward(x, weight, bias, product_spec(format, n, k, activation, wide))


library.impl("linear", _linear, "CompositeImplicitAutograd")

"""Observe every product of a model by a weight: the squares of its inputs and, on request, its Fisher information.

Dense weights are recognized by their memory in the call itself, linear(x, W) or x @ W, whichever layer makes it; one
expert of a parameter [experts, N, K] by its offset there. Packed layers are observed by hooks.

Latent attention (DeepSeek 2 and 3) expands keys and values from a vector of each token, c, by one matrix. llama.cpp
multiplies queries by its part k_b, and sums of c that the attention weights by its part v_b. The inputs of k_b are
thus queries, and the inputs of v_b are the result of an attention that has c in place of the values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from qgemm.errors import QgemmError
from qgemm.experts import moe_matmul
from qgemm.files.imatrix_sums import Sums
from qgemm.gating import gated_by
from qgemm.routing import GATE_OF
from qgemm.torch.experts import QExperts
from qgemm.torch.linear import QLinear
from qgemm.torch.model_experts import LAYER, PARTS, tensor_name

from .models import TextModel

# A function of torch -> the positions of x and W among its arguments.
PRODUCTS: dict[Any, tuple[int, int]] = {
    functional.linear: (0, 1), torch.matmul: (0, 1), torch.Tensor.matmul: (0, 1), torch.Tensor.__matmul__: (0, 1),
    torch.mm: (0, 1), torch.addmm: (1, 2),
}  # fmt: skip


ATTENTION = functional.scaled_dot_product_attention
LATENT_KEYS = "attn_k_b.weight"


class Latent(NamedTuple):
    """Keys and values that one matrix has expanded from c [tokens, rank], before the attention uses them."""

    keys: str
    values: str
    c: Any


class Parameter(NamedTuple):
    """A weight of the model: llama.cpp's names of its matrices, and the offset and stride of its experts."""

    names: tuple[str, ...]
    offset: int
    stride: int  # elements of one expert; 0: there is one matrix
    experts: int


class Accumulator:
    """The sums of one matrix, on the model's device."""

    def __init__(self, experts: int, k: int, device: torch.device) -> None:
        self.squares = torch.zeros(experts, k, dtype=torch.float64, device=device)
        self.tokens = torch.zeros(experts, dtype=torch.float64, device=device)
        self.fisher = torch.zeros(experts, k, dtype=torch.float64, device=device)


class Observer(TorchFunctionMode):
    """Sums over everything that a model computes within the context.

    wants: whether a matrix of this name counts. gradients: also sum the Fisher information of columns, which needs a
    backward pass; without one it is zero.
    """

    def __init__(self, text_model: TextModel, wants: Callable[[str], bool], gradients: bool = False) -> None:
        super().__init__()
        self.text_model, self.wants, self.gradients = text_model, wants, gradients
        self.sums: dict[str, Accumulator] = {}
        self.last: tuple[Any, Any] = (None, None)  # an input and its squares: Q, K and V share one
        self.latent: Latent | None = None
        self.stack = ExitStack()
        model = text_model.model
        self.parameters: dict[int, Parameter] = {}
        for name, parameter in model.named_parameters():
            names = self._counted_names(name) if parameter.dim() in (2, 3) and parameter.is_floating_point() else ()
            if names:
                experts, stride = (parameter.shape[0], parameter.stride(0)) if parameter.dim() == 3 else (1, 0)
                storage = parameter.untyped_storage().data_ptr()
                self.parameters[storage] = Parameter(names, parameter.storage_offset(), stride, experts)

    def _counted_names(self, name: str) -> tuple[str, ...]:
        return tuple(filter(self.wants, self.text_model.gguf_names(name)))

    def __enter__(self) -> Observer:
        for name, module in self.text_model.model.named_modules():
            if isinstance(module, QLinear) and (names := self._counted_names(f"{name}.weight")):
                self._observe_linear(module, names)
            elif isinstance(module, QExperts) and (layer := LAYER.search(name)):
                self._observe_experts(module, layer[1])
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self.stack.close()
        self.last, self.latent = (None, None), None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function; if it multiplies by a weight of the model, count it."""
        result = function(*args, **(kwargs or {}))
        if function is ATTENTION and self.latent is not None:
            self._count_latent(self.latent, result, args, kwargs or {})
            self.latent = None
        place = PRODUCTS.get(function)
        if place is None or len(args) <= place[1] or not isinstance(args[place[1]], torch.Tensor):
            return result
        x, w = args[place[0]], args[place[1]]
        parameter = self.parameters.get(w.untyped_storage().data_ptr()) if w.dim() == 2 else None
        if parameter is not None and parameter.names[0].endswith(LATENT_KEYS):
            keys, values = parameter.names
            self.latent = Latent(keys, values, x.detach().reshape(-1, x.shape[-1]))
        elif parameter is not None and w.device.type != "meta":
            expert = (w.storage_offset() - parameter.offset) // parameter.stride if parameter.stride else 0
            self._count(parameter.names, x, result, expert, parameter.experts)
        return result

    def _observe_linear(self, module: Any, names: tuple[str, ...]) -> None:
        def count(layer: Any, inputs: tuple[Any, ...], y: Any) -> None:
            self._count(names, inputs[0], y, 0, 1)

        self.stack.callback(module.register_forward_hook(count).remove)

    def _observe_experts(self, module: Any, layer: str) -> None:
        """Packed experts compute both products in one call: the input of the second is computed here once more."""
        gate, up, down = (tensor_name(layer, part, "weight") for part in PARTS)
        if self.gradients:
            rule = "no gradient flows through packed experts; measure the sensitivity on the Hugging Face folder"
            raise QgemmError(f"{self.text_model.path}: {rule}")

        def count(experts: Any, inputs: tuple[Any, ...]) -> None:
            x, ids = inputs[0].detach(), inputs[1]
            gates, ups = (
                moe_matmul(x, part.packed, ids, bias=part._parameters["bias"], dtype=x.dtype).float().cpu().numpy()
                for part in (experts.gate, experts.up)
            )
            gated = gated_by(GATE_OF[experts.activation], gates, ups)
            hidden = torch.from_numpy(np.ascontiguousarray(gated)).to(x.device)
            for expert in range(experts.num_experts):
                token, position = torch.where(ids == expert)
                self._count((gate, up), x[token], None, expert, experts.num_experts)
                self._count((down,), hidden[token, position], None, expert, experts.num_experts)

        self.stack.callback(module.register_forward_pre_hook(count).remove)

    def _count_latent(self, latent: Latent, result: Any, args: Any, kwargs: Any) -> None:
        """Count the inputs of k_b and v_b, heads side by side, in an attention over [1, heads, tokens, D].

        The gradients of k_b are those of keys, times the mean square of c over that of queries: only the product of
        squared input and squared gradient counts, which is that of the expansion of keys.
        """
        query, key, value, *others = args
        c = latent.c.expand(1, value.shape[1], -1, -1)
        with torch.no_grad():
            mean = ATTENTION(query, key, c, *others, **kwargs)
        plain = self.text_model.model.config.get_text_config().qk_nope_head_dim
        queries = _by_token(query.detach()[..., :plain])
        self._count((latent.keys,), queries, None, 0, 1)
        weighted = _by_token(mean)
        self._count((latent.values,), weighted, None, 0, 1)
        share = float(latent.c.square().mean() / queries.square().mean().clamp(min=1e-30))
        keys, values = (self.sums[name].fisher[0] for name in (latent.keys, latent.values))
        self._add_fisher(key, queries, [keys], lambda gradient: _by_token(gradient[..., :plain]) * share**0.5)
        self._add_fisher(result, weighted, [values], _by_token)

    def _add_fisher(
        self, y: Any, x: Any, targets: Sequence[Any], rows: Callable[[Any], Any] = lambda gradient: gradient
    ) -> None:
        """Add the Fisher information of columns to targets [K] when the gradient of y comes. x: its inputs [tokens, K].

        rows: from the gradient to rows [..., N], a row for each token.
        """
        if self.gradients and y is not None and y.requires_grad:

            def add(gradient: torch.Tensor) -> None:
                squares = rows(gradient).float().square().mean(-1).reshape(-1)
                total = (squares @ x.float().square()).double()
                for target in targets:
                    target += total

            y.register_hook(add)

    def _count(self, names: tuple[str, ...], x: Any, y: Any, expert: int, experts: int) -> None:
        """Count tokens x [..., K] of an expert and, when the gradient of y comes, the Fisher information."""
        rows = x.detach().reshape(-1, x.shape[-1])
        if self.last[0] is not x:
            self.last = x, rows.float().square().sum(0, dtype=torch.float64)
        accumulators = []
        for name in names:
            if name not in self.sums:
                self.sums[name] = Accumulator(experts, rows.shape[1], rows.device)
            accumulators.append(self.sums[name])
            accumulators[-1].squares[expert] += self.last[1]
            accumulators[-1].tokens[expert] += len(rows)
        self._add_fisher(y, rows, [accumulator.fisher[expert] for accumulator in accumulators])

    def result(self) -> dict[str, Sums]:
        """The sums by name; QgemmError if activations were NaN or infinite."""
        sums = {}
        for name, accumulator in self.sums.items():
            squares, tokens, fisher = (
                tensor.cpu().numpy() for tensor in (accumulator.squares, accumulator.tokens, accumulator.fisher)
            )
            if not (np.isfinite(squares).all() and np.isfinite(fisher).all()):
                raise QgemmError(f"{self.text_model.path}: the activations at {name} are NaN or infinite")
            sums[name] = Sums(squares, tokens, fisher if self.gradients else None)
        return sums


def _by_token(x: Any) -> Any:
    """[1, heads, tokens, D] as [tokens, heads D]."""
    return x[0].transpose(0, 1).flatten(1)

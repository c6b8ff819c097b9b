"""QLinear: torch.nn.Linear with a packed weight; LoRA: matrices of low rank beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from qgemm.arguments import check_activation
from qgemm.codec.format import Format
from qgemm.errors import ShapeError, UnsupportedError
from qgemm.packed import Packed

from .gradients import Product, differentiated, graph_linear
from .ops import PLAIN, check_tensor, is_compiling, one_line, product, traced, tracing
from .replay import Replay, replay_of
from .storage import packed_of
from .views import BUFFERS, ViewedModule

autocasting = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)  # on any device; called per forward


def cast_by_autocast(x: torch.Tensor) -> torch.Tensor:
    """x in autocast's type for its device, or unchanged."""
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(device))
    return x


class LoRA(torch.nn.Module):
    """scale * (x @ A.T) @ B.T, with parameters A [rank, K] and B [N, rank], which may be trained."""

    def __init__(self, A: torch.Tensor, B: torch.Tensor, scale: float = 1.0) -> None:
        """Parameters are used directly, so that they can be shared; other tensors become trainable parameters."""
        super().__init__()
        if A.dim() != 2 or B.dim() != 2 or A.shape[0] != B.shape[1]:
            raise ShapeError(f"LoRA is A [rank, K] and B [N, rank], got A {list(A.shape)} and B {list(B.shape)}")
        self.A, self.B = (m if isinstance(m, torch.nn.Parameter) else torch.nn.Parameter(m) for m in (A, B))
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N] in x's dtype, computed in A's."""
        y = functional.linear(functional.linear(x.to(self.A.dtype), self.A), self.B) * self.scale
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        """For repr."""
        return f"rank={self.A.shape[0]}, scale={self.scale}"


class QLinear(ViewedModule):
    """y [..., N] = x [..., K] @ weight.T + bias, the weight in the packed blocks of a .gguf file, never inflated.

    x: float16, bfloat16 or float32, on the layer's device (CPU or CUDA), any leading shape and strides; y has its
    dtype. Under autocast x is first cast to its dtype. Gradients flow to x and bias, by decoding the weight panel by
    panel, and to LoRA; the weight takes none. activation: "a16", or "a8" for activations quantized to Q8_1.

    weight: a parameter of bytes, uint8 [N, bytes per row] as in the file; on a GPU its tiles, padded to 64 rows and
    columns. `.to` moves it; dtypes affect the bias alone. Buffers beside it are `column_order` of a weight with
    act-order, and float32 `factor` or `divisor` of a scaled one (qgemm/torch/views.py).
    """

    rows, columns = "out_features", "in_features"
    in_features: int
    out_features: int
    lora: Any  # a ModuleDict by name; absent while empty
    _replay: Replay | None = None  # the latest call on the CPU, for others like it
    siblings: Any = None  # the Siblings that share a call with this layer (siblings.py), or None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        format: Format | str,
        bias: bool = True,
        activation: str = "a16",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """A layer of zeros, for a state dict, which also sets the format. dtype: of the bias."""
        super().__init__((out_features, in_features), format, device)
        empty = torch.zeros(out_features, device=device, dtype=dtype) if bias else None
        self._complete(empty, activation)

    def _complete(self, bias: torch.Tensor | None, activation: str) -> None:
        if bias is not None and tuple(bias.shape) != (self.out_features,):
            raise ShapeError(f"bias has shape {list(bias.shape)}, {self._shape} needs [{self.out_features}]")
        if bias is not None and not isinstance(bias, torch.nn.Parameter):
            bias = torch.nn.Parameter(bias, requires_grad=False)
        self.register_parameter("bias", bias)
        self.activation = check_activation(activation)
        if self.activation != "a16" and not self.format.integer:
            raise UnsupportedError(f"{self.format} has no integer codes for activation {self.activation!r}; use 'a16'")

    @classmethod
    def from_tensor(cls, tensor: Packed, bias: torch.Tensor | None = None, activation: str = "a16") -> QLinear:
        """A layer over the memory of a qgemm.Tensor [N, K], which may be in a mapped file, of a DeviceTensor or a view.

        bias: a tensor [N] of floats on the same device, or a parameter, which is used directly.
        """
        return cls._sharing(tensor, None, bias, activation)

    @classmethod
    def _sharing(
        cls, tensor: Packed, weight: torch.nn.Parameter | None, bias: torch.Tensor | None, activation: str
    ) -> QLinear:
        """`from_tensor`, with an existing parameter that holds the tensor's bytes, or None."""
        layer = cls.__new__(cls)
        torch.nn.Module.__init__(layer)
        layer._take(tensor, weight)
        layer._complete(bias, activation)
        return layer

    def add_lora(self, A: torch.Tensor, B: torch.Tensor, scale: float = 1.0, name: str = "default") -> LoRA:
        """Add scale * (x @ A.T) @ B.T to every y: A [rank, K], B [N, rank] -> the LoRA, in `lora[name]`.

        ShapeError for shapes that do not fit, UnsupportedError for a name in use.
        """
        needs = f"{one_line(self)} needs A [rank, {self.in_features}] and B [{self.out_features}, rank]"
        if A.dim() != 2 or B.dim() != 2 or (B.shape[0], A.shape[1]) != self._shape:
            raise ShapeError(f"{needs}, got A {list(A.shape)} and B {list(B.shape)}")
        if name in self._modules.get("lora", ()):
            raise UnsupportedError(f"there is a LoRA {name!r} already; remove_lora({name!r}) takes it away")
        added = LoRA(A, B, scale)
        self._modules.setdefault("lora", torch.nn.ModuleDict())[name] = added
        return added

    def remove_lora(self, name: str = "default") -> None:
        """Remove a LoRA; UnsupportedError if there is none of that name."""
        loras = self._modules.get("lora", {})
        if name not in loras:
            raise UnsupportedError(f"there is no LoRA {name!r}; there are: {', '.join(loras) or 'none'}")
        del loras[name]
        if not len(loras):
            del self._modules["lora"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> y [..., N]."""
        compiling = is_compiling()
        if not compiling:
            replay = self._replay
            if replay is not None:
                y = replay(self, x)
                if y is not None:
                    return y
            if type(x) not in PLAIN:
                check_tensor(x, self)
            elif (
                self.siblings is None and type(self) is QLinear
                and not (self._buffers or self._modules or autocasting() or x.is_meta or tracing())
            ):  # fmt: skip
                weight, bias = self._parameters["weight"], self._parameters["bias"]
                if not differentiated(x, bias):  # y is the product alone
                    packed = packed_of(weight, self._format, self._shape, self.tensor_name)
                    y = product(x, packed, bias, self.activation)
                    self.__dict__["_replay"] = replay_of(self, x, packed)  # torch's own setter costs a microsecond
                    return y
        y = None if self.siblings is None else self.siblings.product(self, x)
        if y is None:
            y = self._linear(cast_by_autocast(x) if compiling or autocasting() else x)
        if "lora" in self._modules:
            x = cast_by_autocast(x)
            for added in self.lora.values():
                y = y + added(x)
        return y

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copies, which have calls of their own."""
        return {name: value for name, value in self.__dict__.items() if name != "_replay"}

    def _linear(self, x: torch.Tensor) -> torch.Tensor:
        bias = self._parameters["bias"]
        if not self._buffers:
            return self._product(x, bias, False)
        if not self.wide:
            return self._product(self.gathered(x), bias, False)
        y = self.scaled(self._product(self.gathered(x), None, True))
        return (y if bias is None else y + bias).to(x.dtype)

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None, wide: bool) -> torch.Tensor:
        n, k = self.out_features, self.in_features  # numbers, because torch.compile checks a tuple at every call
        if traced(x):
            return graph_linear(x, self.weight, bias, self._format, n, k, self.activation, wide)
        if differentiated(x, bias):
            return Product.apply(x, self.weight, bias, self._format, n, k, self.activation, wide)
        return product(x, self.packed, bias, self.activation, wide)

    def extra_repr(self) -> str:
        """For repr."""
        facts = f"in_features={self.in_features}, out_features={self.out_features}, format={self.format}"
        buffers = "".join(f", {name}" for name in BUFFERS if self._buffers.get(name) is not None)
        return f"{facts}, bias={self.bias is not None}, activation={self.activation}{buffers}"

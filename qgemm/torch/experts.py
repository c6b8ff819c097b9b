"""QExperts: the feed-forward layer of a mixture of experts, its weights packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qgemm.codec.format import Format
from qgemm.errors import ShapeError, UnsupportedError
from qgemm.experts import moe
from qgemm.packed import Packed
from qgemm.routing import GATE_OF, layer_of

from .gradients import differentiated, is_exporting
from .linear import autocasting
from .module import PackedModule
from .ops import check_tensor, is_compiling, traced, traced_moe
from .replay import Replay, replay_of_experts


class PackedExperts(PackedModule):
    """Weights [E, N, K] of the experts of a layer, a parameter of bytes as that of QLinear; with a bias [E, N] or None.

    On the CPU they are bytes [E, N, bytes of a row] as in the file, on a GPU tiles of one expert after the other.
    """

    rows, columns, axes = "out_features", "in_features", 3
    in_features: int
    out_features: int
    num_experts: int

    def __init__(
        self, shape: tuple[int, int, int], format: Format | str, bias: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """Experts of zero bytes [E, N, K], for a state dict. dtype: of the bias."""
        super().__init__(shape, format, device)
        self._complete(torch.zeros(shape[:2], device=device, dtype=dtype) if bias else None)

    def _complete(self, bias: torch.Tensor | None) -> None:
        self.num_experts = self._shape[0]
        if bias is not None and tuple(bias.shape) != self._shape[:2]:
            raise ShapeError(f"bias has shape {list(bias.shape)}, experts {self._shape} need {self._shape[:2]}")
        if bias is not None and not isinstance(bias, torch.nn.Parameter):
            bias = torch.nn.Parameter(bias, requires_grad=False)
        self.register_parameter("bias", bias)

    @classmethod
    def from_tensor(cls, tensor: Packed, bias: torch.Tensor | None = None) -> PackedExperts:
        """Experts over the memory of a qgemm.Tensor [E, N, K] or of DeviceExperts."""
        layer = cls.__new__(cls)
        torch.nn.Module.__init__(layer)
        layer._take(tensor)
        layer._complete(bias)
        return layer

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weights as a new tensor [E, N, K] on their device."""
        packed, device = self.packed, self.weight.device
        weights = torch.empty(self._shape, dtype=dtype, device=device)
        for expert in range(self.num_experts):
            weights[expert] = torch.from_dlpack(packed[expert].dequantize()).to(dtype)
        return weights

    def extra_repr(self) -> str:
        """For repr."""
        e, n, k = self._shape
        return f"experts={e}, in_features={k}, out_features={n}, format={self.format}, bias={self.bias is not None}"


class QExperts(torch.nn.Module):
    """y [T, K], the sum over a token's experts of weight * (g(x @ gate.T, x @ up.T) @ down.T), as `qgemm.moe`.

    gate, up, down: PackedExperts [E, F, K], [E, F, K] and [E, K, F], each with a bias or without. activation: g,
    "swiglu", "swiglu_oai", "geglu" or "geglu_tanh". x is float16, bfloat16 or float32; y has its dtype. No gradient
    flows through it.
    """

    _replay: Replay | None = None  # the latest call on the CPU, for others like it

    def __init__(
        self, experts: int, hidden: int, intermediate: int, formats: Sequence[Format | str],
        activation: str = "swiglu", bias: bool = False, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """A layer of zeros, for a state dict. formats: of gate, up and down."""
        super().__init__()
        shapes = ((experts, intermediate, hidden),) * 2 + ((experts, hidden, intermediate),)
        self.gate, self.up, self.down = (
            PackedExperts(shape, fmt, bias, device, dtype) for shape, fmt in zip(shapes, formats, strict=True)
        )
        self.activation = _checked(activation)

    @classmethod
    def from_tensors(
        cls, gate: Packed, up: Packed, down: Packed, biases: Sequence[Any] = (None, None, None),
        activation: str = "swiglu",
    ) -> QExperts:  # fmt: skip
        """A layer over the memory of Tensors, which may be in a mapped file, or of DeviceExperts.

        biases: of gate, up and down, tensors [E, N] or None.
        """
        layer_of((gate, up), down, None, activation)
        layer = cls.__new__(cls)
        torch.nn.Module.__init__(layer)
        layer.gate, layer.up, layer.down = (
            PackedExperts.from_tensor(tensor, bias) for tensor, bias in zip((gate, up, down), biases, strict=True)
        )
        layer.activation = _checked(activation)
        return layer

    @property
    def parts(self) -> tuple[PackedExperts, PackedExperts, PackedExperts]:
        """gate, up and down."""
        return self.gate, self.up, self.down

    @property
    def num_experts(self) -> int:
        """E."""
        return self.gate.num_experts

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """x [T, K], ids [T, top_k] of experts, the router's weights [T, top_k] -> y [T, K]."""
        replay = self._replay
        if replay is not None and not is_compiling():
            y = replay(self, hidden_states, top_k_index, top_k_weights)
            if y is not None:
                return y
        for tensor in (hidden_states, top_k_index, top_k_weights):
            check_tensor(tensor, self)
        x, parts = hidden_states, self.parts
        device = x.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        biases = [part._parameters["bias"] for part in parts]
        if differentiated(x, None) and not is_exporting():  # an exported program may be for inference alone
            raise UnsupportedError("no gradient flows through QExperts: run it under torch.no_grad()")
        if traced(x):
            shapes = [self.gate.num_experts, self.gate.out_features, self.gate.in_features]
            formats = [part._format for part in parts]
            return traced_moe(
                x, top_k_index, top_k_weights, [part.weight for part in parts], biases, formats, shapes, self.activation
            )  # fmt: skip
        tensors = [part.packed for part in parts]
        gate, up, down = tensors
        y = moe(
            x, (gate, up), down, top_k_index, top_k_weights.detach(), self.activation,  # type: ignore[arg-type]
            biases=biases, dtype=x.dtype,
        )  # fmt: skip
        if type(self) is QExperts and not autocasting():
            self.__dict__["_replay"] = replay_of_experts(self, x, top_k_index, top_k_weights, tensors)
        return y

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copies, which have calls of their own."""
        return {name: value for name, value in self.__dict__.items() if name != "_replay"}

    def extra_repr(self) -> str:
        """For repr."""
        return f"activation={self.activation}"


def _checked(activation: str) -> str:
    if activation not in GATE_OF:
        raise UnsupportedError(f"activation is {', '.join(map(repr, GATE_OF))}, got {activation!r}")
    return activation

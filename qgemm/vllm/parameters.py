"""Parameters that collect the tensors of a merged layer while vLLM loads a file, each cut to this rank's share.

vLLM's loaders call a parameter's `load_*` methods with whole tensors of the file. A tensor's format comes under another
name, before the bytes: vllm-gguf-plugin yields `qweight_type`, then `qweight`. Floats come as `weight`, without a type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.parameter import BasevLLMParameter

from qgemm.codec.format import Format
from qgemm.errors import UnsupportedError
from qgemm.formats import FORMATS
from qgemm.torch.serving import QKV, Shard, cut_columns, format_of

FLOATS = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}


class Collected:
    """The tensors of a layer by their place in it, and the formats that were announced for these places."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.data: dict[Any, torch.Tensor] = {}
        self.formats: dict[Any, Format] = {}

    def announce(self, number: int, place: Any = None) -> None:
        """Note the format of a place, or of several, by its number in ggml."""
        fmt = format_of(number, self.label)
        for key in place if isinstance(place, tuple) else (place,):
            self.formats[key] = fmt

    def format(self, place: Any, data: torch.Tensor) -> Format:
        """The format of a tensor that is loaded for a place."""
        if data.dtype in FLOATS:
            return FORMATS[FLOATS[data.dtype]]
        fmt = self.formats.get(place, self.formats.get(None))
        if fmt is None:
            raise UnsupportedError(f"{self.label}: the bytes of {place or 'the weight'} came before their type")
        return fmt

    def shards(self) -> list[Shard]:
        """The tensors in the order of their places; empties this record."""
        places = sorted(self.data, key=lambda place: QKV.get(place, place or 0))
        shards = [Shard(self.format(place, self.data[place]), self.data.pop(place)) for place in places]
        self.data.clear()
        return shards


class CollectingParameter(BasevLLMParameter):  # type: ignore[misc]
    """An empty parameter on the layer's device whose loaded tensors go into `collected`."""

    output_dim, input_dim = 0, 1
    collected: Collected

    def __init__(self, collected: Collected, weight_loader: Callable[..., Any], data: torch.Tensor) -> None:
        super().__init__(data=data, weight_loader=weight_loader)
        self.collected = collected

    def __new__(cls, collected: Collected, weight_loader: Callable[..., Any], data: torch.Tensor) -> Any:
        """A parameter over `data`."""
        return super().__new__(cls, data=data)

    def store(self, data: torch.Tensor, place: Any = None) -> None:
        """Keep a tensor, on the layer's device, in memory of its own if it is part of a larger one."""
        data = data.detach().to(self.device)
        whole = data.untyped_storage().nbytes() == data.numel() * data.element_size()
        self.collected.data[place] = data if whole and data.is_contiguous() else data.contiguous().clone()

    def load_column_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        """Keep this rank's rows."""
        rows = loaded_weight.shape[0] // self.tp_size
        self.store(loaded_weight.narrow(0, rows * self.tp_rank, rows))

    def load_row_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        """Keep this rank's columns, in whole blocks."""
        shard = Shard(self.collected.format(None, loaded_weight), loaded_weight)
        self.store(cut_columns(shard, self.tp_rank, self.tp_size, self.collected.label).data)

    def load_merged_column_weight(
        self, loaded_weight: torch.Tensor, shard_id: Any = None, shard_size: int | None = None, **_: Any
    ) -> None:
        """Keep this rank's rows of one of the merged tensors."""
        rows = loaded_weight.shape[0] if shard_size is None else shard_size
        self.store(loaded_weight.narrow(0, rows * self.tp_rank, rows), shard_id)

    def load_qkv_weight(
        self, loaded_weight: torch.Tensor, shard_id: Any = None, shard_size: int | None = None, num_heads: int = 1,
        **_: Any,
    ) -> None:  # fmt: skip
        """Keep this rank's rows of Q, K or V; num_heads: the number of ranks that share the same heads of K and V."""
        rows = loaded_weight.shape[0] if shard_size is None else shard_size
        rank = self.tp_rank if shard_id == "q" else self.tp_rank // num_heads
        self.store(loaded_weight.narrow(0, rows * rank, rows), shard_id)


def load_whole(param: CollectingParameter, loaded_weight: torch.Tensor, loaded_shard_id: Any = None) -> None:
    """The loader of layers that every rank holds whole."""
    param.store(loaded_weight, loaded_shard_id)


def type_parameter(collected: Collected, experts: bool) -> torch.nn.Parameter:
    """A parameter that announces the numbers of types it is loaded with, by the arguments that vLLM loads weights."""

    def load(param: Any, loaded_weight: torch.Tensor, loaded_shard_id: Any = None) -> None:
        collected.announce(int(loaded_weight), loaded_shard_id)

    def load_experts(
        param: Any, loaded_weight: torch.Tensor, weight_name: str, shard_id: str, expert_id: int,
        return_success: bool = False,
    ) -> bool | None:  # fmt: skip
        collected.announce(int(loaded_weight), shard_id)
        return True if return_success else None

    parameter = torch.nn.Parameter(torch.empty(0, dtype=torch.int64), requires_grad=False)  # as vLLM loads numbers
    parameter.weight_loader = load_experts if experts else load
    return parameter

"""Layers of serving engines over packed weights, shared by the adapters: merged layers, tables, experts.

    qgemm::linear_joined(x [..., K], bytes of the weights, bias, formats, Ns, K, activation) -> y [..., sum of Ns]

An engine merges layers that share x, such as those of Q, K and V, into one layer with one output; its tensors may have
different formats. Neighbours of one format become one weight, whose rows follow one another: a layer of one format has
one product, by `qgemm::linear_forward`, which stores y directly.

`hold` puts packed weights into a layer of the engine. Their descriptions are the layer's attribute `qgemm_weights`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import groupby
from typing import Any, NamedTuple

import torch
from gguf import gguf_reader, quants

from qgemm.codec.format import Format
from qgemm.errors import ShapeError, UnsupportedError
from qgemm.formats import GGML_TYPES
from qgemm.ops import matmul_many

from . import ops
from .patching import Patched
from .storage import packed_of, spelled

Shape = tuple[int, ...]

QKV = {"q": 0, "k": 1, "v": 2}  # order of these tensors in a merged layer; others are numbered
INTERLEAVED = ("llama", "mistral", "mixtral", "granite")  # model types whose files interleave halves of rotary pairs
FILE_TYPES = IntEnum("FILE_TYPES", {fmt.name.upper(): number for number, fmt in GGML_TYPES.items()})  # type: ignore[misc]
ROTARY = re.compile(r"\.self_attn\.([qk])_proj\.(qweight|weight|bias)$")

_library = torch.library.Library("qgemm", "FRAGMENT")
_library.define(
    "linear_joined(Tensor x, Tensor[] weights, Tensor? bias, str[] formats, int[] ns, int k, str activation) -> Tensor"
)
_traced_linear_joined = torch.ops.qgemm.linear_joined.default


class Shard(NamedTuple):
    """A tensor of the file: its format, and its bytes uint8 [..., bytes per row] or floats [..., K]."""

    format: Format
    data: torch.Tensor

    @property
    def columns(self) -> int:
        """K."""
        nbytes: int = self.data.shape[-1] * self.data.element_size()
        return nbytes // self.format.block_bytes * self.format.weights


class Weight(NamedTuple):
    """A packed weight of a layer: its parameter's name, its format as text, and [N, K], or [E, N, K] of experts."""

    name: str
    format: str
    shape: Shape


# ---------------------------------------------------------------- bytes -> weights


def format_of(number: int, label: str) -> Format:
    """The format with this number in ggml; UnsupportedError names the layer if qgemm does not multiply it."""
    fmt = GGML_TYPES.get(number)
    if fmt is None or fmt.levels is None:
        raise UnsupportedError(f"{label}: type {number} of ggml is none that qgemm multiplies")
    return fmt


def packed_parameter(shard: Shard, shape: Shape) -> torch.nn.Parameter:
    """The bytes of a weight [N, K] or of experts [E, N, K] as a parameter; on a GPU they become tiles."""
    data = shard.data.detach().contiguous()
    with torch.inference_mode(False):
        parameter = torch.nn.Parameter(data.view(torch.uint8), requires_grad=False)
    packed_of(parameter, spelled(shard.format), shape)
    return parameter


def hold(layer: torch.nn.Module, names: Sequence[str], shards: list[Shard]) -> None:
    """Give a layer the packed weights of these shards, a parameter each, and empty the list.

    On a GPU no more than one of the weights exists twice: its bytes go when its tiles exist.
    """
    weights = []
    for name in names:
        shard = shards.pop(0)
        shape = (*shard.data.shape[:-1], shard.columns)
        layer.register_parameter(name, packed_parameter(shard, shape))
        weights.append(Weight(name, spelled(shard.format), shape))
    layer.qgemm_weights = tuple(weights)


def hold_joined(layer: torch.nn.Module, name: str, shards: list[Shard]) -> None:
    """`hold` for shards of one output, whose neighbours of one format become one weight; the first has this name."""
    joined = []
    for fmt, run in groupby(shards.copy(), key=lambda shard: shard.format):
        data = [shard.data for shard in run]
        del shards[: len(data)]
        joined.append(Shard(fmt, data[0] if len(data) == 1 else torch.cat(data)))
    hold(layer, [name, *(f"{name}_{number}" for number in range(1, len(joined)))], joined)


def packed_weights(model: torch.nn.Module) -> Iterator[Any]:
    """The Tensors and DeviceTensors over the weights that `hold` gave to the modules of a model."""
    for module in model.modules():
        for name, fmt, shape in getattr(module, "qgemm_weights", ()):
            yield packed_of(getattr(module, name), fmt, shape)


# ---------------------------------------------------------------- shares of ranks


def check_columns(fmt: Format, columns: int, ranks: int, label: str) -> None:
    """ShapeError, which names the numbers that fit, unless that many ranks can cut columns where blocks end."""
    if columns % (fmt.weights * ranks) == 0:
        return
    blocks = columns // fmt.weights
    fitting = ", ".join(str(number) for number in range(1, blocks + 1) if blocks % number == 0)
    raise ShapeError(
        f"{label}: {columns} columns of {fmt} are {blocks} blocks of {fmt.weights}, which {ranks} ranks cannot share "
        f"evenly; numbers of ranks that can: {fitting}"
    )


def cut_columns(shard: Shard, rank: int, ranks: int, label: str) -> Shard:
    """A rank's columns of a weight [..., K], in whole blocks."""
    check_columns(shard.format, shard.columns, ranks, label)
    width = shard.data.shape[-1] // ranks
    return Shard(shard.format, shard.data.narrow(-1, width * rank, width))


# ---------------------------------------------------------------- products


def linear(layer: Any, x: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """y [..., N] of a layer, the products by its weights side by side."""
    weights: tuple[Weight, ...] = layer.qgemm_weights
    return products_of([getattr(layer, w.name) for w in weights], weights, x, bias, activation)


def products_of(
    parameters: Sequence[torch.Tensor], weights: Sequence[Weight], x: torch.Tensor, bias: torch.Tensor | None = None,
    activation: str = "a16",
) -> torch.Tensor:  # fmt: skip
    """y [..., N] of packed weights, their products side by side."""
    y: torch.Tensor
    if len(weights) == 1:
        n, k = weights[0].shape
        spec = ops.product_spec(weights[0].format, n, k, activation, False)
        y = (ops.traced_linear_forward if ops.traced(x) else ops.linear_forward)(x, parameters[0], bias, spec)
        return y
    formats, ns = [w.format for w in weights], [w.shape[0] for w in weights]
    joined = _traced_linear_joined if ops.traced(x) else _linear_joined
    y = joined(x, parameters, bias, formats, ns, weights[0].shape[1], activation)
    return y


def embedding(layer: Any, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a layer's table by their index."""
    (table,) = layer.qgemm_weights
    return rows_of(getattr(layer, table.name), table, index, dtype)


def rows_of(parameter: torch.Tensor, weight: Weight, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of one packed weight by their index."""
    n, k = weight.shape
    function = ops.traced_embedding if ops.traced(index) else ops.embedding
    rows: torch.Tensor = function(index, parameter, weight.format, n, k, dtype)
    return rows


def experts(
    layer: Any, x: torch.Tensor, ids: torch.Tensor, factors: torch.Tensor, function: str, scales_x: bool = False
) -> torch.Tensor:
    """y [T, K] of a layer with gate, up and down; an id of -1, of an expert on another rank, adds nothing.

    ids, factors: [T, top_k] of the router. scales_x: whether the factors multiply x, not y, which models with one
    expert a token ask for.
    """
    if scales_x:
        if ids.shape[1] != 1:
            raise UnsupportedError(f"factors of the router multiply x of one expert a token, not of {ids.shape[1]}")
        x, factors = x * factors.to(x.dtype), torch.ones_like(factors)
    if x.device.type == "cpu":  # kernels of a GPU skip these ids
        present = ids >= 0
        ids, factors = ids.where(present, 0), factors.where(present, 0)
    weights: tuple[Weight, ...] = layer.qgemm_weights
    y: torch.Tensor = (ops.traced_moe if ops.traced(x) else ops.experts)(
        x,
        ids,
        factors,
        [getattr(layer, w.name) for w in weights],
        [None] * len(weights),
        [w.format for w in weights],
        weights[0].shape,
        function,
    )
    return y


def _linear_joined(
    x: torch.Tensor, weights: Sequence[torch.Tensor], bias: torch.Tensor | None, formats: Sequence[str],
    ns: Sequence[int], k: int, activation: Any,
) -> torch.Tensor:  # fmt: skip
    packed = [packed_of(w, fmt, (n, k)) for w, fmt, n in zip(weights, formats, ns, strict=True)]
    if bias is not None and bias.device.type == "cpu":
        bias = bias.detach().clone()  # NumPy would pin its storage
    biases = None if bias is None else bias.split_with_sizes(ns)
    if x.numel() == k:  # parts of one row of y are contiguous, so that kernels can store into them
        y = x.new_empty((*x.shape[:-1], sum(ns)))
        matmul_many(x, packed, activation, biases=biases, outs=y.split_with_sizes(ns, -1))
        return y
    return torch.cat(matmul_many(x, packed, activation, biases=biases, dtype=x.dtype), -1)


def _fake_linear_joined(
    x: torch.Tensor, weights: Sequence[torch.Tensor], bias: torch.Tensor | None, formats: Sequence[str],
    ns: Sequence[int], k: int, activation: str,
) -> torch.Tensor:  # fmt: skip
    torch._check(x.dim() > 0 and x.shape[-1] == k, lambda: f"x has shape {tuple(x.shape)}, the weight needs K = {k}")
    return x.new_empty((*x.shape[:-1], sum(ns)))


for _device in ("CPU", "CUDA"):
    _library.impl("linear_joined", _linear_joined, _device)
torch.library.register_fake("qgemm::linear_joined", _fake_linear_joined, lib=_library)


def read_all_types(patched: Patched) -> None:
    """Let the package gguf read all types of GGML_TYPES: its reader refuses files with a number that it lacks."""
    sizes = {number: (fmt.weights, fmt.block_bytes) for number, fmt in GGML_TYPES.items()}
    patched.replace(gguf_reader, "GGMLQuantizationType", FILE_TYPES)
    for module in (gguf_reader, quants):
        patched.replace(module, "GGML_QUANT_SIZES", sizes)


def in_halves(weights: Iterable[tuple[str, torch.Tensor]], config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a file by their names in the model, with rows of Q and K in the order that engines expect.

    In a head the first numbers of rotary pairs come first. Engines' loaders leave them as llama.cpp orders them.
    config: of transformers.
    """
    if config.model_type not in INTERLEAVED:
        yield from weights
        return
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    for name, tensor in weights:
        match = ROTARY.search(name)
        if match:
            pairs = tensor.reshape(heads[match[1]], -1, 2, *tensor.shape[1:])
            tensor = pairs.transpose(1, 2).reshape(tensor.shape)
        yield name, tensor

"""Tensors that a checkpoint fuses, split into llama.cpp's tensors under Hugging Face's names.

Each function returns the parts of one tensor, or the tensor itself; tensors that do not fit are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from qgemm.errors import CheckpointError

from .hyperparameters import Config
from .weight import Weight, numbers_of, weight_from_numbers
from .weight_views import reorder_rows, reshaped, transpose_matrices

Refusal = Callable[[str, str], CheckpointError]  # (tensor name, rule) -> the error
Split = Callable[[Weight, Config, Refusal], list[Weight]]


def joined_experts(weight: Weight, config: Config, refusal: Refusal) -> list[Weight]:
    """Split gate and up projections of all experts, [X, 2 M, E] with gates first; down projections are [X, E, M]."""
    stem = weight.name.removesuffix(".weight")
    if stem.endswith("experts.down_proj"):
        return [renamed_to(weight, f"{stem}.weight")]
    if not stem.endswith("experts.gate_up_proj"):
        return [weight]
    _check_axes(weight, 3, refusal)
    rows, stem = _even(weight, weight.shape[1], refusal), stem.removesuffix("gate_up_proj")
    return [
        renamed_to(reorder_rows(weight, np.arange(start, start + rows // 2), rows), f"{stem}{part}_proj.weight")
        for part, start in (("gate", 0), ("up", rows // 2))
    ]


def gpt_oss_experts(weight: Weight, config: Config, refusal: Refusal) -> list[Weight]:
    """Split gate and up projections whose rows alternate, [X, 2 M, E]; all but MXFP4 are stored transposed."""
    name = weight.name
    if name.endswith(".sinks"):
        return [renamed_to(weight, f"{name}.weight")]
    if name.endswith("experts.down_proj_bias"):
        return [renamed_to(weight, name.replace("_bias", ".bias"))]
    if name.endswith("experts.gate_up_proj_bias"):
        _check_axes(weight, 2, refusal)
        columns, stem = _even(weight, weight.shape[1], refusal), name.removesuffix("gate_up_proj_bias")
        both = numbers_of(weight)(0, weight.size).reshape(-1, columns)
        return [weight_from_numbers(f"{stem}{part}_proj.bias", both[:, i::2]) for i, part in enumerate(("gate", "up"))]
    if not name.endswith(("experts.down_proj", "experts.gate_up_proj")):
        return [weight]
    _check_axes(weight, 3, refusal)
    matrix = weight if weight.quantized else transpose_matrices(weight)
    if name.endswith("down_proj"):
        return [renamed_to(matrix, f"{name}.weight")]
    stem = name.removesuffix("gate_up_proj")
    _even(weight, matrix.shape[1], refusal)
    return [
        renamed_to(reorder_rows(matrix, np.array([i]), 2), f"{stem}{part}_proj.weight")
        for i, part in enumerate(("gate", "up"))
    ]


def heads_of_three(weight: Weight, config: Config, refusal: Refusal) -> list[Weight]:
    """Reorder [H, 3, D] rows, where each head has its query, key and value, into all queries, keys, values."""
    if "query_key_value" not in weight.name:
        return [weight]
    heads = config.need("num_attention_heads")
    return [_regrouped(weight, heads, 3, [[0], [1], [2]], refusal)]


def groups_of_heads(weight: Weight, config: Config, refusal: Refusal) -> list[Weight]:
    """Reorder falcon's rows [G, H / G + 2, D], where each group has its queries, key and value."""
    if "query_key_value" not in weight.name:
        return [weight]
    heads, groups = config.need("num_attention_heads"), config.need("num_key_value_heads")
    queries = heads // groups
    return [_regrouped(weight, groups, queries + 2, [list(range(queries)), [queries], [queries + 1]], refusal)]


def _regrouped(weight: Weight, groups: int, members: int, parts: list[list[int]], refusal: Refusal) -> Weight:
    """Rows [groups, members, D] in the order of the parts, each of which lists members of every group."""
    rows = weight.shape[0]
    if rows % (groups * members):
        raise refusal(weight.name, f"has {rows} rows, not {groups} groups of {members} heads")
    order = np.arange(rows).reshape(groups, members, -1)
    return reorder_rows(weight, np.concatenate([order[:, part].ravel() for part in parts]))


def transposed_products(weight: Weight, config: Config, refusal: Refusal) -> list[Weight]:
    """Transpose the matrices of GPT-2, which are stored as [K, N]."""
    names = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    if not weight.name.endswith(names):
        return [weight]
    _check_axes(weight, 2, refusal)
    return [transpose_matrices(weight)]


def granite_experts(weight: Weight, config: Config, refusal: Refusal) -> list[Weight]:
    """Split gate and up projections of all experts, [X, 2 M, E], or of the shared expert, [2 S, E], gates first."""
    stem, dot, last = weight.name.partition("input_linear.weight")
    if not dot or last:
        return [renamed_to(weight, weight.name.replace("shared_mlp.output_linear", "mlp.shared_expert.down_proj"))]
    _check_axes(weight, 2 if "shared_mlp." in stem else 3, refusal)
    stem = stem.replace("shared_mlp.", "mlp.shared_expert.").replace("block_sparse_moe.", "mlp.experts.")
    return halves(weight, f"{stem}gate_proj.weight", f"{stem}up_proj.weight", refusal)


def halves(weight: Weight, first: str, second: str, refusal: Refusal) -> list[Weight]:
    """The first and the second half of the rows of each matrix, under these names."""
    rows = _even(weight, weight.shape[-2], refusal)
    return [
        renamed_to(reorder_rows(weight, np.arange(start, start + rows // 2), rows), name)
        for name, start in ((first, 0), (second, rows // 2))
    ]


def transposed_experts(weight: Weight, config: Config, refusal: Refusal) -> list[Weight]:
    """Transpose the matrices of joined experts, [X, E, 2 M] and [X, M, E], and split gates and ups."""
    if not weight.name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return joined_experts(weight, config, refusal)
    _check_axes(weight, 3, refusal)
    return joined_experts(transpose_matrices(weight), config, refusal)


def either_experts(weight: Weight, config: Config, refusal: Refusal) -> list[Weight]:
    """Split joined experts that are transposed in older files; a matrix that fits both ways is not, to transformers."""
    size, hidden = config.need("moe_intermediate_size"), config.need("hidden_size")
    shapes = {"gate_up_proj": (hidden, 2 * size), "down_proj": (size, hidden)}
    shape = shapes.get(weight.name.rpartition("experts.")[2])
    transposed = shape is not None and weight.shape[1:] == shape != shape[::-1]
    return (transposed_experts if transposed else joined_experts)(weight, config, refusal)


def latent_attention(weight: Weight, config: Config, refusal: Refusal) -> list[Weight]:
    """Split DeepSeek's kv_b_proj [H (P + S), R] into k_b [H, R, P], transposed, and v_b [H, S, R]."""
    if not weight.name.endswith("kv_b_proj.weight"):
        return joined_experts(weight, config, refusal)
    _check_axes(weight, 2, refusal)
    keys, values, heads = (config.need(name) for name in ("qk_nope_head_dim", "v_head_dim", "num_attention_heads"))
    if weight.shape[0] != heads * (keys + values):
        raise refusal(weight.name, f"has {weight.shape[0]} rows, not {heads} heads of {keys} and {values}")
    rank = weight.shape[1]
    k_b = reorder_rows(weight, np.arange(keys), keys + values)
    v_b = reorder_rows(weight, np.arange(keys, keys + values), keys + values)
    return [
        renamed_to(transpose_matrices(reshaped(k_b, (heads, keys, rank))), weight.name.replace("kv_b", "k_b")),
        renamed_to(reshaped(v_b, (heads, values, rank)), weight.name.replace("kv_b", "v_b")),
    ]


def renamed_to(weight: Weight, name: str) -> Weight:
    """The weight under another name."""
    return replace(weight, name=name)


def _check_axes(weight: Weight, axes: int, refusal: Refusal) -> None:
    if len(weight.shape) != axes:
        raise refusal(weight.name, f"has shape {weight.shape}, where {axes} axes are needed")


def _even(weight: Weight, rows: int, refusal: Refusal) -> int:
    if rows % 2:
        raise refusal(weight.name, f"{rows} rows are no gates and as many ups")
    return rows

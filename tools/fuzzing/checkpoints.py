"""The rules for checkpoints: safetensors, shards, AWQ and GPTQ. See reference.py."""

from __future__ import annotations

import json
import re
from math import prod
from typing import Any

import numpy as np

from . import eight_bits, reference
from .reference import F32, I8, I32, Cursor, Files, Invalid, Tensor, Unsure, kbit, need, utf8

TYPES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E8M0": 1,
}  # fmt: skip
GGML = {"F32": F32, "F16": 1, "I8": I8, "BOOL": I8, "I32": I32, "U16": I32}  # unsigned ones are widened
CONFIGS = ("config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json")
SECTIONS = ("quantization_config", "compression_config", "quantization")
INDEX = ".safetensors.index.json"
MATRIX = ("qweight", "qzeros", "scales", "g_idx")
KNOWN = {  # fields of a config that this reference understands
    "quant_method", "bits", "w_bit", "group_size", "q_group_size", "checkpoint_format", "version", "sym", "desc_act",
    "weight_block_size",
}  # fmt: skip
SUSPECT = (  # name endings of packed tensors
    ".qzeros", ".weight_packed", ".weight_zero_point", ".bitmask", "_blocks", ".weight_scale", ".weight_scale_2",
    ".weight_scale_inv", ".quant_map", ".SCB", ".W_q", ".codebooks", ".Qidxs",
)  # fmt: skip


class Number(str):
    """A JSON number as text."""


def document(raw: bytes) -> Any:
    """Parse JSON without duplicate names; numbers with a point or an exponent are float."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        need(len(dict(pairs)) == len(pairs), "a name twice")
        return dict(pairs)

    def whole(digits: str) -> int | Number:
        need(len(digits) <= 32, "a long number")
        return Number(digits) if digits.startswith("-") else int(digits)

    try:
        return json.loads(utf8(raw), object_pairs_hook=once, parse_int=whole)
    except (ValueError, RecursionError):
        raise Invalid("JSON") from None


def safetensors(raw: bytes) -> dict[str, Tensor]:
    """The tensors of a file."""
    cursor = Cursor(raw)
    header = cursor.take(cursor.number("<Q"))
    need(header.startswith(b"{"), "no object")
    listed = document(header)
    start = cursor.position
    metadata = listed.pop("__metadata__", {})
    need(isinstance(metadata, dict), "metadata")
    need(all(type(text) is str for text in metadata.values()), "metadata")
    for text in (*listed, *metadata, *metadata.values()):
        need(text < "\ud800" or all(not 0xD800 <= ord(c) < 0xE000 for c in text), "a surrogate")
    places, tensors = [], {}
    for name, entry in listed.items():
        need(isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}, "keys of a tensor")
        kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        need(type(kind) is str and kind in TYPES, "dtype")
        for numbers in (shape, offsets):
            need(type(numbers) is list and all(type(n) is int and n < 2**63 for n in numbers), "numbers")
        need(len(offsets) == 2 and offsets[1] - offsets[0] == prod(shape) * TYPES[kind], "offsets")
        places.append((offsets[0], offsets[1]))
        tensors[name] = kind, tuple(shape), raw[start + offsets[0] : start + offsets[1]]
    places.sort()
    ends = [0, *(end for _, end in places)]
    need([first for first, _ in places] == ends[:-1] and start + ends[-1] == len(raw), "holes or overlaps")
    return tensors


def npz(files: Files, main: str) -> dict[str, tuple[tuple[int, ...], Any]]:
    """The arrays of an archive; names of packed tensors are Unsure."""
    arrays = reference.npz(files[main])
    if any(name.removesuffix(".npy").endswith((*SUSPECT, ".qweight")) for name in arrays):
        raise Unsure("names of other methods")
    return {name.removesuffix(".npy"): (shape, None) for name, (_, shape, _) in arrays.items()}


def checkpoint(files: Files, main: str) -> dict[str, tuple[tuple[int, ...], Any]]:
    """The tensors of a checkpoint: name -> (shape, values or None)."""
    tensors = index(files, main) if main.endswith(INDEX) else sharded(files, main)
    method = config(files)
    packed_tensors: dict[str, tuple[tuple[int, ...], Any]] = {}
    packed = {name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")}
    own = {f"{prefix}.{part}" for prefix in packed for part in MATRIX}
    parts = set(own)
    if "scaled_fp8" in tensors and 0 in tensors["scaled_fp8"][1]:
        parts.add("scaled_fp8")
    block = method if method is not None and len(method) == 2 else None
    for name, (kind, shape, _) in tensors.items():
        if kind in ("F8_E4M3", "F8_E5M2") and not name.endswith(".qweight") and name not in parts:
            others, values = eight_bits.matrix(name, tensors, block)
            parts |= others
            packed_tensors[name] = shape or (1,), values if len(shape) < 5 else None
    if any(name.endswith(SUSPECT) for name in tensors.keys() - parts):
        raise Unsure("names of other methods")
    need(not packed or (method is not None and len(method) > 2), "a packed tensor without a config")
    for prefix in packed:
        assert method is not None
        need(f"{prefix}.weight" not in tensors, "a tensor twice")
        packed_tensors[f"{prefix}.weight"] = matrix({part: tensors.get(f"{prefix}.{part}") for part in MATRIX}, *method)
    plain = {name: tensor for name, tensor in tensors.items() if name not in parts}
    others = {name: tensor for name, tensor in tensors.items() if name not in own}
    kbit({name: (GGML.get(kind, -1), shape or (1,), data) for name, (kind, shape, data) in others.items()})
    return {name: (shape, None) for name, (_, shape, _) in plain.items()} | packed_tensors


def sharded(files: Files, main: str) -> dict[str, Tensor]:
    """The tensors of a file and, if it is named as the first of several shards, of the other shards."""
    match = re.fullmatch(r"(.*)-00001-of-([0-9]{5})\.safetensors", main)
    if match is None:
        return safetensors(files[main])
    stem, count = match[1], int(match[2])
    names = [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    need(all(name in files for name in names), "a shard is missing")
    if f"{stem}{INDEX}" in files:
        tensors = index(files, f"{stem}{INDEX}")
        placed = document(files[f"{stem}{INDEX}"])["weight_map"]
        need(set(placed.values()) <= set(names), "an index of other files")
        need(all(safetensors(files[name]).keys() <= tensors.keys() for name in names), "a shard without a place")
        return tensors
    tensors = {}
    for name in names:
        held = safetensors(files[name])
        need(not held.keys() & tensors.keys(), "a tensor in two shards")
        tensors |= held
    return tensors


def index(files: Files, main: str) -> dict[str, Tensor]:
    """The tensors of all files of an index."""
    listed = document(files[main])
    need(isinstance(listed, dict), "no object")
    placed = listed.get("weight_map")
    need(isinstance(placed, dict) and all(type(file) is str for file in placed.values()), "weight_map")
    for file in placed.values():
        need(file.endswith(".safetensors") and "/" not in file and file in files, "a file that is not there")
    tensors: dict[str, Tensor] = {}
    for file in set(placed.values()):
        held = safetensors(files[file])
        need(all(placed.get(name) == file for name in held), "a tensor elsewhere")
        tensors |= held
    need(tensors.keys() == placed.keys(), "a tensor that is missing")
    return tensors


def config(files: Files) -> tuple[Any, ...] | None:
    """The method of the config. AWQ or GPTQ: name, bits, weights a group, version of zeros, symmetric, reordered.

    FP8: the rows and columns of a block.
    """
    methods = []
    for name in CONFIGS:
        if name not in files:
            continue
        need(files[name], "empty")
        parsed = document(files[name])
        need(isinstance(parsed, dict), "no object")
        holders = [parsed, *([parsed["text_config"]] if isinstance(parsed.get("text_config"), dict) else [])]
        sections = [holder[key] for holder in holders for key in SECTIONS if holder.get(key) is not None]
        sections = sections or ([] if name == CONFIGS[0] else [parsed])
        methods += [(name, method(section)) for section in sections]
    firsts = list(dict(reversed(methods)).values())[::-1]  # the first section of each file
    if not firsts:
        return None
    for other in firsts[1:]:
        same = len(other) == len(firsts[0]) and other[:4] + other[5:] == firsts[0][:4] + firsts[0][5:]
        symmetric = {first[4] for first in (other, firsts[0]) if len(first) > 4} - {None}
        need(same and len(symmetric) < 2, "configs that disagree")
    return firsts[0]


def method(section: Any) -> tuple[Any, ...]:
    """The method of one config section, see `config`."""
    need(isinstance(section, dict), "no object")

    def get(*keys: str, kind: type, default: Any = None) -> Any:
        values = [section[key] for key in keys if section.get(key) is not None]
        values = [int(value) if type(value) is Number else value for value in values]
        need(all(type(value) is kind and value == values[0] for value in values), "values")
        return values[0] if values else default

    guess = "awq" if "w_bit" in section else "modelopt" if "quant_algo" in section else None
    guess = guess or ("compressed-tensors" if "config_groups" in section else "gptq")
    name = get("quant_method", kind=str, default=guess).lower()
    if name in ("compressed-tensors", "modelopt", "modelopt_fp4", "mxfp4", "hqq", "bitsandbytes"):
        raise Unsure(name)
    if any(key not in KNOWN and value not in (None, False, "", [], {}) for key, value in section.items()):
        raise Unsure("another field")
    if name in ("fp8", "fbgemm_fp8"):
        block = get("weight_block_size", kind=list, default=list(eight_bits.BLOCK))
        need(len(block) == 2 and all(type(n) is int and 0 < n < 2**31 for n in block), "block")
        return tuple(block)
    need(name in ("awq", "gptq"), "method")
    bits, group = get("bits", "w_bit", kind=int), get("group_size", "q_group_size", kind=int)
    form = get("checkpoint_format", kind=str, default="gptq").lower()
    layout = get("version", kind=str, default="gemm").lower() if name == "awq" else form
    need(bits == 4 or (name == "gptq" and bits in (2, 3, 8)), "bits")
    need(group is not None and (group == -1 or group > 0), "group")
    need(layout in ("gemm", "gptq", "gptq_v2"), "layout")
    symmetric = get("sym", kind=bool)
    symmetric = symmetric if name == "gptq" else None
    reordered = get("desc_act", kind=bool, default=False)
    return name, bits, group, 2 if name == "awq" or form == "gptq_v2" else 1, symmetric, reordered


def matrix(
    parts: dict[str, Tensor | None], name: str, bits: int, group: int, version: int, symmetric: Any, reordered: bool
) -> tuple[tuple[int, ...], Any]:
    """A matrix [N, K]: its shape and its values."""
    qweight, qzeros, scales, g_idx = (parts[part] for part in MATRIX)
    need(qweight and qzeros and scales, "a part that is missing")
    assert qweight is not None
    assert qzeros is not None
    assert scales is not None
    need(qweight[0] == qzeros[0] == "I32" and scales[0] in ("F16", "BF16", "F32"), "types")
    need(len(qweight[1]) == len(qzeros[1]) == len(scales[1]) == 2, "axes")
    down, across = qweight[1]
    k, n = (down, across * 8) if name == "awq" else (down * 32 // bits, across)
    need(k and n and (name == "awq" or -(-k * bits // 32) == down), "no weights")
    group = k if group == -1 else group
    need(k % group == 0 and n % {2: 16, 3: 32, 4: 8, 8: 4}[bits] == 0, "groups")
    need(qzeros[1] == (k // group, n * bits // 32) and scales[1] == (k // group, n), "shapes")
    groups = np.arange(k) // group
    if g_idx is None:
        need(not reordered, "no order")
    else:
        need(g_idx[:2] == ("I32", (k,)), "order")
        groups = np.frombuffer(g_idx[2], "<i4")
        need((groups >= 0).all() and (groups < k // group).all(), "groups that are not there")
    if name == "awq":
        codes, zeros = (columns(np.frombuffer(part[2], "<u4").reshape(part[1])) for part in (qweight, qzeros))
    else:
        codes = bit_by_bit(np.frombuffer(qweight[2], "<u4").reshape(qweight[1]).T, bits)[:, :k].T
        zeros = bit_by_bit(np.frombuffer(qzeros[2], "<u4").reshape(qzeros[1]), bits)[:, :n]
    if version == 1:
        zeros = (zeros + 1) % (1 << bits)
    need(not symmetric or (zeros == 1 << bits - 1).all(), "zeros that are not symmetric")
    if scales[0] == "BF16":
        s = (np.frombuffer(scales[2], "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        s = np.frombuffer(scales[2], {"F16": "<f2", "F32": "<f4"}[scales[0]])
    with np.errstate(all="ignore"):
        values = (codes - zeros[groups]).astype(np.float32) * s.astype(np.float32).reshape(-1, n)[groups]
    return (n, k), values.T


def columns(words: Any) -> Any:
    """Words of AWQ [a, b] -> codes [a, 8 b] in column order; AWQ interleaves the eight columns of a word."""
    order = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of each column of eight
    return np.stack([words.astype(np.int64) >> 4 * nibble & 15 for nibble in order], -1).reshape(len(words), -1)


def bit_by_bit(words: Any, bits: int) -> Any:
    """Words [a, b] -> codes [a, 32 b / bits], read from the bits of each row, lowest bits first."""
    bit_values = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little").astype(np.int64)
    bit_values = bit_values[:, : bit_values.shape[1] // bits * bits].reshape(len(words), -1, bits)
    return bit_values @ (1 << np.arange(bits))

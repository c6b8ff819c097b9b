"""Checkpoints of other libraries, written code by code from the formats' descriptions, with their decoded values.

Each function writes a folder with one quantized matrix and a norm, and returns the weights [N, K] float32. Nothing here
knows the reader. `change` replaces parts, None leaves one out; `settings` adds to the config.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from files import pack_awq, safetensors

MODULE = "layer.q_proj"
E4M3 = ml_dtypes.float8_e4m3fn
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
], np.float32)  # fmt: skip
FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3], np.float32) / np.float32(12)


def stream(rows: np.ndarray, bits: int) -> np.ndarray:
    """Codes [n, count] -> int32 [n, words]: code i of a row at bit i * bits of one long integer."""
    size = -(-rows.shape[1] * bits // 32) * 4
    whole = [sum(int(code) << i * bits for i, code in enumerate(row)).to_bytes(size, "little") for row in rows]
    return np.frombuffer(b"".join(whole), "<i4").reshape(len(rows), -1).copy()


def write(
    folder: Path, parts: dict, settings: dict | None, change: dict | None = None, prefix: str = f"{MODULE}."
) -> None:
    """The parts under the prefix, a norm, and a config."""
    folder.mkdir(exist_ok=True)
    parts = {**parts, **(change or {})}
    tensors = {f"{prefix}{part}": np.asarray(array) for part, array in parts.items() if array is not None}
    safetensors(folder / "model.safetensors", {**tensors, "layer.norm.weight": np.ones(8, np.float16)})
    if settings is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))


def grouped(rng: np.random.Generator, n: int, k: int, bits: int, groups: int, scales: Any, zero: int | None) -> tuple:
    """Codes [n, k], zeros and scales [n, groups]."""
    codes = rng.integers(0, 2**bits, (n, k))
    zeros = rng.integers(0, 2**bits, (n, groups)) if zero is None else np.full((n, groups), zero)
    return codes, zeros, (rng.random((n, groups)) / 50 + 1e-3).astype(scales)


def decoded(codes: np.ndarray, zeros: np.ndarray, s: np.ndarray, group_of: np.ndarray) -> np.ndarray:
    """(code - zero) * scale, rounded once to float32; group_of [k]: the group of each column."""
    return (np.float32(codes - zeros[:, group_of]) * s.astype(np.float32)[:, group_of]).astype(np.float32)


def awq(folder: Path, *, group: int = 32, n: int = 16, k: int = 64, zero: int | None = None, scales: Any = np.float16,
        seed: int = 0, settings: dict | None = None, change: dict | None = None) -> np.ndarray:  # fmt: skip
    rng = np.random.default_rng(seed)
    size = k if group == -1 else group
    codes, zeros, s = grouped(rng, n, k, 4, k // size, scales, zero)
    parts = {"qweight": pack_awq(codes.T), "qzeros": pack_awq(zeros.T), "scales": s.T}
    write(folder, parts, {"quant_method": "awq", "bits": 4, "group_size": group, **(settings or {})}, change)
    return decoded(codes, zeros, s, np.arange(k) // size)


def gptq(
    folder: Path, *, bits: int = 4, group: int = 32, n: int = 32, k: int = 64, v2: bool = False, order: bool = False,
    zero: int | None = None, scales: Any = np.float16, seed: int = 0, settings: dict | None = None,
    change: dict | None = None,
) -> np.ndarray:  # fmt: skip
    """order: the columns of a group are anywhere (act-order)."""
    rng = np.random.default_rng(seed)
    size = k if group == -1 else group
    codes, zeros, s = grouped(rng, n, k, bits, -(-k // size), scales, zero)  # the last group may be short
    group_of = rng.permutation(np.arange(k) // size) if order else np.arange(k) // size
    stored = zeros if v2 else (zeros - 1) % 2**bits
    parts = {
        "qweight": stream(codes, bits).T, "qzeros": stream(stored.T, bits), "scales": s.T,
        "g_idx": group_of.astype(np.int32),
    }  # fmt: skip
    form = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": order}
    write(folder, parts, {**form, "checkpoint_format": "gptq_v2" if v2 else "gptq", **(settings or {})}, change)
    return decoded(codes, zeros, s, group_of)


def compressed(
    folder: Path, *, bits: int = 4, group: int = 32, n: int = 16, k: int = 64, symmetric: bool = True,
    scales: Any = ml_dtypes.bfloat16, packed_zeros: bool = True, order: bool = False, plain: bool = False,
    rows: int = 1, form: str = "", seed: int = 0, settings: dict | None = None, weights: dict | None = None,
    change: dict | None = None,
) -> np.ndarray:  # fmt: skip
    """Integers of compressed-tensors; group -1: a row, 0: the tensor; plain: not packed; rows: per scale."""
    rng = np.random.default_rng(seed)
    size = k if group < 1 else group
    middle = 1 << bits - 1
    codes, zeros, s = grouped(rng, n, k, bits, -(-k // size), scales, middle if symmetric else None)
    if group == 0:
        zeros, s = (np.broadcast_to(values[:1, :1], values.shape) for values in (zeros, s))
    stored_zeros, stored_scale = (values[:1, 0] if group == 0 else values[::rows] for values in (zeros, s))
    zeros, s = (np.repeat(values[::rows], rows, axis=0)[:n] for values in (zeros, s))
    group_of = rng.permutation(np.arange(k) // size) if order else np.arange(k) // size
    parts: dict[str, Any] = {"weight_scale": stored_scale}
    if plain:
        parts["weight"] = (codes - middle).astype(np.int8)
    else:
        parts |= {"weight_packed": stream(codes, bits), "weight_shape": np.array([n, k])}
    if not symmetric:
        packed = packed_zeros and group != 0 and rows == 1
        parts["weight_zero_point"] = stream(zeros.T, bits).T if packed else (stored_zeros - middle).astype(np.int8)
    if order:
        parts["weight_g_idx"] = group_of.astype(np.int32)
    strategy = {-1: "channel", 0: "tensor"}.get(group, "group")
    own = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": max(group, 0) or None,
    }
    if rows > 1:
        own |= {"strategy": "block", "group_size": None, "block_structure": [rows, group]}
    form = form or ("int-quantized" if plain else "pack-quantized")
    write(folder, parts, ct(form, {**own, **(weights or {})}, settings), change)
    return decoded(codes, zeros, s, group_of)


def ct(form: str, weights: dict, settings: dict | None = None) -> dict:
    """The config of a checkpoint of compressed-tensors with one group."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": groups,
        "ignore": [],
        **(settings or {}),
    }


def nibbles(codes: np.ndarray) -> np.ndarray:
    """Codes [n, k] -> bytes [n, k / 2]: the first of two in the low nibble."""
    return (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)


def nvfp4(folder: Path, *, n: int = 8, k: int = 128, modelopt: bool = False, factor: float = 0.37, seed: int = 0,
          settings: dict | None = None, change: dict | None = None) -> np.ndarray:  # fmt: skip
    rng = np.random.default_rng(seed)
    codes, scale = rng.integers(0, 16, (n, k)), (rng.random((n, k // 16)) * 400).astype(E4M3)
    f = np.float32(factor)
    s = scale.astype(np.float32) * f if modelopt else scale.astype(np.float32) / f
    names = ("weight", "weight_scale", "weight_scale_2") if modelopt else (
        "weight_packed", "weight_scale", "weight_global_scale")  # fmt: skip
    parts = dict(zip(names, (nibbles(codes), scale, f if modelopt else f.reshape(1)), strict=True))
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"} if modelopt else ct("nvfp4-pack-quantized", weights)
    write(folder, parts, {**config, **(settings or {})}, change)
    return E2M1[codes] * np.repeat(s, 16, axis=1)


def mxfp4(folder: Path, *, n: int = 8, k: int = 64, seed: int = 0, weights: dict | None = None,
          change: dict | None = None) -> np.ndarray:  # fmt: skip
    """MXFP4 of compressed-tensors."""
    rng = np.random.default_rng(seed)
    codes, e = rng.integers(0, 16, (n, k)), rng.integers(100, 140, (n, k // 32)).astype(np.uint8)
    own = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    config = ct("mxfp4-pack-quantized", {**own, **(weights or {})})
    write(folder, {"weight_packed": nibbles(codes), "weight_scale": e}, config, change)
    return E2M1[codes] * np.repeat(np.float32(2) ** (e.astype(np.float32) - 127), 32, axis=1)


def mxfp6(folder: Path, *, n: int = 8, k: int = 64, seed: int = 0, change: dict | None = None) -> np.ndarray:
    """MXFP6 of compressed-tensors: e2m3."""
    rng = np.random.default_rng(seed)
    codes, e = rng.integers(0, 64, (n, k)), rng.integers(100, 140, (n, k // 32)).astype(np.uint8)
    magnitude, exponent = codes & 7, codes >> 3 & 3
    numbers = np.where(exponent == 0, magnitude / 8, (1 + magnitude / 8) * 2.0 ** (exponent - 1))
    quads = codes.reshape(n, -1, 4) @ (1 << np.arange(0, 24, 6))
    packed = (quads[..., None] >> np.arange(0, 24, 8) & 255).astype(np.uint8).reshape(n, -1)
    own = {"num_bits": 6, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    write(folder, {"weight_packed": packed, "weight_scale": e}, ct("mxfp6-pack-quantized", own), change)
    scale = np.repeat(np.float32(2) ** (e.astype(np.float32) - 127), 32, axis=1)
    return np.copysign(numbers.astype(np.float32), np.where(codes >> 5, -1, 1)).astype(np.float32) * scale


def mxfp8(folder: Path, *, n: int = 8, k: int = 96, settings: dict | None = None, name: str = "weight_scale",
          scale_type: Any = np.uint8, seed: int = 0, change: dict | None = None) -> np.ndarray:  # fmt: skip
    """MXFP8 of compressed-tensors, ModelOpt or SGLang."""
    rng = np.random.default_rng(seed)
    w, e = rng.normal(size=(n, k)).astype(E4M3), rng.integers(100, 140, (n, k // 32)).astype(np.uint8)
    own = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    write(folder, {"weight": w, name: e.view(scale_type)}, settings or ct("mxfp8-quantized", own), change)
    return w.astype(np.float32) * np.repeat(np.float32(2) ** (e.astype(np.float32) - 127), 32, axis=1)


def fp8(folder: Path, *, n: int = 200, k: int = 320, grid: tuple = (2, 3), block: tuple = (128, 128),
        kind: Any = E4M3, settings: dict | None = None, seed: int = 0) -> np.ndarray:  # fmt: skip
    """grid: the shape of the scales; block: rows and columns that share one, (n, k) of the tensor, (1, k) of rows."""
    rng = np.random.default_rng(seed)
    w, s = rng.normal(size=(n, k)).astype(kind), (rng.random(grid) + 0.5).astype(np.float32)
    config = {"quant_method": "fp8", "weight_block_size": list(block), **(settings or {})}
    write(folder, {"weight": w, "weight_scale_inv": s}, config if settings is None or settings else None)
    of_blocks = s.reshape(-(-n // block[0]), -(-k // block[1]))
    return w.astype(np.float32) * of_blocks[np.arange(n)[:, None] // block[0], np.arange(k) // block[1]]


def gpt_oss(
    folder: Path, *, e: int = 3, n: int = 8, k: int = 64, seed: int = 0, change: dict | None = None
) -> np.ndarray:
    """Experts [E, N, K]."""
    rng = np.random.default_rng(seed)
    codes, exponents = rng.integers(0, 16, (e * n, k)), rng.integers(100, 140, (e, n, k // 32)).astype(np.uint8)
    parts = {"_blocks": nibbles(codes).reshape(e, n, k // 32, 16), "_scales": exponents}
    write(folder, parts, {"quant_method": "mxfp4", "modules_to_not_convert": ["router"]}, change, prefix=MODULE)
    return E2M1[codes].reshape(e, n, k) * np.repeat(np.float32(2) ** (exponents.astype(np.float32) - 127), 32, axis=-1)


def hqq(
    folder: Path, *, bits: int = 4, group: int = 64, n: int = 8, k: int = 128, axis: int = 1, scales: Any = np.float16,
    whole: bool = False, seed: int = 0, settings: dict | None = None, change: dict | None = None,
) -> np.ndarray:  # fmt: skip
    rng = np.random.default_rng(seed)
    count = n * k // group
    shape = (count, group) if axis == 1 else (group, count)
    codes = rng.integers(0, 2**bits, shape)
    across = (count, 1) if axis == 1 else (1, count)
    zero = (rng.random(across) * 2**bits).astype(scales)
    zero = np.rint(zero) if whole else zero
    scale = (rng.random(across) / 50 + 1e-3).astype(scales)
    packing, slots = {8: ("8bit_u8", 1), 4: ("4bit_u8", 2), 3: ("3bit_32", 10), 2: ("2bit_u8", 4), 1: ("1bit_u8", 8)}[
        bits
    ]
    rows = -(-shape[0] // slots)
    padded = np.zeros((rows * slots, shape[1]), np.int64)
    padded[: shape[0]] = codes
    packed = np.zeros((rows, shape[1]), np.int64)
    for slot in range(slots):
        packed |= padded[slot * rows : (slot + 1) * rows] << bits * (slots - 1 - slot)
    text = lambda word: np.frombuffer(word.encode(), np.uint8)  # noqa: E731
    parts = {
        "W_q": packed.astype(np.int32 if bits == 3 else np.uint8), "scale": scale, "zero": zero,
        "nbits": np.int32(bits), "axis": np.int32(axis), "group_size": np.int32(group), "shape": np.array([n, k]),
        "packing": text(packing), "view_as_float": np.uint8(0), "quant_scale": np.uint8(0), "quant_zero": np.uint8(0),
        "unpack_view_dtype": text("torch.uint8"), "compute_dtype": text("torch.float16"), "channel_wise": np.uint8(1),
        "offload_meta": np.uint8(0), "encoded_state_dict": np.uint8(1), "stores_quant_config": np.uint8(1),
        "optimize": np.uint8(1), "round_zero": np.uint8(0),
    }  # fmt: skip
    own = {"weight_quant_params": {"nbits": bits, "group_size": group, "axis": axis}}
    write(
        folder,
        parts,
        {"quant_method": "hqq", "quant_config": own, "skip_modules": ["lm_head"], **(settings or {})},
        change,
    )
    decoded_weights = (codes.astype(np.float32) - zero.astype(np.float32)) * scale.astype(np.float32)
    return decoded_weights.reshape(n, k)


def bitsandbytes(
    folder: Path, *, kind: str = "nf4", n: int = 8, k: int = 96, block: int = 64, nested: bool = True,
    storage: Any = np.uint8, seed: int = 0, settings: dict | None = None, state: dict | None = None,
    change: dict | None = None,
) -> np.ndarray:  # fmt: skip
    rng = np.random.default_rng(seed)
    codes, count = rng.integers(0, 16, n * k), -(-n * k // block)
    book = NF4 if kind == "nf4" else FP4
    padded = np.pad(codes, (0, n * k % 2))  # an odd number of weights leaves the last nibble unused
    packed = (padded[::2] << 4 | padded[1::2]).astype(np.uint8).view(storage)
    json_state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [n, k]}
    absmax = rng.random(count).astype(np.float32)
    parts = {"": packed[:, None], ".absmax": absmax, ".quant_map": book}
    if nested:
        levels, outer, offset = np.sort(rng.normal(size=256)).astype(np.float32), rng.random(1).astype(np.float32), 0.53
        offset = float(np.float32(offset))
        parts[".absmax"] = rng.integers(0, 256, count).astype(np.uint8)
        parts |= {".nested_absmax": outer, ".nested_quant_map": levels}
        json_state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        absmax = levels[parts[".absmax"]] * outer[0] + np.float32(offset)
    raw = json.dumps({**json_state, **(state or {})}).encode()
    parts[f".quant_state.bitsandbytes__{kind}"] = np.frombuffer(raw, np.uint8)
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": kind}
    write(folder, parts, {**config, **(settings or {})}, change, prefix=f"{MODULE}.weight")
    return (book[codes] * np.repeat(absmax, block)[: n * k]).astype(np.float32).reshape(n, k)


def bitsandbytes_int8(folder: Path, *, n: int = 8, k: int = 96, scales: Any = np.float32, seed: int = 0,
                      settings: dict | None = None, change: dict | None = None) -> np.ndarray:  # fmt: skip
    rng = np.random.default_rng(seed)
    codes, absmax = rng.integers(-127, 128, (n, k)).astype(np.int8), rng.random(n).astype(scales).astype(np.float32)
    parts = {"weight": codes, "SCB": absmax, "weight_format": np.array(0, np.uint8)}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True, "llm_int8_threshold": 6.0}
    write(folder, parts, {**config, **(settings or {})}, change)
    return codes * absmax[:, None] * np.float32(7.874015718698502e-3)

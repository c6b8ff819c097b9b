"""Small files for tests: sources of the converter, safetensors, tensors that are spoiled."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
from helpers import normal

import qgemm

METADATA = {
    "general.architecture": "llama",
    "general.file_type": np.uint32(1),
    "empty": "",
    "none": [],
    "no numbers": np.array([], np.int16),
    "words": ["", "a", "ä"],
    "half": np.float64(0.5),
}


def model(path: Path, tensors: dict | None = None, metadata: dict | None = None) -> Path:
    """A file of a few tensors as models have them."""
    tensors = tensors or {
        "token_embd.weight": normal(40, 64, seed=1).astype(np.float16),
        "blk.0.attn_q.weight": normal(96, 64, seed=2).astype(np.float16),
        "blk.0.attn_norm.weight": normal(64, seed=3),
        "blk.0.ffn_down.weight": normal(3, 8, 96, seed=4),
        "output.weight": normal(40, 64, seed=5),
    }
    qgemm.write(path, tensors, METADATA if metadata is None else metadata)
    return path


def ones(value: float = 1, shape: tuple[int, ...] = (2, 8)) -> dict[str, np.ndarray]:
    return {"w": np.full(shape, value, np.float32)}


def written(path: Path, tensors: dict, metadata: dict | None = None) -> Path:
    qgemm.write(path, tensors, metadata)
    return path


KINDS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "I8", "int16": "I16",
    "int32": "I32", "int64": "I64", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip


def safetensors(path: Path, tensors: dict[str, np.ndarray], metadata: dict | None = None) -> Path:
    header, data = {} if metadata is None else {"__metadata__": metadata}, b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": KINDS[array.dtype.name], "shape": list(array.shape), "data_offsets": offsets}
        data += raw
    return with_header(path, json.dumps(header).encode(), data)


def with_header(path: Path, header: bytes, data: bytes) -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def spoiled(tensor, field, value):
    """The tensor with a field of its blocks [1, ..., 2] set to a value."""
    blocks = tensor.blocks.copy()
    blocks[field][1, ..., 2] = value
    return qgemm.Tensor(tensor.format, tensor.shape, blocks)


def pack_awq(codes: np.ndarray) -> np.ndarray:
    """[rows, columns] -> int32 [rows, columns / 8]: nibble i of word c is column 8 c + order[i]."""
    rows, columns = codes.shape
    words = np.zeros((rows, columns // 8), np.uint32)
    for row in range(rows):
        for c in range(columns // 8):
            for i, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                words[row, c] |= np.uint32(int(codes[row, 8 * c + column]) << 4 * i)
    return words.view(np.int32)


def pack_down(codes: np.ndarray, bits: int) -> np.ndarray:
    """[rows, columns] -> int32 [rows * bits / 32, columns]: in plain order down the rows."""
    per_word = 32 // bits
    words = np.zeros((len(codes) // per_word, codes.shape[1]), np.uint32)
    for row in range(len(codes)):
        for column in range(codes.shape[1]):
            words[row // per_word, column] |= np.uint32(int(codes[row, column]) << bits * (row % per_word))
    return words.view(np.int32)


def imatrix(path: Path, names: list[str], k: int = 256, origin: bytes = b"") -> Path:
    """An importance matrix of the older kind; origin: the bytes that newer files append."""
    entries = b""
    for seed, name in enumerate(names):
        sums = np.random.default_rng(seed).uniform(1, 4, k).astype(np.float32)
        entries += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 1, k) + sums.tobytes()
    path.write_bytes(struct.pack("<i", len(names)) + entries + origin)
    return path

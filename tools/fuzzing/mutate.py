"""Mutations that follow the structure of files: fields, records, JSON trees, members of archives.

Each function accepts a random.Random first and returns a new value. Most mutations are small, so that readers get past
them and many files stay valid.
"""

from __future__ import annotations

import json
import struct
from random import Random
from typing import Any

WIDTHS = {"B": 8, "H": 16, "I": 32, "Q": 64}
EDGES = sorted(
    {0, 1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 33, 63, 64, 127, 128, 255, 256, 1000, 4096, 65535, 65536, 10**19}
    | {2**n + d for n in (31, 32, 53, 60, 61, 62, 63, 64) for d in (-8, -1, 0, 1)}
)
NAMES = (
    b"", b"w", b"a.weight", b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc3", "ä".encode(), b"a\0b",
    b"\x1b[2J", b"n" * 63, b"n" * 64, b"n" * 127, b"n" * 128, "\U0001f600".encode(), b"token_embd.weight",
    b"k.kbit_absmax", b"k.kbit_planes", b"k.kbit_codebook", b"w.in_sum2", b"w.counts", b"scaled_fp8",
    b"layer.qweight", b"layer.weight", b"layer.qzeros", b"layer.weight_scale", b"e_blocks", b"e_scales",
)  # fmt: skip
WORDS = (
    "", "F32", "F16", "BF16", "F64", "I8", "U8", "I32", "U64", "BOOL", "F8_E4M3", "F8_E5M2", "F31", "gptq", "awq",
    "fp8", "GPTQ", "gptq_v2", "gemm", "gemv", "marlin", "compressed-tensors", "modelopt", "bitsandbytes", "dense",
    "\u202e", "é", "m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors", "../m.safetensors", ".safetensors",
    "x\0.safetensors", "\ud800", "a" * 300, "__metadata__", "weight_map",
)  # fmt: skip


def number(rng: Random, old: int = 0) -> int:
    """A number that may be critical: an edge, or close to the old number."""
    if rng.random() < 0.5:
        return rng.choice(EDGES)
    return rng.choice((old + 1, old - 1, old * 2, old // 2, -old, old + 8, old + 32, old ^ 1 << rng.randrange(64)))


def packed(rng: Random, code: str, old: int = 0) -> bytes:
    """A number as a field."""
    return struct.pack(f"<{code}", number(rng, old) % (1 << WIDTHS[code]))


def name(rng: Random, old: bytes, others: list[bytes]) -> bytes:
    """Another name: an existing one, an odd one, or a small change."""
    pick = rng.random()
    if pick < 0.3 and others:
        return rng.choice(others)
    if pick < 0.8:
        return rng.choice(NAMES)
    return junk(rng, old)


def junk(rng: Random, raw: bytes) -> bytes:
    """Change, insert, remove or repeat some bytes, or cut off the end."""
    if not raw:
        return rng.randbytes(rng.randrange(4))
    start = rng.randrange(len(raw))
    size = min(rng.choice((1, 1, 1, 2, 4, 8, rng.randrange(1, 64))), len(raw) - start)
    pick = rng.randrange(9)
    if pick == 0:
        return raw[:start]
    if pick == 1:
        return raw[:start] + raw[start + size :]
    if pick == 2:
        return raw[: start + size] + raw[start:]
    if pick == 3:
        return raw[:start] + rng.randbytes(size) + raw[start:]
    if pick == 4:
        return raw[:start] + packed(rng, rng.choice("BHIQ")) + raw[start:]
    if pick == 5:
        other = rng.randrange(len(raw))
        return raw[:start] + raw[other : other + size] + raw[start + size :]
    if pick == 6:
        code = rng.choice("BHIQ")
        width = WIDTHS[code] // 8
        old = int.from_bytes(raw[start : start + width], "little")
        return raw[:start] + packed(rng, code, old) + raw[start + width :]
    if pick == 7:
        return raw[:start] + bytes([raw[start] ^ 1 << rng.randrange(8)]) + raw[start + 1 :]
    return (
        raw[:start]
        + rng.choice((b"\0", b"\xff", b" ", b"0", b"9", b"-", b'"', b",", b"{", b"[", b"}")) * size
        + raw[start + size :]
    )


def shuffled(rng: Random, records: list[Any]) -> list[Any]:
    """A copy of a list with one record removed, repeated or moved."""
    if not records:
        return records
    records = list(records)
    index = rng.randrange(len(records))
    pick = rng.randrange(3)
    if pick == 0:
        del records[index]
    elif pick == 1:
        records.insert(rng.randrange(len(records) + 1), records[index])
    else:
        records.insert(rng.randrange(len(records)), records.pop(index))
    return records


# ---------------------------------------------------------------- JSON


class Pairs(list[tuple[str, Any]]):
    """A JSON object in which names may be repeated."""


class Raw(str):
    """JSON text that is written unchanged."""


RAW = (
    "NaN",
    "Infinity",
    "-0",
    "1e999",
    "01",
    "1.0",
    "2.5e0",
    "9" * 30,
    "9" * 5000,
    "[" * 3000,
    "nul",
    "{}",
    "[]",
    "[[]]",
)


def tree(text: str) -> Any:
    """Parse JSON into a tree that can be changed."""
    return json.loads(text, object_pairs_hook=Pairs)


def dumped(rng: Random, node: Any) -> str:
    """A tree as JSON, with spaces and escapes or without."""
    comma, colon = rng.choice(((",", ":"), (", ", ": "), (" ,\n", " :\t")))
    escape = rng.random() < 0.5

    def dump(node: Any) -> str:
        if isinstance(node, Raw):
            return node
        if isinstance(node, Pairs):
            return "{" + comma.join(f"{dump(key)}{colon}{dump(value)}" for key, value in node) + "}"
        if isinstance(node, list):
            return "[" + comma.join(map(dump, node)) + "]"
        return json.dumps(node, ensure_ascii=escape)

    return dump(node)


def changed_tree(rng: Random, node: Any) -> Any:
    """A copy with one node changed."""
    if isinstance(node, list) and node and rng.random() < 0.85:
        if rng.random() < 0.12:
            return type(node)(shuffled(rng, node))
        index = rng.randrange(len(node))
        copy = type(node)(node)
        if isinstance(node, Pairs):
            key, value = node[index]
            if rng.random() < 0.15:
                others = [other for other, _ in node]
                key = rng.choice((*others, *WORDS, rng.choice(NAMES).decode("utf-8", "replace")))
            else:
                value = changed_tree(rng, value)
            copy[index] = key, value
        else:
            copy[index] = changed_tree(rng, node[index])
        return copy
    pick = rng.randrange(8)
    if isinstance(node, int) and pick < 4:
        return number(rng, node)
    if isinstance(node, str) and pick < 4:
        return rng.choice((rng.choice(WORDS), rng.choice(NAMES).decode("utf-8", "replace"), node + "x", node[:-1]))
    return rng.choice((number(rng), rng.choice(WORDS), None, True, False, Raw(rng.choice(RAW)), [], Pairs(), [0], 0.5))


def json_bytes(rng: Random, node: Any) -> bytes:
    """A tree as bytes; lone surrogates are encoded as UTF-8 would encode them."""
    return dumped(rng, node).encode("utf-8", "surrogatepass")


# ---------------------------------------------------------------- safetensors


class Safetensors:
    """A .safetensors file: the tree of its header, and its data."""

    def __init__(self, header: Any, data: bytes) -> None:
        self.header, self.data = header, data

    def changed(self, rng: Random) -> Safetensors:
        """A copy with one thing changed."""
        if rng.random() < 0.1:
            return Safetensors(self.header, junk(rng, self.data))
        return Safetensors(changed_tree(rng, self.header), self.data)

    def raw(self, rng: Random) -> bytes:
        """The file."""
        header = json_bytes(rng, self.header) + b" " * rng.choice((0, 0, 1, 8))
        size = len(header) if rng.random() < 0.95 else number(rng, len(header)) % 2**64
        return struct.pack("<Q", size) + header + self.data

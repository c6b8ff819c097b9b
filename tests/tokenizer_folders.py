"""Folders with tokenizers, and the metadata of the .gguf files that they become."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from hf_folders import folder

import qgemm

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL = {"type": "ByteLevel", "use_regex": False}


def split(expression: str) -> dict:
    return {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": expression}}, BYTE_LEVEL]}


def bpe(pre: dict | None = None, **model: object) -> dict:
    """A tokenizer.json of byte-level BPE."""
    vocabulary = {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4}
    return {
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [["a", "b"], ["ab", "c"]], **model},
        "pre_tokenizer": split(QWEN2) if pre is None else pre,
        "added_tokens": [
            {"id": 5, "content": "<|end|>", "special": True},
            {"id": 7, "content": "<tool>", "special": False},
        ],
    }


def keys(tmp_path: Path, architecture: str = "Qwen2ForCausalLM", **files: object) -> dict:
    """The metadata of the .gguf file of a folder with these files; values of _json are its names' objects."""
    path = folder(tmp_path / "m", architecture)
    for name, content in files.items():
        if isinstance(content, bytes):
            (path / name.replace("_model", ".model")).write_bytes(content)
        else:
            (path / f"{name.removesuffix('_json')}.json").write_text(json.dumps(content))
    qgemm.convert(path, tmp_path / "y.gguf", "f16", force=True)
    with qgemm.open(tmp_path / "y.gguf", copy=True) as file:
        return dict(file.metadata)


def digits(*steps: dict) -> dict:
    """A pre_tokenizer that takes each digit for itself, then other steps."""
    return {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, *steps]}


def piece(text: bytes, score: float = 0.0, kind: int | None = None) -> bytes:
    """A SentencePiece, as protobuf writes it."""
    data = b"\x0a" + bytes([len(text)]) + text + b"\x15" + struct.pack("<f", score)
    data += b"" if kind is None else b"\x18" + bytes([kind])
    return b"\x0a" + bytes([len(data)]) + data


PIECES = [(b"<unk>", 0.0, 2), (b"<s>", 0.0, 3), (b"<0x00>", 0.0, 6), ("\u2581a".encode(), -1.5, None), (b"b", -2.5, 1)]
MODEL = b"".join(piece(*fields) for fields in PIECES)

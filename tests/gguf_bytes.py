"""GGUF files put together byte by byte, and the recorded cases of tests/data/malformed."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
from helpers import DATA

from qgemm.errors import GGUFError
from qgemm.files.gguf.reader import open as open_gguf

MALFORMED = DATA / "malformed"


CASES = {case["id"]: case for case in json.loads((MALFORMED / "cases.json").read_text())["cases"]}


OURS = {  # cases that are a matter of policy, in which the rules here part from what cases.json suggests
    "TI-012": "reject",  # n_dims 1 to 5: a scalar has no row to be packed
    "OFF-015": "accept",  # a gap is waste, not ambiguity
    "OFF-016": "accept",  # as is another order
}


VERDICTS = {name: OURS.get(name, case["expect"]) for name, case in CASES.items()}


ACCEPTED = [name for name, verdict in VERDICTS.items() if verdict == "accept"]
REJECTED = [name for name, verdict in VERDICTS.items() if verdict == "reject"]
ONE = bytes(128)  # data of a float32 tensor of 32 weights
U8, U16, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 2, 5, 6, 7, 8, 9, 10


def case_path(name: str) -> Path:
    return MALFORMED / CASES[name]["file"]


def text(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, elements: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + elements


def tensor(name: bytes, ne: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, kind, offset)


def file_of(keys=(), tensors=(), data: bytes = b"", alignment: int = 32, version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join((*keys, *tensors))
    return head + bytes(-len(head) % alignment) + data


def saved(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def refused(path) -> str:
    """The message with which a file is refused, checked for what every message has to be."""
    with pytest.raises(GGUFError) as caught:
        open_gguf(path)
    message = str(caught.value)
    assert message.isascii()
    assert message.isprintable()
    assert len(message) < 800
    assert message.startswith(ascii(os.fsdecode(path))[1:-1] + ": ")
    return message.removeprefix(ascii(os.fsdecode(path))[1:-1] + ": ")

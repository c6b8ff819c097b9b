"""Kinds of files that are met in place of others, recognized by their first bytes, for the end of a message."""

from __future__ import annotations

import re

POINTER = b"version https://git-lfs"
SAFETENSORS = b'{"'  # at byte 8, after the size of the header
KINDS = (
    # (offset, bytes there, kind of file)
    (0, POINTER, "a git-lfs pointer, `git lfs pull` fetches the file itself"),
    (0, b"GGUF", "a GGUF file"),
    (0, b"FUGG", "a byte-swapped GGUF file"),
    (0, b"tjgg", "a GGJT file from before GGUF, convert the model again"),
    (0, b"fmgg", "a GGMF file from before GGUF, convert the model again"),
    (0, b"lmgg", "a GGML file from before GGUF, convert the model again"),
    (0, b"PK\3\4", "a zip archive, as PyTorch writes them"),
    (0, b"\x80\2", "a pickle, as PyTorch wrote before 1.6, which may run code: save it again"),
    (0, b"\x93NUMPY", "a .npy file"),
    (8, SAFETENSORS, "a safetensors file"),
)
PAGE = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*<[!?A-Za-z]")  # the beginning of HTML or XML
LONGEST = 64  # bytes that recognize a kind


def hint(start: bytes, magic: bytes = b"") -> str:
    """The end of the message about a refused file: ", it is KIND" if it starts like a file of another kind, else "".

    magic: that of the expected kind, which no hint names.
    """
    if PAGE.match(start[:LONGEST]):
        return ", it is a web page, perhaps in place of a download"
    kinds = (kind for offset, other, kind in KINDS if other != magic and start.startswith(other, offset))
    return next((f", it is {kind}" for kind in kinds), "")

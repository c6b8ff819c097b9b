"""JSON files of a checkpoint, its configs and its index, read as objects at bounded cost."""

from __future__ import annotations

import os
from typing import Any

from qgemm.errors import CheckpointError

from .json_parser import parse_object
from .kinds import POINTER, hint
from .limits import DATA_PER_BYTE, DATA_PER_TOKENIZER_BYTE, FREE_TEXT, longest_text
from .paths import RegularFile, shown, shown_path, system_errors

WEIGHTS = ".safetensors"


def shards(path: str) -> dict[str, str]:
    """Tensor name -> path of its file, from an index (model.safetensors.index.json)."""
    where = shown_path(path)
    files = json_object(path).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise CheckpointError(f"{where}: weight_map must be an object of file names")
    for file in dict.fromkeys(files.values()):
        if file != os.path.basename(file) or not file.endswith(WEIGHTS) or "\0" in file:
            raise CheckpointError(f"{where}: weight_map: {shown(file)} is not the name of a {WEIGHTS} file beside it")
    return {name: os.path.join(os.path.dirname(path), file) for name, file in files.items()}


def json_object(path: str) -> dict[str, Any]:
    """The object in a JSON file; CheckpointError for anything else, or a file too long for the weights beside it."""
    return _object(path, DATA_PER_BYTE)


def tokenizer_object(path: str) -> dict[str, Any]:
    """The object in a tokenizer's JSON, which may be longer: small models have the vocabularies of large ones."""
    return _object(path, DATA_PER_TOKENIZER_BYTE)


def _object(path: str, share: int) -> dict[str, Any]:
    return parse_object(_read(path, share), lambda rule: CheckpointError(f"{shown_path(path)}: {rule}"))


def text_file(path: str) -> str:
    """The text of a file beside weights; CheckpointError if it is not UTF-8 or too long for the weights."""
    raw, where = _read(path, DATA_PER_BYTE), shown_path(path)
    if raw.startswith(POINTER):
        raise CheckpointError(f"{where}: is not the text itself{hint(raw)}")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: is not UTF-8: {error}") from None


def _read(path: str, share: int) -> bytes:
    """The bytes of a file beside weights; share: the bytes of weights that allow one of text."""
    file = RegularFile(path, CheckpointError)
    try:
        if file.size > FREE_TEXT and file.size > (limit := longest_text(FREE_TEXT, _weights_beside(path), share)):
            rule = f"has {file.size} bytes, the weights beside it cannot need more than {limit}"
            raise CheckpointError(f"{shown_path(path)}: {rule}")
        return file.read(0, file.size).tobytes()
    finally:
        file.close()


def _weights_beside(path: str) -> int:
    """Bytes of the weights in a file's folder."""
    with system_errors(path, "read"), os.scandir(os.path.dirname(path) or ".") as entries:
        return sum(entry.stat().st_size for entry in entries if entry.name.endswith(WEIGHTS) and entry.is_file())

"""JSON files of a checkpoint, its configs and its index, read as objects at bounded cost."""

from __future__ import annotations

import json
import os
from typing import Any

from qgemm.errors import CheckpointError

from .limits import FREE_TEXT, longest_text
from .paths import RegularFile, shown, shown_path, system_errors

WEIGHTS = ".safetensors"
FREE_BRACKETS, BYTES_PER_BRACKET = 1 << 14, 16  # bounds: an empty list of 2 bytes costs 64 in memory
# Limit of a number: Python's conversion needs time quadratic in the digits. transformers writes 10^30, which has 31
# digits, for a tokenizer without a maximum length.
MAX_DIGITS = 32


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
    where = shown_path(path)
    file = RegularFile(path, CheckpointError)
    try:
        if file.size > FREE_TEXT and file.size > (limit := longest_text(FREE_TEXT, _weights_beside(path))):
            rule = f"has {file.size} bytes, the weights beside it cannot need more than {limit}"
            raise CheckpointError(f"{where}: {rule}")
        raw = file.read(0, file.size).tobytes()
    finally:
        file.close()
    if raw.count(b"[") + raw.count(b"{") > FREE_BRACKETS + len(raw) // BYTES_PER_BRACKET:
        raise CheckpointError(f"{where}: is made of brackets")
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_once, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: is not a JSON object")
    return value


def _weights_beside(path: str) -> int:
    """Bytes of the weights in a file's folder."""
    with system_errors(path, "read"), os.scandir(os.path.dirname(path) or ".") as entries:
        return sum(entry.stat().st_size for entry in entries if entry.name.endswith(WEIGHTS) and entry.is_file())


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name comes twice in an object")
    return values


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)

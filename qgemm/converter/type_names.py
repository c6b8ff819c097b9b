"""The names of types as users write them: those of formats, of other tools, and llama-quantize's numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

from qgemm.codec.format import Format
from qgemm.errors import UnsupportedError
from qgemm.formats import FORMATS, written
from qgemm.text import MAX_HINTS

from .mixture import ALIASES, FILE_TYPES, MIXTURES

SYNONYMS = {
    **dict.fromkeys(("fp32", "float32", "float"), "f32"),
    **dict.fromkeys(("fp16", "float16", "half"), "f16"),
    "bfloat16": "bf16",
}
NUMBERS = {  # llama-quantize accepts the number of a file type for its name
    **{str(file_type.number): name for name, file_type in FILE_TYPES.items()},
    "0": "f32", "1": "f16", "32": "bf16",
}  # fmt: skip
COPY = "copy"  # llama-quantize's word for a copy of every tensor


def format_and_mixture(kind: str | Format) -> tuple[Format, str]:
    """The format of a TYPE, and the file type that mixes it with others, "" if none does."""
    if isinstance(kind, str):
        name = NUMBERS.get(kind, kind.lower())
        name = ALIASES.get(name, name)
        if name in FILE_TYPES:
            return FORMATS[FILE_TYPES[name].default], name
        if name == COPY:
            raise UnsupportedError("copy is no format; f16 with --keep . leaves the type of every tensor as it is")
        kind = name
    try:
        return one_format(kind), ""
    except UnsupportedError as error:
        raise UnsupportedError(f"{error}; file types that mix them: {', '.join(MIXTURES).upper()}") from None


def one_format(kind: str | Format) -> Format:
    """The format of one tensor; UnsupportedError has the names that are near, and all that can be written."""
    if isinstance(kind, Format):
        return kind
    if kind.lower() in MIXTURES:
        default = FILE_TYPES[kind.lower()].default
        raise UnsupportedError(f"{kind} mixes several formats, one tensor has one of them, such as {default.upper()}")
    name = SYNONYMS.get(kind.lower(), kind)
    if name not in FORMATS:
        near = near_names(kind, [fmt.name for fmt in FORMATS.values() if fmt.encode is not None] + MIXTURES)
        hint = f"; near {kind!r} are {', '.join(near)}" if near else ""
        raise UnsupportedError(f"there is no format {kind!r}; those that can be written: {written()}{hint}")
    return FORMATS[name]


def near_names(text: str, names: Iterable[str]) -> list[str]:
    """The names that a text may mean: those that begin with it or are within it, close ones, those of as many bits."""
    key, by_key = _key(text), {_key(name): name for name in names}
    bits = re.search("[1-8]", key)
    candidates = [
        *(name for other, name in by_key.items() if key and other.startswith(key)),
        *(name for other, name in by_key.items() if other in key),
        *(by_key[other] for other in get_close_matches(key, by_key, MAX_HINTS)),
        *(name for other, name in by_key.items() if bits and other.startswith(f"q{bits[0]}")),
    ]
    return list(dict.fromkeys(candidates))[:MAX_HINTS]


def _key(name: str) -> str:
    """The letters and digits of a name."""
    return re.sub("[^a-z0-9]", "", name.lower())

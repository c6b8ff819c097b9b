"""llama.cpp's names of pre-tokenizers: how text is split before byte-level BPE merges pairs.

A name is looked up by the tokens of a test text, as llama.cpp's converter does (pre_tokenizers.json; this needs the
tokenizers package), else by the steps of the tokenizer.json.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from hashlib import sha256
from typing import Any

from qgemm.errors import CheckpointError
from qgemm.files.documents import json_object
from qgemm.files.paths import shown

_ENGLISH, _REST = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _REST
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    rf"|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
)
_O200K = _CASED % (_ENGLISH + "?", _ENGLISH + "?", "{1,3}")
_MARKS = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _REST
_CODE_AND_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|""" + _REST
)
_SEED = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|" + _REST
_LING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SENTENCES = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"
_CJK, _KANA = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
BYTES, PUNCTUATION, DIGIT, DIGITS = "ByteLevel", "Punctuation", r"\p{N}", "Digits"  # steps without a regex
# (steps that split text, whether whole tokens skip merging) -> llama.cpp's name.
NAMES: Mapping[tuple[tuple[str, ...], bool], str] = {
    ((_WORDS % "{1,3}",), True): "llama-bpe",
    ((_WORDS % "{1,3}",), False): "dbrx",
    ((_WORDS % "",), False): "qwen2",
    ((_O200K,), False): "gpt-4o",
    ((_O200K,), True): "gpt-4o",
    ((_CASED % ("", "", ""),), False): "tekken",
    ((_CASED % ("", "", ""),), True): "tekken",
    ((BYTES,), False): "gpt-2",
    ((DIGIT, BYTES), False): "smollm",
    ((_MARKS,), False): "qwen35",
    ((r"\p{N}{1,3}", _KANA, _CODE_AND_WORDS), False): "deepseek-v3",
    ((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, DIGIT), False): "deepseek-coder",
    ((PUNCTUATION, BYTES, DIGITS, "[0-9][0-9][0-9]"), False): "falcon",
    ((_SENTENCES,), False): "bloom",
    ((_SENTENCES, DIGIT), False): "viking",
    ((_SEED,), False): "seed-coder",
    ((_LING,), False): "bailingmoe",
    ((r"\p{N}+", r"(?=(\d{3})+(?!\d))"), False): "superbpe",
    ((r"\d{1,3}(?=(?:\d{3})*\b)", _O200K), False): "tiny_aya",
}
SAME_STEPS: Mapping[str, tuple[str, ...]] = {  # name in NAMES -> others that llama.cpp splits by the same expressions
    "llama-bpe": ("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "glm4",
                  "glm5"),
    "dbrx": ("smaug-bpe", "chatglm-bpe"),
    "qwen2": ("deepseek-r1-qwen", "kormo", "f2llmv2", "stablelm2", "hunyuan", "solar-open", "megrez", "grok-2"),
    "gpt-4o": ("llama4", "kanana2", "talkie", "minimax-m2"),
    "gpt-2": ("phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum", "modern-bert",
              "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "jina-v1-en", "jina-v2-code",
              "roberta-bpe"),
    "smollm": ("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
    "deepseek-v3": ("hunyuan-dense", "joyai-llm", "hy_v4"),
    "bloom": ("poro-chat", "gpt3-finnish"),
    "bailingmoe": ("bailingmoe2", "llada-moe"),
    "tiny_aya": ("cohere2moe",),
}  # fmt: skip
WHOLE_TOKENS = ("llama-bpe", "tekken")  # llama.cpp does not merge a word that is a token
ADD_BOS = ("llama-bpe", "tekken")  # llama.cpp puts the first token in front where the file does not say


def steps_of(name: str) -> tuple[list[dict[str, Any]], bool] | None:
    """The pre_tokenizers of a tokenizer.json that a name stands for, and whether whole tokens skip merging; or None."""
    name = next((first for first, others in SAME_STEPS.items() if name in others), name)
    steps = next((steps for (steps, _), candidate in NAMES.items() if candidate == name), None)
    if steps is None:
        return None
    objects: dict[str, dict[str, Any]] = {
        BYTES: {"type": BYTES, "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        PUNCTUATION: {"type": PUNCTUATION, "behavior": "Contiguous"},
        DIGIT: {"type": "Digits", "individual_digits": True},
        DIGITS: {"type": "Digits", "individual_digits": False},
    }
    splitters = [
        objects.get(step, {"type": "Split", "pattern": {"Regex": step}, "behavior": "Isolated", "invert": False})
        for step in steps
    ]
    if BYTES not in steps:
        splitters.append({**objects[BYTES], "use_regex": False})
    return splitters, name in WHOLE_TOKENS


def name_by_tokens(path: str, ends: Sequence[int | None]) -> str | None:
    """The name by the hash of a test text's tokens, None for an unknown hash or without the tokenizers package.

    ends: the first and the last token of a text, which some tokenizers of transformers add by their configuration.
    """
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(path)
        document = _document()
        plain = tokenizer.encode(document["text"], add_special_tokens=False).ids
        full = tokenizer.encode(document["text"]).ids
        first, last = ([] if end is None else [end] for end in ends)
        candidates = (full, plain, first + plain, plain + last, first + plain + last)
        hashes = (sha256(str(tokens).encode()).hexdigest() for tokens in candidates)
        names: Mapping[str, str] = document["names"]
        return next((names[digest] for digest in hashes if digest in names), None)
    except BaseException as error:  # a tokenizer that the package does not read is named by its steps, or refused
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # Rust's, a BaseException
            raise
        return None


@cache
def _document() -> Any:
    return json_object(os.path.splitext(__file__)[0] + ".json")


def name_by_steps(where: str, document: Mapping[str, Any], ignore_merges: bool) -> str:
    """The name by the steps of a tokenizer.json; CheckpointError if llama.cpp has none."""
    steps = tuple(_steps(where, document))
    name = _names().get((tuple(map(_escaped, steps)), ignore_merges))
    if name is None and steps in ((PUNCTUATION,), (DIGITS,)):
        raise CheckpointError(f"{where}: pre_tokenizer {shown(steps[0])} is not known to llama.cpp")
    if name is None:
        action = f"splits by {shown(' '.join(steps))}" if steps else "splits nothing"
        raise CheckpointError(f"{where}: llama.cpp has no name for a pre_tokenizer that {action}")
    return name


@cache
def _names() -> Mapping[tuple[tuple[str, ...], bool], str]:
    return {(tuple(map(_escaped, steps)), ignores): name for (steps, ignores), name in NAMES.items()}


def _escaped(expression: str) -> str:
    """The expression with line ends as escapes, since some files have the characters."""
    return expression.replace("\r", r"\r").replace("\n", r"\n")


def _steps(where: str, document: Mapping[str, Any]) -> Iterator[str]:
    for step in sequence(document.get("pre_tokenizer"), "pretokenizers"):
        kind, pattern = step.get("type"), step.get("pattern")
        if kind == BYTES:
            if step.get("use_regex", True):
                yield BYTES
        elif kind == "Split" and isinstance(pattern, dict):
            yield str(pattern.get("Regex"))
        elif kind == "Digits":
            yield DIGIT if step.get("individual_digits") else DIGITS
        elif kind == PUNCTUATION:
            yield PUNCTUATION
        else:
            raise CheckpointError(f"{where}: pre_tokenizer {shown(str(kind))} is not known to llama.cpp")


def sequence(step: Any, name: str) -> Iterable[Mapping[str, Any]]:
    """The steps of a Sequence under this key, or the single step; {} for a step that is no object."""
    steps = step.get(name, [step]) if isinstance(step, dict) else []
    return [part if isinstance(part, dict) else {} for part in steps] if isinstance(steps, list) else []

"""The tokens of a tokenizer.json: BPE with bytes or with pieces, Unigram, WordPiece.

    BPE, byte-level       "gpt2": tokens and merges, and the name of the pre-tokenizer
    BPE, byte_fallback    "llama": scores by the order of merges; "gemma4": the merges instead
    Unigram               "t5": scores, and the table that normalizes text
    WordPiece             "bert": the first piece of a word starts with SPACE, others lose their prefix

Each is what llama.cpp computes; a tokenizer that it would compute otherwise is refused.
"""

from __future__ import annotations

import re
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, NamedTuple

from gguf import TokenType

from qgemm.errors import CheckpointError
from qgemm.files.paths import shown

from .pre_tokenizers import sequence

SPACE = "\u2581"  # SentencePiece's symbol for a space
ADDED_SCORE = -1000.0
READ_BY_PARSERS = frozenset(  # control tokens of Gemma 4 that programs must see in the text
    ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>')
)
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Token(NamedTuple):
    """One token: text, score and type as in .gguf files."""

    text: str
    score: float
    type: TokenType


@dataclass
class Vocabulary:
    """A tokenizer for a .gguf file: llama.cpp's kind of it, the tokens by their numbers, and its settings.

    pre: the pre-tokenizer's name. space: whether text gets a leading space, None if unknown.
    runs_joined: whether runs of spaces become one.
    normalization: the table of characters that are replaced, empty for none.
    """

    kind: str
    tokens: dict[int, Token]
    pre: str = "default"
    space: bool | None = None
    runs_joined: bool | None = None
    normalization: bytes = field(default=b"", repr=False)

    @property
    def scored(self) -> bool:
        """Whether the file has scores."""
        return self.kind in ("llama", "t5", "gemma4")


def vocabulary(where: str, document: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary of a tokenizer.json; the pre-tokenizer's name is not looked up."""
    model = document.get("model")
    values: Mapping[str, Any] = model if isinstance(model, dict) else {}
    kind = values.get("type", "BPE")
    if kind == "Unigram":
        return _unigram(where, document, values)
    tokens = values.get("vocab")
    if kind not in ("BPE", "WordPiece") or not isinstance(tokens, dict):
        raise CheckpointError(
            f"{where}: a tokenizer of type {shown(str(kind))} is not read, BPE, Unigram and WordPiece are"
        )
    if not all(type(number) is int and number >= 0 for number in tokens.values()):
        raise CheckpointError(f"{where}: vocab: not all numbers of tokens are counts")
    if kind == "WordPiece":
        return _word_pieces(where, document, values)
    merged = list(_merged(where, values))
    if values.get("byte_fallback"):
        return Vocabulary("llama", _by_merges(values, merged))
    return Vocabulary("gpt2", {number: Token(text, 0.0, TokenType.NORMAL) for text, number in tokens.items()})


def _by_merges(model: Mapping[str, Any], merged: list[str]) -> dict[int, Token]:
    """The tokens with scores that make llama.cpp merge in the order of this tokenizer's list of merges."""
    score = {text: -float(rank) for rank, text in reversed(list(enumerate(merged)))}
    lowest = -float(len(score))
    tokens = {}
    for text, number in model["vocab"].items():
        kind = _type(text, model.get("unk_token"))
        tokens[number] = Token(text, score.get(text, lowest) if kind == TokenType.NORMAL else 0.0, kind)
    return tokens


def _type(text: str, unknown: Any) -> TokenType:
    return TokenType.UNKNOWN if text == unknown else TokenType.BYTE if BYTE.fullmatch(text) else TokenType.NORMAL


def _merged(where: str, model: Mapping[str, Any]) -> Iterator[str]:
    """The results of the merges."""
    merges = model.get("merges") or []
    if isinstance(merges, list) and len({type(merge) for merge in merges}) > 1:
        raise CheckpointError(f"{where}: merges: some are texts, others lists")
    for merge in merges if isinstance(merges, list) else [None]:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise CheckpointError(f"{where}: merges: {shown(str(merge))} is no pair of tokens")
        yield "".join(pair)


def _unigram(where: str, document: Mapping[str, Any], model: Mapping[str, Any]) -> Vocabulary:
    pieces, unknown = model.get("vocab"), model.get("unk_id")
    tokens: dict[int, Token] = {}
    for number, entry in enumerate(pieces if isinstance(pieces, list) else [None]):
        text, score = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
        if not isinstance(text, str) or not isinstance(score, (int, float)) or not isfinite(score):
            raise CheckpointError(f"{where}: vocab: {shown(str(entry))} is no text with a score")
        kind = TokenType.UNKNOWN if number == unknown else _type(text, None)
        tokens[number] = Token(text, float(score), kind)
    table, joined = b"", False
    for step in sequence(document.get("normalizer"), "normalizers"):
        if step.get("type") == "Precompiled":
            table = _table(where, step.get("precompiled_charsmap"))
        elif step.get("type") == "Replace" and step.get("pattern") == {"Regex": " {2,}"}:
            joined = True
        elif step.get("type") not in ("Strip", "Sequence"):
            raise CheckpointError(f"{where}: normalizer {shown(str(step.get('type')))} is not known to llama.cpp")
    space = None
    for step in sequence(document.get("pre_tokenizer"), "pretokenizers"):
        if step.get("type") == "WhitespaceSplit":
            joined = True
            if not table:
                rule = "is not known beside a normalizer without precompiled_charsmap, which makes line ends spaces"
                raise CheckpointError(f"{where}: pre_tokenizer 'WhitespaceSplit' {rule}")
        elif step.get("type") == "Metaspace":
            space = step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space") is not False
        else:
            kind_of_step = shown(str(step.get("type")))
            raise CheckpointError(f"{where}: pre_tokenizer {kind_of_step} is not known to llama.cpp beside Unigram")
    return Vocabulary("t5", tokens, space=space, runs_joined=joined, normalization=table)


def _table(where: str, text: Any) -> bytes:
    """The bytes of precompiled_charsmap."""
    try:
        return b64decode(text or "", validate=True)
    except (Base64Error, TypeError, ValueError):
        raise CheckpointError(f"{where}: precompiled_charsmap is no text in base 64") from None


def _word_pieces(where: str, document: Mapping[str, Any], model: Mapping[str, Any]) -> Vocabulary:
    """Tokens by numbers; llama.cpp lowers letters and drops accents, whatever the file says."""
    for step in sequence(document.get("normalizer"), "normalizers"):
        if step.get("type") != "BertNormalizer":
            raise CheckpointError(f"{where}: normalizer {shown(str(step.get('type')))} is not known beside WordPiece")
        for key in ("lowercase", "strip_accents"):
            if step.get(key) is False:
                raise CheckpointError(f"{where}: normalizer: {key}: 'False' is not true, as llama.cpp computes")
    for step in sequence(document.get("pre_tokenizer"), "pretokenizers"):
        if step.get("type") != "BertPreTokenizer":
            raise CheckpointError(
                f"{where}: pre_tokenizer {shown(str(step.get('type')))} is not known beside WordPiece"
            )
    prefix = model.get("continuing_subword_prefix", "##")
    if prefix != "##":
        raise CheckpointError(f"{where}: continuing_subword_prefix: {shown(str(prefix))} is not ##")
    tokens = {number: Token(text, 0.0, TokenType.NORMAL) for text, number in model["vocab"].items()}
    return Vocabulary("bert", tokens)


def word_start(token: Token) -> Token:
    """A token of WordPiece as llama.cpp has it: SPACE before the first piece of a word, no prefix before others."""
    if token.type == TokenType.CONTROL:
        return token
    text = token.text.removeprefix("##") if token.text.startswith("##") else f"{SPACE}{token.text}"
    return token._replace(text=text)


def ranked_piece(token: Token) -> Token:
    """A token of Gemma 4 as llama.cpp has it: pairs are merged by their rank in the list of merges, not by scores."""
    kind = TokenType.USER_DEFINED if token.text in READ_BY_PARSERS else token.type
    return Token(token.text.replace(" ", SPACE), ADDED_SCORE, kind)

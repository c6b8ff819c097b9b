"""The tokenizer of a Hugging Face folder as metadata of a .gguf file.

    tokenizer.model  SentencePiece: "llama" with scores and bytes
    tokenizer.json   BPE: with byte_fallback "llama", scores by the order of merges; else "gpt2" with merges
    neither          "none": a model without a vocabulary; refused if the folder has another kind of tokenizer

llama.cpp knows pre-tokenizers of BPE by name; the name is looked up by the tokenizer's regular expression.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gguf import GGUFWriter, Keys, SpecialVocab, TokenType

from qgemm.errors import CheckpointError
from qgemm.files.documents import json_object, text_file
from qgemm.files.paths import shown, shown_path
from qgemm.files.sentencepiece import read_sentencepiece

from .chat_templates import DEFAULT, TEMPLATE, TEMPLATE_JSON, chat_templates
from .checkpoints.configs import MODEL

SENTENCEPIECE, TOKENIZER, CONFIG, ADDED = (
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
)
READ_AGAIN: Mapping[str, Callable[[str], object]] = {
    TOKENIZER: json_object, CONFIG: json_object, MODEL: json_object, TEMPLATE_JSON: json_object,
    TEMPLATE: text_file, "merges.txt": text_file,
}  # fmt: skip
OTHERS = (  # files of tokenizers that are not supported without one of the first two
    "tekken.json", "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tiktoken.model",
)  # fmt: skip
MAX_PADDING = 1 << 16  # largest number of rows without a token; a text and a type are written for each
ADDED_SCORE, PADDING_SCORE = -1000.0, -10000.0
SPACE = "\u2581"  # SentencePiece's symbol for a space
NUMBER = re.compile("[0-9]{1,9}")  # number of an added token
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
CONTROL = re.compile(r"<\|.*\|>|<\uff5c.*\uff5c>|<unused.*>|<pad>|<mask>|<2mass>|\[@BOS@\]", re.DOTALL)

_ENGLISH, _REST = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _REST
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    rf"|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
)
BYTES = "ByteLevel"  # a pre-tokenizer with a regular expression of its own
# (regular expression that splits text, whether whole tokens skip merging) -> llama.cpp's name.
PRE = {
    (_WORDS % "{1,3}", True): "llama-bpe",
    (_WORDS % "{1,3}", False): "dbrx",
    (_WORDS % "", False): "qwen2",
    (_CASED % (_ENGLISH + "?", _ENGLISH + "?", "{1,3}"), False): "gpt-4o",
    (_CASED % (_ENGLISH + "?", _ENGLISH + "?", "{1,3}"), True): "gpt-4o",
    (_CASED % ("", "", ""), False): "tekken",
    (_CASED % ("", "", ""), True): "tekken",
    (BYTES, False): "gpt-2",
    (rf"\p{{N}}|{BYTES}", False): "smollm",
}


class Token(NamedTuple):
    """One token: text, score and type as in .gguf files."""

    text: str
    score: float
    type: TokenType


def tokenizer_keys(folder: str, rows: int, writer: GGUFWriter, space: bool | None = None) -> None:
    """Write the keys of the tokenizer in a folder. rows: of the embedding, which is the number of tokens in the file.

    space: whether text gets a leading space where pieces are merged by scores, if the folder does not say.

    CheckpointError for a tokenizer of another kind, or one with more tokens than rows, or far fewer.
    """
    model, tokenizer = os.path.join(folder, SENTENCEPIECE), os.path.join(folder, TOKENIZER)
    document = json_object(tokenizer) if os.path.exists(tokenizer) else {}
    where = shown_path(tokenizer if document else folder)
    if os.path.exists(model):
        kind, pre = "llama", "default"
        vocabulary = {
            i: Token(text.decode("utf-8", "surrogateescape"), score, TokenType(number))
            for i, (text, score, number) in enumerate(read_sentencepiece(model))
        }
    elif document:
        bpe = _Json(where, document)
        kind, pre, vocabulary = (
            ("llama", "default", bpe.by_merges()) if bpe.bytes_fall_back else ("gpt2", bpe.pre(), bpe.plain())
        )
    else:
        for other in OTHERS:
            if os.path.exists(os.path.join(folder, other)):
                raise CheckpointError(f"{where}: {other} is not read, {TOKENIZER} or {SENTENCEPIECE} is needed")
        writer.add_tokenizer_model("none")
        if Keys.LLM.VOCAB_SIZE.format(arch=writer.arch) not in writer.kv_data[0]:
            writer.add_vocab_size(rows)
        return
    for number, token in _added(folder, where, document):
        if number < rows or kind == "gpt2":  # text-only gemma 3 1B lists an image token beyond its rows
            vocabulary[number] = token
    if vocabulary and max(vocabulary) >= rows:
        raise CheckpointError(f"{where}: token {max(vocabulary)} is beyond the {rows} rows of the embedding")
    if rows - len(vocabulary) > MAX_PADDING:
        rule = f"has {len(vocabulary)} tokens, which are too few for the {rows} rows of the embedding"
        raise CheckpointError(f"{where}: {rule}")
    tokens = [vocabulary.get(i) or Token(f"[PAD{i}]", PADDING_SCORE, TokenType.UNUSED) for i in range(rows)]
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token.text for token in tokens])
    if kind == "llama":
        writer.add_token_scores([token.score for token in tokens])
    writer.add_token_types([token.type for token in tokens])
    _special(folder, where, kind == "gpt2", rows, writer)
    config = os.path.join(folder, CONFIG)
    prefix_space = json_object(config).get("add_prefix_space") if os.path.exists(config) else None
    if isinstance(prefix_space, bool):
        space = prefix_space
    elif kind != "llama":
        space = None
    if space is not None:
        writer.add_add_space_prefix(space)


def _special(folder: str, where: str, merges: bool, rows: int, writer: GGUFWriter) -> None:
    """Write the merges, the numbers of special tokens and the chat templates."""
    templates = chat_templates(folder)
    for name, read in READ_AGAIN.items():  # SpecialVocab parses these files itself, without limits
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            read(path)
    try:
        special = SpecialVocab(Path(folder), load_merges=merges, n_vocab=rows)
        special.chat_template = None
        special.add_to_gguf(writer, quiet=True)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{where}: special tokens are not read: {shown(repr(error))}") from None
    if DEFAULT in templates:
        writer.add_chat_template(templates.pop(DEFAULT))
    if templates:
        writer.add_array(Keys.Tokenizer.CHAT_TEMPLATES, list(templates))
    for name, template in templates.items():
        writer.add_string(Keys.Tokenizer.CHAT_TEMPLATE_N.format(name=name), template)


def _added(folder: str, where: str, document: Mapping[str, Any]) -> Iterator[tuple[int, Token]]:
    """Tokens that were added to a vocabulary, with their numbers; later entries override earlier ones."""
    for name in (ADDED, CONFIG):
        path = os.path.join(folder, name)
        config = json_object(path) if os.path.exists(path) else {}
        entries_by_key = config if name == ADDED else config.get("added_tokens_decoder", {})
        if not isinstance(entries_by_key, dict):
            raise CheckpointError(f"{shown_path(path)}: added_tokens_decoder is no object")
        for key, value in entries_by_key.items():
            text, number = (key, value) if name == ADDED else (value, key)
            yield _added_token(shown_path(path), number, {"content": text} if name == ADDED else text)
    entries = document.get("added_tokens") or []
    if not isinstance(entries, list):
        raise CheckpointError(f"{where}: added_tokens is no list")
    for entry in entries:
        yield _added_token(where, entry.get("id") if isinstance(entry, dict) else None, entry)


def _added_token(where: str, number: Any, entry: Any) -> tuple[int, Token]:
    text = entry.get("content") if isinstance(entry, dict) else None
    number = int(number) if isinstance(number, str) and NUMBER.fullmatch(number) else number
    if not isinstance(text, str) or type(number) is not int or number < 0:
        raise CheckpointError(f"{where}: an added token is {shown(str(entry))}, not a text with a number")
    if entry.get("special") or CONTROL.fullmatch(text):
        return number, Token(text, ADDED_SCORE, TokenType.CONTROL)
    return number, Token(text.replace(SPACE, " "), ADDED_SCORE, TokenType.USER_DEFINED)


class _Json:
    """The BPE of a tokenizer.json."""

    def __init__(self, where: str, document: Mapping[str, Any]) -> None:
        self.where, self.document = where, document
        model = document.get("model")
        self.model: Mapping[str, Any] = model if isinstance(model, dict) else {}
        vocabulary = self.model.get("vocab")
        if self.model.get("type", "BPE") != "BPE" or not isinstance(vocabulary, dict):
            kind = shown(str(self.model.get("type")))
            raise CheckpointError(f"{where}: a tokenizer of type {kind} is not read, BPE and SentencePiece are")
        if not all(type(number) is int and number >= 0 for number in vocabulary.values()):
            raise CheckpointError(f"{where}: vocab: not all numbers of tokens are counts")
        self.vocabulary: Mapping[str, int] = vocabulary
        self.bytes_fall_back = bool(self.model.get("byte_fallback"))
        self.merged = list(self._merged())

    def plain(self) -> dict[int, Token]:
        """The tokens by their numbers, without scores."""
        return {number: Token(text, 0.0, TokenType.NORMAL) for text, number in self.vocabulary.items()}

    def by_merges(self) -> dict[int, Token]:
        """The tokens with scores that make llama.cpp merge in the order of this tokenizer's list of merges."""
        score = {merged: -float(rank) for rank, merged in reversed(list(enumerate(self.merged)))}
        lowest = -float(len(score))
        unknown = self.model.get("unk_token")
        tokens = {}
        for text, number in self.vocabulary.items():
            kind = (
                TokenType.UNKNOWN if text == unknown else TokenType.BYTE if BYTE.fullmatch(text) else TokenType.NORMAL
            )
            tokens[number] = Token(text, score.get(text, lowest) if kind == TokenType.NORMAL else 0.0, kind)
        return tokens

    def _merged(self) -> Iterator[str]:
        """The results of the merges."""
        merges = self.model.get("merges") or []
        if isinstance(merges, list) and len({type(merge) for merge in merges}) > 1:
            raise CheckpointError(f"{self.where}: merges: some are texts, others lists")
        for merge in merges if isinstance(merges, list) else [None]:
            pair = merge.split(" ") if isinstance(merge, str) else merge
            if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
                raise CheckpointError(f"{self.where}: merges: {shown(str(merge))} is no pair of tokens")
            yield "".join(pair)

    def pre(self) -> str:
        """llama.cpp's name of the pre-tokenizer."""
        first = self.document.get("pre_tokenizer")
        steps = first.get("pretokenizers", [first]) if isinstance(first, dict) else []
        expressions: list[str] = []
        for step in steps if isinstance(steps, list) else []:
            fields = step if isinstance(step, dict) else {}
            kind, pattern = fields.get("type"), fields.get("pattern")
            if kind == BYTES and fields.get("use_regex", True):
                expressions.append(BYTES)
            if kind == "Split" and isinstance(pattern, dict):
                expressions.append(str(pattern.get("Regex")))
            elif kind == "Digits" and fields.get("individual_digits"):
                expressions.append(r"\p{N}")
            elif kind != BYTES:
                raise CheckpointError(f"{self.where}: pre_tokenizer {shown(str(kind))} is not known to llama.cpp")
        name = PRE.get(("|".join(expressions), bool(self.model.get("ignore_merges"))))
        if name is None or not steps:
            action = f"splits by {shown(' '.join(expressions))}" if expressions else "splits nothing"
            raise CheckpointError(f"{self.where}: llama.cpp has no name for a pre_tokenizer that {action}")
        return name

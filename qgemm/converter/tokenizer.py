"""The tokenizer of a Hugging Face folder as metadata of a .gguf file.

tokenizer.model  SentencePiece: BPE "llama", unigram "t5", with scores and bytes
tokenizer.json   BPE, Unigram, WordPiece (tokenizer_json.py)
neither          "none": a model without a vocabulary; refused if the folder has another kind of tokenizer
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, Keys, SpecialVocab, TokenType

from qgemm.errors import CheckpointError
from qgemm.files.documents import json_object, text_file, tokenizer_object
from qgemm.files.paths import shown, shown_path
from qgemm.files.sentencepiece import read_sentencepiece

from .architecture_record import Architecture
from .chat_templates import DEFAULT, TEMPLATE, TEMPLATE_JSON, chat_templates
from .checkpoints.configs import MODEL
from .pre_tokenizers import ADD_BOS, name_by_steps, name_by_tokens
from .tokenizer_json import ADDED_SCORE, SPACE, Token, Vocabulary, ranked_piece, word_start
from .tokenizer_json import vocabulary as vocabulary_of

SENTENCEPIECE, TOKENIZER, CONFIG, ADDED = (
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
)
READ_AGAIN: Mapping[str, Callable[[str], object]] = {
    TOKENIZER: tokenizer_object, CONFIG: tokenizer_object, MODEL: json_object, TEMPLATE_JSON: json_object,
    TEMPLATE: text_file, "merges.txt": text_file,
}  # fmt: skip
OTHERS = (  # files of tokenizers that are not supported without one of the first two
    "tekken.json", "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tiktoken.model",
)  # fmt: skip
MAX_PADDING = 1 << 16  # largest number of rows without a token; a text and a type are written for each
TOKENS = Keys.Tokenizer
PADDING_SCORE = -10000.0
NUMBER = re.compile("[0-9]{1,9}")  # number of an added token
CONTROL = re.compile(r"<\|.*\|>|<\uff5c.*\uff5c>|<unused.*>|<pad>|<mask>|<2mass>|\[@BOS@\]", re.DOTALL)


def tokenizer_keys(folder: str, rows: int, writer: GGUFWriter, architecture: Architecture) -> None:
    """Write the keys of the tokenizer in a folder. rows: of the embedding, which is the number of tokens in the file.

    CheckpointError for a tokenizer of another kind, or one with more tokens than rows, or far fewer.
    """
    model, tokenizer = os.path.join(folder, SENTENCEPIECE), os.path.join(folder, TOKENIZER)
    document = tokenizer_object(tokenizer) if os.path.lexists(tokenizer) else {}
    where = shown_path(tokenizer if document else folder)
    if os.path.lexists(model) and architecture.tokenizer == "llama":
        vocabulary = _of_sentencepiece(model)
    elif document:
        vocabulary = vocabulary_of(where, document)
        if vocabulary.kind == "llama":
            vocabulary.kind = architecture.tokenizer
        if vocabulary.kind == "gpt2":
            vocabulary.pre = _pre_tokenizer(folder, where, document)
    else:
        for other in OTHERS:
            if os.path.lexists(os.path.join(folder, other)):
                raise CheckpointError(f"{where}: {other} is not read, {TOKENIZER} or {SENTENCEPIECE} is needed")
        writer.add_tokenizer_model("none")
        if Keys.LLM.VOCAB_SIZE.format(arch=writer.arch) not in writer.kv_data[0]:
            writer.add_vocab_size(rows)
        return
    tokens = vocabulary.tokens
    for number, token in _added(folder, where, document):
        if number < rows or not vocabulary.scored:  # text-only gemma 3 1B lists an image token beyond its rows
            tokens[number] = token
    if tokens and max(tokens) >= rows:
        raise CheckpointError(f"{where}: token {max(tokens)} is beyond the {rows} rows of the embedding")
    if rows - len(tokens) > MAX_PADDING:
        rule = f"has {len(tokens)} tokens, which are too few for the {rows} rows of the embedding"
        raise CheckpointError(f"{where}: {rule}")
    rewrite = {"bert": word_start, "gemma4": ranked_piece}.get(vocabulary.kind)
    if rewrite is not None:
        tokens = {number: rewrite(token) for number, token in tokens.items()}
    listed = [tokens.get(i) or Token(f"[PAD{i}]", PADDING_SCORE, TokenType.UNUSED) for i in range(rows)]
    writer.add_tokenizer_model(vocabulary.kind)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list([token.text for token in listed])
    if vocabulary.scored:
        writer.add_token_scores([token.score for token in listed])
    writer.add_token_types([token.type for token in listed])
    numbers = {token.text: number for number, token in tokens.items()}
    roles = {role: numbers.get(text) for role, text in architecture.roles.items()}
    _special(folder, where, vocabulary, roles, writer)
    space, prefix_space = architecture.space, _setting(folder, "add_prefix_space")
    if isinstance(prefix_space, bool):
        space = prefix_space
    elif vocabulary.space is not None or not vocabulary.scored:
        space = vocabulary.space
    if space is not None:
        writer.add_add_space_prefix(space)
    if vocabulary.runs_joined is not None:
        writer.add_remove_extra_whitespaces(vocabulary.runs_joined)
    if vocabulary.normalization:
        writer.add_precompiled_charsmap(vocabulary.normalization)


def _of_sentencepiece(path: str) -> Vocabulary:
    model = read_sentencepiece(path)
    tokens = {
        i: Token(text.decode("utf-8", "surrogateescape"), score, TokenType(number))
        for i, (text, score, number) in enumerate(model.pieces)
    }
    if not model.unigram:
        return Vocabulary("llama", tokens)
    return Vocabulary("t5", tokens, "default", model.leading_space, model.runs_joined, model.normalization)


def _setting(folder: str, key: str) -> Any:
    """A value of tokenizer_config.json, None where absent."""
    config = os.path.join(folder, CONFIG)
    return tokenizer_object(config).get(key) if os.path.lexists(config) else None


def _pre_tokenizer(folder: str, where: str, document: Mapping[str, Any]) -> str:
    """llama.cpp's name of the pre-tokenizer."""
    model = document["model"]
    added = document.get("added_tokens")
    numbers = {
        entry["content"]: entry.get("id")
        for entry in (added if isinstance(added, list) else [])
        if isinstance(entry, dict) and isinstance(entry.get("content"), str)
    }
    ends = []
    for role in ("bos_token", "eos_token"):
        token = _setting(folder, role)
        text = token.get("content") if isinstance(token, dict) else token
        number = numbers.get(text) if isinstance(text, str) else None
        ends.append(number if type(number) is int else None)
    name = name_by_tokens(os.path.join(folder, TOKENIZER), ends)
    return name or name_by_steps(where, document, bool(model.get("ignore_merges")))


def _special(
    folder: str, where: str, vocabulary: Vocabulary, roles: Mapping[str, int | None], writer: GGUFWriter
) -> None:
    """Write the merges, the numbers of special tokens and the chat templates. roles: role -> number of a token."""
    merges, rows = vocabulary.kind in ("gpt2", "gemma4"), len(writer.kv_data[0][Keys.Tokenizer.LIST].value)
    templates = chat_templates(folder)
    for name, read in READ_AGAIN.items():  # SpecialVocab parses these files itself, without limits
        path = os.path.join(folder, name)
        if os.path.lexists(path):
            read(path)
    try:
        special = SpecialVocab(Path(folder), load_merges=merges, n_vocab=rows)
        special.chat_template = None
        for role, number in roles.items():
            if number is not None:
                special.special_token_ids.setdefault(role, number)
        if vocabulary.pre in ADD_BOS or vocabulary.kind == "t5":  # llama.cpp would add a token where the file is silent
            special.add_special_token.setdefault("bos" if merges else "eos", False)
        for role, key in (("bos", TOKENS.ADD_BOS), ("eos", TOKENS.ADD_EOS), ("sep", TOKENS.ADD_SEP)):
            if key in writer.kv_data[0]:  # the architecture has decided
                special.add_special_token.pop(role, None)
        special.add_to_gguf(writer, quiet=True)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{where}: special tokens are not read: {shown(repr(error))}") from None
    if DEFAULT in templates:
        writer.add_chat_template(templates.pop(DEFAULT))
    if templates:
        writer.add_array(Keys.Tokenizer.CHAT_TEMPLATES, list(templates))
    for name, template in templates.items():
        writer.add_string(Keys.Tokenizer.CHAT_TEMPLATE_N.format(name=name), template)


def added_tokens(folder: str) -> Iterator[tuple[int, Token]]:
    """Tokens that were added to the vocabulary of a folder, with their numbers."""
    path = os.path.join(folder, TOKENIZER)
    return _added(folder, shown_path(path), tokenizer_object(path) if os.path.lexists(path) else {})


def _added(folder: str, where: str, document: Mapping[str, Any]) -> Iterator[tuple[int, Token]]:
    """Tokens that were added to a vocabulary, with their numbers; later entries override earlier ones."""
    for name in (ADDED, CONFIG):
        path = os.path.join(folder, name)
        config = tokenizer_object(path) if os.path.lexists(path) else {}
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

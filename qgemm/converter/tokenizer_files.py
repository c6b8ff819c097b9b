"""The tokenizer of a .gguf model as files of a Hugging Face folder: the inverse of tokenizer.py and tokenizer_json.py.

    "gpt2"    BPE over bytes, with the steps that the pre-tokenizer's name stands for
    "llama"   BPE over pieces: the merges follow from the scores
    "gemma4"  BPE over pieces, with the merges of the file
    "t5"      Unigram
    "bert"    WordPiece

A .gguf file does not tell some settings: whether added tokens strip spaces beside them, other post-processors than one
that adds tokens at the ends, normalizers of BPE. They get the usual values, and a note says so.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gguf import Keys, TokenType
from numpy.typing import NDArray

from qgemm.errors import CheckpointError
from qgemm.files.paths import shown

from .chat_templates import CONFIG, DEFAULT, KEY
from .pre_tokenizers import steps_of
from .tokenizer_json import SPACE

TOKENIZER, GENERATION = "tokenizer.json", "generation_config.json"
ROLES = {"bos": Keys.Tokenizer.BOS_ID, "eos": Keys.Tokenizer.EOS_ID, "unk": Keys.Tokenizer.UNK_ID,
         "sep": Keys.Tokenizer.SEP_ID, "pad": Keys.Tokenizer.PAD_ID, "mask": Keys.Tokenizer.MASK_ID,
         "cls": "tokenizer.ggml.cls_token_id"}  # fmt: skip
ENDS = {  # kind of tokenizer -> tokens that llama.cpp adds where the file does not say
    "llama": {"bos"}, "gemma4": {"bos"}, "t5": {"eos"}, "bert": {"bos", "sep"}, "gpt2": set[str](),
}  # fmt: skip
ENDS_BY_NAME = {"llama-bpe": {"bos"}, "tekken": {"bos"}}  # pre-tokenizer of "gpt2" -> tokens that llama.cpp adds
ADDS = {"bos": Keys.Tokenizer.ADD_BOS, "eos": Keys.Tokenizer.ADD_EOS, "sep": Keys.Tokenizer.ADD_SEP}
COMPOSED = ("qwen2", "qwen35")  # pre-tokenizers of models that compose accents first
SAMPLING = {  # key of generation_config.json -> key of the file
    "temperature": "general.sampling.temp", "top_k": "general.sampling.top_k", "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p", "repetition_penalty": "general.sampling.penalty_repeat",
}  # fmt: skip
ADDED = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
MAX_CHARACTERS = 4096  # a token with more is refused: finding its pairs costs the square of its length
USUAL = "the usual values stand for what a .gguf file does not tell of a tokenizer (docs/converting.md)"
MISSING = "the folder has no tokenizer: add the files of the model's own"


class Files(NamedTuple):
    """The files of a tokenizer by their names, and a sentence for the user."""

    files: dict[str, bytes]
    note: str


def tokenizer_files(metadata: Mapping[str, Any]) -> Files:
    """The files of the tokenizer that the keys of a .gguf file describe, none where it cannot be restored."""
    generation = generation_config(metadata)
    files = {GENERATION: _text(generation)} if generation else {}
    try:
        tokenizer = Tokenizer(metadata)
        files |= {TOKENIZER: _text(tokenizer.document(), indent=None), CONFIG: _text(tokenizer.config())}
        return Files(files, USUAL)
    except CheckpointError as error:
        return Files(files, f"{MISSING}; {error}")


def _text(document: Mapping[str, Any], indent: int | None = 2) -> bytes:
    text = json.dumps(document, indent=indent, ensure_ascii=False) + "\n"
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise CheckpointError("a token or a template is no text in UTF-8") from None


def _count(metadata: Mapping[str, Any], key: str) -> int | None:
    """The value of a key that holds a whole number, None for any other."""
    value = metadata.get(key)
    return int(value) if isinstance(value, np.integer) else None


def _flag(metadata: Mapping[str, Any], key: str, usual: bool) -> bool:
    """The value of a key that holds a boolean, the usual one where there is none."""
    value = metadata.get(key)
    return bool(value) if isinstance(value, (bool, np.bool_)) else usual


class Tokenizer:
    """A tokenizer as the keys of a .gguf file have it; CheckpointError where a key is missing or unknown."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.kind = str(metadata.get(Keys.Tokenizer.MODEL, "none"))
        self.pre = str(metadata.get(Keys.Tokenizer.PRE, "default"))
        if self.kind not in ENDS:
            raise CheckpointError(f"{Keys.Tokenizer.MODEL} {shown(self.kind)} does not become tokenizer.json")
        texts, types = self._texts(Keys.Tokenizer.LIST), self._numbers(Keys.Tokenizer.TOKEN_TYPE, "iu")
        if len(types) != len(texts):
            raise CheckpointError(f"{Keys.Tokenizer.TOKEN_TYPE} has {len(types)} numbers for {len(texts)} tokens")
        self.tokens: dict[int, tuple[str, int]] = {}
        for number, (text, kind) in enumerate(zip(texts, types, strict=True)):
            padding = kind == TokenType.UNUSED and text == f"[PAD{number}]"  # rows of the embedding without a token
            if not padding:
                self.tokens[number] = self._spelled(text, int(kind)), int(kind)
        self.numbers = {text: number for number, (text, _) in self.tokens.items()}
        if len(self.numbers) != len(self.tokens):
            raise CheckpointError(f"{Keys.Tokenizer.LIST} has a text twice, which tokenizer.json cannot express")
        for role in ADDS:
            if self._adds(role) and self._role(role) is None:
                raise CheckpointError(f"{ADDS[role]} is true, and there is no such token")

    def _texts(self, key: str) -> list[str]:
        values = self.metadata.get(key)
        if not isinstance(values, list):
            raise CheckpointError(f"{key} is missing, a list of texts")
        long = next((text for text in values if len(text) > MAX_CHARACTERS), None)
        if long is not None:
            raise CheckpointError(f"{key} has a text of {len(long)} characters, {shown(long)}")
        return values

    def _numbers(self, key: str, kinds: str) -> NDArray[Any]:
        """A list of numbers, whose dtype has one of these kinds."""
        values = self.metadata.get(key)
        if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in kinds:
            raise CheckpointError(f"{key} is missing, a list of numbers")
        if not np.isfinite(values).all():
            raise CheckpointError(f"{key} has numbers that are not finite")
        return values

    def _spelled(self, text: str, kind: int) -> str:
        """The text of a token as tokenizer.json spells it."""
        if self.kind == "bert" and kind != TokenType.CONTROL:
            return text.removeprefix(SPACE) if text.startswith(SPACE) else f"##{text}"
        return text.replace(" ", SPACE) if self.scored and kind == TokenType.USER_DEFINED else text

    @property
    def scored(self) -> bool:
        """Whether spaces are a symbol of the tokens."""
        return self.kind in ("llama", "t5", "gemma4")

    @property
    def leading_space(self) -> bool:
        """Whether text gets a space in front."""
        return _flag(self.metadata, Keys.Tokenizer.ADD_PREFIX, self.kind in ("llama", "t5"))

    def _adds(self, role: str) -> bool:
        usual = role in (ENDS_BY_NAME.get(self.pre, ENDS[self.kind]) if self.kind == "gpt2" else ENDS[self.kind])
        return _flag(self.metadata, ADDS[role], usual)

    def _role(self, role: str) -> str | None:
        """The text of the token with a role."""
        number = _count(self.metadata, ROLES[role])
        if number is None and role == "bos" and self.kind == "bert":
            number = _count(self.metadata, ROLES["cls"])
        token = None if number is None else self.tokens.get(number)
        return None if token is None else token[0]

    def document(self) -> dict[str, Any]:
        """The tokenizer.json."""
        model, normalizer, splitter, decoder = getattr(self, f"_{self.kind}")()
        return {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": list(self._added()),
            "normalizer": normalizer, "pre_tokenizer": splitter, "post_processor": self._ends(), "decoder": decoder,
            "model": model,
        }  # fmt: skip

    def config(self) -> dict[str, Any]:
        """The tokenizer_config.json: the roles of tokens, and the chat templates if there are several."""
        roles = {f"{role}_token": text for role in ROLES if (text := self._role(role)) is not None}
        templates = self.metadata.get(Keys.Tokenizer.CHAT_TEMPLATES)
        adds = {f"add_{role}_token": self._adds(role) for role in ("bos", "eos")}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **roles, **adds}
        if Keys.Tokenizer.ADD_PREFIX in self.metadata:
            config["add_prefix_space"] = self.leading_space
        if isinstance(templates, list):
            texts = {DEFAULT: self.metadata.get(Keys.Tokenizer.CHAT_TEMPLATE)}
            texts |= {name: self.metadata.get(Keys.Tokenizer.CHAT_TEMPLATE_N.format(name=name)) for name in templates}
            config[KEY] = [{"name": name, "template": text} for name, text in texts.items() if isinstance(text, str)]
        return config

    def _added(self) -> Iterator[dict[str, Any]]:
        """Tokens that are recognized in the text before it is split."""
        for number, (text, kind) in self.tokens.items():
            if kind in ADDED:
                special = kind != TokenType.USER_DEFINED
                flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
                yield {"id": number, "content": text, **flags, "special": special}

    def _ends(self) -> dict[str, Any] | None:
        """The post-processor that adds tokens at the ends, None if there are none."""
        first = [text for text in [self._role("bos")] if text and self._adds("bos")]
        last = [text for role in ("eos", "sep") if (text := self._role(role)) and self._adds(role)][:1]
        if not first and not last:
            return None

        def template(sequence: str, second: bool) -> list[dict[str, Any]]:
            kind = int(second and self.kind == "bert")
            front = [] if second and self.kind == "bert" else first
            specials = ([{"SpecialToken": {"id": text, "type_id": kind}} for text in texts] for texts in (front, last))
            before, after = specials
            return [*before, {"Sequence": {"id": sequence, "type_id": kind}}, *after]

        return {
            "type": "TemplateProcessing", "single": template("A", second=False),
            "pair": [*template("A", second=False), *template("B", second=True)],
            "special_tokens": {
                text: {"id": text, "ids": [self.numbers[text]], "tokens": [text]} for text in {*first, *last}
            },
        }  # fmt: skip

    def _bpe(self, merges: list[list[str]], pieces: bool, skips: bool = False) -> dict[str, Any]:
        """A model of BPE. pieces: bytes without a token are tokens of their own. skips: whole tokens are not merged."""
        unknown = next((text for text, kind in self.tokens.values() if kind == TokenType.UNKNOWN), None)
        return {
            "type": "BPE", "dropout": None, "unk_token": unknown, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": pieces, "byte_fallback": pieces, "ignore_merges": skips,
            "vocab": self.numbers, "merges": merges,
        }  # fmt: skip

    def _merges(self) -> list[list[str]]:
        """The merges of the file: pairs of texts."""
        pairs = [merge.split(" ") for merge in self._texts(Keys.Tokenizer.MERGES)]
        if any(len(pair) != 2 for pair in pairs):
            raise CheckpointError(f"{Keys.Tokenizer.MERGES} has an entry that is no pair")
        return pairs

    def _gpt2(self) -> tuple[Any, ...]:
        steps = steps_of(self.pre)
        if steps is None:
            raise CheckpointError(f"{Keys.Tokenizer.PRE} {shown(self.pre)} has no steps in tokenizer.json")
        splitters, skips = steps
        whole = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        normalizer = {"type": "NFC"} if self.pre in COMPOSED else None
        splitter = splitters[0] if len(splitters) == 1 else {"type": "Sequence", "pretokenizers": splitters}
        return self._bpe(self._merges(), pieces=False, skips=skips), normalizer, splitter, whole

    def _pieces(self, merges: list[list[str]]) -> tuple[Any, ...]:
        symbol = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        steps = [{"type": "Prepend", "prepend": SPACE}, symbol] if self.leading_space else [symbol]
        decoders: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]  # fmt: skip
        if self.leading_space:
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        return (
            self._bpe(merges, pieces=True), {"type": "Sequence", "normalizers": steps}, None,
            {"type": "Sequence", "decoders": decoders},
        )  # fmt: skip

    def _gemma4(self) -> tuple[Any, ...]:
        return self._pieces(self._merges())

    def _llama(self) -> tuple[Any, ...]:
        """llama.cpp merges the adjacent pair whose result has the highest score; the leftmost of equal ones."""
        scores, ranks = self._scores(), dict[str, float]()
        for number, (text, kind) in self.tokens.items():
            if kind == TokenType.NORMAL:
                ranks[text] = -scores[number]
            elif kind == TokenType.USER_DEFINED and SPACE in text:  # a run of spaces, which is one token in any text
                ranks[text] = -np.inf
        pairs = (
            [text[:end], text[end:]]
            for text in sorted(ranks, key=ranks.__getitem__)
            for end in range(len(text) - 1, 0, -1)
        )
        return self._pieces([pair for pair in pairs if pair[0] in ranks and pair[1] in ranks])

    def _scores(self) -> Sequence[float]:
        scores = [float(str(score)) for score in self._numbers(Keys.Tokenizer.SCORES, "iuf")]
        if len(scores) <= max(self.tokens, default=-1):
            raise CheckpointError(f"{Keys.Tokenizer.SCORES} has {len(scores)} numbers, fewer than the tokens")
        return scores

    def _t5(self) -> tuple[Any, ...]:
        scores = self._scores()
        if [*self.tokens] != [*range(len(self.tokens))]:
            raise CheckpointError(f"{Keys.Tokenizer.LIST} has gaps, which Unigram cannot express")
        unknown = next((number for number, (_, kind) in self.tokens.items() if kind == TokenType.UNKNOWN), None)
        model = {
            "type": "Unigram", "unk_id": unknown, "vocab": [[text, scores[i]] for i, (text, _) in self.tokens.items()],
            "byte_fallback": any(kind == TokenType.BYTE for _, kind in self.tokens.values()),
        }  # fmt: skip
        table = self.metadata.get(Keys.Tokenizer.PRECOMPILED_CHARSMAP)
        steps: list[dict[str, Any]] = []
        if isinstance(table, np.ndarray) and table.size:
            text = b64encode(table.astype(np.uint8).tobytes()).decode()
            steps.append({"type": "Precompiled", "precompiled_charsmap": text})
        if _flag(self.metadata, Keys.Tokenizer.REMOVE_EXTRA_WS, usual=False):
            steps += [{"type": "Strip", "strip_left": True, "strip_right": True},
                      {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]  # fmt: skip
        scheme = "always" if self.leading_space else "never"
        splitter = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": True}
        normalizer = {"type": "Sequence", "normalizers": steps} if steps else None
        return model, normalizer, splitter, splitter

    def _bert(self) -> tuple[Any, ...]:
        model = {
            "type": "WordPiece", "unk_token": self._role("unk") or "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": self.numbers,
        }  # fmt: skip
        normalizer = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                      "strip_accents": None, "lowercase": True}  # fmt: skip
        return model, normalizer, {"type": "BertPreTokenizer"}, {"type": "WordPiece", "prefix": "##", "cleanup": True}


def generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The generation_config.json: the tokens that end a text, and the sampling that the file recommends."""
    numbers = {role: _count(metadata, ROLES[role]) for role in ("bos", "eos", "pad")}
    config: dict[str, Any] = {f"{role}_token_id": value for role, value in numbers.items() if value is not None}
    turn = _count(metadata, Keys.Tokenizer.EOT_ID)
    if turn is not None and numbers["eos"] not in (None, turn):
        config["eos_token_id"] = [numbers["eos"], turn]
    values = {key: metadata.get(stored) for key, stored in SAMPLING.items()}
    sampling = {
        key: int(value) if isinstance(value, np.integer) else float(str(value))
        for key, value in values.items()
        if isinstance(value, (np.integer, np.floating)) and np.isfinite(value)
    }
    if sampling:
        config |= {"do_sample": True, **sampling}
    return config

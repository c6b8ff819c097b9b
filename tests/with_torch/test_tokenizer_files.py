"""The tokenizer of a folder that a .gguf model becomes encodes text as that of the folder that it came from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from torch_logits import random_model, transformers

import qgemm
from qgemm.converter.pre_tokenizers import steps_of
from qgemm.converter.tokenizer_files import tokenizer_files

tokenizers = pytest.importorskip("tokenizers")
SPACE = "\u2581"
TEXTS = [
    "Hello world!", "I've said that they'll come, 'D you?", "  two  spaces\tand a tab ", "1 22 333 4444 55555.5",
    "na\u00efve caf\u00e9 \u6771\u4eac\u90fd \U0001f680\U0001f680",
    "line\n\nline\r\n  indented\n", "def f(x):\n    return x+1",
    "HTTPServer camelCase \u041c\u043e\u0441\u043a\u0432\u0430",
    "a<|user|>b c<tool>d", "", " ", "------====", "hello hello world",
]  # fmt: skip
CORPUS = [text * 3 for text in TEXTS] + ["the quick brown fox jumps over the lazy dog", "hello world, hello there"] * 4
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>"]


def save(path: Path, tokenizer: tokenizers.Tokenizer, **roles: object) -> None:
    """Write the folder of a tokenizer and of a tiny Llama."""
    count = tokenizer.get_vocab_size()
    config = transformers.LlamaConfig(
        vocab_size=count, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=None,
    )  # fmt: skip
    random_model(config).save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
                "unk_token": "<unk>", **roles}  # fmt: skip
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def assert_same_ids(folder: Path, back: Path) -> None:
    first, second = (transformers.AutoTokenizer.from_pretrained(path) for path in (folder, back))
    for text in TEXTS:
        assert second(text).input_ids == first(text).input_ids, text
        assert second.encode(text, add_special_tokens=False) == first.encode(text, add_special_tokens=False), text
        ids = first.encode(text, add_special_tokens=False)
        assert second.decode(ids) == first.decode(ids), text
    for role in ("bos_token", "eos_token", "unk_token"):
        assert getattr(second, role) == getattr(first, role)


def round_trip(tmp_path: Path) -> None:
    """Folder -> file -> folder, whose tokenizer has the same keys in a file."""
    for source, target, options in (
        ("m", "m.gguf", {}), ("m.gguf", "back", {"layout": "huggingface"}), ("back", "back.gguf", {}),
    ):  # fmt: skip
        qgemm.convert(tmp_path / source, tmp_path / target, "f32", **options)
    files = [tokenizer_keys(tmp_path / name) for name in ("m.gguf", "back.gguf")]
    assert {k: (v, files[1].get(k)) for k, v in files[0].items() if v != files[1].get(k)} == {}
    assert_same_ids(tmp_path / "m", tmp_path / "back")


def tokenizer_keys(path: Path) -> dict[str, object]:
    with qgemm.open(path, copy=True) as file:
        return {key: np.array(value).tolist() for key, value in file.metadata.items() if key.startswith("tokenizer.")}


def byte_level(name: str) -> tokenizers.Tokenizer:
    """A trained BPE over bytes whose pre-tokenizer has a name of llama.cpp."""
    splitters, skips = steps_of(name)
    document = {
        "version": "1.0", "added_tokens": [], "normalizer": None, "post_processor": None, "decoder": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splitters},
        "model": {"type": "BPE", "vocab": {}, "merges": [], "ignore_merges": skips},
    }  # fmt: skip
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(document))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=380, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([tokenizers.AddedToken("<tool>", normalized=False)])
    return tokenizer


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2", "gpt-2", "smollm", "tekken", "deepseek-v3", "falcon", "gpt-4o"])
def test_bpe_over_bytes(name, tmp_path):
    tokenizer = byte_level(name)
    if name == "qwen2":
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    if name == "llama-bpe":
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    save(tmp_path / "m", tokenizer)
    round_trip(tmp_path)
    if name in ("llama-bpe", "qwen2", "gpt-2"):  # transformers' own reader of .gguf files knows them
        witness = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
        back = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
        for text in TEXTS:
            ids = [tokenizer.encode(text, add_special_tokens=False) for tokenizer in (witness, back)]
            assert ids[0] == ids[1], text


def pieces() -> dict[str, float]:
    """Pieces with all results of merges of their prefixes, and scores in the order of their length."""
    words = {SPACE + word for text in CORPUS for word in text.split() if word.isascii()}
    texts = sorted(
        {word[:end] for word in words for end in range(2, len(word) + 1)}, key=lambda text: (len(text), text)
    )
    return {text: -float(i) for i, text in enumerate(texts)}


@pytest.mark.parametrize("space", [True, False])
def test_bpe_over_pieces(space, tmp_path):
    """As Llama 2 and Gemma have it: merges by scores, bytes for unknown characters, spaces as a symbol."""
    scores = pieces()
    letters = sorted({letter for text in scores for letter in text})
    listed = [*SPECIAL[:3], *(f"<0x{byte:02X}>" for byte in range(256)), *scores, *letters, SPACE * 2]
    vocabulary = {text: i for i, text in enumerate(dict.fromkeys(listed))}
    merges = [(SPACE, SPACE)] if not space else []
    merges += [(text[:end], text[end:]) for text in scores for end in range(len(text) - 1, 0, -1)
               if text[:end] in vocabulary and text[end:] in vocabulary]  # fmt: skip
    if space:
        vocabulary.pop(SPACE * 2)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(
        vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    ))  # fmt: skip
    normal = tokenizers.normalizers
    replaced = normal.Replace(" ", SPACE)
    tokenizer.normalizer = normal.Sequence([normal.Prepend(SPACE), replaced] if space else [replaced])
    steps = tokenizers.decoders
    stripped = [steps.Strip(" ", 1, 0)] if space else []
    tokenizer.decoder = steps.Sequence([steps.Replace(SPACE, " "), steps.ByteFallback(), steps.Fuse(), *stripped])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in SPECIAL])
    added = ["<tool>"] if space else ["<tool>", SPACE * 2]
    tokenizer.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in added])
    save(tmp_path / "m", tokenizer, add_bos_token=True, add_prefix_space=space)
    round_trip(tmp_path)


def restored(tmp_path: Path) -> None:
    """Write the files of the tokenizer of m.gguf, whose architecture becomes no folder of a Llama."""
    with qgemm.open(tmp_path / "m.gguf", copy=True) as file:
        files = tokenizer_files(dict(file.metadata)).files
    (tmp_path / "back").mkdir()
    for name, content in files.items():
        (tmp_path / "back" / name).write_bytes(content)


@pytest.mark.parametrize("joined", [True, False])
def test_unigram(joined, tmp_path):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram())
    normal, before = tokenizers.normalizers, tokenizers.pre_tokenizers
    if joined:
        tokenizer.normalizer = normal.Sequence([normal.Strip(), normal.Replace(tokenizers.Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = before.Metaspace(prepend_scheme="always" if joined else "never")
    tokenizer.decoder = tokenizers.decoders.Metaspace(prepend_scheme="always" if joined else "never")
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 2)]
    )
    save(tmp_path / "m", tokenizer, add_eos_token=True)
    qgemm.convert(tmp_path / "m", tmp_path / "m.gguf", "f32")
    restored(tmp_path)
    assert_same_ids(tmp_path / "m", tmp_path / "back")


def test_word_pieces(tmp_path):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=160, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    roles = {"bos_token": None, "eos_token": None, "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    save(tmp_path / "m", tokenizer, **roles)
    qgemm.convert(tmp_path / "m", tmp_path / "m.gguf", "f32")
    restored(tmp_path)
    first, second = (tokenizers.Tokenizer.from_file(str(tmp_path / name / "tokenizer.json")) for name in ("m", "back"))
    for text in TEXTS:
        assert second.encode(text).ids == first.encode(text).ids, text
        assert second.encode(text, "b c").ids == first.encode(text, "b c").ids
        assert second.encode(text, "b c").type_ids == first.encode(text, "b c").type_ids

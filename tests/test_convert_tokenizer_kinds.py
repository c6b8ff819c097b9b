"""Tokenizers of other kinds than BPE with bytes, and llama.cpp's names of pre-tokenizers, by tokens and by steps."""

from __future__ import annotations

import json
from base64 import b64encode
from hashlib import sha256

import pytest
from class_folders import converted, folder
from gguf import TokenType
from tokenizer_folders import BYTE_LEVEL, MODEL, O200K, QWEN2, bpe, digits, keys, split

from qgemm.converter import pre_tokenizers
from qgemm.errors import CheckpointError

tokenizers = pytest.importorskip("tokenizers")
NORMAL, UNKNOWN, CONTROL, ADDED, UNUSED, BYTE = TokenType
TABLE = b"\x04\x00\x00\x00abcd"
ENDS = [{"id": 0, "content": "<s>", "special": True}, {"id": 1, "content": "</s>", "special": True}]


def unigram(**changes: object) -> dict:
    """A tokenizer.json of Unigram, as XLM-RoBERTa has it."""
    pieces = [["<s>", 0.0], ["</s>", 0.0], ["<unk>", 0.0], ["\u2581a", -1.5], ["b", -2.5], ["<0x0A>", -3.0]]
    return {
        "model": {"type": "Unigram", "unk_id": 2, "vocab": pieces},
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": b64encode(TABLE).decode()},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "WhitespaceSplit"}, {"type": "Metaspace", "replacement": "\u2581", "add_prefix_space": True}
        ]},
        "added_tokens": ENDS,
        **changes,
    }  # fmt: skip


def test_unigram(tmp_path):
    """Scores, types, the table that normalizes text, and how spaces are treated."""
    metadata = keys(tmp_path, tokenizer_json=unigram())
    assert (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]) == ("t5", "default")
    assert metadata["tokenizer.ggml.tokens"][:6] == ["<s>", "</s>", "<unk>", "\u2581a", "b", "<0x0A>"]
    assert metadata["tokenizer.ggml.scores"].tolist()[2:6] == [0, -1.5, -2.5, -3]
    assert metadata["tokenizer.ggml.token_type"].tolist()[:7] == [3, 3, UNKNOWN, NORMAL, NORMAL, BYTE, UNUSED]
    assert metadata["tokenizer.ggml.precompiled_charsmap"].tobytes() == TABLE
    assert metadata["tokenizer.ggml.precompiled_charsmap"].dtype.str == "|u1"
    assert metadata["tokenizer.ggml.add_space_prefix"]
    assert metadata["tokenizer.ggml.remove_extra_whitespaces"]
    assert not metadata["tokenizer.ggml.add_eos_token"]  # llama.cpp adds one where the file is silent
    assert "tokenizer.ggml.merges" not in metadata


def test_spaces_of_unigram(tmp_path):
    """Without a step that joins runs of spaces they stay; a Metaspace says whether text gets a space."""
    pre = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "never"}
    metadata = keys(tmp_path, tokenizer_json=unigram(pre_tokenizer=pre, normalizer=None))
    assert not metadata["tokenizer.ggml.add_space_prefix"]
    assert not metadata["tokenizer.ggml.remove_extra_whitespaces"]
    assert "tokenizer.ggml.precompiled_charsmap" not in metadata
    replaced = {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]}
    metadata = keys(tmp_path, tokenizer_json=unigram(pre_tokenizer=pre, normalizer=replaced))
    assert metadata["tokenizer.ggml.remove_extra_whitespaces"]


def word_pieces(**changes: object) -> dict:
    """A tokenizer.json of WordPiece, as BERT has it."""
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "ab": 5, "##c": 6, "##": 7, "\u2581": 8}
    return {
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "vocab": vocabulary},
        "normalizer": {"type": "BertNormalizer", "lowercase": True, "strip_accents": None},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "added_tokens": [{"id": i, "content": text, "special": True} for text, i in list(vocabulary.items())[:5]],
        **changes,
    }


def test_word_pieces(tmp_path):
    """The first piece of a word starts with a space's symbol, the others lose their prefix."""
    config = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "pad_token": "[PAD]"}
    metadata = keys(tmp_path, tokenizer_json=word_pieces(), tokenizer_config_json=config)
    assert metadata["tokenizer.ggml.model"] == "bert"
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "\u2581ab", "c", "", "\u2581\u2581"]
    assert metadata["tokenizer.ggml.tokens"][:9] == tokens
    assert metadata["tokenizer.ggml.token_type"].tolist()[:10] == [CONTROL] * 5 + [NORMAL] * 4 + [UNUSED]
    assert (metadata["tokenizer.ggml.seperator_token_id"], metadata["tokenizer.ggml.mask_token_id"]) == (3, 4)
    assert "tokenizer.ggml.scores" not in metadata


TRAINED = b"\x12\x02\x18%c"  # a TrainerSpec with this model_type


@pytest.mark.parametrize(("model_type", "kind"), [(1, "t5"), (2, "llama")])
def test_sentencepiece_of_both_kinds(model_type, kind, tmp_path):
    normalizer = b"\x1a\x0e\x12\x08" + TABLE + b"\x18\x00\x20\x00"
    metadata = keys(tmp_path, tokenizer_model=MODEL + TRAINED % model_type + normalizer)
    assert metadata["tokenizer.ggml.model"] == kind
    names = ("add_space_prefix", "remove_extra_whitespaces", "precompiled_charsmap")
    if kind == "llama":
        assert not any(f"tokenizer.ggml.{name}" in metadata for name in names)
        return
    space, joined, table = (metadata[f"tokenizer.ggml.{name}"] for name in names)
    assert (space, joined, table.tobytes()) == (False, False, TABLE)


def test_sentencepiece_of_words_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: model_type 3 is not read, unigram and BPE are"):
        keys(tmp_path, tokenizer_model=MODEL + TRAINED % 3)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (unigram(model={"type": "Unigram", "vocab": [["a"]]}), "is no text with a score"),
        (unigram(model={"type": "Unigram", "vocab": [["a", float("nan")]]}), "is no text with a score"),
        (unigram(normalizer={"type": "NFKC"}), "normalizer 'NFKC' is not known"),
        (unigram(normalizer={"type": "Precompiled", "precompiled_charsmap": "?"}), "no text in base 64"),
        (unigram(normalizer=None), "'WhitespaceSplit' is not known beside a normalizer without"),
        (unigram(pre_tokenizer={"type": "Whitespace"}), "pre_tokenizer 'Whitespace' is not known"),
        (word_pieces(normalizer={"type": "BertNormalizer", "lowercase": False}), "lowercase: 'False' is not true"),
        (word_pieces(normalizer={"type": "BertNormalizer", "strip_accents": False}), "strip_accents: 'False'"),
        (word_pieces(normalizer={"type": "Lowercase"}), "normalizer 'Lowercase' is not known"),
        (word_pieces(pre_tokenizer={"type": "Whitespace"}), "pre_tokenizer 'Whitespace' is not known"),
        (word_pieces(model={"type": "WordPiece", "vocab": {"a": 0}, "continuing_subword_prefix": "@@"}), "'@@' is not"),
    ],
)  # fmt: skip
def test_what_llama_cpp_computes_otherwise_is_refused(document, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        keys(tmp_path, tokenizer_json=document)


MARKS = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
DEEPSEEK3 = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)


def splits(*steps: str | dict) -> dict:
    parts = [step if isinstance(step, dict) else split(step)["pretokenizers"][0] for step in steps]
    return {"type": "Sequence", "pretokenizers": [*parts, BYTE_LEVEL]}


DIGITS = digits()["pretokenizers"][0]


@pytest.mark.parametrize(
    ("pre", "name"),
    [
        (splits(MARKS), "qwen35"),
        (splits(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", DEEPSEEK3), "deepseek-v3"),
        (splits("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", DIGITS),
         "deepseek-coder"),
        (splits({"type": "Punctuation", "behavior": "Contiguous"}, {"type": "ByteLevel", "use_regex": True},
                {"type": "Digits", "individual_digits": False}, "[0-9][0-9][0-9]"), "falcon"),
        (splits(r"\d{1,3}(?=(?:\d{3})*\b)", O200K), "tiny_aya"),
        (splits(" ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"), "bloom"),
    ],
)  # fmt: skip
def test_steps_that_split_text(pre, name, tmp_path):
    assert keys(tmp_path, tokenizer_json=bpe(pre))["tokenizer.ggml.pre"] == name


@pytest.mark.parametrize(("config", "first"), [({}, []), ({"bos_token": "<|end|>"}, [5])])
def test_tokens_of_the_test_text_name_the_pre_tokenizer(config, first, tmp_path, monkeypatch):
    """The hash precedes the steps; a first token may come from the configuration alone."""
    steps = [{"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated", "invert": False},
             {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False, "trim_offsets": True}]  # fmt: skip
    vocabulary = {text: i for i, text in enumerate("texabcdfgh") if i not in (5, 7)}
    added = [{"id": i, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False} for i, text in ((5, "<|end|>"), (7, "<tool>"))]  # fmt: skip
    document = {
        **bpe({"type": "Sequence", "pretokenizers": steps}, vocab={**vocabulary, "te": 10}, merges=[["t", "e"]]),
        "added_tokens": added,
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(document))
    tokens = [*first, *tokenizers.Tokenizer.from_file(str(path)).encode("text").ids]
    table = {"text": "text", "names": {sha256(str(tokens).encode()).hexdigest(): "chameleon"}}
    monkeypatch.setattr(pre_tokenizers, "_document", lambda: table)
    metadata = keys(tmp_path, tokenizer_json=document, tokenizer_config_json=config)
    assert metadata["tokenizer.ggml.pre"] == "chameleon"
    table["text"] += "x"
    with pytest.raises(CheckpointError, match="splits by 'x'"):
        keys(tmp_path, tokenizer_json=document, tokenizer_config_json=config)


def test_the_names_by_tokens_are_hashes():
    document = pre_tokenizers._document()
    assert len(document["names"]) == 95
    assert all(len(digest) == 64 and int(digest, 16) for digest in document["names"])
    assert {"llama-bpe", "deepseek-v3", "glm4", "gpt-4o", "hunyuan"} <= set(document["names"].values())


def test_no_first_token_where_the_file_is_silent(tmp_path):
    """llama.cpp's pre-tokenizers of Llama 3 and Tekken add one; a folder that does not say so has none."""
    llama = split(QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|"))
    metadata = keys(tmp_path, tokenizer_json=bpe(llama, ignore_merges=True))
    assert not metadata["tokenizer.ggml.add_bos_token"]
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|end|>"}}, {"Sequence": {"id": "A"}}],
    }
    document = {**bpe(llama, ignore_merges=True), "post_processor": template}
    metadata = keys(tmp_path, tokenizer_json=document, tokenizer_config_json={"bos_token": "<|end|>"})
    assert metadata["tokenizer.ggml.add_bos_token"]


def test_roles_of_special_tokens_of_an_architecture(tmp_path):
    """GLM's folders do not say which token ends a turn."""
    document = {**bpe(), "added_tokens": [{"id": 5, "content": "<|endoftext|>", "special": True},
                                          {"id": 6, "content": "<|user|>", "special": True}]}  # fmt: skip
    path = folder(tmp_path / "m", "Glm4ForCausalLM", eos_token_id=6)
    (path / "tokenizer.json").write_text(json.dumps(document))
    _, metadata = converted(path, tmp_path / "y.gguf")
    names = ("eos", "eot", "unknown", "bos")
    assert [metadata[f"tokenizer.ggml.{name}_token_id"] for name in names] == [6, 6, 5, 1]


def test_gemma_4_merges_by_rank(tmp_path):
    """llama.cpp reads the list of merges, no scores; control tokens that programs parse stay visible."""
    path = folder(tmp_path / "m", "Gemma4ForCausalLM")
    document = bpe({"type": "Split", "pattern": {"String": " "}}, byte_fallback=True)
    document["added_tokens"] += [
        {"id": 8, "content": "<|tool_call>", "special": True},
        {"id": 9, "content": "\u2581\u2581", "special": False},
    ]
    (path / "tokenizer.json").write_text(json.dumps(document))
    _, metadata = converted(path, tmp_path / "y.gguf")
    assert metadata["tokenizer.ggml.model"] == "gemma4"
    assert list(metadata["tokenizer.ggml.merges"]) == ["a b", "ab c"]
    assert set(metadata["tokenizer.ggml.scores"][[0, 4, 5, 9]]) == {-1000.0}
    types = metadata["tokenizer.ggml.token_type"]
    assert types[[0, 5, 7, 8]].tolist() == [NORMAL, CONTROL, ADDED, ADDED]
    assert metadata["tokenizer.ggml.tokens"][9] == "\u2581\u2581"
    assert metadata["tokenizer.ggml.add_bos_token"]
    assert not metadata["tokenizer.ggml.add_space_prefix"]

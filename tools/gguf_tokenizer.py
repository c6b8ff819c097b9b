"""The tokenizer and the chat template of a .gguf file, by the libraries tokenizers and jinja2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL = 3  # the token type of tokens that no text spells
DIGITS_APART = {"smollm": True, "gpt-2": False}  # tokenizer.ggml.pre: whether every digit is a token of its own


def tokenizer_from(metadata: Mapping[str, Any]) -> Tokenizer:
    """A byte-level BPE tokenizer from the metadata of a .gguf file; ValueError for one of another kind."""
    kind, rules = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or rules not in DIGITS_APART:
        rules_read = ", ".join(DIGITS_APART)
        raise ValueError(f"the tokenizer is {kind!r} with rules {rules!r}; this demo reads 'gpt2' with {rules_read}")
    tokens = list(metadata["tokenizer.ggml.tokens"])
    merges = [tuple(pair.split(" ", 1)) for pair in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    digits = [pre_tokenizers.Digits(individual_digits=True)] if DIGITS_APART[rules] else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    control = [token for token, token_type in zip(tokens, types, strict=True) if token_type == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def chat_prompt(metadata: Mapping[str, Any], messages: Sequence[Mapping[str, str]]) -> str:
    """Messages {"role", "content"} as the text that the model continues, by the chat template of the file.

    The template is a program from a file of unknown origin, so it runs in the sandbox of jinja2.
    """
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(metadata["tokenizer.chat_template"])
    return str(template.render(messages=list(messages), add_generation_prompt=True))

"""A tiny llama of random weights as a .gguf file with a byte-level tokenizer, for the tests of the demo."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import pre_tokenizers

import qgemm

WIDTH, FEED_FORWARD, HEADS, KV_HEADS, BLOCKS = 64, 96, 4, 2, 2
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END = 2
VOCABULARY = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the"]
MERGES = ["t h", "th e"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def metadata() -> dict[str, object]:
    """The metadata of the file."""
    return {
        "general.architecture": "llama",
        "llama.block_count": np.uint32(BLOCKS),
        "llama.context_length": np.uint32(512),
        "llama.embedding_length": np.uint32(WIDTH),
        "llama.feed_forward_length": np.uint32(FEED_FORWARD),
        "llama.attention.head_count": np.uint32(HEADS),
        "llama.attention.head_count_kv": np.uint32(KV_HEADS),
        "llama.attention.layer_norm_rms_epsilon": np.float32(1e-5),
        "llama.rope.freq_base": np.float32(10000),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": VOCABULARY,
        "tokenizer.ggml.token_type": np.array([3] * len(CONTROL) + [1] * (len(VOCABULARY) - len(CONTROL)), np.int32),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.eos_token_id": np.uint32(END),
        "tokenizer.chat_template": TEMPLATE,
    }


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    """float32 weights by their names in the file."""
    rng = np.random.default_rng(seed)
    kv_width = WIDTH // HEADS * KV_HEADS
    shapes = {"token_embd.weight": (len(VOCABULARY), WIDTH), "output_norm.weight": (WIDTH,)}
    for block in range(BLOCKS):
        shapes |= {
            f"blk.{block}.{name}.weight": shape
            for name, shape in {
                "attn_norm": (WIDTH,), "attn_q": (WIDTH, WIDTH), "attn_k": (kv_width, WIDTH),
                "attn_v": (kv_width, WIDTH), "attn_output": (WIDTH, WIDTH), "ffn_norm": (WIDTH,),
                "ffn_gate": (FEED_FORWARD, WIDTH), "ffn_up": (FEED_FORWARD, WIDTH), "ffn_down": (WIDTH, FEED_FORWARD),
            }.items()
        }  # fmt: skip
    values = {name: rng.standard_normal(shape, np.float32) / 4 for name, shape in shapes.items()}
    return {name: value + 1 if value.ndim == 1 else value for name, value in values.items()}


def write(path: Path, fmt: str) -> Path:
    """The file, its matrices in one format."""
    tensors = {name: qgemm.quantize(value, "f32" if value.ndim == 1 else fmt) for name, value in weights().items()}
    qgemm.write(path, tensors, metadata())
    return path

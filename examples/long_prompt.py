"""Read a long prompt with activations of 8 bits: python examples/long_prompt.py FILE.gguf TEXT"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import qgemm.torch.transformers
from qgemm.torch import QLinear

NEW_TOKENS = 16

path, text = Path(sys.argv[1]), Path(sys.argv[2])
device = "cuda" if torch.cuda.is_available() else "cpu"
with qgemm.torch.transformers.patch():
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.bfloat16, device_map=device
    )
tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
layers = [layer for layer in model.modules() if isinstance(layer, QLinear) and layer.format.integer]


def next_token(ids, activation):
    for layer in layers:
        layer.activation = activation
    logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1].argmax(-1, keepdim=True)


with torch.no_grad():
    ids = tokenizer(text.read_text(), return_tensors="pt").input_ids.to(device)
    cache = DynamicCache(config=model.config)
    tokens = [next_token(ids, "a8_g256")]  # pays from 512 tokens on; x is rounded to 8 bits in groups of 256
    while len(tokens) < NEW_TOKENS:
        tokens.append(next_token(tokens[-1], "a16"))
print(tokenizer.decode(torch.cat(tokens, dim=1)[0]))

"""Generate text by a compiled decode step: python examples/compiled_step.py FILE.gguf [PROMPT]"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, StaticCache

import qgemm.torch.transformers

NEW_TOKENS = 64

path, prompt = Path(sys.argv[1]), " ".join(sys.argv[2:]) or "def matmul("
device = "cuda" if torch.cuda.is_available() else "cpu"
with qgemm.torch.transformers.patch():
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.bfloat16, device_map=device
    )
tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def next_token(forward, ids):
    logits = forward(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1].argmax(-1, keepdim=True)


with torch.no_grad():
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to(device)
    cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + NEW_TOKENS)
    tokens = [next_token(model, ids)]  # the prompt is not compiled: its length changes
    compiled = torch.compile(model.forward, mode="reduce-overhead")
    while len(tokens) < NEW_TOKENS:
        tokens.append(next_token(compiled, tokens[-1]))
print(tokenizer.decode(torch.cat([ids, *tokens], dim=1)[0]))

"""Generate text by a CUDA graph of a decode step: python examples/cuda_graph.py FILE.gguf [PROMPT]"""

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


def next_token(ids):
    logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1].argmax(-1, keepdim=True)


def step():
    token.copy_(next_token(token))  # a graph reads and writes the same memory at each replay


with torch.no_grad():
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to(device)
    cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + NEW_TOKENS)
    token = next_token(ids)
    tokens = [token.clone()]
    replay = step
    if device == "cuda":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()  # kernels are compiled and memory is allocated before the capture
        torch.cuda.current_stream().wait_stream(stream)
        tokens.append(token.clone())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()  # recorded, not run
        replay = graph.replay
    while len(tokens) < NEW_TOKENS:
        replay()
        tokens.append(token.clone())
print(tokenizer.decode(torch.cat([ids, *tokens], dim=1)[0]))

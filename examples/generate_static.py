"""Generate text from a .gguf file with a static cache: python examples/generate_static.py FILE.gguf [PROMPT]"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import qgemm.torch.transformers

path, prompt = Path(sys.argv[1]), " ".join(sys.argv[2:]) or "def matmul("
device = "cuda" if torch.cuda.is_available() else "cpu"
with qgemm.torch.transformers.patch():
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.bfloat16, device_map=device
    )
tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)

# The cache has a fixed size, so that on a GPU transformers compiles a step and replays its CUDA graph.
inputs = tokenizer(prompt, return_tensors="pt").to(device)
tokens = model.generate(**inputs, max_new_tokens=64, do_sample=False, cache_implementation="static")
print(tokenizer.decode(tokens[0]))

"""Save a model with packed weights as safetensors and load it again: python examples/save_packed.py FILE.gguf FOLDER"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import qgemm.torch.transformers

path, folder = Path(sys.argv[1]), Path(sys.argv[2])
device = "cuda" if torch.cuda.is_available() else "cpu"
with qgemm.torch.transformers.patch():
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.bfloat16, device_map=device
    )
tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)

model.save_pretrained(folder, max_shard_size="5GB")  # weights stay in their blocks
tokenizer.save_pretrained(folder)
loaded = AutoModelForCausalLM.from_pretrained(folder, device_map=device)  # no patch: config.json names qgemm

inputs = tokenizer("def matmul(", return_tensors="pt").to(device)
with torch.no_grad():
    print(torch.equal(model(**inputs).logits, loaded(**inputs).logits))

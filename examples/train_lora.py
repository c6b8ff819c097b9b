"""Train LoRA beside packed weights by peft: python examples/train_lora.py FILE.gguf TEXT [STEPS]"""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import qgemm.torch.peft
import qgemm.torch.transformers

STEP_TOKENS = 512

path, text, steps = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 100
device = "cuda" if torch.cuda.is_available() else "cpu"
qgemm.torch.transformers.patch()
qgemm.torch.peft.patch()
model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16, device_map=device)
tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)

layers = ["q_proj", "k_proj", "v_proj", "o_proj"]
model = get_peft_model(model, LoraConfig(r=8, target_modules=layers, task_type="CAUSAL_LM"))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
ids = tokenizer(text.read_text(), return_tensors="pt").input_ids[0]
for step in range(steps):
    start = torch.randint(max(1, len(ids) - STEP_TOKENS), ()).item()
    batch = ids[start : start + STEP_TOKENS].unsqueeze(0).to(device)
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step in (0, steps - 1):
        print(f"step {step} loss {loss.item():.3f}")
model.save_pretrained(path.parent / "adapter")  # A and B alone; PeftModel.from_pretrained puts them beside the file

"""The program of docs/several-gpus.md runs as it stands, under torchrun; a rank that fails there ends the others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch_layers import torch
from torch_models import random_model, transformers, write_gguf

import qgemm.torch.transformers as adapter

ROOT = Path(__file__).parents[2]
(PROGRAM,) = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "docs" / "several-gpus.md").read_text(), re.DOTALL | re.MULTILINE
)


def torchrun(folder, *args):
    """Two processes of a program on the CPU."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *args], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # raised by transformers
def test_the_program_of_the_document(tmp_path):
    """It prints the words of the whole model."""
    (tmp_path / "several.py").write_text(PROGRAM)
    write_gguf(tmp_path / "model.gguf", random_model("llama"), "q8_0")
    done = torchrun(tmp_path, "several.py", str(tmp_path), "model.gguf")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank} of 2: 11 layers cut by outputs, 4 by inputs; " in done.stdout
    with adapter.patch():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file="model.gguf", dtype=torch.bfloat16
        )
    tokens = torch.arange(1, 9)[None]
    assert str(model.generate(tokens, max_new_tokens=16, do_sample=False).tolist()) in done.stdout


FAILING = """
import torch, torch.distributed as dist, numpy as np, qgemm
from qgemm.torch import RowParallelLinear
dist.init_process_group("gloo")
w = qgemm.quantize(np.ones((64, 128), np.float32), "q4_0")
layer = RowParallelLinear.from_tensor(w, whole=True)
x = torch.ones(1, 128)
for step in range(3):
    if (dist.get_rank(), step) == (1, 2):
        raise SystemExit("rank 1 is out of cheese")
    layer(x)
print("went on")
"""


def test_a_rank_that_fails_in_a_forward_ends_the_program(tmp_path):
    """With its message, and without a wait for the timeout of the group, which is half an hour."""
    (tmp_path / "failing.py").write_text(FAILING)
    done = torchrun(tmp_path, "failing.py")
    assert done.returncode != 0
    assert "rank 1 is out of cheese" in done.stderr
    assert "went on" not in done.stdout

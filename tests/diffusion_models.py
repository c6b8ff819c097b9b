"""A small Flux of diffusers with random weights as a .gguf file, and its output."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch_layers import torch

import qgemm

os.environ["HF_HUB_OFFLINE"] = "1"  # a test asks no server
diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed (extra diffusers)")
pytest.importorskip("accelerate", reason="accelerate is not installed, without which diffusers loads no .gguf file")

import qgemm.torch.diffusers as adapter  # noqa: E402

FLUX = {
    "patch_size": 1, "in_channels": 64, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 64,
    "num_attention_heads": 4, "joint_attention_dim": 256, "pooled_projection_dim": 256, "axes_dims_rope": (16, 24, 24),
}  # fmt: skip


def formats(name: str) -> str:
    """Several formats, and numbers of 16 bits, in one file."""
    return "bf16" if "proj_out" in name else "q6_k" if "norm" in name else "q4_k" if "attn" in name else "q5_0"


def write_flux(path: Path) -> None:
    """A Flux of two blocks as model.gguf, and its config."""
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(**FLUX)
    model.save_config(path)
    tensors = {}
    for name, value in model.state_dict().items():
        packs = value.dim() == 2 and value.shape[1] % 256 == 0
        tensors[name] = qgemm.quantize(value.numpy(), formats(name)) if packs else value.numpy()
    qgemm.write(path / "model.gguf", tensors)


def load(folder: Path, patched: bool = True, dtype: Any = torch.float32) -> Any:
    """The model, by the adapter or by diffusers alone."""
    config = diffusers.GGUFQuantizationConfig(compute_dtype=dtype)
    with adapter.patch() if patched else nullcontext():
        model = diffusers.FluxTransformer2DModel.from_single_file(
            str(folder / "model.gguf"), config=str(folder), quantization_config=config, torch_dtype=dtype
        )
    return model.eval()


def output(model: Any, dtype: Any = torch.float32) -> Any:
    """The model's output for a fixed random input, as float64."""
    dice = torch.Generator().manual_seed(0)
    shapes = {"hidden_states": (1, 16, 64), "encoder_hidden_states": (1, 8, 256), "pooled_projections": (1, 256)}
    with torch.no_grad():
        return model(
            **{name: torch.randn(shape, generator=dice).to(dtype) for name, shape in shapes.items()},
            timestep=torch.tensor([1.0], dtype=dtype), img_ids=torch.zeros(16, 3), txt_ids=torch.zeros(8, 3),
        ).sample.double()  # fmt: skip

"""qgemm.torch.fuse of diffusers' models, whose processors call the layers of an attention."""

from __future__ import annotations

import pytest
from torch_layers import assert_same, torch

import qgemm
from qgemm.torch import fuse, replace_linear

diffusers = pytest.importorskip("diffusers")


def flux(diffusers):
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 6, 4), "encoder_hidden_states": torch.randn(1, 3, 32),
        "pooled_projections": torch.randn(1, 32), "timestep": torch.ones(1), "img_ids": torch.randn(6, 3),
        "txt_ids": torch.zeros(3, 3),
    }  # fmt: skip
    return model, inputs, 3  # q, k, v of both inputs; of the single block


def sd3(diffusers):
    model = diffusers.SD3Transformer2DModel(
        sample_size=4, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=32, caption_projection_dim=64, pooled_projection_dim=32, out_channels=4,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 4, 4, 4), "encoder_hidden_states": torch.randn(1, 3, 32),
        "pooled_projections": torch.randn(1, 32), "timestep": torch.ones(1),
    }  # fmt: skip
    return model, inputs, 4


def sana(diffusers):
    model = diffusers.SanaTransformer2DModel(
        in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=16, num_layers=1,
        num_cross_attention_heads=4, cross_attention_head_dim=16, cross_attention_dim=64, caption_channels=32,
        sample_size=4,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 4, 4, 4), "encoder_hidden_states": torch.randn(1, 3, 32),
        "timestep": torch.ones(1),
    }  # fmt: skip
    return model, inputs, 2  # self attention; k and v of the cross attention


@pytest.mark.parametrize("build", [flux, sd3, sana], ids=lambda build: build.__name__)
def test_models_of_diffusers(build, calls):
    """After two rounds, in which a cross attention learns that Q has another input."""
    torch.manual_seed(0)
    model, inputs, shared = build(diffusers)
    model.eval()
    weights = {
        name: qgemm.quantize(p.detach(), "q4_0")
        for name, p in model.named_parameters()
        if p.dim() == 2 and p.shape[1] % 32 == 0
    }
    replace_linear(model, weights, fuse=False)
    keys = list(model.state_dict())
    with torch.no_grad():
        expected = model(**inputs)[0]
        apart, _ = calls.total(), fuse(model)
        for _ in range(3):
            calls.clear()
            assert_same(model(**inputs)[0], expected)
    assert calls["matmul_many"] == shared
    assert calls.total() < apart
    assert list(model.state_dict()) == keys

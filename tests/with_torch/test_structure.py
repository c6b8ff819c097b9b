"""qgemm.torch.structure: which layers share an input and which blocks are gated, by the source of their classes."""

from __future__ import annotations

import numpy as np
import pytest
from torch_layers import torch

from qgemm.gating import gated_by
from qgemm.torch import fusion
from qgemm.torch.structure import GatedBlock, gated_block, shared_inputs

activations = pytest.importorskip("transformers.activations")


def test_sources_of_diffusers():
    """Processors, and functions of their modules; a layer that is called with one of two inputs counts for both."""
    processors = pytest.importorskip("diffusers.models.attention_processor")
    flux = pytest.importorskip("diffusers.models.transformers.transformer_flux")

    def groups(processor):
        owner = torch.nn.Module()
        owner.processor = processor
        return [tuple(name for name in names if name.startswith(("to_", "add_"))) for names in shared_inputs(owner)]

    qkv, added = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")
    for processor in (flux.FluxAttnProcessor(), processors.JointAttnProcessor2_0()):
        assert {qkv, added} <= set(groups(processor))
    assert qkv in groups(processors.AttnProcessor2_0())
    assert qkv in groups(processors.SanaLinearAttnProcessor2_0())


class Block(torch.nn.Module):
    def forward(self, hidden):
        """Variables, each used once; up comes first."""
        gate = self.act(self.w1(hidden))
        inner = self.w3(hidden) * gate
        return self.w2(inner)


class Scaled(Block):
    def forward(self, hidden):
        return self.w2(self.act(self.w1(hidden)) * self.w3(hidden)) * 2


class Twice(Block):
    def forward(self, hidden):
        gate = self.act(self.w1(hidden))
        return self.w2(gate * gate)


class OtherInput(Block):
    def forward(self, hidden):
        return self.w2(self.act(self.w1(hidden)) * self.w3(hidden + 1))


class Branching(Block):
    def forward(self, hidden):
        if self.training:
            hidden = hidden * 2
        return self.w2(self.act(self.w1(hidden)) * self.w3(hidden))


def test_gated_blocks_by_their_source():
    expected = GatedBlock("w2", "act", "w1", "w3")
    assert gated_block(Block) == expected
    assert [gated_block(kind) for kind in (Scaled, Twice, OtherInput, Branching, torch.nn.Linear)] == [None] * 5


def test_gates_are_the_activations():
    """Every activation of transformers with a gate of qgemm is that function; the others have none."""
    x, count = torch.linspace(-30, 30, 721, dtype=torch.float64), 0
    ones = np.ones(721, np.float32)
    acts = [*(activations.ACT2FN[name] for name in activations.ACT2FN if name != "xielu"), torch.nn.SiLU()]
    acts += [torch.nn.GELU(), torch.nn.GELU("tanh"), torch.nn.functional.silu, torch.nn.functional.gelu]
    for act in acts:
        gate = fusion.gate_of(act)
        expected = act(x).numpy() if not isinstance(act, torch.nn.PReLU) else None
        values = {name: gated_by(name, x.numpy().astype(np.float32), ones) for name in fusion.GATES.values()}
        same = [name for name, y in values.items() if expected is not None and np.abs(y - expected).max() < 2e-6]
        assert ([gate] if gate else []) == same, act
        count += gate is not None
    assert count > 8

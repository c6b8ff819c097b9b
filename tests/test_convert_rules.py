"""Which type the converter gives each tensor: llama-quantize's rules, then overrides, each honoured or refused."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from files import model
from helpers import converted, normal

import qgemm
from qgemm.converter.rules import parse_override


@pytest.fixture
def source(tmp_path) -> Path:
    return model(tmp_path / "source.gguf")


def test_rules_of_llama_quantize(tmp_path):
    shapes = {
        "token_embd.weight": ("Q4_0", ""),
        "output.weight": ("Q8_0", "output matrix: Q8_0"),
        "position_embd.weight": ("F32", "positions"),
        "token_types.weight": ("F32", "token types"),
        "blk.0.attn_norm.weight": ("F32", "norm"),
        "blk.0.ffn_gate_inp.weight": ("F32", "router"),
        "blk.0.attn_q.bias": ("F32", "not a weight"),
        "blk.0.ssm_a": ("F32", "not a weight"),
        "blk.0.other": ("F32", "not a weight"),
        "blk.0.attn_q.weight": ("Q4_0", ""),
    }
    tensors = {name: normal(4, 64) for name in shapes}
    tensors |= {"vector.weight": normal(64), "odd.weight": normal(4, 48), "ids": np.arange(64).reshape(2, 32)}
    all_shapes = shapes | {
        "vector.weight": ("F32", "1-D"),
        "odd.weight": ("F16", "row length not a multiple of 32: F16"),
        "ids": ("I64", "integers"),
    }
    source = model(tmp_path / "x.gguf", tensors)
    lines = converted(source, tmp_path / "y.gguf", "q4_0")
    assert {name: (line.new, line.rule) for name, line in lines.items()} == all_shapes
    assert converted(source, tmp_path / "y.gguf", "q4_0", pure=True)["output.weight"].new == "Q4_0"
    del tensors["output.weight"]
    lines = converted(model(source, tensors), tmp_path / "y.gguf", "q4_0")
    assert lines["token_embd.weight"].new == "Q8_0"  # tied to the output


KEPT_BY_LLAMA_QUANTIZE = re.findall(
    r"\S+",
    """
    blk.0.attn_norm.weight blk.0.ffn_gate_inp.weight blk.0.ffn_gate_tid2eid.weight blk.0.altup_proj.weight
    blk.0.laurel_l.weight per_layer_model_proj.weight blk.0.ssm_conv1d.weight blk.0.shortconv.conv.weight
    blk.0.indexer.k_proj.weight blk.0.indexer.q_proj.weight blk.0.attn_rel_b.weight v.position_embd.weight
    v.sam.pos_embd.weight v.sam.neck.0.weight v.sam.net_2.weight v.blk.0.attn.rel_pos_h.weight v.patch_embd.weight
    v.patch_merger.weight a.rvq.codebook.weight mm.a.code_embd.weight position_embd.weight token_types.weight
    blk.0.attn_q.bias blk.0.ssm_a
    blk.0.time_mix_first.weight blk.0.time_mix_w0.weight blk.0.time_mix_w1.weight blk.0.time_mix_w2.weight
    blk.0.time_mix_v0.weight blk.0.time_mix_v1.weight blk.0.time_mix_v2.weight blk.0.time_mix_a0.weight
    blk.0.time_mix_a1.weight blk.0.time_mix_a2.weight blk.0.time_mix_g1.weight blk.0.time_mix_g2.weight
    blk.0.time_mix_decay_w1.weight blk.0.time_mix_decay_w2.weight blk.0.time_mix_lerp_fused.weight
""",
)
KEPT_OF_GLM5 = re.findall(
    r"\S+",
    """
    blk.0.hc_attn_fn.weight blk.0.indexer.attn_q_b.weight blk.0.indexer.attn_k.weight blk.0.indexer.proj.weight
    blk.0.indexer_compressor_gate.weight blk.0.indexer_compressor_ape.weight blk.0.ssm_f_a.weight blk.0.ssm_f_b.weight
    blk.0.ssm_g_a.weight blk.0.ssm_g_b.weight blk.0.ssm_beta.weight blk.0.attn_kv_a_mqa.weight blk.0.attn_k_b.weight
    blk.0.attn_v_b.weight
""",
)
QUANTIZED = re.findall(
    r"\S+",
    """
    token_embd.weight blk.0.attn_q.weight blk.0.ffn_gate_inp_shexp.weight blk.0.time_mix_key.weight blk.0.gate.weight
    blk.0.mlp.gate.weight blk.0.token_types.weight blk.0.norm.weight blk.0.ssm_in.weight
""",
)


def test_all_that_llama_quantize_keeps(tmp_path):
    """Names by the source of llama.cpp; no override reaches them. Some are kept in one architecture alone."""
    names = [*KEPT_BY_LLAMA_QUANTIZE, *KEPT_OF_GLM5, *QUANTIZED]
    for architecture, tensors in (
        ("llama", KEPT_BY_LLAMA_QUANTIZE),
        ("glm5-next", [*KEPT_BY_LLAMA_QUANTIZE, *KEPT_OF_GLM5]),
    ):
        path = model(tmp_path / "x.gguf", {n: normal(2, 32) for n in names}, {"general.architecture": architecture})
        for options in ({}, {"overrides": [parse_override("=q8_0")]}):
            lines = converted(path, tmp_path / "y.gguf", "q4_0", **options)
            assert [name for name, line in lines.items() if line.new == "F32"] == [n for n in names if n in tensors]


def test_overrides_are_honoured_or_refused(run, source, tmp_path):
    """No override reaches a norm, falls back to F16, or goes unnoticed."""
    lines = converted(source, tmp_path / "y.gguf", "q4_0", overrides=[parse_override("attn=q8_0")])
    assert (lines["blk.0.attn_q.weight"].new, lines["blk.0.attn_norm.weight"].new) == ("Q8_0", "F32")
    odd = model(tmp_path / "odd.gguf", {"a.weight": normal(4, 64), "b.weight": normal(4, 48)})
    for text, message in (
        ("b=q4_0", "tensor 'b.weight': rows of 48 weights are no whole blocks of Q4_0, which have 32"),
        ("c=q4_0", "--tensor-type 'c=Q4_0' fits no tensor's name"),
    ):
        status, _, err = run("convert", odd, tmp_path / "z.gguf", "q8_0", "--tensor-type", text)
        assert (status, message in err) == (1, True)
    status, _, err = run("convert", odd, tmp_path / "z.gguf", "q8_0", "--keep", "c")
    assert (status, "--keep 'c' fits no tensor's name" in err) == (1, True)
    assert not (tmp_path / "z.gguf").exists()


def test_the_first_pattern_wins(source, tmp_path):
    overrides = [parse_override("attn=q8_0"), parse_override("attn_q=q4_0"), parse_override("=q5_1")]
    lines = converted(source, tmp_path / "y.gguf", "q4_0", overrides=overrides, keep=[re.compile("norm|^output")])
    assert [line.new for line in lines.values()] == ["Q5_1", "Q8_0", "F32", "Q5_1", "F32"]


def test_names_of_other_checkpoints(tmp_path):
    """Without names that end in weight, every matrix is one."""
    np.savez(tmp_path / "x.npz", w=normal(2, 64), b=normal(64))
    lines = converted(tmp_path / "x.npz", tmp_path / "y.gguf", "q4_0")
    assert [line.new for line in lines.values()] == ["Q4_0", "F32"]


@pytest.mark.parametrize("text", ["q4_0", "(=q4_0", "x=q9_9"])
def test_overrides_that_make_no_sense(text):
    with pytest.raises(qgemm.QgemmError):
        parse_override(text)

"""File types of llama-quantize: the type of each tensor, as llama-quantize --dry-run prints it for nine models."""

from __future__ import annotations

import json
import lzma
import struct
from pathlib import Path

import numpy as np
import pytest

import qgemm
from qgemm.converter.mixture import FILE_TYPES, Model, chosen
from qgemm.converter.rules import keeps

# For each model its architecture, metadata, shapes, and the type of each tensor in 37 file types, "+imatrix" where that
# differs; written by llama-quantize of llama.cpp 0c1e57098.
GOLDEN = json.loads(lzma.decompress((Path(__file__).parent / "data" / "llama_quantize_types.json.xz").read_bytes()))
CASES = [(model, kind) for model, found in GOLDEN.items() for kind in found["types"] if kind not in ("F16", "BF16")]


@pytest.mark.parametrize(("model", "kind"), CASES, ids=lambda case: case)
def test_types_of_llama_quantize(model, kind):
    found = GOLDEN[model]
    shapes = {name: tuple(shape) for name, shape in found["tensors"].items()}
    name, _, imatrix = kind.lower().partition("+")
    metadata = {"general.architecture": found["architecture"], **found["metadata"]}
    quantized = [tensor for tensor, shape in shapes.items() if not keeps(tensor, len(shape), found["architecture"])]
    types = chosen(name, Model.of(metadata), shapes, quantized, bool(imatrix))
    want = found["types"][kind]
    kept = {tensor: "f32" if len(shape) < 2 else "f16" for tensor, shape in shapes.items()}  # as the source has them
    assert {**kept, **types} == want


def test_every_file_type_is_held_against_llama_quantize():
    assert {kind.lower().partition("+")[0] for _, kind in CASES} == set(FILE_TYPES)


# ---------------------------------------------------------------- files


@pytest.fixture
def model(tmp_path):
    """A llama of eight layers, in F16."""
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (64, 256), "output": (64, 256), "output_norm": (256,)}
    for layer in range(8):
        parts = {"attn_q": (256, 256), "attn_k": (64, 256), "attn_v": (64, 256), "attn_norm": (256,)}
        parts |= {"ffn_up": (288, 256), "ffn_down": (256, 288), "ffn_gate_inp": (8, 256)}
        shapes |= {f"blk.{layer}.{part}": shape for part, shape in parts.items()}
    tensors = {}
    for name, shape in shapes.items():
        x = rng.standard_normal(shape).astype(np.float32 if len(shape) < 2 else np.float16)
        tensors[f"{name}.weight"] = qgemm.Tensor("f32" if len(shape) < 2 else "f16", shape, x)
    keys = {"block_count": 8, "attention.head_count": 8, "attention.head_count_kv": 2}
    metadata = {"general.architecture": "llama", **{f"llama.{key}": np.uint32(value) for key, value in keys.items()}}
    qgemm.write(tmp_path / "model.gguf", tensors, metadata)
    return tmp_path / "model.gguf"


@pytest.mark.parametrize(("asked", "number"), [("q4_k_m", 15), ("Q4_K", 15), ("q4_k_s", 14), ("q5_k_m", 17)])
def test_a_mixture_is_written(model, tmp_path, asked, number):
    """Types by the rule, bytes by each type's encoder, the fallback for what does not fit, the file type's number."""
    done = qgemm.convert(model, tmp_path / "y.gguf", asked)
    kind = next(name for name, found in FILE_TYPES.items() if found.number == number)
    with qgemm.open(model) as source, qgemm.open(tmp_path / "y.gguf") as file:
        shapes = {name: tensor.shape for name, tensor in source.items()}
        quantized = [name for name, shape in shapes.items() if not keeps(name, len(shape), "llama")]
        want = chosen(kind, Model.of(source.metadata), shapes, quantized, False)
        assert {name: tensor.format.name for name, tensor in file.items() if name in want} == want
        assert len(set(want.values())) > 2
        for name, tensor in file.items():
            x = source[name]
            again = qgemm.quantize(x.dequantize(), want[name]) if name in want else x
            assert tensor.blocks.tobytes() == again.blocks.tobytes()
        assert file.metadata["general.file_type"] == number
        assert file.metadata["general.quantization_version"] == 2
    rules = {line.name: line.rule for line in done.lines}
    assert rules["output.weight"] == "output matrix: Q6_K"
    assert rules["blk.0.ffn_down.weight"].startswith("row length not a multiple of 256: ")
    assert rules["blk.0.ffn_gate_inp.weight"] == "router"
    assert rules["blk.3.attn_q.weight"] == ""


def test_an_importance_matrix_reaches_the_k_quants(model, tmp_path):
    importance = np.random.default_rng(1).uniform(0, 4, 256).astype(np.float32)
    sums = (b"blk.0.attn_q.weight", importance)
    entry = struct.pack("<i", len(sums[0])) + sums[0] + struct.pack("<ii", 1, 256) + sums[1].tobytes()
    (tmp_path / "x.dat").write_bytes(struct.pack("<i", 1) + entry)
    qgemm.convert(model, tmp_path / "y.gguf", "q4_k_m", imatrix=tmp_path / "x.dat")
    with qgemm.open(model) as source, qgemm.open(tmp_path / "y.gguf") as file:
        x = source["blk.0.attn_q.weight"].dequantize()
        want = qgemm.quantize(x, "q4_k", imatrix=importance)
        assert file["blk.0.attn_q.weight"].blocks.tobytes() == want.blocks.tobytes()
        assert want.blocks.tobytes() != qgemm.quantize(x, "q4_k").blocks.tobytes()


def test_overrides_and_pure(model, tmp_path):
    """What is overridden is not counted; pure is one type."""
    done = qgemm.convert(model, tmp_path / "y.gguf", "q4_k_m", tensor_types={"blk.0.attn_v": "q8_0"}, dry_run=True)
    types = {line.name: line.new for line in done.lines}
    assert types["blk.0.attn_v.weight"] == "Q8_0"
    assert types["blk.1.attn_v.weight"] == "Q6_K"  # the first of seven that are counted
    pure = qgemm.convert(model, tmp_path / "y.gguf", "q4_k_m", pure=True, dry_run=True)
    assert {line.new for line in pure.lines if not line.rule} == {"Q4_K"}


def test_types_of_the_ends(model, tmp_path, run):
    """As llama-quantize's options of these names say it, before --tensor-type; from the shell alike."""
    given = {"tensor_types": {"output|embd": "q4_0"}, "token_embedding_type": "q5_0", "output_tensor_type": "q5_1"}
    done = qgemm.convert(model, tmp_path / "y.gguf", "q4_k_m", dry_run=True, **given)
    types = {line.name: line.new for line in done.lines}
    assert (types["token_embd.weight"], types["output.weight"]) == ("Q5_0", "Q5_1")
    left = qgemm.convert(model, tmp_path / "y.gguf", "q4_k_m", dry_run=True, leave_output_tensor=True)
    assert {line.name: line.new for line in left.lines}["output.weight"] == "F16"
    words = "--output-tensor-type", "q8_0", "--token-embedding-type", "q6_k", "--dry-run"
    status, out, err = run("convert", model, tmp_path / "y.gguf", "q4_k_m", *words)
    assert (status, err) == (0, "")
    to = {line.split()[0]: line.split()[3] for line in out.splitlines() if ".weight" in line}
    assert (to["token_embd.weight"], to["output.weight"]) == ("Q6_K", "Q8_0")
    status, out, err = run("convert", model, tmp_path / "y.gguf", "q4_k_m", "--leave-output-tensor", "--dry-run")
    assert {line.split()[0]: line.split()[3] for line in out.splitlines() if ".weight" in line}[
        "output.weight"
    ] == "F16"
    assert run("convert", model, tmp_path / "y.gguf", "q4_k_m", "--output-tensor-type", "q9")[0] == 2


def test_what_has_other_names_is_not_mixed(tmp_path):
    np.savez(tmp_path / "x.npz", w=np.ones((4, 256), np.float32))
    with pytest.raises(qgemm.QgemmError, match="q4_k_m chooses types by the names of tensors"):
        qgemm.convert(tmp_path / "x.npz", tmp_path / "y.gguf", "q4_k_m")
    done = qgemm.convert(tmp_path / "x.npz", tmp_path / "y.gguf", "q6_k")
    assert [line.new for line in done.lines] == ["Q6_K"]


def test_types_without_an_encoder_are_refused_before_any_work(model, tmp_path):
    with pytest.raises(qgemm.QgemmError, match="IQ3_S has no encoder; types that can be written"):
        qgemm.convert(model, tmp_path / "y.gguf", "iq3_s")
    assert not (tmp_path / "y.gguf").exists()

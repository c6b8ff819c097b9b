"""File types of llama-quantize on models of other kinds: tied, without decoder layers, with rules of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from files import imatrix

import qgemm
from qgemm.converter.mixture import Model, choose_types


def tensors(path: Path, architecture: str, shapes: dict[str, tuple[int, ...]], **keys: object) -> Path:
    """A model of F16 tensors."""
    weights = {f"{name}.weight": qgemm.quantize(np.ones(shape, np.float32), "f16") for name, shape in shapes.items()}
    metadata = {f"{architecture}.{key}": np.uint32(value) for key, value in keys.items()}
    qgemm.write(path, weights, {"general.architecture": architecture, **metadata})
    return path


def tied(path: Path, **more: tuple[int, ...]) -> Path:
    """A gemma of two layers, whose token embedding is the output matrix."""
    shapes = {"token_embd": (8, 256), "per_layer_token_embd": (8, 256), **more}
    shapes |= {f"blk.{layer}.attn_q": (4, 256) for layer in range(2)} | {"blk.0.ffn_down": (4, 288)}
    return tensors(path, "gemma3", shapes, block_count=2)


@pytest.mark.parametrize(
    ("options", "tokens", "of_layers"),
    [
        ({}, "Q6_K", "Q6_K"),
        ({"output_tensor_type": "q8_0"}, "Q8_0", "Q8_0"),
        ({"output_tensor_type": "q8_0", "token_embedding_type": "q4_0"}, "Q4_0", "Q4_0"),
        ({"output_tensor_type": "q8_0", "tensor_types": {"token_embd": "q5_0"}}, "Q5_0", "Q5_0"),
        ({"token_embedding_type": "q4_0", "tensor_types": {"per_layer": "q5_0"}}, "Q4_0", "Q5_0"),
    ],
)
def test_types_of_the_end_of_a_tied_model(tmp_path, options, tokens, of_layers):
    """Both tables are the output matrix to llama-quantize; that of layers yields to a --tensor-type that names it."""
    done = qgemm.convert(tied(tmp_path / "x.gguf"), tmp_path / "y.gguf", "q4_k_m", dry_run=True, **options)
    types = {line.name: line.new for line in done.lines}
    assert (types["token_embd.weight"], types["per_layer_token_embd.weight"]) == (tokens, of_layers)
    assert types["blk.0.attn_q.weight"] == "Q4_K"


def test_ends_that_are_not_there(tmp_path):
    """Without any, and of one type for all, where the tied embedding is no output matrix."""
    path = tied(tmp_path / "x.gguf")
    with pytest.raises(qgemm.QgemmError, match="--output-tensor-type: no tensor's name is one of those"):
        qgemm.convert(path, tmp_path / "y.gguf", "q4_k_m", pure=True, output_tensor_type="q8_0")


def test_rows_that_a_type_does_not_fit(tmp_path):
    """A file type's own type and a pure one fall back; an override is refused; a tensor that is one row stays."""
    path = tied(tmp_path / "x.gguf", **{"blk.1.attn_k": (1, 256), "blk.1.ffn_down": (4, 48)})
    done = qgemm.convert(path, tmp_path / "y.gguf", "q4_k_s", dry_run=True)
    types = {line.name: (line.new, line.rule) for line in done.lines}
    assert types["blk.0.ffn_down.weight"] == ("Q5_0", "row length not a multiple of 256: Q5_0")
    assert types["blk.1.attn_k.weight"] == ("F16", "1-D")
    for tensor, kind in (("0.ffn_down", "q4_k"), ("0.ffn_down", "iq4_xs"), ("1.ffn_down", "q4_0")):
        with pytest.raises(
            qgemm.QgemmError, match=rf"{tensor}.*rows of \d+ weights are no whole blocks of {kind.upper()}"
        ):
            qgemm.convert(path, tmp_path / "y.gguf", "q6_k", tensor_types={tensor: kind}, dry_run=True)
    pure = qgemm.convert(path, tmp_path / "y.gguf", "q4_k_m", pure=True, dry_run=True)
    types = {line.name: line.new for line in pure.lines}
    assert (types["blk.0.ffn_down.weight"], types["blk.1.ffn_down.weight"]) == ("Q5_0", "F16")
    assert types["token_embd.weight"] == "Q4_K"


def test_models_without_decoder_layers(tmp_path):
    """Encoders' names are llama.cpp's as well, and a matrix of one row is a vector to ggml wherever it stands."""
    layers = {"enc.blk.0.attn_v": (4, 256), "dec.blk.0.cross_attn_v": (4, 256), "enc.blk.0.attn_rel_b": (4, 256)}
    path = tensors(tmp_path / "x.gguf", "t5", {"token_embd": (4, 256), **layers, "cls.output": (1, 256)}, block_count=8)
    done = qgemm.convert(path, tmp_path / "y.gguf", "q4_k_m", dry_run=True)
    assert {line.name.removesuffix(".weight"): line.new for line in done.lines} == {
        "token_embd": "Q6_K", "enc.blk.0.attn_v": "Q6_K", "dec.blk.0.cross_attn_v": "Q4_K",
        "enc.blk.0.attn_rel_b": "F16", "cls.output": "F16",
    }  # fmt: skip
    done = qgemm.convert(path, tmp_path / "y.gguf", "bf16", dry_run=True)
    assert {line.name: line.new for line in done.lines}["cls.output.weight"] == "F16"


def test_the_table_of_tokens_of_layers_needs_no_importance(tmp_path):
    """As a token embedding, which no importance matrix has."""
    shapes = {"token_embd": (4, 256), "output": (4, 256), "per_layer_token_embd": (4, 256), "blk.0.attn_q": (4, 256)}
    path = tensors(tmp_path / "x.gguf", "gemma3n", shapes, block_count=1)
    importances = imatrix(tmp_path / "x.dat", ["blk.0.attn_q.weight"])
    done = qgemm.convert(path, tmp_path / "y.gguf", "q2_k_s", imatrix=importances, dry_run=True)
    assert {line.name: line.new for line in done.lines}["per_layer_token_embd.weight"] == "Q2_K"


def test_an_output_matrix_that_is_not_there_is_left(tmp_path):
    done = qgemm.convert(tied(tmp_path / "x.gguf"), tmp_path / "y.gguf", "q4_k_m", leave_output_tensor=True)
    assert {line.name: line.new for line in done.lines}["token_embd.weight"] == "Q6_K"


def test_metadata_of_a_model():
    """Counts come from the first layer; invalid counts, and tensors beyond the last layer, are refused, not guessed."""
    keys = {"general.architecture": "llama", "llama.block_count": np.uint32(80), "llama.attention.head_count": 8}
    assert not Model.from_metadata(keys).is_70b
    for of_layers in ([1, 0], np.array([1, 0], np.int32)):
        assert Model.from_metadata({**keys, "llama.attention.head_count_kv": of_layers}).is_70b
    embed = {key.replace("llama", "llama-embed"): value for key, value in keys.items()}
    grouped = {"general.architecture": "llama-embed", "llama-embed.attention.head_count_kv": 1}
    assert Model.from_metadata({**embed, **grouped}).is_70b
    loops = {"nanbeige.block_count": 20, "nanbeige.num_loops": 2}
    assert Model.from_metadata({"general.architecture": "nanbeige", **loops}).layers == 40
    for bad in ("80", 8.0, np.array([], np.int32), ["8"]):
        with pytest.raises(qgemm.QgemmError, match=r"llama\.block_count: .* is no count"):
            Model.from_metadata({**keys, "llama.block_count": bad})
    shapes = {"blk.8.ffn_down_exps.weight": (2, 4, 256)}
    with pytest.raises(qgemm.QgemmError, match=r"'blk\.8\.ffn_down_exps\.weight': is in none of the model's 8 layers"):
        choose_types("q4_k_m", Model("llama", 8, 8, 8, experts=2), shapes, list(shapes), False)


def test_architectures_with_rules_of_their_own():
    """GLM5's projections of queries get no fewer bits than q8_0; of Bailing's three-dimensional tensors experts alone
    are MXFP4."""
    shapes = {"output.weight": (64, 256), "blk.0.attn_q_b.weight": (64, 256), "blk.0.ffn_up_exps.weight": (8, 64, 256)}
    shapes |= {"blk.0.attn_k_b.weight": (8, 64, 256)}

    def types(architecture: str, name: str) -> dict[str, str]:
        return choose_types(name, Model(architecture, 1, experts=16), shapes, list(shapes), False)

    assert types("glm5-next", "q4_k_m")["blk.0.attn_q_b.weight"] == "q8_0"
    assert types("deepseek2", "q4_k_m")["blk.0.attn_q_b.weight"] == "q4_k"
    assert types("bailingmoe3", "mxfp4_moe")["blk.0.attn_k_b.weight"] == "q8_0"
    assert types("bailingmoe3", "mxfp4_moe")["blk.0.ffn_up_exps.weight"] == "mxfp4"
    assert types("deepseek2", "mxfp4_moe")["blk.0.attn_k_b.weight"] == "mxfp4"


def test_what_has_other_names_is_not_mixed(tmp_path):
    np.savez(tmp_path / "x.npz", w=np.ones((4, 256), np.float32))
    with pytest.raises(qgemm.QgemmError, match="q4_k_m chooses types by the names of tensors"):
        qgemm.convert(tmp_path / "x.npz", tmp_path / "y.gguf", "q4_k_m")
    done = qgemm.convert(tmp_path / "x.npz", tmp_path / "y.gguf", "q6_k")
    assert [line.new for line in done.lines] == ["Q6_K"]

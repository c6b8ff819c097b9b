"""A checkpoint made like a .gguf file of the same model: names, order, metadata, rotary rows, experts, exact codes."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from files import pack_awq, safetensors, written
from helpers import normal
from numpy.testing import assert_array_equal

import qgemm

WIDTH, HEADS, KV_HEADS, ROWS, LAYERS, EXPERTS = 64, 4, 2, 16, 2, 3  # ROWS: of a head
LINEAR = {  # name in a layer -> the file's name, rows, columns
    "self_attn.q_proj": ("attn_q", HEADS * ROWS, WIDTH),
    "self_attn.k_proj": ("attn_k", KV_HEADS * ROWS, WIDTH),
    "self_attn.v_proj": ("attn_v", KV_HEADS * ROWS, WIDTH),
    "self_attn.o_proj": ("attn_output", WIDTH, HEADS * ROWS),
    "mlp.gate_proj": ("ffn_gate", 96, WIDTH),
    "mlp.up_proj": ("ffn_up", 96, WIDTH),
    "mlp.down_proj": ("ffn_down", WIDTH, 96),
}
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


def rotary(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp's rotary embedding takes them: number i of both halves of a head beside each other."""
    rotated = np.empty_like(w)
    for row in range(len(w)):
        head, position = divmod(row, len(w) // heads)
        half, i = divmod(position, len(w) // heads // 2)
        rotated[head * (len(w) // heads) + 2 * i + half] = w[row]
    return rotated


def as_llama(name: str, w: np.ndarray) -> np.ndarray:
    return rotary(w, HEADS) if "q_proj" in name else rotary(w, KV_HEADS) if "k_proj" in name else w


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    """A model by Hugging Face's names."""
    tensors = {
        "model.embed_tokens.weight": normal(48, WIDTH, seed=seed),
        "lm_head.weight": normal(48, WIDTH, seed=seed + 1),
    }
    for layer in range(LAYERS):
        for i, (name, (_, n, k)) in enumerate(LINEAR.items()):
            tensors[f"model.layers.{layer}.{name}.weight"] = normal(n, k, seed=100 * seed + 10 * layer + i)
        for i, name in enumerate(NORMS):
            tensors[f"model.layers.{layer}.{name}.weight"] = 1 + normal(WIDTH, seed=500 + layer + i) / 10
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = normal(ROWS // 2)
    tensors["model.norm.weight"] = 1 + normal(WIDTH, seed=600) / 10
    return tensors


def base(path: Path, tensors: dict, *, fmt: str = "q8_0", own: dict | None = None, **keys: object) -> Path:
    """The .gguf file that llama.cpp's converter and llama-quantize make of such a model."""

    def matrix(w: np.ndarray) -> qgemm.Tensor:
        return qgemm.quantize(w.astype(np.float32), fmt)

    stored: dict = {"output.weight": matrix(tensors["lm_head.weight"])}
    stored["token_embd.weight"] = matrix(tensors["model.embed_tokens.weight"])
    stored["rope_freqs.weight"] = normal(ROWS // 2)
    for layer in range(LAYERS):
        for name, new in NORMS.items():
            stored[f"blk.{layer}.{new}.weight"] = tensors[f"model.layers.{layer}.{name}.weight"].astype(np.float32)
        for name, (new, _, _) in LINEAR.items():
            w = tensors[f"model.layers.{layer}.{name}.weight"]
            stored[f"blk.{layer}.{new}.weight"] = matrix(as_llama(name, w))
    stored["output_norm.weight"] = tensors["model.norm.weight"].astype(np.float32)
    metadata = {
        "general.architecture": "llama", "llama.block_count": np.uint32(LAYERS),
        "llama.attention.head_count": np.uint32(HEADS), "llama.attention.head_count_kv": np.uint32(KV_HEADS),
        "tokenizer.ggml.tokens": [str(i) for i in range(48)], "quantize.imatrix.file": "x.dat",
        "general.file_type": np.uint32(7),
    }  # fmt: skip
    return written(path, {**stored, **(own or {})}, {**metadata, **keys})


def half(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: w.astype(np.float16) for name, w in tensors.items()}


def test_a_checkpoint_becomes_a_model(tmp_path):
    """Every tensor of the file, in its order, from the checkpoint's weights; its metadata, less what tells types."""
    tensors = half(weights())
    like = base(tmp_path / "base.gguf", tensors)
    safetensors(tmp_path / "model.safetensors", tensors)
    done = qgemm.convert(tmp_path / "model.safetensors", tmp_path / "y.gguf", "q5_1", like=like)
    with qgemm.open(tmp_path / "y.gguf") as file, qgemm.open(like) as old:
        assert list(file) == list(old) == [line.name for line in done.lines]
        copied_keys = [key for key in old.metadata if "imatrix" not in key and key != "general.file_type"]
        assert list(file.metadata) == [*copied_keys, "general.quantization_version", "general.file_type"]
        assert file.metadata["general.file_type"] == 9
        assert file.metadata["tokenizer.ggml.tokens"] == old.metadata["tokenizer.ggml.tokens"]
        for layer in range(LAYERS):
            for name, (new, _, _) in LINEAR.items():
                want = as_llama(name, tensors[f"model.layers.{layer}.{name}.weight"]).astype(np.float32)
                assert (
                    file[f"blk.{layer}.{new}.weight"].blocks.tobytes() == qgemm.quantize(want, "q5_1").blocks.tobytes()
                )
        for name in ("blk.0.attn_norm.weight", "output_norm.weight", "rope_freqs.weight"):
            assert file[name].format == qgemm.FORMATS["f32"]
        norm = tensors["model.layers.1.input_layernorm.weight"]
        assert_array_equal(file["blk.1.attn_norm.weight"].blocks, norm.astype(np.float32))
        assert_array_equal(file["rope_freqs.weight"].blocks, old["rope_freqs.weight"].blocks)


def quantized(w: np.ndarray, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The parts of an AWQ matrix near w, groups of 32 along K, and the weights that they stand for."""
    n, k = w.shape
    grouped = w.reshape(n, k // 32, 32)
    low, high = np.minimum(grouped.min(2), 0), np.maximum(grouped.max(2), 0)
    scale = ((high - low) / 15).astype(np.float16)
    zero = np.clip(np.rint(-low / scale), 0, 15)
    codes = np.clip(np.rint(grouped / scale[..., None]) + zero[..., None], 0, 15)
    parts = {
        "qweight": pack_awq(codes.reshape(n, k).T.astype(int)), "qzeros": pack_awq(zero.T.astype(int)),
        "scales": np.ascontiguousarray(scale.T),
    }  # fmt: skip
    return parts, ((codes - zero[..., None]) * scale[..., None].astype(np.float32)).reshape(n, k).astype(np.float32)


def awq_folder(folder: Path, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """An AWQ checkpoint of the model, with scales moved from columns into norms; the weights that it holds."""
    stored, meant = {}, {}
    for i, (name, w) in enumerate(tensors.items()):
        if "_proj." in name:
            spread = np.exp(normal(w.shape[1], seed=i) / 2).astype(np.float32)
            parts, meant[name] = quantized(w.astype(np.float32) * spread, i)
            stored |= {f"{name.removesuffix('.weight')}.{part}": array for part, array in parts.items()}
        else:
            stored[name] = meant[name] = (w * np.float16(1.5) if "norm" in name else w).astype(np.float16)
    folder.mkdir()
    safetensors(folder / "model.safetensors", stored)
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return meant


@pytest.mark.parametrize("fmt", ["q8_0", "q4_0", "f16"])
def test_an_awq_folder_becomes_a_model_with_exact_codes(fmt, run, tmp_path):
    tensors = half(weights())
    like = base(tmp_path / "base.gguf", tensors, fmt=fmt)
    meant = awq_folder(tmp_path / "awq", tensors)
    words = ("convert", tmp_path / "awq", tmp_path / "y.gguf", "q5_0", "--like", like, "--keep", "embd|^output")
    assert run(*words)[0] == 0
    with qgemm.open(tmp_path / "y.gguf") as file:
        for layer in range(LAYERS):
            for name, (new, _, _) in LINEAR.items():
                tensor = file[f"blk.{layer}.{new}.weight"]
                assert str(tensor.format) == "Q5_0"
                assert_array_equal(tensor.dequantize(), as_llama(name, meant[f"model.layers.{layer}.{name}.weight"]))
            norm = meant[f"model.layers.{layer}.input_layernorm.weight"].astype(np.float32)
            assert_array_equal(file[f"blk.{layer}.attn_norm.weight"].blocks, norm)
    status, _, err = run(*words[:2], like, *words[3:])
    assert (status, "a file of this very command" in err) == (1, True)


def test_no_rotary_rows_in_other_architectures(tmp_path):
    """The order of rows in the file decides, not a list of architectures; biases follow their matrices."""
    tensors = {name: w for name, w in half(weights()).items() if "inv_freq" not in name}
    bias = normal(HEADS * ROWS, seed=9).astype(np.float16)
    tensors["model.layers.0.self_attn.q_proj.bias"] = bias
    safetensors(tmp_path / "model.safetensors", tensors)
    for architecture, order in (("qwen2", lambda w, heads: w), ("llama", rotary)):
        q, k = (tensors[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qk")
        own = {
            "blk.0.attn_q.weight": qgemm.quantize(order(q, HEADS).astype(np.float32), "q8_0"),
            "blk.0.attn_k.weight": qgemm.quantize(order(k, KV_HEADS).astype(np.float32), "q8_0"),
            "blk.0.attn_q.bias": order(bias, HEADS).astype(np.float32),
        }
        keys = {
            f"{architecture}.{key}": np.uint32(value)
            for key, value in {
                "block_count": LAYERS,
                "attention.head_count": HEADS,
                "attention.head_count_kv": KV_HEADS,
            }.items()
        }
        like = base(tmp_path / "base.gguf", tensors, own=own, **{"general.architecture": architecture, **keys})
        qgemm.convert(tmp_path / "model.safetensors", tmp_path / "y.gguf", "f16", like=like, force=True)
        with qgemm.open(tmp_path / "y.gguf") as file:
            assert_array_equal(file["blk.0.attn_q.weight"].blocks, order(q, HEADS))
            assert_array_equal(file["blk.0.attn_k.weight"].blocks, order(k, KV_HEADS))
            assert_array_equal(file["blk.0.attn_q.bias"].blocks, order(bias, HEADS).astype(np.float32))


def test_norms_plus_one(tmp_path):
    """Gemma's norms are stored less one, and the file has them whole."""
    tensors = half(weights())
    norms = {f"blk.0.{new}.weight": 1 + tensors[f"model.layers.0.{name}.weight"].astype(np.float32)
             for name, new in NORMS.items()}  # fmt: skip
    like = base(tmp_path / "base.gguf", tensors, own=norms)
    safetensors(tmp_path / "model.safetensors", tensors)
    qgemm.convert(tmp_path / "model.safetensors", tmp_path / "y.gguf", "q4_0", like=like)
    with qgemm.open(tmp_path / "y.gguf") as file:
        for name, want in norms.items():
            assert_array_equal(file[name].blocks, want)


@pytest.mark.parametrize("kind", ["f16", "awq"])
def test_experts_are_stacked(kind, tmp_path):
    """Matrices of experts, each of its own name, become one tensor of three axes."""
    w = normal(EXPERTS, 96, WIDTH, seed=3).astype(np.float16)
    router = normal(EXPERTS, WIDTH, seed=4).astype(np.float16)
    folder, meant, stored = tmp_path / "m", w.astype(np.float32), {"model.layers.0.mlp.gate.weight": router}
    folder.mkdir()
    for i in reversed(range(EXPERTS)):
        name = f"model.layers.0.mlp.experts.{i}.gate_proj"
        if kind == "awq":
            parts, meant[i] = quantized(w[i].astype(np.float32), i)
            stored |= {f"{name}.{part}": array for part, array in parts.items()}
        else:
            stored[f"{name}.weight"] = w[i]
    safetensors(folder / "model.safetensors", stored)
    if kind == "awq":
        quantization = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
        (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    metadata = {"general.architecture": "qwen3moe", "qwen3moe.block_count": np.uint32(1)}
    tensors = {"blk.0.ffn_gate_exps.weight": qgemm.quantize(w.astype(np.float32), "q4_0"),
               "blk.0.ffn_gate_inp.weight": router.astype(np.float32)}  # fmt: skip
    like = written(tmp_path / "base.gguf", tensors, metadata)
    fmt = "q5_0" if kind == "awq" else "f16"
    line = qgemm.convert(folder, tmp_path / "y.gguf", fmt, like=like).lines[0]
    assert (line.how, line.shape, line.error) == ("exact", (EXPERTS, 96, WIDTH), 0)
    with qgemm.open(tmp_path / "y.gguf") as file:
        assert_array_equal(file["blk.0.ffn_gate_exps.weight"].dequantize(), meant)
        assert_array_equal(file["blk.0.ffn_gate_inp.weight"].blocks, router.astype(np.float32))


def change(tensors: dict[str, np.ndarray], kind: str) -> dict[str, np.ndarray]:
    target = "model.layers.1.mlp.up_proj.weight"
    if kind == "missing":
        return {name: w for name, w in tensors.items() if name != target}
    if kind == "unknown":
        return {**tensors, "model.layers.1.mlp.side_proj.weight": normal(4, 32)}
    return {
        **tensors,
        target: {"shape": normal(95, WIDTH), "other": normal(96, WIDTH, seed=77)}[kind].astype(np.float16),
    }


REFUSED = {
    "missing": r"'blk\.1\.ffn_up\.weight': is in .*base\.gguf, and no tensor here has its place",
    "unknown": r"'model\.layers\.1\.mlp\.side_proj\.weight': has no place in .*base\.gguf",
    "shape": r"'blk\.1\.ffn_up\.weight': has shape \(95, 64\), and \(96, 64\) in .*base\.gguf",
    "other": r"'blk\.1\.ffn_up\.weight': is of another model than .*base\.gguf: signs agree by 0\.[45]",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_another_model_is_refused(kind, tmp_path):
    tensors = half(weights())
    like = base(tmp_path / "base.gguf", tensors)
    safetensors(tmp_path / "model.safetensors", change(tensors, kind))
    with pytest.raises(qgemm.QgemmError, match=REFUSED[kind]):
        qgemm.convert(tmp_path / "model.safetensors", tmp_path / "y.gguf", "q8_0", like=like)
    assert not (tmp_path / "y.gguf").exists()


def test_eight_bits_in_rotary_order(tmp_path):
    """Rows of FP8 move with their scales."""
    tensors = half(weights())
    like = base(tmp_path / "base.gguf", tensors)
    name = "model.layers.0.self_attn.q_proj.weight"
    w, scale = tensors[name].astype(ml_dtypes.float8_e4m3fn), np.linspace(1, 2, HEADS * ROWS, dtype=np.float32)
    safetensors(tmp_path / "model.safetensors", {**tensors, name: w, f"{name}_scale": scale[:, None]})
    qgemm.convert(tmp_path / "model.safetensors", tmp_path / "y.gguf", "f32", like=like)
    with qgemm.open(tmp_path / "y.gguf") as file:
        assert_array_equal(file["blk.0.attn_q.weight"].blocks, rotary(w.astype(np.float32) * scale[:, None], HEADS))

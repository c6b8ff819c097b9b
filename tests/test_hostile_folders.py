"""Folders made to do harm: JSON of any depth, values and tensors of any kind, other files in place of the real ones.

Each is refused by CheckpointError with the name of the file, key or tensor; tools/fuzzing/folders.py tries many more.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from pathlib import Path

import class_folders
import ml_dtypes
import numpy as np
import pytest
from files import safetensors
from hf_folders import FOLDERS, YARN, D, E, X, folder, tensors_of

import qgemm
from qgemm.converter.architecture_record import Architecture
from qgemm.converter.architectures import ARCHITECTURES
from qgemm.converter.hf_folder import LEFT_OUT
from qgemm.errors import CheckpointError
from qgemm.files.json_parser import MAX_DEPTH

ROOT = Path(qgemm.__file__).parent
LLAMA = "LlamaForCausalLM"
TOKENIZER = {
    "model": {"type": "BPE", "vocab": {chr(97 + i): i for i in range(20)}, "merges": ["a b"]},
    "pre_tokenizer": {"type": "ByteLevel"},
}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
PAGE = b"<!DOCTYPE html>\n<html><body>Not found</body></html>\n"
INDEX = "model.safetensors.index.json"


def model(path: Path, architecture: str = LLAMA, **config: object) -> Path:
    """A folder with a tokenizer."""
    folder(path, architecture, **config)
    (path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (path / "tokenizer_config.json").write_text("{}")
    return path


def refused(path: Path, message: str) -> None:
    """A folder, or a file in it, is refused, with this message and at little cost."""
    with pytest.raises(CheckpointError, match=message) as caught:
        qgemm.convert(path, path.parent / "y.gguf", "q8_0", force=True)
    assert str(caught.value).startswith(str(path.parent))
    assert not (path.parent / "y.gguf").exists()


def metadata(path: Path) -> dict:
    """The metadata of the model that a folder becomes."""
    qgemm.convert(path, path.parent / "y.gguf", "f16", force=True)
    with qgemm.open(path.parent / "y.gguf", copy=True) as file:
        keys = dict(file.metadata)
    (path.parent / "y.gguf").unlink()
    return keys


# ---------------------------------------------------------------- JSON

FILES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.json", "added_tokens.json", INDEX,
    "quantize_config.json",
)  # fmt: skip


def test_one_module_parses_json_of_inputs():
    """qgemm/files/json_parser.py, whose checks thus hold for all JSON; the CUDA configs are files of the package."""
    parsers = {"load", "loads", "JSONDecoder", "raw_decode"}
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        if "json" not in text:
            continue
        tree = ast.parse(text)
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} & parsers
        imports = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert "json" not in imported, path
        if "json" in imports and names:
            assert path.relative_to(ROOT).as_posix() in ("files/json_parser.py", "cuda/configs/__init__.py")


@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("name", FILES)
def test_deep_json_is_refused_at_a_fixed_depth(name, opening, tmp_path):
    """Whatever the depth of the caller, and whatever Python's limit."""
    path = model(tmp_path / "m")
    text = (path / name).read_text() if (path / name).exists() else "{}"
    closing = {"[": "]", '{"a":': "}"}[opening]
    source = path / INDEX if name == INDEX else path
    for depth in (MAX_DEPTH, 985, 100_000 // len(opening)):
        nested = opening * depth + "0" + closing * depth
        comma = ", " if len(text) > 2 else ""
        (path / name).write_text(f'{text[:-1]}{comma}"\\"[": {nested}}}')
        limit = sys.getrecursionlimit()
        try:
            sys.setrecursionlimit(400)
            refused(source, rf"{re.escape(name)}: (is JSON nested {depth + 1} deep|is made of brackets)")
        finally:
            sys.setrecursionlimit(limit)


def test_brackets_within_strings_are_not_nested(tmp_path):
    extra = {"notes": ["[" * 500, '\\"{' * 500, '\\\\"'], "deep": json.loads("[" * 50 + "]" * 50)}
    assert metadata(model(tmp_path / "m", **extra))["llama.embedding_length"] == E


def test_numbers_and_names_of_json(tmp_path):
    """NaN and Infinity are read, as Python writes them, unless a key is read that has a range."""
    path = model(tmp_path / "m", time_step_limit=[0.0, float("inf")], initializer_range=float("nan"))
    assert metadata(path)["llama.embedding_length"] == E
    config = (path / "config.json").read_text()
    for text, message in (
        (config.replace("512", "9" * 5000), "a number has 5000 digits"),
        (config.replace('"vocab_size": 40', '"vocab_size": 40, "vocab_size": 41'), "a name comes twice in an object"),
        (config.replace("512", "\xff"), "is not JSON that is read"),
    ):
        (path / "config.json").write_bytes(text.encode("latin-1"))
        refused(path, rf"config\.json: .*{message}")


@pytest.mark.parametrize(
    ("raw", "kind"), [(POINTER, "a git-lfs pointer"), (PAGE, "a web page"), (b"\n" + PAGE, "page")]
)
@pytest.mark.parametrize("name", [*FILES, "model.safetensors", "tokenizer.model", "x.npy", "x.npz"])
def test_other_files_in_place_of_the_real_ones(name, raw, kind, tmp_path):
    path = model(tmp_path / "m")
    (path / name).write_bytes(raw)
    single = name == INDEX or name.startswith("x.")
    refused(path / name if single else path, rf"{re.escape(name)}: .*, it is .*{kind}")


@pytest.mark.parametrize(("raw", "kind"), [(POINTER, "a git-lfs pointer"), (PAGE, "a web page")])
@pytest.mark.parametrize("name", ["model", "model.bin", "model.gguf", "model.gguf.part"])
def test_other_files_of_any_name(name, raw, kind, tmp_path):
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(qgemm.QgemmError, match=rf"{re.escape(name)}: .*, it is {kind}"):
        qgemm.load(tmp_path / name)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_long_file_of_a_tokenizer(name, tmp_path):
    """By the bytes of all weights beside it."""
    path = model(tmp_path / "m")
    text = (path / name).read_text()
    (path / name).write_text(text[:-1] + " " * (2 << 20) + text[-1])
    refused(path, rf"{re.escape(name)}: has [0-9]+ bytes, the weights beside it cannot need more than")
    (path / "adapter.safetensors").touch()
    os.truncate(path / "adapter.safetensors", 4 << 20)
    assert metadata(path)["tokenizer.ggml.model"] == "gpt2"


@pytest.mark.parametrize("target", ["blobs/gone", "itself"])
@pytest.mark.parametrize(
    "name",
    [*FILES[:5], "quantize_config.json", "chat_template.jinja", "merges.txt", "model.safetensors", "tokenizer.model"],
)
def test_links_to_nothing(name, target, tmp_path):
    """As in a cache whose blobs were removed: a config would otherwise count as missing, and the model as tensors."""
    path = model(tmp_path / "m")
    (path / name).unlink(missing_ok=True)
    (path / name).symlink_to(name if target == "itself" else target)
    with pytest.raises(qgemm.QgemmError, match=rf"{re.escape(name)}: "):
        qgemm.convert(path, tmp_path / "y.gguf", "q8_0")
    assert os.listdir(tmp_path) == ["m"]


def test_a_tokenizer_to_copy_that_is_a_link_to_nothing(tmp_path):
    path = model(tmp_path / "m")
    (path / "tokenizer.json").unlink()
    (path / "tokenizer.json").symlink_to("blobs/gone")
    with pytest.raises(qgemm.QgemmError, match=r"tokenizer\.json: cannot be read: "):
        qgemm.convert(path, tmp_path / "y", "u4_g32", layout="compressed-tensors")
    assert os.listdir(tmp_path) == ["m"]


@pytest.mark.parametrize("name", ["chat_template.jinja", "merges.txt"])
def test_pointers_in_place_of_text(name, tmp_path):
    path = model(tmp_path / "m")
    (path / name).write_bytes(POINTER)
    refused(path, rf"{name}: is not the text itself, it is a git-lfs pointer")
    (path / name).write_bytes(b"\xff\xfe")
    refused(path, rf"{name}: is not UTF-8")


# ---------------------------------------------------------------- values of configs

LONG = {"type": "longrope", "long_factor": [2.0] * (D // 2), "short_factor": [1.0] * (D // 2)}


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        (LLAMA, "rope_theta", 1e308),
        (LLAMA, "rope_theta", -1),
        (LLAMA, "rope_theta", 0),
        (LLAMA, "rms_norm_eps", 1e308),
        (LLAMA, "rms_norm_eps", float("inf")),
        (LLAMA, "partial_rotary_factor", -1.0),
        (LLAMA, "partial_rotary_factor", 1e300),
        (LLAMA, "head_dim", 2**32 - 1),
        (LLAMA, "hidden_size", 2**31),
        (LLAMA, "num_hidden_layers", 2**31),
        (LLAMA, "num_experts", 2**64),
        (LLAMA, "vocab_size", 2**40),
        (LLAMA, "max_position_embeddings", True),
        (LLAMA, "tie_word_embeddings", "yes"),
        (LLAMA, "architectures", [3]),
        (LLAMA, "text_config", [3]),
        (LLAMA, "bos_token_id", -1),
        (LLAMA, "eos_token_id", [1, True]),
        (LLAMA, "rope_scaling", "yarn"),
        ("Gemma3ForCausalLM", "final_logit_softcapping", 1e308),
        ("Gemma3ForCausalLM", "final_logit_softcapping", -1),
        ("Gemma3ForCausalLM", "rope_local_base_freq", 1e308),
        ("Phi3ForCausalLM", "original_max_position_embeddings", 1),
        ("Phi3ForCausalLM", "partial_rotary_factor", -1.0),
        ("Qwen3MoeForCausalLM", "num_experts_per_tok", 10**31),
    ],
)
def test_values_beyond_the_range_of_their_key(architecture, key, value, tmp_path):
    refused(model(tmp_path / "m", architecture, **{key: value}), rf"config\.json: {key}: .* is no ")


@pytest.mark.parametrize(
    ("architecture", "scaling", "message"),
    [
        (LLAMA, {**YARN, "factor": 1e308}, "factor: '1e.308' is no number"),
        (LLAMA, {**YARN, "factor": 0}, "factor: '0' is no number"),
        (LLAMA, {**YARN, "beta_slow": 1e39}, "beta_slow: '1e.39' is no number"),
        (LLAMA, {**YARN, "attention_factor": "1"}, "attention_factor: '1' is no number"),
        (LLAMA, {**YARN, "original_max_position_embeddings": 1}, "original_max_position_embeddings: '1' is no count"),
        (LLAMA, {"rope_type": ["yarn"]}, "rope_type: .* is no string"),
        (LLAMA, {"sliding_attention": {"rope_theta": -1}}, "sliding_attention: rope_theta: '-1' is no number"),
        (LLAMA, {"rope_type": "llama3", "factor": 8, "low_freq_factor": 2, "high_freq_factor": 1},
         "high_freq_factor: '1.0' is below the low_freq_factor"),
        (LLAMA, {"rope_type": "llama3", "factor": 1e308, "low_freq_factor": 1, "high_freq_factor": 4}, "factor: '1e"),
        ("Phi3ForCausalLM", {**LONG, "long_factor": [1e308] * (D // 2)}, "long_factor: .* is no list of number"),
        ("Phi3ForCausalLM", {**LONG, "long_factor": ["1"] * (D // 2)}, "long_factor: .* is no list of number"),
        ("Phi3ForCausalLM", {**LONG, "short_factor": [1.0]}, "short_factor: .* has 1 numbers, 8 are needed"),
        ("Phi3ForCausalLM", {"type": "longrope", "short_factor": LONG["short_factor"]}, "long_factor: .* has 0 num"),
    ],
)  # fmt: skip
def test_rotary_scaling_beyond_its_range(architecture, scaling, message, tmp_path):
    path = model(tmp_path / "m", architecture, rope_scaling=scaling)
    refused(path, rf"config\.json: rope_scaling: {message}")


def test_more_experts_used_than_there_are(tmp_path):
    path = model(tmp_path / "m", "Qwen3MoeForCausalLM", num_experts_per_tok=X + 1)
    refused(path, r"config\.json: num_experts_per_tok: '4' is more than the 3 experts")


# ---------------------------------------------------------------- tensors

WRONG = {
    "integers": lambda w: np.ones(w.shape, np.int32),
    "bools": lambda w: np.ones(w.shape, np.bool_),
    "unsigned": lambda w: np.ones(w.shape, np.uint64),
    "no rows": lambda w: np.ones((0, *w.shape[1:]), w.dtype),
    "no columns": lambda w: np.ones((*w.shape[:-1], 0), w.dtype),
    "one axis": lambda w: w.reshape(-1) if w.ndim > 1 else w[:1],
    "an axis more": lambda w: w[None],
    "a number": lambda w: w.reshape(-1)[0],
    "five axes": lambda w: w.reshape(1, 1, 1, 1, *w.shape) if w.ndim > 1 else w.reshape(1, 1, 1, 1, -1),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "GptOssForCausalLM"])
def test_tensors_of_the_wrong_kind(architecture, wrong, tmp_path):
    """Each tensor of the first layer and of both ends in turn: the message names it or the tensor that it becomes."""
    tensors = tensors_of(architecture)
    path = folder(tmp_path / "m", architecture)
    for name in [name for name in tensors if ".1." not in name or "layers.0" in name]:
        array = WRONG[wrong](tensors[name])
        safetensors(path / "model.safetensors", {**tensors, name: np.array(array)})
        refused(path, r"model\.safetensors: tensor '")


SPLITS = {ARCHITECTURES[name].split: name for name in class_folders.CLASSES}  # each function, and a class that has it
del SPLITS[Architecture._field_defaults["split"]]


@pytest.mark.parametrize("wrong", ["one axis", "a number"])
@pytest.mark.parametrize("name", SPLITS.values())
def test_fused_tensors_with_too_few_axes(name, wrong, tmp_path):
    """Functions that split, transpose or reorder a class's tensors look at their axes first."""
    tensors = class_folders.tensors_of(name)
    path = class_folders.folder(tmp_path / "m", name)
    for changed, array in tensors.items():
        other_layer = re.search(r"\.[1-9][0-9]*\.", changed)
        if array.ndim > 1 and array.shape[0] > 1 and not other_layer and not LEFT_OUT.search(changed):
            safetensors(path / "model.safetensors", {**tensors, changed: np.array(WRONG[wrong](array))})
            refused(path, r"model\.safetensors: tensor '")


def test_numbers_of_layers_and_experts(tmp_path):
    """Numbers of any length and with leading zeros are no numbers of a tensor."""
    tensors = tensors_of("Qwen3MoeForCausalLM")
    path = folder(tmp_path / "m", "Qwen3MoeForCausalLM")
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    for new in ("9" * 5000, "01", "\u0661", "100000", "1e1", "-1"):
        for other in (name.replace("experts.1", f"experts.{new}"), name.replace("layers.0", f"layers.{new}")):
            renamed = {other if key == name else key: w for key, w in tensors.items()}
            safetensors(path / "model.safetensors", renamed)
            refused(path, r"model\.safetensors: tensor '")
    safetensors(tmp_path / "x.safetensors", {f"blk.{'9' * 5000}.attn_q.weight": np.ones((2, 32), np.float32)})
    with pytest.raises(qgemm.QgemmError, match=r"x\.safetensors|y\.gguf"):
        qgemm.convert(tmp_path / "x.safetensors", tmp_path / "y.gguf", "q4_k_m")


def test_empty_tensors_are_refused_early(tmp_path):
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": np.ones((0, E), np.float32) for i in range(4000)}
    path = folder(tmp_path / "m", LLAMA, tensors, num_hidden_layers=4000)
    refused(path, r"model\.safetensors: header: lists more than 256 tensors without data")


def test_embeddings_of_many_more_rows_than_tokens(tmp_path):
    """A row of two bytes must not cost a token with a text, a score and a type."""
    rows, layer = 1 << 20, FOLDERS["Qwen2ForCausalLM"][1]
    shapes = {"model.norm.weight": (E,)} | {f"model.layers.0.{name}": shape for name, shape in layer.items()}
    tensors = {name: np.ones([2] * len(shape), np.float16) for name, shape in shapes.items()}
    tensors["model.embed_tokens.weight"] = np.ones((rows, 2), ml_dtypes.float8_e4m3fn)
    config = {
        "hidden_size": 2, "intermediate_size": 2, "num_attention_heads": 1, "num_key_value_heads": 1,
        "num_hidden_layers": 1, "vocab_size": rows, "tie_word_embeddings": True,
    }  # fmt: skip
    path = folder(tmp_path / "m", "Qwen2ForCausalLM", tensors, **config)
    assert metadata(path)["qwen2.vocab_size"] == rows
    (path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    refused(path, rf"tokenizer\.json: has 20 tokens, which are too few for the {rows} rows of the embedding")


# ---------------------------------------------------------------- chat templates

TEMPLATES = {"default": "{{ a }}", "tool use": "{{ b }}"}


@pytest.mark.parametrize(
    "value",
    [TEMPLATES, [{"name": name, "template": text} for name, text in TEMPLATES.items()]],
    ids=["mapping", "list"],
)
@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.json"])
def test_several_chat_templates(name, value, tmp_path):
    path = model(tmp_path / "m")
    (path / name).write_text(json.dumps({"chat_template": value}))
    keys = metadata(path)
    assert keys["tokenizer.chat_template"] == "{{ a }}"
    assert keys["tokenizer.chat_template.tool_use"] == "{{ b }}"
    assert keys["tokenizer.chat_templates"] == ["tool_use"]


def test_chat_templates_of_files(tmp_path):
    path = model(tmp_path / "m")
    (path / "chat_template.jinja").write_text("<|im_start|>{{ a }}")
    assert metadata(path)["tokenizer.chat_template"] == "<|im_start|>{{ a }}"
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "rag.jinja").write_text("{{ r }}")
    assert metadata(path)["tokenizer.chat_template.rag"] == "{{ r }}"
    (path / "additional_chat_templates" / "rag.jinja").write_bytes(b"\xff")
    refused(path, r"rag\.jinja: is not UTF-8")
    (path / "additional_chat_templates" / "rag.jinja").write_bytes(b"x" * (2 << 20))
    refused(path, r"rag\.jinja: has 2097152 bytes")
    (path / "additional_chat_templates" / "rag.jinja").unlink()
    (path / "tokenizer_config.json").write_text('{"chat_template": "{{ c }}"}')
    assert metadata(path)["tokenizer.chat_template"] == "{{ c }}"
    assert "tokenizer.chat_templates" not in metadata(path)


@pytest.mark.parametrize(
    "value",
    [
        3, True, ["x"], [3], {"default": {"a": "b"}}, {"default": None}, [{"name": "default", "template": {"a": "b"}}],
        [{"template": "x"}], [{"name": 3, "template": "x"}], {"a b": "x", "a-b": "y"}, {"": "x"},
        {str(i): "x" for i in range(300)},
    ],
    ids=str,
)  # fmt: skip
def test_chat_templates_of_the_wrong_kind(value, tmp_path):
    path = model(tmp_path / "m")
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    refused(path, r"tokenizer_config\.json: chat_template: ")

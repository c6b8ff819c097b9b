"""A LoRA adapter of peft becomes a .gguf adapter: base + adapter is the merged folder, converted."""

from __future__ import annotations

import re

import class_folders
import hf_folders
import numpy as np
import pytest
from class_folders import CLASSES, converted
from hf_folders import FOLDERS, D, E, F, H, V
from lora_folders import ALPHA, PREFIX, RANK, adapted, adapter, matrices
from numpy.testing import assert_allclose, assert_array_equal

import qgemm
from qgemm.errors import CheckpointError, QgemmError

Q = "model.layers.1.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"
SIZES = {Q: (H * D, E), DOWN: (E, F)}
NO_MODULE = re.compile(r"norm|ln_|embed|wte|wpe|lm_head|embed_out|kv_b_proj|\bgate\.weight$|router|conv")
CONV1D = ("c_attn", "c_proj", "c_fc")  # modules whose W is stored as [K, N]


def folder_of(path, name, tensors):
    module = hf_folders if name in FOLDERS else class_folders
    return module.folder(path, name, tensors)


def tensors_of(name):
    return (hf_folders if name in FOLDERS else class_folders).tensors_of(name)


@pytest.mark.parametrize("name", [*FOLDERS, *CLASSES])
def test_base_and_adapter_are_the_merged_model(name, tmp_path):
    """All linear layers of every architecture, experts and fused rows among them."""
    tensors = {key: w.astype(np.float32) for key, w in tensors_of(name).items()}
    crossed = name == "GPT2LMHeadModel"
    shapes = {
        key.removesuffix(".weight"): w.shape[::-1] if crossed else w.shape
        for key, w in tensors.items()
        if key.endswith(".weight") and w.ndim == 2 and not NO_MODULE.search(key)
    }
    lora = matrices(shapes)
    base = folder_of(tmp_path / "base", name, tensors)
    for module in shapes:
        a, b = (lora[f"{PREFIX}{module}.lora_{part}.weight"] for part in "AB")
        delta = ALPHA / RANK * (b @ a)
        tensors[f"{module}.weight"] = tensors[f"{module}.weight"] + (delta.T if crossed else delta)
    merged = folder_of(tmp_path / "merged", name, tensors)
    path = adapter(tmp_path / "lora", lora, base, fan_in_fan_out=crossed)
    qgemm.convert(path, tmp_path / "lora.gguf", "f32")
    expected, _ = converted(merged, tmp_path / "merged.gguf")
    weights, metadata = converted(base, tmp_path / "base.gguf")
    result = adapted(weights, tmp_path / "lora.gguf")
    assert any((result[key] != weights[key]).any() for key in result)
    for key in expected:
        assert_allclose(result[key], expected[key], rtol=1e-5, atol=1e-5, err_msg=key)
    with qgemm.open(tmp_path / "lora.gguf") as file:
        keys = "general.architecture", "general.type", "adapter.type", "adapter.lora.alpha"
        values = metadata["general.architecture"], "adapter", "lora", np.float32(ALPHA)
        assert tuple(file.metadata[key] for key in keys) == values


@pytest.fixture
def base(tmp_path):
    return hf_folders.folder(tmp_path / "base", "LlamaForCausalLM")


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_types_and_names(run, base, tmp_path, kind):
    """Numbers that a type holds stay exact; --base takes the place of the adapter's own base."""
    path = adapter(tmp_path / "lora", matrices(SIZES, dtype=np.float16), tmp_path / "missing")
    assert run("convert", path, tmp_path / "y.gguf", kind, "--base", base)[0] == 0
    with qgemm.open(tmp_path / "y.gguf") as file:
        names = "blk.1.attn_q.weight", "blk.0.ffn_down.weight"
        assert list(file) == [f"{name}.lora_{part}" for name in names for part in "ab"]
        assert {str(tensor.format).lower() for tensor in file.values()} == {kind}
        stored = matrices(SIZES)
        assert_array_equal(file[f"{names[1]}.lora_b"].dequantize(), stored[f"{PREFIX}{DOWN}.lora_B.weight"])
        assert file[f"{names[0]}.lora_a"].shape == (RANK, E)


@pytest.mark.parametrize(
    ("config", "alphas", "alpha"),
    [
        ({"use_rslora": True}, (ALPHA * 2, ALPHA * 2), ALPHA * 2),
        ({"alpha_pattern": {"q_proj": 32}}, (32, ALPHA), 32),
        ({"alpha_pattern": {r"layers\.0\..*down_proj": 2}}, (ALPHA, 2), ALPHA),
        ({"alpha_pattern": {"proj": 2}}, (ALPHA, ALPHA), ALPHA),  # peft matches whole parts of a name
        ({"rank_pattern": {"q_proj": RANK}, "lora_alpha": 3}, (3, 3), 3),
        ({"lora_alpha": -3}, (-3, -3), -3),
    ],
)
def test_alphas_of_modules_move_into_b(base, tmp_path, config, alphas, alpha):
    """The scale of each module is alpha / r, or alpha / sqrt(r); the most frequent alpha is that of the file."""
    lora = matrices(SIZES)
    done = qgemm.convert(adapter(tmp_path / "lora", lora, base, **config), tmp_path / "y.gguf", "f32")
    with qgemm.open(tmp_path / "y.gguf") as file:
        assert file.metadata["adapter.lora.alpha"] == np.float32(alpha)
        b = file["blk.0.ffn_down.weight.lora_b"].dequantize()
        assert_array_equal(alpha * b, alphas[1] * lora[f"{PREFIX}{DOWN}.lora_B.weight"])
    assert any("B of 1 modules holds the factor" in note for note in done.notes) == (alphas[0] != alphas[1])


def test_the_first_alpha_may_be_the_rare_one(base, tmp_path):
    """Two modules of three have the file's alpha, so that B of one alone holds a factor."""
    lora = matrices({**SIZES, Q.replace(".1.", ".0."): SIZES[Q]})
    folder = adapter(tmp_path / "lora", lora, base, alpha_pattern={r"layers\.1\..*q_proj": 2})
    done = qgemm.convert(folder, tmp_path / "y.gguf", "f32")
    with qgemm.open(tmp_path / "y.gguf") as file:
        assert file.metadata["adapter.lora.alpha"] == ALPHA
    assert any("B of 1 modules holds the factor" in note for note in done.notes)


def test_ranks_of_modules_differ(base, tmp_path):
    """llama.cpp divides alpha by the rank of each matrix; with use_rslora the factor moves into B."""
    lora = {**matrices({Q: SIZES[Q]}, rank=16), **matrices({DOWN: SIZES[DOWN]})}
    for rslora, power in ((False, 1.0), (True, 0.5)):
        path = adapter(tmp_path / "lora", lora, base, use_rslora=rslora)
        qgemm.convert(path, tmp_path / "y.gguf", "f32", force=True)
        weights, _ = converted(base, tmp_path / "base.gguf")
        a, b = (lora[f"{PREFIX}{DOWN}.lora_{part}.weight"] for part in "AB")
        expected = weights["blk.0.ffn_down.weight"] + ALPHA / RANK**power * (b @ a)
        assert_allclose(adapted(weights, tmp_path / "y.gguf")["blk.0.ffn_down.weight"], expected, rtol=1e-6)


def test_token_embedding(base, tmp_path):
    """A is stored transposed, as llama.cpp reads rows of it."""
    rng, module = np.random.default_rng(2), f"{PREFIX}model.embed_tokens"
    a, b = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((RANK, V), (E, RANK)))
    lora = {f"{module}.lora_embedding_A": a, f"{module}.lora_embedding_B": b, f"{module}.base_layer.weight": b}
    done = qgemm.convert(adapter(tmp_path / "lora", lora, base), tmp_path / "y.gguf", "f32")
    weights, _ = converted(base, tmp_path / "base.gguf")
    result = adapted(weights, tmp_path / "y.gguf")["token_embd.weight"]
    assert_allclose(result, weights["token_embd.weight"] + 2 * (b @ a).T, rtol=1e-6)
    assert any("base_layer" in note for note in done.notes)


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ({"use_dora": True}, "use_dora: 'True': DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: "),
        ({"bias": "all"}, "bias: 'all': llama.cpp's adapters hold no biases"),
        ({"lora_bias": True}, "lora_bias"),
        ({"peft_type": "IA3"}, "peft_type: 'IA3': only LORA"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: 'pissa': changes the base"),
        ({"target_parameters": ["x"]}, "target_parameters"),
        ({"key_of_2030": {"a": 1}}, "is not known, and may change the result"),
        *(({"lora_alpha": alpha}, "no number of a magnitude") for alpha in (0, "8", True, 1e308, float("nan"), [8])),
        ({"alpha_pattern": {"q_proj": 1e308}}, "is '1e+308', no number of a magnitude from 1e-09 to 1e+09"),
        ({"alpha_pattern": {"(": 8}}, "alpha_pattern: '(' is not a regular expression"),
        ({"alpha_pattern": {r"((\w|\.)+)+X": 8}}, "repeats too much"),
        ({"alpha_pattern": ["q_proj"]}, "no object with regular expressions"),
        ({"use_rslora": "no"}, "use_rslora: 'no': is no boolean"),
        ({"alora_invocation_tokens": [-1]}, "are not all numbers of tokens"),
        ({"base_model_name_or_path": "meta/llama"}, "base_model_name_or_path: 'meta/llama': is no folder here; --base"),
    ],
)
def test_settings_that_are_refused(base, tmp_path, config, rule):
    path = adapter(tmp_path / "lora", matrices(SIZES), base, **config)
    with pytest.raises(CheckpointError, match=re.escape(rule)):
        qgemm.convert(path, tmp_path / "y.gguf", "f16")
    assert not (tmp_path / "y.gguf").exists()


@pytest.mark.parametrize(
    ("tensors", "rule"),
    [
        ({f"{PREFIX}{Q}.lora_A.weight": np.ones((4, E), np.float32)}, "has A, where A and B are needed"),
        ({**matrices({Q: (E, E)}), f"{PREFIX}{Q}.lora_A.weight": np.ones((2, E), np.float32)}, "different ranks"),
        (matrices({Q: (H * D, 32)}), "the base has (64, 64): it is another model"),
        (matrices({"model.layers.7.mlp.up_proj": (F, E)}), "has no name in a .gguf model of llama"),
        (matrices({"model.embed_tokens": (V, E)}), "has no matrices of an embedding"),
        ({f"{PREFIX}model.norm.weight": np.ones(E, np.float32)}, "is no A or B of a LoRA adapter"),
        ({f"{PREFIX}{Q}.lora_magnitude_vector": np.ones(E, np.float32)}, "is no A or B of a LoRA adapter"),
        (matrices({f"model.{'a.' * 120}q_proj": (E, E)}), "is too long a name to be matched"),
        ({f"{PREFIX}model.visual.q.lora_A.weight": np.ones((4, E), np.float32)}, "holds no matrix"),
    ],
)
def test_tensors_that_are_refused(base, tmp_path, tensors, rule):
    path = adapter(tmp_path / "lora", tensors, base, alpha_pattern={"k_proj": 8})
    with pytest.raises(CheckpointError, match=re.escape(rule)):
        qgemm.convert(path, tmp_path / "y.gguf", "f16")


@pytest.mark.parametrize("module", ["lm_head", "model.embed_tokens"])
def test_tied_matrices_are_refused(tmp_path, module):
    base = hf_folders.folder(tmp_path / "base", "LlamaForCausalLM", tie_word_embeddings=True)
    path = adapter(tmp_path / "lora", matrices({module: (V, E)}), base)
    with pytest.raises(CheckpointError, match="is tied to another matrix"):
        qgemm.convert(path, tmp_path / "y.gguf", "f16")


def test_experts_of_a_layer_are_all_adapted_or_none(tmp_path):
    base = hf_folders.folder(tmp_path / "base", "MixtralForCausalLM")
    modules = {f"model.layers.0.block_sparse_moe.experts.{i}.w1": (F, E) for i in (0, 2)}
    with pytest.raises(CheckpointError, match="of 3 experts 2 have matrices"):
        qgemm.convert(adapter(tmp_path / "lora", matrices(modules), base), tmp_path / "y.gguf", "f16")


def test_matrices_that_the_file_splits_are_refused(tmp_path):
    """llama.cpp's converter transposes half of kv_b_proj."""
    name, module = "DeepseekV3ForCausalLM", "model.layers.0.self_attn.kv_b_proj"
    base = class_folders.folder(tmp_path / "base", name)
    shape = class_folders.tensors_of(name)[f"{module}.weight"].shape
    with pytest.raises(CheckpointError, match="is split or transposed in the file"):
        qgemm.convert(adapter(tmp_path / "lora", matrices({module: shape}), base), tmp_path / "y.gguf", "f16")


def test_pickled_weights_are_not_read(base, tmp_path):
    path = adapter(tmp_path / "lora", matrices(SIZES), base)
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin, which is not read"):
        qgemm.convert(path, tmp_path / "y.gguf", "f16")


@pytest.mark.parametrize("kind", ["q4_0", "q4_k_m"])
def test_types_of_adapters(base, tmp_path, kind):
    """Also for one that is a .gguf file already."""
    path = adapter(tmp_path / "lora", matrices(SIZES), base)
    qgemm.convert(path, tmp_path / "y.gguf", "f32")
    for source in (path, tmp_path / "y.gguf"):
        with pytest.raises(QgemmError, match="an adapter is written as f32, f16, bf16, q8_0"):
            qgemm.convert(source, tmp_path / "z.gguf", kind)


def test_adapters_in_q8_0(base, tmp_path):
    """Rows of A that fill no blocks are F16."""
    qgemm.convert(adapter(tmp_path / "lora", matrices(SIZES), base), tmp_path / "y.gguf", "q8_0")
    with qgemm.open(tmp_path / "y.gguf") as file:
        types = {tensor.shape[-1] % 32 == 0: tensor.format.name for tensor in file.values()}
        assert file.metadata["general.file_type"] == 7
    assert types == {True: "q8_0", False: "f16"}


def test_base_is_for_adapters(base, tmp_path):
    with pytest.raises(QgemmError, match="--base is for the folder of a LoRA adapter"):
        qgemm.convert(base, tmp_path / "y.gguf", "f16", base=base)

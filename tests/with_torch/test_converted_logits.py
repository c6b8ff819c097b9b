"""A tiny random folder becomes a .gguf file of float32, and transformers computes the same logits from both."""

from __future__ import annotations

import pytest
from class_folders import CLASSES, TOKENS, folder
from model_configs import CONFIGS as MODEL_CONFIGS
from model_configs import STAND_INS
from torch_logits import assert_same_logits, random_model

import qgemm
from qgemm.converter.encoder_architectures import ENCODERS

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GEMMA = {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 64}  # the loader leaves the scale at 256
CONFIGS = {
    "LlamaConfig": {},
    "MistralConfig": {"sliding_window": None},
    "Qwen2Config": {},
    "Qwen3Config": {"head_dim": 128},
    "Gemma2Config": GEMMA,
    "Gemma3TextConfig": GEMMA,
}  # classes that transformers loads from .gguf files, and their keys besides SIZES


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_folder_and_file(name, tmp_path):
    model = random_model(getattr(transformers, name)(**SIZES, **CONFIGS[name]))
    model.save_pretrained(tmp_path / "folder")
    qgemm.convert(tmp_path / "folder", tmp_path / "model.gguf", "f32")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    ).eval()
    assert_same_logits(loaded, model)


# Classes whose keys the loader reads in part: it gets the config, and the tensors from the file. Of Falcon's fused
# rows it reads those of one group alone in their order.
WITH_CONFIG: dict[str, dict[str, object]] = {
    "Qwen2MoeForCausalLM": {}, "StableLmForCausalLM": {}, "Starcoder2ForCausalLM": {}, "NemotronForCausalLM": {},
    "GPT2LMHeadModel": {}, "BloomForCausalLM": {},
    "FalconForCausalLM": {"new_decoder_architecture": False, "multi_query": True},
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_CONFIG)
def test_logits_of_folder_and_file_by_the_folders_config(name, tmp_path):
    kind = getattr(transformers, name)
    config = kind.config_class(**{**MODEL_CONFIGS[name], **WITH_CONFIG[name]})
    model = random_model(config)
    model.save_pretrained(tmp_path / "folder")
    qgemm.convert(tmp_path / "folder", tmp_path / "model.gguf", "f32")
    loaded = kind.from_pretrained(tmp_path, gguf_file="model.gguf", config=config, dtype=torch.float32).eval()
    assert_same_logits(loaded, model)


BOUNDS = {"Gemma3nForCausalLM": 1e-2}  # 21 layers, of which ten keep the largest 5% of their numbers


@pytest.mark.parametrize("name", CLASSES)
def test_logits_of_llama_cpp(name, tmp_path, monkeypatch):
    """llama.cpp computed these with the file whose digest tests/test_convert_classes.py compares.

    Its GELU is a table of float16, so that a few differ in the third digit.
    """
    stand_in, values = STAND_INS.get(name, (name, None))
    kind = getattr(transformers, stand_in)
    config = None if values is None else kind.config_class(**values)
    model = kind.from_pretrained(folder(tmp_path / "m", name), config=config, dtype=torch.float32).eval()
    if name.startswith(("Gemma3n", "Gemma4")):  # more layers, which amplify the rounding
        for module in model.modules():
            if isinstance(module, transformers.activations.GELUTanh):
                monkeypatch.setattr(module, "act", gelu_of_ggml)
    if name.startswith("Gemma3n"):  # llama.cpp divides the variance by one less than the size, transformers by the size
        std = torch.std
        monkeypatch.setattr(torch, "std", lambda x, **options: std(x, **{**options, "unbiased": True}))
    if name == "Llama4ForConditionalGeneration":  # transformers 5.24 computes no logits of text without an image
        model = model.language_model
    if isinstance(model, transformers.PhimoeForCausalLM):
        as_llama_cpp_computes_phimoe(model, monkeypatch)
    if name in ENCODERS and name.endswith("ForMaskedLM"):  # the file has no head
        model = model.base_model
    with torch.no_grad():
        output = model(torch.tensor([TOKENS]))
    logits = (output.last_hidden_state if name in ENCODERS else output.logits)[0, -1]
    torch.testing.assert_close(logits, torch.tensor(CLASSES[name]["logits"]), rtol=0, atol=BOUNDS.get(name, 2e-3))


def as_llama_cpp_computes_phimoe(model, monkeypatch):
    """Replace layer norms by norms of the root mean square, and the sparse mixer by a softmax of the two largest."""

    def norm(self, x):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps) + self.bias

    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            monkeypatch.setattr(module, "forward", norm.__get__(module))

    def mixture(scores, *_, top_k, **__):
        largest, experts = scores.topk(top_k)
        return largest.softmax(-1), experts

    monkeypatch.setattr(transformers.models.phimoe.modeling_phimoe, "sparsemixer", mixture)


def test_phimoe_differs_from_transformers_by_its_router_and_norms(tmp_path):
    """docs/converting.md names the cosine."""
    name = "PhimoeForCausalLM"
    kind = transformers.PhimoeForCausalLM
    model = kind.from_pretrained(folder(tmp_path / "m", name), dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0, -1]
    cosine = torch.nn.functional.cosine_similarity(logits, torch.tensor(CLASSES[name]["logits"]), dim=0)
    assert round(float(cosine), 2) == 0.80


def gelu_of_ggml(x):
    """GELU as ggml's table has it: of numbers in float16, in float16."""
    return torch.nn.functional.gelu(x.half().float(), approximate="tanh").half().float()

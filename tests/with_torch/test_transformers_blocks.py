"""qgemm.torch.transformers with the loader of transformers that keeps blocks itself: the architectures of its list."""

from __future__ import annotations

import pytest
from torch_layers import assert_product, assert_same, torch
from torch_models import SIZES, VOCABULARY, name_map, transformers

import qgemm
import qgemm.torch.transformers as adapter
from qgemm.torch import QEmbedding, QLinear, ggml_kernels, storage

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # raised by transformers
INDEX = torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
KINDS = {
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "qwen35": (
        "qwen3_5_text",
        {
            "layer_types": ["linear_attention", "full_attention"], "head_dim": 64, "tie_word_embeddings": False,
            "linear_key_head_dim": 32, "linear_value_head_dim": 32,
            "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        },
    ),
}  # fmt: skip
METADATA = {
    "lfm2": {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3, "rope.freq_base": 1e6},
    "qwen35": {
        "attention.head_count_kv": 2, "attention.key_length": 64, "full_attention_interval": 2, "rope.freq_base": 1e6,
        "rope.dimension_count": 16, "rope.dimension_sections": [3, 3, 2, 0], "ssm.conv_kernel": 4,
        "ssm.state_size": 32, "ssm.group_count": 4, "ssm.time_step_rank": 8, "ssm.inner_size": 256,
    },
}  # fmt: skip
ODD = {"dt_bias": "ssm_dt.bias", "A_log": "ssm_a"}  # leaves whose tensors are not named as layers are


@pytest.fixture(params=KINDS)
def path(request, tmp_path):
    """A file of random tensors with the names and shapes of an architecture; any order of heads is one of a model."""
    kind, (model_type, more) = request.param, KINDS[request.param]
    config = transformers.AutoConfig.for_model(model_type, **SIZES, **more)
    torch.manual_seed(0)
    state, names, tensors = transformers.AutoModelForCausalLM.from_config(config).state_dict(), name_map(kind), {}
    for key, value in state.items():
        layer, _, leaf = key.rpartition(".")
        if key == "lm_head.weight" and kind == "lfm2":
            continue  # it is the table
        array = (value + 0.1 * torch.randn(value.shape)).squeeze().numpy()
        if leaf in ODD:
            name, array = f"blk.{layer.split('.')[2]}.{ODD[leaf]}", -abs(array) if leaf == "A_log" else array
        else:
            name = f"{names.get_name(layer)}.{leaf}"
        packs = array.ndim == 2 and array.shape[1] % 256 == 0
        tensors[name] = qgemm.quantize(array, "q6_k" if "down" in name else "q4_k") if packs else array
    sizes = {
        "block_count": 2, "context_length": 64, "embedding_length": 256, "feed_forward_length": 512,
        "attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-5, **METADATA[kind],
    }  # fmt: skip
    metadata = {f"{kind}.{key}": value for key, value in sizes.items()}
    metadata |= {"general.architecture": kind, "tokenizer.ggml.tokens": [f"t{n}" for n in range(VOCABULARY)]}
    qgemm.write(tmp_path / f"{kind}.gguf", tensors, metadata)
    return tmp_path / f"{kind}.gguf"


def load(path, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_is_that_of_the_decoded_weights(path, dtype):
    """Its logits, no further from those in float64 than four times what transformers' are; and each of its products.

    A weight whose columns have another order in the file stays as it is there, and x takes that order.
    """
    config, kind = transformers.GgufConfig(dequantize=True), getattr(torch, dtype)
    theirs, exact = (load(path, dtype=dtype, quantization_config=config) for dtype in (kind, torch.float64))
    with adapter.patch():
        ours = load(path, dtype=kind)
    with torch.no_grad():
        wants, want, got = (model(INDEX).logits.double() for model in (exact, theirs, ours))
    assert (got - wants).abs().max() <= 4 * (want - wants).abs().max()
    dense, moved = exact.state_dict(), set()
    for name, layer in ours.named_modules():
        assert type(layer) is not torch.nn.Linear or layer.weight.shape == (8, 256)  # floats in the file
        if type(layer) is QLinear:
            assert_same(layer.dequantize(torch.float64), dense[f"{name}.weight"])
            x = torch.randn(3, layer.in_features).to(kind)
            assert_product(layer(x), layer.gathered(x), layer.packed)
            if layer.viewed:
                assert sorted(layer.column_order.tolist()) == list(range(layer.in_features))
                moved.add(name)
    assert moved == ({"model.layers.0.linear_attn.out_proj"} if path.stem == "qwen35" else set())
    assert type(ours.get_input_embeddings()) is QEmbedding
    assert (ours.lm_head.weight is ours.get_input_embeddings().weight) is (path.stem == "lfm2")


def test_packed_weights_become_tiles_when_they_are_moved(path, monkeypatch):
    """After transformers' own conversions of blocks; no packed weight reaches a GPU in the file's layout."""
    moved, to = [], storage.PackedParameter.to

    def counted_to(self, *args, **kwargs):
        moved.append(tuple(self.shape))
        return to(self, *args, **kwargs)

    monkeypatch.setattr(storage.PackedParameter, "to", counted_to)
    with adapter.patch():
        model = load(path, device_map="cpu")
    layers = [layer for layer in model.modules() if isinstance(layer, (QLinear, QEmbedding))]
    assert sorted(moved) == sorted({id(layer.weight): tuple(layer.weight.shape) for layer in layers}.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_of_transformers_multiply_by_the_kernels_that_are_installed(path, dtype, calls):
    """A prompt, which transformers multiplies itself, and few rows; the packed weights stay those of the file."""
    config, kind = transformers.GgufConfig(dequantize=True), getattr(torch, dtype)
    theirs, exact = (load(path, dtype=dtype, quantization_config=config) for dtype in (kind, torch.float64))
    with ggml_kernels.install():
        ours = load(path, dtype=kind)
        layers = [layer for layer in ours.modules() if type(layer).__name__ == "GgufLinear"]
        assert layers
        with torch.no_grad():
            for index in (INDEX, INDEX[:, :3]):
                wants, want, got = (model(index).logits.double() for model in (exact, theirs, ours))
                assert (got - wants).abs().max() <= 4 * (want - wants).abs().max()
                assert calls["matmul"] == (0 if index is INDEX else len(layers))
    assert all(layer.weight.dtype == torch.uint8 for layer in layers)

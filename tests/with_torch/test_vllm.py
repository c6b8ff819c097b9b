"""qgemm.vllm over stand-ins of vLLM and vllm-gguf-plugin, whose signatures are those of the real ones if installed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import vllm_like
from engine_layers import FACTORS, IDS, NUMBERS, E, F, K, assert_near, linear, load, product, raw, routed
from stand_ins import check_signatures
from torch_layers import normal, torch, weights
from vllm_like import RANKS

import qgemm
from qgemm.errors import QgemmError
from qgemm.torch import serving

# ---------------------------------------------------------------- signatures


@pytest.mark.filterwarnings("ignore")  # the packages import deprecated names
@pytest.mark.parametrize("name", [name for name, contents in vllm_like.MODULES.items() if contents])
def test_stand_ins_have_the_signatures_of_the_installed_packages(name):
    check_signatures(name, vllm_like.MODULES)


# ---------------------------------------------------------------- linear layers


@pytest.mark.parametrize("m", [1, 5])
def test_merged_layers_of_mixed_types_give_one_output(methods, m):
    tensors = {"q": weights("q4_0", 64), "k": weights("q4_0", 32, seed=1), "v": weights("q6_k", 32, 1, seed=2)}
    tensors = {
        place: qgemm.quantize(normal(w.shape[0], 256, seed=w.shape[0]).numpy(), w.format.name)
        for place, w in tensors.items()
    }
    method, layer = linear(methods, "qkv", tensors)
    assert [w.shape for w in layer.qgemm_weights] == [(96, 256), (32, 256)]
    x, bias = normal(m, 256), normal(128, seed=3)
    y = method.apply(layer, x, bias)
    assert_near(y, torch.cat([product(x, w) for w in tensors.values()], 1) + bias)
    assert sorted(name for name, _ in layer.named_parameters()) == ["qweight", "qweight_1"]


def test_floats_beside_packed_tensors_are_merged_as_well(methods):
    tensors = {0: weights("q8_0", 32), 1: weights("f16", 64, seed=1)}
    method, layer = linear(methods, "merged", tensors, floats=True)
    x = normal(3, tensors[0].shape[1])
    assert_near(method.apply(layer, x), torch.cat([product(x, w) for w in tensors.values()], 1))


def test_types_of_a_tensor_that_is_merged_in_the_file_hold_for_its_parts(methods):
    """Phi-3 has one tensor for Q, K and V: its type comes without a place, its rows with one."""
    w = weights("q5_0", 96)
    layer = vllm_like.LinearBase("qkv", (32, 32, 32))
    method = methods.PackedLinearMethod("a", "a16")
    method.create_weights(layer, w.shape[1], [32] * 3, w.shape[1], 96, torch.float32)
    number = torch.tensor(int(NUMBERS["q5_0"]))
    assert layer.qweight_type.dtype == number.dtype  # vLLM warns of each parameter of another type
    layer.qweight_type.weight_loader(layer.qweight_type, number)
    for place, rows in zip("qkv", raw(w).split(32), strict=True):
        layer.qweight.weight_loader(layer.qweight, rows, place)
    method.process_weights_after_loading(layer)
    x = normal(2, w.shape[1])
    assert_near(method.apply(layer, x), product(x, w))


def test_layers_without_a_loader_of_their_own_hold_a_tensor_whole(methods):
    layer, w = torch.nn.Module(), weights("q4_1", 32)
    method = methods.PackedLinearMethod("a", "a16")
    method.create_weights(layer, w.shape[1], [32], w.shape[1], 32, torch.float32, weight_loader=None)
    load(layer, w)
    method.process_weights_after_loading(layer)
    x = normal(2, w.shape[1])
    assert_near(method.apply(layer, x), product(x, w))


def test_processing_twice_changes_nothing(methods):
    method, layer = linear(methods, "column", {None: weights("q4_0", 32)})
    parameter = layer.qweight
    method.process_weights_after_loading(layer)
    assert layer.qweight is parameter


def test_activations_are_an_option(methods):
    w = weights("q4_0", 32)
    method, layer = linear(methods, "column", {None: w}, activation="a8")
    x = normal(2, w.shape[1])
    np.testing.assert_array_equal(method.apply(layer, x), qgemm.matmul(x.numpy(), w, "a8"))


def test_a_layer_without_tensors_is_an_error(methods):
    method, layer = methods.PackedLinearMethod("model.x", "a16"), torch.nn.Module()
    method.create_weights(layer, 64, [32], 64, 32, torch.float32)
    with pytest.raises(QgemmError, match=r"model\.x: the file has no tensor"):
        method.process_weights_after_loading(layer)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_hold_rows_or_whole_blocks_of_columns(methods, rank):
    RANKS.rank, RANKS.size = rank, 2
    w = qgemm.quantize(normal(64, 1024).numpy(), "q4_k")
    method, layer = linear(methods, "row", {None: w}, formats=(w.format,))
    x = normal(3, 1024)
    half = slice(512 * rank, 512 * rank + 512)
    expected = x[:, half].double() @ torch.from_numpy(w.dequantize()[:, half]).double().T
    assert_near(method.apply(layer, x[:, half].contiguous()), expected)
    method, layer = linear(methods, "merged", {0: w, 1: w})
    part = torch.from_numpy(w.dequantize()[32 * rank : 32 * rank + 32])
    assert_near(method.apply(layer, x), x.double() @ torch.cat([part, part]).double().T)


@pytest.mark.parametrize("rank", range(4))
def test_ranks_share_heads_of_k_and_hold_their_rows_alone(methods, rank):
    """Four ranks, two heads of K: ranks 2 and 3 have the second. Their rows keep no memory of the whole tensor."""
    RANKS.rank, RANKS.size = rank, 4
    whole, collected = torch.arange(32, dtype=torch.uint8).reshape(8, 4), methods.Collected("x")
    parameter = methods.CollectingParameter(collected, None, torch.empty(0, dtype=torch.uint8))
    parameter.load_qkv_weight(whole, shard_id="q", shard_size=2, num_heads=2)
    parameter.load_qkv_weight(whole, shard_id="k", shard_size=4, num_heads=2)
    assert torch.equal(collected.data["q"], whole[2 * rank : 2 * rank + 2])
    assert torch.equal(collected.data["k"], whole[4 * (rank // 2) :][:4])
    assert all(data.untyped_storage().nbytes() == data.nbytes for data in collected.data.values())


def test_blocks_that_ranks_cannot_share_are_refused_before_loading(methods):
    RANKS.size = 4
    w = qgemm.quantize(normal(64, 1536).numpy(), "q6_k")
    message = "1536 columns of Q6_K are 6 blocks of 256, which 4 ranks cannot share evenly; numbers .*: 1, 2, 3, 6"
    method = methods.PackedLinearMethod("model.layers.0.mlp.down_proj", "a16", False, (w.format,))
    with pytest.raises(QgemmError, match=f"down_proj: {message}"):
        method.create_weights(vllm_like.LinearBase("row"), 384, [64], 1536, 64, torch.float32)
    with pytest.raises(QgemmError, match=message):  # formats that were not known before
        linear(methods, "row", {None: w})


# ---------------------------------------------------------------- tables


def test_tables_hold_rows_of_their_rank_and_padding(methods):
    w = weights("q8_0", 100)
    method, layer = methods.PackedEmbeddingMethod("embed_tokens", "a16"), vllm_like.VocabParallelEmbedding(64, 100)
    k = w.shape[1]
    method.create_weights(layer, k, [64], k, 128, torch.float16, weight_loader=None)
    load(layer, w)
    method.process_weights_after_loading(layer)
    rows = method.embedding(layer, torch.tensor([[0, 35], [36, 63]]))
    expected = torch.from_numpy(np.concatenate([w.dequantize()[[64, 99]], np.zeros((2, k), np.float32)]))
    torch.testing.assert_close(rows, expected.half().reshape(2, 2, k), rtol=0, atol=0)
    x = normal(2, k)
    assert_near(method.apply(layer, x)[:, :36], product(x, w)[:, 64:])
    assert method.tie_weights(None, layer) is layer
    assert layer.weight.device.type == "cpu"  # read by vLLM's LoRA


# ---------------------------------------------------------------- experts


def expert_tensors():
    values = {part: normal(E, *shape, seed=seed).numpy() for seed, (part, shape) in enumerate(
        {"w1": (F, K), "w3": (F, K), "w2": (K, F)}.items())}  # fmt: skip
    return {
        part: qgemm.quantize(values[part] / 16, fmt) for part, fmt in (("w1", "q4_k"), ("w3", "q5_0"), ("w2", "q6_k"))
    }


def moe_config(ranks=1, rank=0, all_to_all=False, **facts):
    parallel = SimpleNamespace(tp_size=ranks, tp_rank=rank, use_all2all_kernels=all_to_all)
    return SimpleNamespace(**({"has_bias": False, "is_lora_enabled": False} | facts), moe_parallel_config=parallel)


def experts(methods, tensors, layer, ranks=1, rank=0, local=E):
    moe = moe_config(ranks, rank)
    method = methods.PackedExpertsMethod("model.layers.0.mlp.experts", moe, (tensors["w2"].format,))
    method.create_weights(layer, local, K, F // ranks, torch.float32, weight_loader=None)
    for part, w in tensors.items():
        prefix = "w2_" if part == "w2" else "w13_"
        for expert in range(E):
            kind = getattr(layer, f"{prefix}qweight_type")
            assert kind.weight_loader(
                param=kind, loaded_weight=torch.tensor(int(NUMBERS[w.format.name])), weight_name="a", shard_id=part,
                expert_id=expert, return_success=True,
            )  # fmt: skip
            parameter = getattr(layer, f"{prefix}qweight")
            success = parameter.weight_loader(
                param=parameter, loaded_weight=raw(w)[expert], weight_name="a", shard_id=part, expert_id=expert,
                return_success=True,
            )  # fmt: skip
            assert success == (layer._map_global_expert_id_to_local_expert_id(expert) >= 0)
    method.process_weights_after_loading(layer)
    return method


def test_experts_of_three_types(methods):
    tensors, layer, x = expert_tensors(), vllm_like.RoutedExperts(), normal(3, K)
    method = experts(methods, tensors, layer)
    assert_near(method.apply(layer, x, FACTORS, IDS, None, None), routed(x, tensors, IDS, FACTORS))
    assert len(list(layer.parameters())) == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_experts_are_cut_over_ranks(methods, rank):
    tensors, layer, x = expert_tensors(), vllm_like.RoutedExperts(), normal(3, K)
    method = experts(methods, tensors, layer, 2, rank)
    columns = slice(F // 2 * rank, F // 2 * (rank + 1))
    assert_near(method.apply(layer, x, FACTORS, IDS, None, None), routed(x, tensors, IDS, FACTORS, columns))


def test_experts_that_ranks_cannot_cut_are_refused_before_loading(methods):
    with pytest.raises(QgemmError, match="512 columns of Q6_K are 2 blocks of 256, which 4 ranks cannot share"):
        experts(methods, expert_tensors(), vllm_like.RoutedExperts(), 4)


def test_ids_of_experts_on_other_ranks_add_nothing(methods):
    """vLLM's map sends them to -1."""
    layer, x = vllm_like.RoutedExperts(expert_map=torch.tensor([-1, -1, 0, 1], dtype=torch.int32)), normal(3, K)
    tensors = expert_tensors()
    method = experts(methods, tensors, layer, local=2)
    mine = FACTORS * (IDS >= 2)
    assert_near(method.apply(layer, x, FACTORS, IDS, None, None), routed(x, tensors, IDS, mine))


def test_the_routers_weights_multiply_x_where_the_model_asks_for_it(methods):
    tensors, layer, x = expert_tensors(), vllm_like.RoutedExperts(on_input=True), normal(3, K)
    method, ids, factors = experts(methods, tensors, layer), IDS[:, :1], FACTORS[:, :1]
    expected = routed(x * factors, tensors, ids, torch.ones(3, 1))
    assert_near(method.apply(layer, x, factors, ids, None, None), expected)
    with pytest.raises(QgemmError, match="one expert a token, not of 2"):
        method.apply(layer, x, FACTORS, IDS, None, None)


@pytest.mark.parametrize(
    ("activation", "facts", "message"),
    [
        ("relu2", {}, "function 'relu2'"),
        ("silu_no_mul", {}, "silu_no_mul"),
        ("silu", {"has_bias": True}, "biases"),
        ("silu", {"is_lora_enabled": True}, "LoRA of experts"),
        ("silu", {"all_to_all": True}, "all-to-all back ends"),
    ],
)
def test_layers_of_experts_that_qgemm_lacks_are_refused(methods, activation, facts, message):
    method = methods.PackedExpertsMethod("a", moe_config(**facts))
    with pytest.raises(QgemmError, match=message):
        method.create_weights(vllm_like.RoutedExperts(activation), E, K, F, torch.float32, weight_loader=None)


def test_limits_of_swiglu_are_refused_except_that_of_gpt_oss(methods):
    layer = vllm_like.RoutedExperts()
    layer.swiglu_limit = 7.0
    with pytest.raises(QgemmError, match=r"'swiglu_limit': 7\.0"):
        methods._function("a", layer)
    layer.activation.value = "swigluoai_uninterleave"
    assert methods._function("a", layer) == "swiglu_oai"


# ---------------------------------------------------------------- ops


def test_the_op_of_merged_layers_fits_its_fake(methods):
    _, layer = linear(methods, "merged", {0: weights("q4_0", 32), 1: weights("q8_0", 64)})
    op = torch.ops.qgemm.linear_joined.default
    parameters = [layer.qweight.data, layer.qweight_1.data]
    arguments = (normal(3, 128), parameters, normal(96), ["q4_0", "q8_0"], [32, 64], 128, "a16")
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_columns_of_floats_have_blocks_of_one():
    serving.check_columns(qgemm.FORMATS["f16"], 6, 3, "a")
    with pytest.raises(QgemmError, match="6 columns"):
        serving.check_columns(qgemm.FORMATS["f16"], 6, 4, "a")

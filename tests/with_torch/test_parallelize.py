"""parallelize: models that transformers loads from a .gguf file, cut over two and three processes by their plans."""

from __future__ import annotations

import re

import pytest
import ranks
from torch_layers import assert_same, normal, torch, weights
from torch_models import INDEX, KINDS, MIX, SIZES, VOCABULARY, load, logits, random_model, transformers, write_gguf

import qgemm
from qgemm.torch import (
    ColumnParallelLinear,
    ParallelExperts,
    QEmbedding,
    QLinear,
    RowParallelLinear,
    parallelize,
    replace_linear,
)
from qgemm.torch.parallelize import _plan_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # raised by transformers
CUT = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}
# Eight heads of 64 on two keys: each of these has a block of a K-quant along the inputs of o_proj.
OF_TWO = {"hidden_size": 512, "num_attention_heads": 8}
# Six heads on three keys; sizes that three divides in multiples of 64.
OF_THREE = {
    "hidden_size": 192, "intermediate_size": 384, "num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 192,
}  # fmt: skip
# Three keys on two ranks: two and one; and 320 = 5 * 64.
UNEVEN = {**OF_THREE, "intermediate_size": 320, "vocab_size": VOCABULARY}


def written(path, kind="llama", sizes=None, default="q4_k", tied=False, **formats):
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (sizes or {}).items():
            patch.setitem(SIZES, name, size)
        write_gguf(path, random_model(kind, tied), default, **formats)
    return path


def whole_and_cut(rank, world, path):
    """At most four times as far from float64 as the whole model; the same bits and words on all ranks."""
    whole, model, exact = load(path), load(path), load(path, False, dtype=torch.float64)
    want = logits(whole)
    done = parallelize(model)
    cut = logits(model)
    distance = (logits(load(path, False)) - logits(exact)).abs().max()
    assert (cut - logits(exact)).abs().max() <= 4 * distance
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QLinear)}
    assert {name.rpartition(".")[2] for name in layers} == CUT
    assert set(layers) == {*done.columns, *done.rows}
    assert done.kept == ()
    kinds = {type(layer) for name, layer in layers.items()}
    assert kinds == {ColumnParallelLinear, RowParallelLinear}
    assert type(model.get_input_embeddings()) is QEmbedding
    outputs = [None] * world
    mine = cut.numpy().tobytes(), model.generate(INDEX[:1], max_new_tokens=8, do_sample=False).tolist(), done.nbytes
    torch.distributed.all_gather_object(outputs, mine)
    assert len({text for text, _, _ in outputs}) == 1
    assert all(
        words == whole.generate(INDEX[:1], max_new_tokens=8, do_sample=False).tolist() for _, words, _ in outputs
    )
    assert sum(nbytes for _, _, nbytes in outputs) == sum(
        layer.weight.nbytes for layer in whole.modules() if isinstance(layer, QLinear)
    )
    assert want.shape == cut.shape
    return done.nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_two_ranks(kind, tmp_path):
    path = written(tmp_path / "model.gguf", kind, OF_TWO, **MIX, tied=kind == "gemma3")
    first, second = ranks.run(2, whole_and_cut, 2, path)
    assert abs(first - second) <= 32 * 512 // 32 * 34  # 96 words are cut at 64; rows of q8_0


@pytest.mark.parametrize(("world", "sizes"), [(3, OF_THREE), (2, UNEVEN)], ids=["three", "uneven"])
def test_sizes_that_are_no_powers_of_two(world, sizes, tmp_path):
    ranks.run(world, whole_and_cut, world, written(tmp_path / "model.gguf", "llama", sizes, "q4_0"))


def refused(rank, world, path):
    """On all ranks, with the sizes that would do; the model stays whole."""
    model = load(path)
    want = logits(model)
    plan = _plan_of(model)
    mlp = {key: how for key, how in plan.items() if "mlp" in key}
    cases = (
        (None, r"axis 0 of .* cut in multiples of .* gives at most .* shares, not 3"),
        ({"model.layers.*.self_attn.sinks": "colwise"}, "the model has no layer"),
        ({"model.norm": "colwise"}, r"'model.norm' \(LlamaRMSNorm\) cannot be cut 'colwise'"),
        ({"lm_head": "diagonal"}, r"'lm_head' \(QLinear\) cannot be cut 'diagonal'; known: colwise"),
        ({"lm_head": "colwise"}, "some are cut colwise and some rowwise"),
        ({**mlp, "model.layers.*.mlp.gate_proj": "rowwise"}, "are not cut alike"),
    )  # fmt: skip
    for bad_plan, message in cases:
        kind = qgemm.ShapeError if bad_plan is None else qgemm.UnsupportedError
        with pytest.raises(kind, match=message):
            parallelize(model, bad_plan)
    for change, message in (
        (lambda layer: layer.add_lora(normal(2, layer.in_features), normal(layer.out_features, 2)), "has LoRA"),
        (lambda layer: layer.register_forward_pre_hook(lambda layer, inputs: None), "has a hook on its input"),
    ):
        other = load(path)
        change(other.model.layers[0].mlp.down_proj)
        with pytest.raises(qgemm.UnsupportedError, match=message):
            parallelize(other, mlp)
    assert_same(logits(model), want)
    assert {type(layer) for layer in model.modules()} & {ColumnParallelLinear, RowParallelLinear} == set()


def test_what_cannot_be_cut_is_refused(tmp_path):
    """Two heads of keys for three ranks. gate_proj cut by inputs has another size."""
    ranks.run(3, refused, 3, written(tmp_path / "model.gguf", "llama", {"intermediate_size": 768}, "q8_0"))


def mismatched(rank, world, paths):
    """Ranks with different files would sum unrelated products."""
    with pytest.raises(qgemm.RankError, match=r"ranks must do the same: rank 0 has .*Q8_0, rank 1 has .*Q4_0"):
        parallelize(load(paths[rank]))


def test_ranks_with_different_files(tmp_path):
    for name in ("q8_0", "q4_0"):
        (tmp_path / name).mkdir()
    paths = [written(tmp_path / name / "model.gguf", default=name) for name in ("q8_0", "q4_0")]
    ranks.run(2, mismatched, 2, paths)


def missing(rank, world, path):
    """The weights of one rank are of a file that was cut short since: all say so."""
    model = load(path)
    if rank == 1:
        layer = model.model.layers[1].mlp.up_proj
        layer.weight = torch.nn.Parameter(layer.weight[:5], requires_grad=False)
    with pytest.raises(
        qgemm.QgemmError, match=re.escape("uint8 [512, 272], bytes as in a file; got torch.uint8 [5, 272]")
    ) as caught:
        parallelize(model)
    assert type(caught.value) is (qgemm.UnsupportedError if rank == 1 else qgemm.RankError)
    assert type(model.model.layers[0].mlp.up_proj) is QLinear


def test_a_rank_that_fails_ends_all(tmp_path):
    ranks.run(2, missing, 2, written(tmp_path / "model.gguf", default="q8_0"))


def dense(rank, world, path):
    """A head of numbers as wide as the model's stays whole; dense layers beside packed ones are refused."""
    model = load(path, dtype=torch.float16)
    done = parallelize(model)
    assert done.kept == ("lm_head",)
    other = load(path, dtype=torch.float16)
    old = other.model.layers[0].mlp.up_proj
    other.model.layers[0].mlp.up_proj = torch.nn.Linear(old.in_features, old.out_features, bias=False)
    with pytest.raises(qgemm.UnsupportedError, match="up_proj' is dense, and those beside it are packed"):
        parallelize(other)
    with pytest.raises(qgemm.UnsupportedError, match="is cut already"):
        parallelize(model)


def test_dense_layers(tmp_path):
    ranks.run(2, dense, 2, written(tmp_path / "model.gguf", default="q8_0", **{"^output": "f16"}))


def own_plan(rank, world):
    """A model of torch with a plan that its owner gives, over a part of the layers; hooks go on."""
    net = torch.nn.Sequential(
        *[torch.nn.ModuleDict({"up": torch.nn.Linear(128, 320), "down": torch.nn.Linear(320, 128)}) for _ in range(2)]
    )
    up, down = weights("q4_0", 320, 2, seed=1), weights("q8_0", 128, 5, seed=2)
    replace_linear(net, {"up": up, "down": down}, lambda name: name.rpartition(".")[2])
    seen = []
    net[0]["up"].register_forward_hook(lambda layer, inputs, y: seen.append(y.shape[-1]))

    def forward(x):
        for layer in net:
            x = x + layer["down"](torch.relu(layer["up"](x)))
        return x

    x = normal(3, 128)
    with torch.no_grad():
        want = forward(x)
        done = parallelize(
            net,
            {"*.up": "colwise", "*.down": "rowwise"},
            torch.distributed.device_mesh.init_device_mesh("cpu", (world,)),
        )
        torch.testing.assert_close(forward(x), want, rtol=1e-4, atol=1e-3)
    assert seen == [320, net[0]["up"].out_features]
    assert str(done).startswith(f"rank {rank} of {world}: 2 layers cut by outputs, 2 by inputs; ")
    with pytest.raises(qgemm.UnsupportedError, match="has no plan of its own"):
        parallelize(net)


@pytest.mark.parametrize("world", [2, 3])
def test_a_plan_of_ones_own(world):
    ranks.run(world, own_plan, world)


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_is_the_models(kind):
    """The plans of its class and of its config, by the names of its layers."""
    model = random_model(kind)
    plan = _plan_of(model)
    assert plan["lm_head"] == "colwise_gather_output"
    assert plan["model.layers.*.mlp.down_proj"] == "rowwise"
    assert set(plan) <= {re.sub(r"\.\d+", ".*", name) for name, _ in model.named_modules()}


# ---------------------------------------------------------------- experts


def experts_and_cut(rank, world, path):
    """Experts of a model go to ranks with its own plan, and by their name alone; dense ones stay whole."""
    exact, dense, whole, model = load(path, False, dtype=torch.float64), load(path, False), load(path), load(path)
    for reference in (exact, dense):
        reference.set_experts_implementation("eager")  # one by one, which works in float64 as well
    distance = (logits(dense) - logits(exact)).abs().max()
    done = parallelize(model)
    assert done.experts == tuple(f"model.layers.{i}.mlp.experts" for i in range(2))
    assert done.kept == ()
    layers = [layer for layer in model.modules() if isinstance(layer, ParallelExperts)]
    counts = [None] * world
    torch.distributed.all_gather_object(counts, [layer.num_experts for layer in layers])
    assert [sum(of_layer) for of_layer in zip(*counts, strict=True)] == [8, 8]
    assert (logits(model) - logits(exact)).abs().max() <= 4 * distance
    alone = parallelize(whole, {"model.layers.*.mlp.experts": "ep_dispatch_experts"})
    assert (alone.columns, alone.rows, alone.experts) == ((), (), done.experts)
    assert "2 by experts" in str(alone)
    assert (logits(whole) - logits(exact)).abs().max() <= 4 * distance
    with pytest.raises(qgemm.UnsupportedError, match=r"layer 'model.layers.0.mlp.experts' is cut already"):
        parallelize(whole, {"model.layers.*.mlp.experts": "ep_dispatch_experts"})
    assert parallelize(dense, {"model.layers.*.mlp.experts": "moe_tp_experts"}).experts == ()


def test_experts_of_a_model(tmp_path):
    config = transformers.Qwen3MoeConfig(
        **{**SIZES, **OF_THREE, "hidden_size": 256, "head_dim": 64},
        moe_intermediate_size=768, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "folder")
    qgemm.convert(tmp_path / "folder", tmp_path / "model.gguf", "q8_0", pure=True)
    ranks.run(3, experts_and_cut, 3, tmp_path / "model.gguf")

"""Packed weights that somebody writes into: the process goes on, and the file stays as it is."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import ranks
from torch_layers import assert_same, normal, torch, weights

import qgemm
from qgemm.torch import QEmbedding, QLinear

X = normal(3, 128)


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.fill_(0),
        lambda w: w.data.zero_(),
        lambda w: torch.nn.init.zeros_(w),
        lambda w: w.copy_(torch.zeros_like(w)),
        lambda w: w.sub_(w.clone()),
        lambda w: w.numpy().fill(0),
    ],
)
def test_a_write_into_the_weight_of_a_mapped_file(tmp_path, write):
    """The layer multiplies by the new bytes; the file has the old ones."""
    qgemm.write(tmp_path / "model.gguf", {"w": weights()})
    with qgemm.open(tmp_path / "model.gguf") as file:
        layer = QLinear.from_tensor(file["w"])
        assert_same(layer(X), QLinear.from_tensor(weights())(X))
        with torch.no_grad():
            write(layer.weight)
        assert_same(layer(X), torch.zeros(3, 40))
    with qgemm.open(tmp_path / "model.gguf") as file:
        assert file["w"].blocks.tobytes() == weights().blocks.tobytes()


def test_memory_that_cannot_be_written_is_copied(tmp_path):
    """Blocks over bytes and over a mapping of the caller's own."""
    w = weights()
    w.blocks.tofile(tmp_path / "blocks")
    for blocks in (
        np.frombuffer(w.blocks.tobytes(), w.format.dtype),
        np.memmap(tmp_path / "blocks", w.format.dtype, "r"),
    ):
        layer = QLinear.from_tensor(qgemm.Tensor(w.format, w.shape, blocks.reshape(w.blocks.shape)))
        layer.weight.data.zero_()
        assert_same(layer(X), torch.zeros(3, 40))


# ---------------------------------------------------------------- copies and ranks


def trained_model(path):
    """A table, a layer with a bias and a layer with LoRA, over a file's tensors."""
    with qgemm.open(path) as file:
        table = QEmbedding.from_tensor(file["table"])
        first = QLinear.from_tensor(file["first"], torch.nn.Parameter(normal(64)))
        last = QLinear.from_tensor(file["last"])
    last.add_lora(normal(2, 64, seed=1), torch.zeros(64, 2))
    return torch.nn.Sequential(table, first, torch.nn.Tanh(), last)


def write_model(path):
    qgemm.write(path, {"table": weights(n=32), "first": weights(n=64, seed=1), "last": weights(n=64, blocks=1, seed=2)})


def losses(model, x, steps=3):
    """The loss of each step, and a value of the last that every rank must share."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, 0.1)
    values = []
    for _ in range(steps):
        loss = (model(x).float() - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


def on_rank(rank, path, kind):
    model, x = trained_model(path), torch.arange(4) + rank
    want = model(x)
    if kind == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    elif kind == "broadcast":  # as DeepSpeed's engine does with all parameters
        wrapped = model
        for parameter in model.parameters():
            torch.distributed.broadcast(parameter.data, 0)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        for layer in (*model, model):
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        wrapped = model
        with pytest.raises(qgemm.UnsupportedError, match="sharded over ranks"):
            model[1].dequantize()
    assert_same(wrapped(x), want)
    return losses(wrapped, x)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "broadcast", "fsdp"])
def test_models_of_several_ranks_train(tmp_path, kind):
    """Under DistributedDataParallel and fully_shard each rank's loss falls, by gradients of both."""
    write_model(tmp_path / "model.gguf")
    for values in ranks.run(2, on_rank, tmp_path / "model.gguf", kind):
        assert values[0] > values[1] > values[2]


def under_mixed_precision(rank, path, wrapped):
    """A dense layer of bfloat16 parameters follows the table, which alone gives float32; the head shares its weight."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with qgemm.open(path) as file:
        table, head = QEmbedding.from_tensor(file["table"]), QLinear.from_tensor(file["table"])
    head.weight = table.weight
    model = torch.nn.Sequential(table, torch.nn.Linear(128, 128), head)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    parts = {"root": [model], "rest": [model[1], model], "tied": [[table, head], model], "head": [[head, table], model]}
    for part in parts[wrapped]:
        fully_shard(part, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    x, rows = torch.arange(4) + rank, []
    table.register_forward_hook(lambda module, args, y: rows.append(y))
    values = losses(model, x)
    assert torch.equal(rows[0], QEmbedding.from_tensor(weights(n=32), dtype=torch.bfloat16)(x))
    return values


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", ["root", "rest", "tied", "head"])
def test_mixed_precision_of_fsdp(tmp_path, wrapped):
    """Rows of a float32 table have the type of the parameters beside them, also if the weight is the head's first."""
    write_model(tmp_path / "model.gguf")
    for values in ranks.run(2, under_mixed_precision, tmp_path / "model.gguf", wrapped):
        assert values[0] > values[1] > values[2]


def test_a_copy_is_written_alone(tmp_path):
    write_model(tmp_path / "model.gguf")
    model, x = trained_model(tmp_path / "model.gguf"), torch.arange(4)
    other, want = copy.deepcopy(model), model(x)
    for parameter in other.parameters():
        parameter.data.zero_()
    assert_same(other(x), torch.zeros(4, 64))
    assert_same(model(x), want)
    other.load_state_dict(model.state_dict())
    assert_same(other(x), want)


# ---------------------------------------------------------------- averages, and gradients that there are not


@pytest.mark.parametrize("decay", [0.9, 0.995, 0.9999])
@pytest.mark.parametrize("kind", ["equal", "exponential", "exponential, one by one"])
def test_averages_of_a_model_that_trains(tmp_path, kind, decay):
    """torch averages bytes in floats. Packed weights stay as they are, and those that train are averaged."""
    averages = torch.optim.swa_utils
    options = {
        "equal": {},
        "exponential": {"multi_avg_fn": averages.get_ema_multi_avg_fn(decay)},
        "exponential, one by one": {"avg_fn": averages.get_ema_avg_fn(decay)},
    }[kind]
    write_model(tmp_path / "model.gguf")
    model, x = trained_model(tmp_path / "model.gguf"), torch.arange(4)
    average, first = averages.AveragedModel(model, **options), model(x)
    average.update_parameters(model)
    losses(model, x, steps=1)
    for _ in range(20):
        average.update_parameters(model)
    for (name, own), other in zip(model.named_parameters(), average.module.parameters(), strict=True):
        if own.dtype == torch.uint8:
            assert torch.equal(own, other), name
    assert not torch.equal(average(x), first)
    distance = [(y - first).norm() for y in (average(x), model(x))]
    assert distance[0] < distance[1]


@pytest.mark.parametrize("foreach", [False, True])
def test_averages_of_diffusers(tmp_path, foreach):
    """EMAModel copies parameters that take no gradient, and averages the others."""
    training_utils = pytest.importorskip("diffusers.training_utils")
    write_model(tmp_path / "model.gguf")
    model, x = trained_model(tmp_path / "model.gguf"), torch.arange(4)
    average, first = training_utils.EMAModel(model.parameters(), decay=0.9, foreach=foreach), model(x)
    for _ in range(3):
        losses(model, x, steps=1)
        average.step(model.parameters())
    trained = model(x)
    average.store(model.parameters())
    average.copy_to(model.parameters())
    distance = [(y - first).norm() for y in (model(x), trained)]
    assert 0 < distance[0] < distance[1]
    average.restore(model.parameters())
    assert_same(model(x), trained)


def test_placeholders_of_a_weight_whose_bytes_are_elsewhere():
    """DeepSpeed's ZeRO-3 keeps parts on its ranks, and saves and loads empty tensors in place of the parameters."""
    layer, whole = QLinear.from_tensor(weights()), QLinear.from_tensor(weights(seed=1))
    want, data = layer(X), layer.weight.data
    layer.weight.data = torch.empty(0, dtype=torch.uint8)
    state = layer.state_dict()
    assert state["weight"].shape == (0,)
    layer.load_state_dict(state)
    with pytest.raises(qgemm.UnsupportedError, match=r"is uint8 \[40, 72\].*got torch.uint8 \[0\]"):
        layer(X)
    layer.weight.data = data
    assert_same(layer(X), want)
    with pytest.raises(RuntimeError, match=r"has torch.uint8 \[0\], this layer's is packed"):
        whole.load_state_dict(state)


def test_a_gradient_of_a_packed_weight_is_refused():
    """A layer refuses it, as does a model of such layers, and names the parameters that can train."""
    layer = QLinear.from_tensor(weights(), torch.nn.Parameter(normal(40)))
    empty = QLinear(128, 40, "q4_0", device="meta")
    empty.load_state_dict(layer.state_dict(), assign=True)
    for part in (layer, copy.deepcopy(layer), empty, QEmbedding(8, 64, "q8_0"), copy.copy(layer).to("meta")):
        for module in (part, torch.nn.Sequential(part)):
            with pytest.raises(qgemm.UnsupportedError, match=r"takes no gradient; train its bias .*, dense layers"):
                module.requires_grad_(True)
            module.requires_grad_(False)


def test_a_state_dict_has_plain_tensors():
    state = QLinear.from_tensor(weights()).state_dict()
    assert {type(value) for value in state.values()} == {torch.Tensor}

"""ColumnParallelLinear and RowParallelLinear on two and three processes over gloo, beside QLinear in one."""

from __future__ import annotations

import copy
import pickle
import re
from datetime import timedelta

import numpy as np
import pytest
import ranks
from helpers import ROUNDING, exact
from measured_errors import check_rms
from torch_layers import DTYPES, MATRICES, assert_same, normal, torch, weights

import qgemm
from qgemm.codec.error_bound import a16_bound, magnitudes
from qgemm.torch import ColumnParallelLinear, QLinear, RowParallelLinear
from qgemm.torch.group import Group

dist = torch.distributed
WORLDS = 2, 3
worlds = pytest.mark.parametrize("world", WORLDS)
N, BLOCKS = 200, 7  # the number of ranks divides neither: shares are uneven


def on_ranks(function):
    """A test that calls function(rank, world) on two and on three ranks."""

    @worlds
    def test(world):
        ranks.run(world, function, world)

    test.__doc__ = function.__doc__
    return test


def activations_of(fmt):
    return ("a16", "a8") if fmt.integer else ("a16",)


def row_bound(x, w, rank_parts, dtype, bias):
    """Each part of the sum is a product within its own bound, rounded; world - 1 sums, and that with the bias, too."""
    u, n = ROUNDING[dtype], w.shape[0]
    size, sums, parts, start = np.zeros((len(x), n)), np.zeros((len(x), n)), np.zeros((len(x), n)), 0
    for width in rank_parts:
        columns = slice(start, start + width)
        part = qgemm.Tensor(
            w.format, (n, width), w.blocks[:, start // w.format.weights : (start + width) // w.format.weights]
        )
        sums += a16_bound(x[:, columns], magnitudes(part.format, part.blocks)) + 2.0**-23 * np.abs(
            exact(x[:, columns], part)
        )
        parts += np.abs(exact(x[:, columns], part))
        start += width
    size = parts + sums + (0 if bias is None else np.abs(bias))
    return sums + (len(rank_parts) + 1) * u * (1 + u) ** 3 * size + 2.0**-23


# ---------------------------------------------------------------- products


def columns(rank, world):
    """Bit for bit what one process computes, of every format, dtype and activation; bias and uneven shares."""
    for fmt in MATRICES:
        w, bias = weights(fmt.name, N, 2), normal(N, seed=1)
        for activation in activations_of(fmt):
            layer = ColumnParallelLinear.from_tensor(w, bias, activation)
            joined = ColumnParallelLinear.from_tensor(w, bias, activation, whole=True)
            whole = QLinear.from_tensor(w, bias, activation)
            part = layer.parts[rank]
            assert layer.out_features == part.stop - part.start
            assert sum(layer.widths) == N
            for dtype in DTYPES:
                x = normal(2, 3, w.shape[1], dtype=dtype, seed=2)
                want = whole(x)
                assert_same(layer(x), want[..., part])
                assert_same(joined(x), want)


def rows(rank, world):
    """Within the derived bound of the exact product, the same bits on all ranks; x in parts or whole."""
    for fmt in MATRICES:
        w, bias = weights(fmt.name, 40, BLOCKS), normal(40, seed=1)
        for layer_bias in (None, bias):
            layer = RowParallelLinear.from_tensor(w, layer_bias)
            split = RowParallelLinear.from_tensor(w, layer_bias, whole=True)
            for dtype in DTYPES:
                x = normal(5, w.shape[1], dtype=dtype, seed=2)
                added = None if layer_bias is None else layer_bias.to(x.dtype)
                y = layer(x[..., layer.parts[rank]])
                assert y.dtype is x.dtype
                assert_same(split(x), y)
                values = x.double().numpy()
                want = exact(values, w) + (0 if layer_bias is None else bias.double().numpy())
                bound = row_bound(values, w, layer.widths, dtype, None if layer_bias is None else bias.double().numpy())
                assert (np.abs(y.double().numpy() - want) <= bound).all(), (fmt, dtype, added)
                check_rms(y.double().numpy(), want, dtype, world + 1)
                outputs = [None] * world
                dist.all_gather_object(outputs, y.view(torch.uint8).numpy().tobytes())
                assert len(set(outputs)) == 1


def shapes(rank, world):
    """A vector, no rows, other strides; and the pair of layers that a block is made of."""
    up, down = weights("q4_0", 64 * world, 2, seed=1), weights("q8_0", 96, world, seed=2)
    first, second = ColumnParallelLinear.from_tensor(up), RowParallelLinear.from_tensor(down)
    for x in (normal(128), normal(0, 128), normal(128, 4).T, normal(2, 3, 256)[..., ::2]):
        y = second(torch.relu(first(x)))
        want = QLinear.from_tensor(down)(torch.relu(QLinear.from_tensor(up)(x)))
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-4)
        assert y.shape == want.shape


def integers(rank, world):
    """a8 along K: parts have the activations' blocks that the whole has, so only the order of the sum differs."""
    w = weights("q4_0", 40, 4)
    x = normal(5, w.shape[1])
    layer = RowParallelLinear.from_tensor(w, None, "a8", whole=True)
    torch.testing.assert_close(layer(x), QLinear.from_tensor(w, None, "a8")(x), rtol=1e-5, atol=1e-5)


def gradients(rank, world):
    """Those of x and bias are those of one process, up to the order of sums."""
    w, bias = weights("q8_0", 64 * world, 2 * world), normal(64 * world)
    results = {}
    for kind in (ColumnParallelLinear, RowParallelLinear, QLinear):
        x = normal(5, w.shape[1], seed=3).requires_grad_()
        parameter = torch.nn.Parameter(bias.clone())
        layer = kind.from_tensor(w, parameter, **({} if kind is QLinear else {"whole": True}))
        (layer(x) ** 2).sum().backward()
        results[kind] = layer, x.grad, layer.bias.grad
    _, x, b = results[QLinear]
    layer, got, part = results[ColumnParallelLinear]
    torch.testing.assert_close(got, x, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(part, b[layer.parts[rank]], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(results[RowParallelLinear][1], x, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(results[RowParallelLinear][2], b, rtol=1e-4, atol=1e-3)


def compiled(rank, world):
    """No break in the graph, and the same bits."""
    w, bias = weights("q4_0", 64 * world, 2 * world), normal(64 * world)
    x = normal(3, w.shape[1])
    for kind in (ColumnParallelLinear, RowParallelLinear):
        layer = kind.from_tensor(w, bias, whole=True)
        torch._dynamo.reset()
        with torch.no_grad():
            assert_same(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))


def modules(rank, world):
    """A layer is saved, loaded and copied as that of its share; pickled it is not, and LoRA is not cut."""
    w, bias = weights("q4_0", 64 * world, 2 * world), normal(64 * world)
    x = normal(3, w.shape[1])
    for kind in (ColumnParallelLinear, RowParallelLinear):
        layer, other = (
            kind.from_tensor(w, bias, whole=True),
            kind.from_tensor(weights("q8_0", *state_of(w)), whole=True),
        )
        assert f"rank {rank} of {world}" in repr(layer)
        assert layer.weight.nbytes == w.nbytes // world
        other.register_parameter("bias", torch.nn.Parameter(torch.zeros_like(layer.bias), requires_grad=False))
        other.load_state_dict(layer.state_dict())
        assert_same(other(x), layer(x))
        assert_same(copy.deepcopy(layer)(x), layer(x))
        with pytest.raises(qgemm.UnsupportedError, match="save its state_dict"):
            pickle.dumps(layer)
        with pytest.raises(qgemm.UnsupportedError, match="LoRA beside a layer that is cut"):
            layer.add_lora(normal(2, layer.in_features), normal(layer.out_features, 2))
        with pytest.raises(qgemm.UnsupportedError, match="there is no empty one"):
            kind(64, 64, "q4_0")


def state_of(w):
    """The rows of a tensor, and blocks of a row as `weights` counts them."""
    return w.shape[0], w.shape[1] // 64


test_columns_are_those_of_one_process = on_ranks(columns)
test_rows_are_within_their_bound = on_ranks(rows)
test_shapes_of_x = on_ranks(shapes)
test_activations_of_8_bits_along_k = on_ranks(integers)
test_gradients = on_ranks(gradients)


def test_compiled_layers():
    ranks.run(2, compiled, 2)


test_a_layer_is_that_of_its_share = on_ranks(modules)


# ---------------------------------------------------------------- refusals and ranks that fail


def refused(rank, world):
    """Before any rank holds a layer, on all ranks, with advice."""
    w = weights("q4_k", 64 * world - 64, world - 1)
    for kind, message in (
        (ColumnParallelLinear, f"axis 0 of {64 * world - 64} cut in multiples of 64 gives"),
        (RowParallelLinear, f"axis 1 of {256 * world - 256} cut in multiples of 256 gives"),
    ):
        with pytest.raises(qgemm.ShapeError, match=re.escape(message)):
            kind.from_tensor(w)
    good = weights("q4_0", 64 * world, world)
    layer = RowParallelLinear.from_tensor(good)
    with pytest.raises(qgemm.ShapeError, match="x has shape"):
        layer(normal(2, good.shape[1]))
    with pytest.raises(qgemm.ShapeError, match="bias has shape"):
        ColumnParallelLinear.from_tensor(good, normal(3))
    with pytest.raises(qgemm.UnsupportedError, match="cut on the host"):
        ColumnParallelLinear.from_tensor(normal(2, 2))


def failing(rank, world):
    """The last rank cannot read its file, say: all end with its message, and the group goes on."""
    w = weights("q4_0", 64 * world, world)

    def blocks():
        raise OSError("disk on fire")

    broken = qgemm.Tensor(w.format, w.shape, blocks)
    with pytest.raises(OSError if rank == world - 1 else qgemm.RankError) as caught:
        ColumnParallelLinear.from_tensor(broken if rank == world - 1 else w)
    assert "disk on fire" in str(caught.value)
    if rank != world - 1:
        assert f"rank {world - 1} of {world} failed with OSError" in str(caught.value)
    assert RowParallelLinear.from_tensor(w, whole=True)(normal(1, w.shape[1])).shape == (1, w.shape[0])


def differing(rank, world):
    """Ranks with different tensors would sum unrelated products."""
    w = weights("q4_0" if rank < world - 1 else "q8_0", 64 * world, world)
    with pytest.raises(qgemm.RankError, match=f"rank 0 has .*Q4_0.*, rank {world - 1} has .*Q8_0"):
        RowParallelLinear.from_tensor(w)


def groups(rank, world):
    """A part of the ranks, by a group or a mesh of one axis; other objects are refused."""
    w = weights("q4_0", 64, 2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    pair = dist.new_group([0, 1])
    for group, members in ((mesh["tp"], world), (pair, 2)):
        if members == 2 and rank >= 2:
            with pytest.raises(qgemm.UnsupportedError, match="in no group"):
                Group(pair)
            continue
        tall = weights("q4_0", 64 * members, 2)
        assert ColumnParallelLinear.from_tensor(tall, group=group).out_features == 64
    with pytest.raises(qgemm.UnsupportedError, match="in no group"):
        ColumnParallelLinear.from_tensor(w, group="tp")


def destroyed(rank, world):
    """A layer does not keep the group of its ranks: it says that it is gone."""
    w = weights("q4_0", 64, world)
    layer = RowParallelLinear.from_tensor(w, whole=True)
    dist.destroy_process_group()
    with pytest.raises(qgemm.UnsupportedError, match="the process group is gone"):
        layer(normal(1, w.shape[1]))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the end of the test destroys it


test_what_cannot_be_cut_is_refused = on_ranks(refused)
test_a_layer_outlives_its_group = on_ranks(destroyed)
test_a_rank_that_fails_ends_all_with_its_message = on_ranks(failing)
test_ranks_must_hold_the_same = on_ranks(differing)
test_groups_and_meshes = on_ranks(groups)


def waiting(rank, world):
    """Rank 0 makes a sum that no other makes: it ends when the time that was given is over."""
    group = Group(timeout=timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(RuntimeError):
            group.sum(torch.ones(4))
    dist.barrier()


test_the_timeout_is_passed_on = on_ranks(waiting)


def leaving(rank, world):
    w = weights("q4_0", 64 * world, world)
    layer = RowParallelLinear.from_tensor(w, whole=True)
    if rank == world - 1:
        raise KeyError("out of cheese")
    layer(normal(1, w.shape[1]))


@worlds
def test_a_rank_that_fails_in_a_forward_leaves_none_waiting(world):
    """Its process is gone, which gloo tells the others at once."""
    outcomes = ranks.outcomes_of(world, leaving, world)
    assert "out of cheese" in outcomes[-1][0]
    assert all("RuntimeError" in text for text, _ in outcomes[:-1])


def test_without_a_process_group():
    with pytest.raises(qgemm.UnsupportedError, match="init_process_group"):
        RowParallelLinear.from_tensor(weights())

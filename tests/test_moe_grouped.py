"""Experts of many tokens without a GPU: sort, gather and combine run on the host, the grouped product in NumPy."""

from __future__ import annotations

import ctypes
from functools import cache, partial

import harness
import numpy as np
import pytest
from experts import assert_within, known_layer, known_matmul, random_experts, routed
from gates import function, gated_up
from harness import check_guards, device_array
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from moe_on_host import Launch, array, device, graph_of, graphs, install, on_device, rows_of_x
from strategies import over_formats, seeds

import qgemm
from qgemm.codec.format import float_dtype
from qgemm.cuda.call import experts, grouped, plan, replay
from qgemm.cuda.jit import codegen
from qgemm.cuda.jit.twins import Divisor, ExpertSort, StreamK, TokenTile
from qgemm.cuda.kernels import activations, moe_sort, prefill_sm90, transforms
from qgemm.cuda.kernels.expert_tiles import DECODE_TILE, max_token_tiles
from qgemm.cuda.kernels.sm90_token_tiles import GROUPED_TOKENS
from qgemm.cuda.problem import Gpu
from qgemm.routing import GATE_OF

pytestmark = [pytest.mark.compiles, harness.needs_compiler]
few = settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
Q4_0, Q8_0 = qgemm.FORMATS["q4_0"], qgemm.FORMATS["q8_0"]
THREADS, SEGMENT = 128, 96  # the sort's; 16 warps, as on a GPU, are slow to emulate
CHUNK, POISON = moe_sort.CHUNK, 255
TOKEN_TILE = np.dtype(TokenTile)
TILES = (DECODE_TILE, *GROUPED_TOKENS)
kernel = cache(harness.Kernel)


# ---------------------------------------------------------------- the sort


def sorted_on_host(ids, experts, tokens, backwards=False):
    """counts, token tiles and the row of each slot, as the kernel writes them; guards and sorted x are checked."""
    slots = ids.size
    counts, rows = device_array(2, np.int32), device_array(slots, np.int32)
    slots_of_x, chunks = (1, 3) if slots % 2 else (2, 33)
    x, sorted_x = (device_array(count * chunks * CHUNK, np.uint8) for count in (slots // slots_of_x, slots))
    x[:] = np.arange(x.size) % 251
    token_tiles = device_array(max_token_tiles(slots, experts, tokens), TOKEN_TILE)
    rows[:], sorted_x[:] = -7, POISON
    device_ids = device_array(slots, ids.dtype)
    device_ids[:] = ids.reshape(-1)
    wide = ids.dtype == np.int64
    arguments = ExpertSort(
        slots=slots,
        experts=experts,
        wide_ids=wide,
        tokens=tokens,
        segment=SEGMENT,
        chunks=chunks,
        chunks_of_row=Divisor.by(chunks),
        slots_of_row=Divisor.by(slots_of_x),
    )
    for name, values in {
        "ids": device_ids, "counts": counts, "token_tiles": token_tiles, "rows": rows, "x": x, "sorted": sorted_x,
    }.items():  # fmt: skip
        setattr(arguments, name, values.ctypes.data)
    kernel("moe_sort", None, THREADS=THREADS)(-(-slots // SEGMENT), THREADS, arguments, backwards=backwards)
    for values in (counts, token_tiles, rows, sorted_x):
        check_guards(values)
    x_rows, sorted_rows = x.reshape(-1, chunks * CHUNK), sorted_x.reshape(slots, -1)
    assigned = np.flatnonzero(rows >= 0)
    np.testing.assert_array_equal(sorted_rows[rows[assigned]], x_rows[assigned // slots_of_x])
    assert (sorted_rows[len(assigned) :] == POISON).all()
    return counts, token_tiles[: counts[0]], rows


@settings(max_examples=30, deadline=None)
@given(
    rng=seeds(), slots=st.integers(1, 700), experts=st.sampled_from([1, 2, 7, 128, 300]),
    tokens=st.sampled_from(TILES), wide=st.booleans(), backwards=st.booleans(),
    kind=st.sampled_from(["random", "skewed", "one", "some are none"]),
)  # fmt: skip
@example(np.random.default_rng(0), 129, 1, 16, False, True, "one")
def test_slots_are_sorted_by_expert_in_their_order(rng, slots, experts, tokens, wide, backwards, kind):
    """The sort is stable in any order of threads; every row is in one token tile; ids of no expert have no row."""
    ids = rng.integers(0, experts, slots).astype(np.int64 if wide else np.int32)
    if kind == "skewed":
        ids[rng.random(slots) < 0.5] = experts - 1
    if kind == "one":
        ids[:] = experts // 2
    if kind == "some are none":
        ids[rng.random(slots) < 0.3] = rng.choice([-1, experts, 1 << 30])
    counts, token_tiles, rows = sorted_on_host(ids, experts, tokens, backwards)
    assigned = np.flatnonzero((ids >= 0) & (ids < experts))
    order = assigned[np.argsort(ids[assigned], kind="stable")]
    places = np.full(slots, -1)
    places[order] = np.arange(len(order))
    np.testing.assert_array_equal(rows, places)
    tile_rows = [np.arange(tile["row"], tile["row"] + tile["rows"]) for tile in token_tiles]
    np.testing.assert_array_equal(np.concatenate([*tile_rows, []]), np.arange(len(order)))
    assert (token_tiles["rows"] <= tokens).all()
    assert (ids[order[token_tiles["row"]]] == token_tiles["expert"]).all() if len(token_tiles) else counts[1] == 0
    for number, tile in enumerate(token_tiles):
        same_expert = token_tiles["expert"] == tile["expert"]
        assert (tile["first"], tile["count"]) == (np.argmax(same_expert), same_expert.sum())
        assert tile["rows"] == tokens or number == tile["first"] + tile["count"] - 1


# ---------------------------------------------------------------- the schedule


@cache
def tiles_library():
    source = f'#include "{harness.FOLDER / "token_tiles.cpp"}"'
    return harness.library(source, codegen.headers())


@given(
    loads=st.lists(st.integers(0, 40), min_size=1, max_size=12), row_tiles=st.integers(1, 30), units=st.integers(1, 40),
    ctas=st.sampled_from([1, 7, 132]),
)  # fmt: skip
@example([40, 0, 3], 45, 45, 132)
@example([3, 2, 2], 3, 3, 132)  # fewer units than CTAs
def test_all_tiles_of_experts_are_multiplied_once(loads, row_tiles, units, ctas):
    """Token tiles, row tiles and units along K are combined once each; CTAs that share a tile agree on their peers."""
    listed = np.zeros(sum(loads), TOKEN_TILE)
    starts = np.cumsum([0, *loads])
    for expert, (first, count) in enumerate(zip(starts, loads, strict=False)):
        listed["expert"][first : first + count] = expert
        listed["first"][first : first + count], listed["count"][first : first + count] = first, count
    count = len(listed) * row_tiles
    if not count:
        return
    sizes = StreamK(ctas=Divisor.by(ctas), work_units=Divisor.by(units), row_tiles=Divisor.by(row_tiles))
    work_items = np.zeros((count + 3 * ctas, 7), np.int32)
    n = tiles_library().grouped(
        listed.ctypes.data_as(ctypes.c_void_p), len(listed), row_tiles, units, ctas, ctypes.byref(sizes),
        work_items.ctypes.data_as(ctypes.c_void_p), len(work_items),
    )  # fmt: skip
    assert n < len(work_items)
    done = np.zeros((len(listed), row_tiles, units), np.int64)
    work = np.zeros(ctas, np.int64)
    sharing = {}
    for cta, number, row_tile, first, end, first_peer, peers in work_items[:n]:
        done[number, row_tile, first:end] += 1
        work[cta] += end - first
        sharing.setdefault((number, row_tile), []).append((cta, first_peer, peers))
    assert (done == 1).all()
    for parts in sharing.values():  # every peer that a finalizer waits for has a part
        assert {part[1:] for part in parts} == {(min(parts)[0], len(parts))}
        assert sorted(part[0] for part in parts) == list(range(min(parts)[0], min(parts)[0] + len(parts)))
    shared = count * units >= 4 * ctas
    assert work.max() <= (work.mean() * (1 + 1 / 8) + 1 if shared else units * -(-count // ctas))


# ---------------------------------------------------------------- calls


class Product:
    """Stands for the grouped product: multiplies the arrays at the kernel's addresses in float32."""

    def __init__(self, weights):
        self.weights = weights  # [E, n, K] float32 by the address of the first expert's tiles

    def __call__(self, kernel, p):
        assert kernel is prefill_sm90.MOE_PREFILL_SM90

        def call(stream, x, counts, token_tiles, *pointers):
            count, rows = array(counts, 2, np.int32)
            x = rows_of_x(x, p)
            y = array(pointers[6], (p.m, p.n), p.outputs[0].y)
            for tile in array(token_tiles, count, TOKEN_TILE):
                tile_rows = slice(tile["row"], tile["row"] + tile["rows"])
                outputs = [
                    self.product(x[tile_rows], int(tile["expert"]), pointers, number, p)
                    for number in range(1 + p.gated)
                ]
                if p.gated:
                    name = p.outputs[0].gate
                    outputs = [(function(name, outputs[0]) * gated_up(name, outputs[1])).astype(np.float32)]
                y[tile_rows] = outputs[0].astype(y.dtype)
            assert (array(counts, 2, np.int32) == (count, rows)).all()

        call.bound = partial(partial, call)
        return call

    def product(self, x, expert, pointers, number, p):
        y = x @ self.weights[pointers[number]][expert].T
        assert pointers[2 + number] > pointers[number]
        bias = p.outputs[number].bias
        if bias:
            address = pointers[4 + number] + expert * p.routed.stride.rows * np.dtype(bias).itemsize
            y = y + array(address, p.n, bias).astype(np.float32)
        return y


@pytest.fixture
def host(monkeypatch):
    """CuPy on NumPy and small kernels on the host, for a GPU with wgmma on which every call is sorted."""
    install(monkeypatch)
    monkeypatch.setattr(transforms, "load", lambda name, fmt, **template: kernel(name, None, **template))
    for module in (moe_sort, activations):
        monkeypatch.setattr(module, "Launch", Launch)
    monkeypatch.setattr(moe_sort, "SORT_THREADS", THREADS)
    sort = transforms.Transform("moe_sort", ({"THREADS": THREADS},))
    monkeypatch.setattr(moe_sort, "MOE_SORT", sort)
    for module in (plan, grouped):
        monkeypatch.setattr(module, "gpu", lambda device: Gpu(device, 90, 132))
    for cached_launch in (moe_sort.sort_launch, moe_sort.combine_launch, activations.scale_launch):
        cached_launch.cache_clear()
    monkeypatch.setattr(grouped, "token_tile", lambda *sizes: 16)
    weights = {}
    monkeypatch.setattr(plan, "launch", Product(weights))
    yield weights
    for cached_launch in (moe_sort.sort_launch, moe_sort.combine_launch, activations.scale_launch):
        cached_launch.cache_clear()


def dense(w):
    return np.stack([w[e].dequantize() for e in range(len(w.blocks))])


def spoilt(rng, ids, e):
    """ids with some replaced by numbers of no expert, and the mask of replacements."""
    nobody = rng.random(ids.shape) < 0.1
    ids = ids.copy()
    ids[nobody] = rng.choice([-1, e, 1 << 30])
    return ids, nobody


@over_formats([Q4_0, Q8_0, qgemm.FORMATS["q4_k"]])
@few
@given(data=st.data())
def test_products_come_back_to_their_places(fmt, data, host):
    """x has a row per token or per expert of a token, in several chunks, with biases and every type of y."""
    rng, dtype = data.draw(seeds()), data.draw(st.sampled_from(["float16", "bfloat16"]))
    t, top_k, e = (data.draw(st.integers(*ends)) for ends in ((1, 40), (1, 4), (1, 6)))
    w = random_experts(fmt, e, data.draw(st.sampled_from([7, 64, 90])), 96, rng)
    packed = on_device(w)
    host[packed.pointer] = dense(w)
    ids, nobody = spoilt(rng, routed(rng, t, top_k, e)[0], e)
    shape = (t, w.shape[2]) if data.draw(st.booleans()) else (t, top_k, w.shape[2])
    x = (rng.standard_normal(shape) / 64).astype(float_dtype(dtype))
    bias = rng.standard_normal(w.shape[:2]).astype(np.float32) if data.draw(st.booleans()) else None
    out = data.draw(st.sampled_from(["float32", "float16", "bfloat16"]))
    ids = ids.astype(data.draw(st.sampled_from(["int32", "int64"])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "MAX_SLOTS", data.draw(st.sampled_from([1 << 17, 20])))
        y = qgemm.moe_matmul(device(x), packed, device(ids), bias=device(bias), dtype=out)
    expected = known_matmul(x.astype(np.float32), w, np.where(nobody, 0, ids), bias, dtype)
    expected.y[nobody] = expected.bound[nobody] = expected.noise[nobody] = 0
    assert (y.shape, y.dtype.name) == ((t, top_k, w.shape[1]), out)
    assert not y.get()[nobody].any()
    assert_within(y, expected, out)


@pytest.mark.parametrize("name", GATE_OF)
@few
@given(data=st.data())
def test_a_layer_sums_over_the_experts_of_a_token(name, data, host):
    """Gate and up are two tensors or one, all three have biases or none, down may have another format."""
    rng, dtype = data.draw(seeds()), data.draw(st.sampled_from(["float16", "bfloat16"]))
    t, top_k, e = (data.draw(st.integers(*ends)) for ends in ((1, 40), (1, 4), (4, 6)))
    gate, up = (random_experts(Q4_0, e, 128, 96, rng) for _ in range(2))
    down = random_experts(data.draw(st.sampled_from([Q4_0, Q8_0])), e, 96, 128, rng)
    ids, weights = routed(rng, t, top_k, e)
    x = (rng.standard_normal((t, 96)) / 64).astype(float_dtype(dtype))
    random_biases = [(rng.standard_normal((e, n)) / 8).astype(np.float32) for n in (128, 128, 96)]
    biases = [None] * 3 if data.draw(st.booleans()) else random_biases
    second = on_device(down)
    host[second.pointer] = dense(down)
    if data.draw(st.booleans()):
        both = on_device(qgemm.Tensor(Q4_0, (e, 256, 96), np.concatenate([gate.blocks, up.blocks], axis=1)))
        both_biases = None if biases[0] is None else np.concatenate(biases[:2], axis=1)
        gate_up, passed = both, [device(both_biases), device(biases[2])]
        half = grouped_up(both)
        host[both.pointer], host[half] = dense(gate), dense(up)
    else:
        gate_up, passed = [on_device(gate), on_device(up)], [device(bias) for bias in biases]
        host[gate_up[0].pointer], host[gate_up[1].pointer] = dense(gate), dense(up)
    y = qgemm.moe(device(x), gate_up, second, device(ids), device(weights), name, biases=passed)
    expected = known_layer(
        x.astype(np.float32), gate, up, down, ids, weights, GATE_OF[name], biases, dtype, in_float=True
    )  # fmt: skip
    rounding = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]  # products are rounded before they are added up
    slack = expected.bound + (rounding + 2.0**-16) * rounded_magnitudes(gate, up, down, x, ids, weights, name, biases)
    assert (np.abs(y.get() - expected.y) <= slack + 2.0**-24).all()


def grouped_up(both):
    """The address of the rows of up, which follow the rows of the gate."""
    _, n, k = both.shape
    return both.pointer + int(np.prod(experts.tiles.tiles_shape(both.format, n // 2, k)))


def rounded_magnitudes(gate, up, down, x, ids, weights, name, biases):
    """The sum of magnitudes of the rounded values, which are products of a token times the router's weights."""
    magnitudes = np.zeros((len(ids), down.shape[1]))
    x = x.astype(np.float64)
    for t, j in np.ndindex(ids.shape):
        e = ids[t, j]
        expert_biases = [0 if bias is None else bias[e].astype(np.float64) for bias in biases]
        g, u = (
            w[e].dequantize().astype(np.float64) @ x[t] + b for w, b in zip((gate, up), expert_biases, strict=False)
        )
        middle = function(GATE_OF[name], g) * gated_up(GATE_OF[name], u)
        magnitudes[t] += weights[t, j] * np.abs(down[e].dequantize().astype(np.float64) @ middle)
    return magnitudes


@pytest.mark.parametrize("sorted_by_expert", [False, True])
@few
@given(data=st.data())
def test_a_later_call_on_other_arrays_goes_the_fast_path(sorted_by_expert, data, host):
    """Other arrays get the same launches, four as a graph, y new or passed; other types or shapes get the slow path."""
    rng = data.draw(seeds())
    gate, up, down = (random_experts(Q4_0, 4, n, k, rng) for n, k in ((128, 96), (128, 96), (96, 128)))
    packed = [on_device(w) for w in (gate, up, down)]
    for w, tensor in zip((gate, up, down), packed, strict=True):
        host[tensor.pointer] = dense(w)
    biases = [device((rng.standard_normal((4, n)) / 8).astype(np.float32)) for n in (128, 128, 96)]
    out = device(np.zeros((5, 96), np.float32)) if data.draw(st.booleans()) else None

    def call(x, ids, weights, out=out, **more):
        return qgemm.moe(x, packed[:2], packed[2], ids, weights, biases=biases, out=out, **more)

    def arrays(t=5):
        ids, weights = routed(rng, t, 2, 4)
        return device((rng.standard_normal((t, 96)) / 64).astype(np.float16)), device(ids), device(weights)

    with pytest.MonkeyPatch.context() as patch:
        if not sorted_by_expert:
            patch.setattr(grouped, "token_tile", lambda *sizes: 0)
            patch.setattr(plan, "launch", lambda kernel, p: Recorded())
        first, second = arrays(), arrays()
        call(*first)
        seen.clear()
        slow_path = call(*second, dtype=None if out is not None else "float32").copy().get()
        pointers = list(seen)
        patch.setattr(experts, "recording", refuse)
        patch.setattr(replay, "graph_of", graph_of)
        graphs.clear()
        seen.clear()
        fast_path = call(*second)
        for _ in range(3 if out is not None else 0):  # the second call with this out binds launches to the pointers
            out[...] = np.nan
            noted, seen[:] = list(seen), []
            np.testing.assert_array_equal(call(*second).get(), fast_path.get())
            assert seen == noted
            assert graphs == ([4] if sorted_by_expert else [])
        if sorted_by_expert:
            np.testing.assert_array_equal(fast_path.get(), slow_path)
        else:
            fixed = [second[0].data.ptr, second[1].data.ptr, second[2].data.ptr, packed[0].pointer, packed[1].pointer]
            assert len(seen) == len(pointers) == 2
            assert set(fixed) <= set(seen[0])
            assert {packed[2].pointer, fast_path.data.ptr, biases[2].data.ptr} <= set(seen[1])
        for other in (
            arrays(6),
            (second[0], second[1].astype(np.int64), second[2]),
            (second[0].T.copy().T, *second[1:]),
        ):
            with pytest.raises(SlowPath):
                call(*other, out=None)
        with pytest.raises(SlowPath):
            call(second[0].astype(np.float32), *second[1:], out=second[0].astype(np.float32))


class SlowPath(Exception):
    """Raised where a call does not get the fast path."""


def refuse(*_):
    raise SlowPath


seen: list[tuple[int, ...]] = []


class Recorded:
    """Stands for a launch: notes its pointers."""

    def __call__(self, stream, *pointers):
        seen.append(pointers)

    def bound(self, *args):
        return partial(self, *args)

"""Products by the kernels of sm_80, run on the host."""

from __future__ import annotations

from functools import cache

import helpers
import numpy as np

from qgemm.codec.eight_bits import COLUMNS, EightBits
from qgemm.codec.group_activations import GROUP_COLUMNS
from qgemm.cuda.jit.twins import EpilogueArguments, Products, Types
from qgemm.cuda.kernels import decode, gemm_sm90_s8, prefill_sm80, requantize
from qgemm.cuda.kernels.decode_config import decode_configs_for, decode_template, gated_config
from qgemm.cuda.kernels.prefill_sm80_eight_bits import PREFILL_SM80_EIGHT_BITS
from qgemm.cuda.layout import group_activations
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import EIGHT_BITS, Problem

from . import Kernel, check_guards, device_array, to_device

kernel = cache(Kernel)
SM = 80
BOX = 128  # columns that requantize swizzles together


@cache
def problem(fmt, m, k=320, n=70):
    """W [n, k'] with ordinary scales, x [m, k'] on the float16 grid, and their expected product by half weights."""
    w = helpers.random_tensor(fmt, n, k, np.random.default_rng(3))
    x = helpers.normal(m, w.shape[1], seed=4).astype(np.float16).astype(np.float32)
    return w, x, helpers.expected_product(x, w, "float16")


@cache
def decode_problem(fmt, m, k=320):
    """Compare y with the expected product of a kernel that rounds only levels of a codebook."""
    w, x, _ = problem(fmt, m, k)
    return w, x, helpers.expected_product(x, w, "float16", levels_alone=True)


def run_prefill(fmt, name, source, x, w, m, split_k):
    """y [m, n] by the first config of a kernel of sm_80."""
    config = prefill_sm80.sm80_configs_for(name, fmt, SM)[0]
    n, k = w.shape
    count = prefill_sm80.tiles_of(config, n, m)
    y, counters = device_array((m, n), np.float32), device_array(count, np.uint32)
    of_tile = config.warp_split_k * config.row_blocks * tiles.ROWS * config.tokens
    partials = device_array(count * split_k * of_tile, np.float32)
    run = kernel(name, fmt, **prefill_sm80.template(fmt, config, source, "float", SM))
    factors = (2.0 ** tiles.level_exponent(fmt), 1.0) if name == prefill_sm80.A16 else ()
    pitch = (k,) * bool(factors)  # pitch of x
    packed = to_device(tiles.pack(fmt, w.blocks))
    sizes = n, k, m, *pitch, split_k
    run(count * split_k, config.threads, packed, to_device(x), y, partials, counters, *sizes, *factors)
    assert not counters.any()
    return y


def in_groups(blocks, group):
    """Blocks [M, K / 32] of codec/group_activations.py as the bytes of layout/group_activations.py."""
    (m, count), weights = blocks.shape, blocks["qs"].shape[2]
    rows, columns = group_activations.rows_of(m), group_activations.columns_of(count * weights)
    codes, scales = np.zeros((rows, columns), np.int8), np.zeros((columns // group, rows), np.float32)
    codes[:m, : count * weights] = blocks["qs"].reshape(m, -1)
    of_group = blocks["d"][:, :: group // weights].T
    scales[: len(of_group), :m] = of_group
    parts = (part.reshape(-1, 16)[:, group_activations.ORDER] for part in (codes, scales))
    return np.concatenate([part.view(np.uint8).reshape(-1) for part in map(np.ascontiguousarray, parts)])


def run_eight_bits(
    w, blocks, kind, config=0, split_k=1, out="float32", bias=None, residual=None, backwards=False,
    record=PREFILL_SM80_EIGHT_BITS,
):  # fmt: skip
    """y [m, n] by a config of a kernel of sm_80, from prepared blocks [m, K / 32]; bytes beside y stay."""
    fmt, (n, k), m, group = w.format, w.shape, len(blocks), GROUP_COLUMNS[kind]
    p = Problem(fmt, kind, m, n, k, SM, EIGHT_BITS)
    whole = list(record.configs(p))[config]
    plan, template = whole.config, record.template(p, whole)
    count = prefill_sm80.tiles_of(plan, n, m)
    y, counters = device_array((m, n), helpers.float_dtype(out)), device_array(count, np.uint32)
    y.view(np.uint8)[...] = 0xFF  # NaN
    partials = device_array(count * split_k * plan.row_blocks * tiles.ROWS * plan.tokens, np.float32)
    added = [None if array is None else to_device(array) for array in (bias, residual)]
    names = ("" if array is None else array.dtype.name for array in (bias, residual))
    epilogue = EpilogueArguments(types=Types.from_names(out, *names))
    epilogue.arrays.y = y.ctypes.data
    for name, array in zip(("bias", "residual"), added, strict=True):
        if array is not None:
            setattr(epilogue.arrays, name, array.ctypes.data)
    packed, activations = to_device(tiles.pack(fmt, w.blocks)), to_device(in_groups(blocks, group))
    sizes = n, k, m, group_activations.rows_of(m), split_k
    run = kernel(record.name, fmt, **template)
    run(count * split_k, plan.threads, packed, activations, epilogue, partials, counters, *sizes, backwards=backwards)
    assert not counters.any()
    check_guards(y)
    return y


def requantized(w, ctas, kind="a8_g256"):
    """The codes [N, K] and scales that requantize computes from W on the host, with `ctas` CTAs along K."""
    fmt, (n, k) = w.format, w.shape
    row_blocks, stages, along_k = -(-n // tiles.ROWS), -(-k // COLUMNS), -(-k // tiles.columns(fmt))
    pairs = gemm_sm90_s8.Slice(0, row_blocks).clusters * gemm_sm90_s8.CLUSTER
    out = device_array(gemm_sm90_s8.Slice(0, row_blocks).nbytes(k), np.uint8)
    out[...] = 0xAA
    packed = to_device(tiles.pack(fmt, w.blocks))
    run = kernel(requantize.NAME, fmt, **requantize.template(fmt, kind))
    along_n = requantize.grid(fmt, row_blocks, stages, 1)[1]
    sizes = along_k, stages, row_blocks, pairs
    run((ctas, along_n), requantize.threads(fmt), packed, out, *sizes)
    size = pairs * 2 * tiles.ROWS * stages * COLUMNS
    chunks = out[:size].view(np.int8).reshape(pairs, stages, 2, COLUMNS // BOX, tiles.ROWS, BOX // 16, 16)
    for row in range(8):  # chunk c of row r lies at c ^ (r % 8)
        rows = chunks[..., row::8, :, :]
        rows[...] = rows[..., [c ^ row for c in range(8)], :].copy()
    codes = np.empty_like(chunks)
    codes[..., group_activations.ORDER] = chunks
    codes = codes.transpose(0, 2, 4, 1, 3, 5, 6).reshape(-1, stages * COLUMNS)
    scale = out[size:].view(np.float32).reshape(pairs, stages, 2, tiles.ROWS).transpose(0, 2, 3, 1)
    assert (codes[row_blocks * tiles.ROWS :].view(np.uint8) == 0xAA).all()  # rows that no tile has stay
    return EightBits(codes[:n, :k], scale.reshape(-1, stages)[:n])


def run_decode(fmt, name, source, x, w, m, out="float32", bias=None, residual=None, gate="", **of_config):
    """y [m, n] by the first config of a decode kernel, + bias [n] + residual [m, n], or times the gated residual.

    of_config: fields that replace those of the config.
    """
    n, k = w.shape
    tokens = decode.token_tile(m)
    config = next(iter(decode_configs_for(fmt, name, tokens, SM)))._replace(**of_config)
    template = decode_template(fmt, config, tokens, name, source, SM)
    rows = 16 * config.m16_tiles
    y, packed, x_bytes = (
        device_array((m, n), helpers.float_dtype(out)),
        to_device(tiles.pack(fmt, w.blocks)),
        to_device(x),
    )
    added = {"bias": bias, "residual": residual}
    added = {key: to_device(value) for key, value in added.items() if value is not None}
    products = Products(k=k, m=m, x=x_bytes.ctypes.data)
    names = ("" if value is None else value.dtype.name for value in (bias, residual))
    cluster = config.cluster_split_k
    ctas = -(-n // rows) * cluster
    products.of[0].n, products.of[0].end, products.of[0].types = n, ctas, Types.from_names(out, *names, gate)
    products.arrays[0].tiles, products.arrays[0].outputs.y = packed.ctypes.data, y.ctypes.data
    for key, value in added.items():
        setattr(products.arrays[0].outputs, key, value.ctypes.data)
    kernel(decode.SOURCE, fmt, **template)(ctas, 32 * template["WARP_SPLIT_K"], products, cluster=cluster)
    for array in (y, packed, x_bytes, *added.values()):
        check_guards(array)
    return y


def run_gated(fmt, name, source, x, weights, m, function, out="float32", biases=(None, None), **of_config):
    """y [m, n] = function(x @ gate.T + bias) * (x @ up.T + bias), weights: gate and up, by one launch of a kernel."""
    n, k = weights[0].shape
    tokens = decode.token_tile(m)
    config = gated_config(next(iter(decode_configs_for(fmt, name, tokens, SM)))._replace(**of_config))
    cluster = config.cluster_split_k
    template = decode_template(fmt, config, tokens, name, source, SM, gated=True)
    ctas = -(-n // (8 * config.m16_tiles)) * cluster
    y, x_bytes = device_array((m, n), helpers.float_dtype(out)), to_device(x)
    products, keep = Products(k=k, m=m, x=x_bytes.ctypes.data), [y, x_bytes]
    for index, (w, bias) in enumerate(zip(weights, biases, strict=True)):
        packed = to_device(tiles.pack(fmt, w.blocks))
        keep.append(packed)
        products.of[index].n, products.of[index].end = n, ctas
        name_of_bias = "" if bias is None else bias.dtype.name
        products.of[index].types = Types.from_names("" if index else out, name_of_bias, "", "" if index else function)
        products.arrays[index].tiles = packed.ctypes.data
        if bias is not None:
            keep.append(to_device(bias))
            products.arrays[index].outputs.bias = keep[-1].ctypes.data
    products.arrays[0].outputs.y = y.ctypes.data
    kernel(decode.SOURCE, fmt, **template)(ctas, 32 * template["WARP_SPLIT_K"], products, cluster=cluster)
    for array in keep:
        check_guards(array)
    return y

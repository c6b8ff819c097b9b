"""The C++ that is generated for a kernel: the structs of tiles and blocks, against the rules of their layouts."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from strategies import TILED, over_formats

import qgemm
from qgemm.cuda.jit import codegen, nvrtc
from qgemm.cuda.kernels import routes
from qgemm.cuda.layout import tile as tiles


@pytest.mark.compiles
@over_formats(TILED)
def test_tile_struct_has_the_size_of_its_dtype(fmt):
    """The generated static_assert is what holds the two together: a wrong size does not compile."""
    source, headers = codegen.compose("dequantize", fmt, Out="half"), codegen.headers(fmt)
    name, size = f"tiles/{fmt.name}.cuh", f' {tiles.tile_dtype(fmt).itemsize}, "the tile'
    assert headers[name].count(size) == 1
    headers[name] = headers[name].replace(size, f"16 + {size}")
    with pytest.raises(nvrtc.CompileError, match="differs from its dtype"):
        nvrtc.compile_cubin(source, "sm_80", headers)


# (kernel, size, sm) -> a template that has some of it, the last.
SHARED = {
    (kernel, constant, sm): template
    for sm in (80, 90)
    for kernel, template in routes.variants(qgemm.FORMATS["q4_k"], sm)
    for constant in template
    if constant.endswith("_BYTES") and template[constant]
}


@pytest.mark.compiles
@pytest.mark.parametrize(("kernel", "constant", "sm"), SHARED)
def test_shared_memory_is_what_the_host_computes(kernel, constant, sm):
    """Every size of shared memory is held by a static_assert: 16 bytes more or fewer do not compile."""
    fmt, template = qgemm.FORMATS["q4_k"], SHARED[kernel, constant, sm]
    for lie in (-16, 16):
        source = codegen.compose(routes.source_of(kernel), fmt, **{**template, constant: int(template[constant]) + lie})
        with pytest.raises(nvrtc.CompileError, match=r"differs? from (the host|what the host asks)"):
            nvrtc.compile_cubin(source, "sm_90a" if sm == 90 else "sm_80", codegen.headers(fmt))


def position_of_code(bits, pairs, step, j, r, plane):
    """(word, bit) by the rules of qgemm/cuda/layout/tile.py, as kernels/pack/panel.cuh has them."""
    p = max(1, 4 // bits)
    bit = bits * (2 * p * (step // p) + p * r + step % p)
    return bit // 8, 8 * j + bit % 8


def position_of_bit(bits, pairs, step, j, r, plane):
    """(word, bit) of one bit of a code that counts levels."""
    index, first = divmod(4 * step + 2 * (j % 2) + r, pairs)
    size, bit = 2 * bits * pairs, bits * (pairs * (j // 2) + first) + plane
    word, first_bit = divmod(index, 32 // size)
    return (word, size * first_bit + bit) if word < bits else (bit // 2, 30 + bit % 2)


@over_formats([fmt for fmt in TILED if fmt.tile.slots])  # test_harness_kernels.py has grids
def test_block_structs_lead_from_blocks_to_tiles(fmt):
    """The generated constants, read as kernels/pack/pack.cu reads them, give the tile of qgemm/cuda/layout/tile.py."""
    text = codegen.block_structs(fmt)
    structs = {
        name: {key: int(value) for key, value in re.findall(r"(\w+) = (\d+)", line)}
        for name, line in re.findall(rf"struct {fmt.name}_block_(\w+) (.*)", text)
    }
    lists = [list(map(int, values.split(", "))) for values in re.findall(r"\[\] = {([\d, ]+)}", text)]
    coded = [name for name in fmt.dtype.names if name in fmt.tile.slots]
    bits_of = dict(zip(coded, zip(lists[::2], lists[1::2], strict=True), strict=True))
    count, dtype = tiles.columns(fmt) // fmt.weights, tiles.tile_dtype(fmt)
    raw = np.frombuffer(np.random.default_rng(3).bytes(64 * count * fmt.block_bytes), np.uint8).reshape(64, -1)
    tile, k_block_bytes = np.zeros(dtype.itemsize, np.uint8), dtype["k_blocks"].base.itemsize
    for name, number in structs.items():
        to = number["TO"]
        if bits := number.get("BITS"):
            (base, offset), chunk = bits_of[name], number["LOAD_WORDS"]
            planes = range(number["PLANES"])
            for row, k_block, step, t, j, plane in np.ndindex(64, tiles.k_blocks(fmt), 4, 4, 4, len(planes)):
                begin = base[4 * k_block + t] + offset[4 * step + j] + plane * fmt.weights
                code = int(raw[row, begin // 8]) >> begin % 8 & number["MASK"]
                group, r, lane = row // 16, row // 8 % 2, 4 * (row % 8) + t
                position = position_of_code if len(planes) == 1 else position_of_bit
                word, bit = position(bits, number["PAIRS"], step, j, r, plane)
                part, word = divmod(word, chunk)
                index = ((group * number["PARTS"] + part) * 32 + lane) * chunk + word
                tile[k_block * k_block_bytes + to + 4 * index + bit // 8] |= code << bit % 8
        else:
            size, unit = number["BYTES"], number["UNIT"]
            for row, block, byte in np.ndindex(64, count, size):
                owner, r = row // 16 * 8 + row % 8, row // 8 % 2
                index = ((owner * count + block) * (size // unit) + byte // unit) * 2 + r
                tile[tiles.k_blocks(fmt) * k_block_bytes + to + index * unit + byte % unit] = raw[
                    row, block * fmt.block_bytes + number["AT"] + byte
                ]
    unchanged = dataclasses.replace(
        fmt, tile=dataclasses.replace(fmt.tile, to_tile=None)
    )  # the format's header has a twin of it
    assert tile.tobytes() == tiles.pack(unchanged, raw.view(fmt.dtype)).tobytes()

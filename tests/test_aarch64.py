"""Libraries for 64-bit ARM, run by qemu: every format compiles, and gives the bits of this CPU."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from harness.replay import (
    INPUT,
    OUTPUT,
    POISON,
    SOURCE,
    TO_PACK,
    Call,
    Packing,
    PackingStruct,
    ProductStruct,
    replayed,
    written,
)
from helpers import random_tensor
from strategies import over_formats

import qgemm
from qgemm.codec import q8_1_f32
from qgemm.codec.eight_bits import COLUMNS
from qgemm.codec.search import searched
from qgemm.cpu.native import calls, compiler, encoders, libraries, library, prebuilt, products, sources

CROSS = compiler.named("aarch64-linux-gnu-gcc")
QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
NOWHERE = Path()  # the library of a call before it is compiled
LIBRARIES = "/usr/aarch64-linux-gnu"  # where Debian has the C library for ARM
MISSING = "" if CROSS and QEMU else "needs gcc-aarch64-linux-gnu and qemu-user-static"

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(library.reason()), reason=library.reason()),
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="compares x86 with ARM"),
]
(TARGET,) = (target for target in prebuilt.TARGETS if target.name == "aarch64-dotprod")
WITH_HEADER = [fmt for fmt in qgemm.FORMATS.values() if libraries.source(fmt)]
FAMILIES = [
    qgemm.FORMATS[name] for name in ("u4z_g128", "u3_g64_bf16", "u7z_g32", "s7_1of2", "f8_e5m2_g64", "kbit4_f32")
]
OTHERS = {"without dotprod": ("-march=armv8-a",), "i8mm": ("-march=armv8.2-a+dotprod+i8mm",)}


@pytest.fixture(autouse=True)
def compiled_code(monkeypatch):
    monkeypatch.delenv("QGEMM_CPU")


@pytest.fixture(scope="module")
def replay(tmp_path_factory):
    """Replays calls on 64-bit ARM with libraries compiled for it."""
    folder = tmp_path_factory.mktemp("aarch64")
    includes = ["-I", str(sources.folder())]
    subprocess.run([*CROSS.command, "-O1", *includes, "-o", str(folder / "replay"), str(SOURCE), "-ldl"], check=True)

    def replay(source, *recorded, march=TARGET.march, by=CROSS):
        path = folder / "library.so"
        path.write_bytes(library.built(by, source, march))
        command = [QEMU, "-cpu", "max", "-L", LIBRARIES, str(folder / "replay")]
        report = replayed(command, written(folder / "calls", [call._replace(library=path) for call in recorded]))
        assert report == f"{len(recorded)} of {len(recorded)} calls agree\n"

    return replay


def product(fmt, digits, tiles, m, w, rng) -> Call:
    """A call of a product of rows or tiles, with the y that x86 computes."""
    k = w.shape[1]
    x = rng.standard_normal((m, k), np.float32) * np.exp2(rng.integers(-8, 8, (m, 1))).astype(np.float32)
    if digits == calls.A8:
        x = qgemm.quantize_activations(x).blocks
    engine, table = libraries.loaded(fmt), products._table(fmt)
    y = np.full((m, w.shape[0]), np.nan, np.float32)
    argument = ProductStruct(
        m=m, n=w.shape[0], k=k, w_row=w.blocks.strides[0], packed_row=engine.qgemm_packed_bytes(digits, tiles, k),
        y_row=w.shape[0], unit=q8_1_f32.UNIT if digits == calls.A8 else 1.0, digits=digits, tiles=tiles,
    )  # fmt: skip
    computed(engine, argument, x, w.blocks, y, table)
    assert np.isfinite(y).all()
    arrays = {"w": (INPUT, w.blocks), "packed": (TO_PACK, x), "y": (OUTPUT, y)}
    if table is not None:
        arrays["table"] = (INPUT, table)
    return Call(NOWHERE, "qgemm_rows", argument, arrays, w.shape[0], Packing(digits, tiles, m, k, x.strides[0]))


def computed(engine, argument, x, blocks, y, table) -> None:
    """Fills y on this CPU."""
    packed = np.empty(argument.m * argument.packed_row + 64, np.uint8)
    packed = packed[-packed.ctypes.data % 64 :]
    rows = PackingStruct(
        to=packed.ctypes.data, to_row=argument.packed_row, x=x.ctypes.data, x_row=x.strides[0], m=argument.m,
        k=argument.k, digits=argument.digits, tiles=argument.tiles,
    )  # fmt: skip
    job = ProductStruct.from_buffer_copy(argument)
    job.w, job.packed, job.y = blocks.ctypes.data, packed.ctypes.data, y.ctypes.data
    job.table = None if table is None else table.ctypes.data
    for function, struct, items in ((engine.qgemm_pack, rows, len(x)), (engine.qgemm_rows, job, len(y.T))):
        function(ctypes.byref(struct), ctypes.c_int64(0), ctypes.c_int64(items))


def products_of(fmt) -> list[Call]:
    """Calls of every path of a format: rows, for each number of tokens that share a pass, and tiles; ragged N."""
    rng = np.random.default_rng(0)
    w = random_tensor(fmt, 37, 5 * (67 if fmt.plain else fmt.weights), rng)
    ways = [(calls.FLOATS, 1, 24)]
    ways += [(calls.A8, 0, 7), (calls.A16, 0, 3), (calls.A8, 1, 16)] if fmt.integer else [(0, 0, 7)]
    eights = [eight_bits_of(fmt, w, i) for i in range(-(-w.shape[1] // COLUMNS) if fmt.integer else 0)]
    return [*(product(fmt, *way, w, rng) for way in ways), *decodings_of(fmt, w), *eights]


class EightBitsStruct(ctypes.Structure):
    """`eight_bits_job` of kernels/cpu/calls.h."""

    _fields_ = (
        ("w", ctypes.c_void_p), ("w_row", ctypes.c_int64), ("k", ctypes.c_int64), ("i", ctypes.c_int64),
        ("to", ctypes.c_void_p),
    )  # fmt: skip


def eight_bits_of(fmt, w, i) -> Call:
    """A call that requantizes COLUMNS columns of all rows to eight bits."""
    n, k = w.shape
    packed = np.zeros(n, [("q", "u1", COLUMNS), ("scale", "<f4"), ("unused", "u1", 60)])
    packed["unused"] = POISON
    job = EightBitsStruct(w=w.blocks.ctypes.data, w_row=w.blocks.strides[0], k=k, i=i, to=packed.ctypes.data)
    libraries.loaded(fmt).qgemm_eight_bits(ctypes.byref(job), ctypes.c_int64(0), ctypes.c_int64(n))
    arrays = {"w": (INPUT, w.blocks), "to": (OUTPUT, packed)}
    return Call(NOWHERE, "qgemm_eight_bits", EightBitsStruct(w_row=w.blocks.strides[0], k=k, i=i), arrays, n)


def decodings_of(fmt, w) -> list[Call]:
    """Calls that decode the rows of an index to each type."""
    index, table = np.array([36, 0, 5, 36]), products._table(fmt)
    decodings = []
    for name in calls.TYPES:
        values = w.rows(index, name)
        argument = calls.Decoding(
            w_row=w.blocks.strides[0], to_row=values.strides[0], k=w.shape[1], type=calls.TYPES[name]
        )
        arrays = {"w": (INPUT, w.blocks), "index": (INPUT, index), "to": (OUTPUT, values)}
        if table is not None:
            arrays["table"] = (INPUT, table)
        decodings.append(Call(NOWHERE, "qgemm_decode", argument, arrays, len(index)))
    return decodings


@over_formats(WITH_HEADER + FAMILIES)
def test_products(fmt, replay):
    replay(libraries.source(fmt), *products_of(fmt))


@pytest.mark.parametrize("name", ["q4_0", "q8_0", "q4_k"])
@pytest.mark.parametrize("march", OTHERS)
def test_other_instructions_of_arm(name, march, replay):
    """Code compiled on the CPU itself would use these instruction sets."""
    fmt = qgemm.FORMATS[name]
    replay(libraries.source(fmt), *products_of(fmt), march=OTHERS[march])


@pytest.mark.skipif(compiler.zig() is None, reason="needs the ziglang package")
@pytest.mark.parametrize("name", ["q4_0", "q6_k", "f16"])
def test_code_of_zig(name, replay):
    """A wheel for another machine ships libraries that Zig cross-compiled."""
    fmt = qgemm.FORMATS[name]
    replay(libraries.source(fmt), *products_of(fmt), march=TARGET.zig, by=compiler.zig())


def test_a_difference_is_seen(replay):
    """The replay names the byte of an output in which one bit differs."""
    call = products_of(qgemm.FORMATS["q4_0"])[0]
    y = call.arrays["y"][1].copy()
    y.view(np.uint32)[3, 5] ^= 1
    with pytest.raises(AssertionError, match=f"qgemm_rows: byte {4 * (3 * y.shape[1] + 5)} of {y.nbytes}"):
        replay(libraries.source(qgemm.FORMATS["q4_0"]), call._replace(arrays={**call.arrays, "y": (OUTPUT, y)}))


def test_activations(replay):
    """x has any finite magnitude; the sign of a NaN depends on the CPU."""
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((300, 32)) * 10.0 ** rng.integers(-42, 37, (300, 1))).astype(np.float32)
    x[10], x[14] = 0, -0.0
    arrays = {"x": (INPUT, x), "blocks": (OUTPUT, products.quantize(x))}
    replay(products.QUANTIZER, Call(NOWHERE, "qgemm_quantize", products.Quantization(), arrays, len(x)))


def blocks_of(fmt, x) -> Call:
    """A call that encodes blocks of a type whose encoder does not search."""
    blocks, refused = fmt.encoded(x), np.zeros(1, np.int32)
    job, arrays = encoders.blocks_job(fmt, x, blocks, refused)
    operands = {field: (OUTPUT if field == "blocks" else INPUT, array) for field, array in arrays.items()}
    return Call(NOWHERE, encoders.exported(fmt), job, operands, len(x))


@pytest.mark.parametrize("source", encoders.SOURCES, ids=lambda source: source.name)
def test_encoders(source, replay, monkeypatch):
    """Fits of every type that a library serves, with an importance matrix and without."""
    recorded_calls, called = [], encoders._called

    def recorded(called_source, name, struct, fields, **facts):
        done = called(called_source, name, struct, fields, **facts)
        inputs = {"x", "importance", *encoders.TABLES}
        arrays = {
            field: (INPUT if field in inputs else OUTPUT, array) for field, array in fields.items() if array is not None
        }
        if called_source == source:
            recorded_calls.append(Call(NOWHERE, name, struct(**facts), arrays))
        return done

    monkeypatch.setattr(encoders, "_called", recorded)
    rng = np.random.default_rng(2)
    x = rng.standard_normal((20, 256), np.float32)
    x[3], x[5, :99] = 0, 0.5
    for fmt in (*qgemm.FORMATS.values(), *FAMILIES):
        for importance in (None, np.abs(x[0])) if searched(fmt) and not fmt.family else ():
            if importance is not None or not fmt.encoding.needs_importance:
                qgemm.quantize(x, fmt, imatrix=importance)
        if source == encoders.BLOCKS and encoders.compiles_blocks(fmt):
            recorded_calls.append(blocks_of(fmt, x.reshape(-1, fmt.weights)))
    assert recorded_calls
    replay(source, *recorded_calls)

"""The kinds of fuzzed files: seeds, in which each draw changes a few places."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

from . import checkpoints, reference
from .gguf_files import Gguf, text
from .mutate import Safetensors, changed_tree, json_bytes, junk, name, number, tree
from .numpy_files import Npy, Npz
from .reference import ARRAY, BOOL, F32, I8, I32, STRING, U32, Files

DATA = Path(__file__).parents[2] / "tests" / "data"
LARGEST = 64 << 10  # largest size in bytes of a seed from tests/data
CHANGES = (0, 1, 1, 1, 1, 2, 2, 3, 5)
JUNK = 0.12  # probability that bytes are changed as well, whatever their meaning


class Kind(NamedTuple):
    """A kind of files: how to draw them and the name of the opened one, how to read it, its reference."""

    draw: Callable[[Random], tuple[Files, str]]
    reads: str  # "gguf", "source" or "imatrix"
    valid: Callable[[Files, str], object]


def finished(rng: Random, raw: bytes) -> bytes:
    """The bytes, a few of them changed with a small probability."""
    while rng.random() < JUNK:
        raw = junk(rng, raw)
    return raw


# ---------------------------------------------------------------- .gguf


def tensors(*shapes: tuple[str, int, tuple[int, ...]]) -> tuple[list[list[object]], bytes]:
    """Records of tensors (name, kind, ne), and their data."""
    records, data = [], b""
    for key, kind, ne in shapes:
        weights, nbytes = reference.SIZES[kind]
        size = int(np.prod(ne)) // weights * nbytes
        records.append([key.encode(), ne, kind, len(data)])
        data += np.random.default_rng(len(data)).integers(0, 256, size, np.uint8).tobytes()
        data += bytes(-len(data) % 32)
    return records, data


def array(kind: int, values: list[bytes]) -> bytes:
    """The value of a key that is an array."""
    return struct.pack("<IQ", kind, len(values)) + b"".join(values)


@cache
def gguf_seed() -> Gguf:
    """Keys of every type, tensors of several types."""
    keys = [
        [b"general.architecture", STRING, text(b"llama")],
        [b"general.alignment", U32, struct.pack("<I", 32)],
        [b"bytes", 0, b"\1"], [b"half", 12, struct.pack("<d", 0.5)], [b"flag", BOOL, b"\1"],
        [b"words", ARRAY, array(STRING, [text(b"a"), text(b"\xff\xfe"), text(b"")])],
        [b"numbers", ARRAY, array(5, [bytes(4)] * 3)], [b"flags", ARRAY, array(BOOL, [b"\0", b"\1"])],
        [b"comfy.gguf.orig_shape.a.weight", ARRAY, array(5, [struct.pack("<i", n) for n in (2, 32)])],
    ]  # fmt: skip
    records, data = tensors(
        ("a.weight", 2, (32, 2)), ("b.weight", F32, (8,)), ("c", 14, (256, 1)), ("d", 8, (64, 2, 3)), ("e", 39, (32,))
    )
    return Gguf(3, keys, records, data)


@cache
def kbit_seed() -> Gguf:
    """Two kbit tensors in parts, and a plain one."""
    keys = [
        [b"general.architecture", STRING, text(b"qgemm")],
        [b"qgemm.general.architecture", STRING, text(b"llama")],
        [b"qgemm.kbit.version", U32, struct.pack("<I", 1)],
    ]
    records, data = tensors(
        ("k.kbit_absmax", I8, (2, 3)), ("k.kbit_planes", I32, (6, 3)), ("k.kbit_codebook", F32, (8,)),
        ("l.kbit_codebook", F32, (16,)), ("l.kbit_absmax", 1, (1, 2)), ("l.kbit_planes", I32, (4, 2)), ("w", F32, (8,)),
    )  # fmt: skip
    books = {key: offset for key, _, _, offset in records if key.endswith(b"codebook")}  # type: ignore[attr-defined]
    for count, offset in zip((8, 16), books.values(), strict=True):
        data = data[:offset] + np.linspace(-1, 1, count, dtype="<f4").tobytes() + data[offset + 4 * count :]
    return Gguf(3, keys, records, data)


@cache
def imatrix_seed() -> Gguf:
    """Sums and counts of two tensors, one with experts."""
    records, data = tensors(
        ("a.in_sum2", F32, (8,)), ("a.counts", F32, (1,)), ("e.in_sum2", F32, (8, 3)), ("e.counts", F32, (1, 3))
    )
    data = np.linspace(0, 9, len(data) // 4, dtype="<f4").tobytes()
    return Gguf(3, [[b"general.type", STRING, text(b"imatrix")]], records, data)


def changed(rng: Random, model: Gguf) -> bytes:
    """A .gguf file mutated from a seed."""
    for _ in range(rng.choice(CHANGES)):
        model = model.changed(rng)
    return finished(rng, model.raw())


def draw_gguf(rng: Random) -> tuple[Files, str]:
    """One file."""
    return {"m.gguf": changed(rng, rng.choice((gguf_seed(), gguf_seed(), kbit_seed())))}, "m.gguf"


@cache
def recorded() -> list[bytes]:
    """The files of tests/data."""
    paths = sorted((DATA / "malformed").glob("*.gguf"))
    return [path.read_bytes() for path in paths if path.stat().st_size <= LARGEST]


def draw_recorded(rng: Random) -> tuple[Files, str]:
    """A recorded file with a few bytes changed."""
    raw = rng.choice(recorded())
    for _ in range(rng.choice(CHANGES)):
        raw = junk(rng, raw)
    return {"m.gguf": raw}, "m.gguf"


def draw_split(rng: Random) -> tuple[Files, str]:
    """Three shards."""
    count = rng.choice((3, 3, 3, 2, 1, 4))
    files = {}
    mutated = rng.randrange(3)
    for i in range(3):
        records, data = tensors((f"t{i}", F32, (8,)), (f"u{i}", 8, (32, 2)))
        keys = [
            [b"split.no", 2, struct.pack("<H", i)],
            [b"split.count", 2, struct.pack("<H", count)],
            [b"split.tensors.count", 5, struct.pack("<i", 6)],
        ]
        model = Gguf(3, keys, records, data)
        files[f"m-{i + 1:05d}-of-{count:05d}.gguf"] = changed(rng, model) if i == mutated else model.raw()
    main = next(iter(files))
    if rng.random() < 0.1:
        del files[rng.choice(list(files)[1:])]
    return files, main


# ---------------------------------------------------------------- safetensors, their indices and configs

SPREAD = np.random.default_rng(7)


def stored(arrays: dict[str, tuple[str, tuple[int, ...], bytes]]) -> Safetensors:
    """A .safetensors file."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for key, (kind, shape, raw) in arrays.items():
        header[key] = {"dtype": kind, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}  # type: ignore[assignment,dict-item]
        data += raw
    return Safetensors(tree(json.dumps(header)), data)


@cache
def noise(kind: str, shape: tuple[int, ...], seed: int = 0) -> tuple[str, tuple[int, ...], bytes]:
    """A tensor of random bytes."""
    size = int(np.prod(shape)) * checkpoints.TYPES[kind]
    return kind, shape, np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()


@cache
def plain_seeds() -> list[Safetensors]:
    """Files without a config: every type, and a kbit tensor."""
    book = ("F32", (4,), np.linspace(-1, 1, 4, dtype="<f4").tobytes())
    every = {f"t.{kind}": noise(kind, (2, 16)) for kind in checkpoints.TYPES if not kind.startswith("F8")}
    return [
        stored({"a.weight": noise("F32", (4, 32)), "b": noise("BF16", (3,)), "c": noise("I64", ())}),
        stored(every),
        stored({"k.kbit_absmax": noise("I8", (2, 1)), "k.kbit_planes": noise("I32", (2, 2)), "k.kbit_codebook": book}),
        stored({"w": noise("F8_E4M3", (4, 32)), "w_scale": noise("F32", (4, 1)), "v": noise("F8_E5M2", (2, 2))}),
    ]


def draw_safetensors(rng: Random) -> tuple[Files, str]:
    """One file."""
    model = rng.choice(plain_seeds())
    for _ in range(rng.choice(CHANGES)):
        model = model.changed(rng)
    return {"m.safetensors": finished(rng, model.raw(rng))}, "m.safetensors"


def draw_index(rng: Random) -> tuple[Files, str]:
    """Two shards and their index; either the index or the first shard is opened."""
    names = {"a.weight": "m-00001-of-00002.safetensors", "b.weight": "m-00002-of-00002.safetensors"}
    document = tree(json.dumps({"metadata": {"total_size": 512}, "weight_map": names}))
    files = {}
    mutated = rng.randrange(4)
    for i, (key, file) in enumerate(names.items()):
        model = stored({key: noise("F32", (2, 32))})
        if i == mutated:
            model = model.changed(rng)
        files[file] = model.raw(rng)
    for _ in range(rng.choice(CHANGES) if mutated > 1 else 0):
        document = changed_tree(rng, document)
    main = f"m{checkpoints.INDEX}"
    files[main] = finished(rng, json_bytes(rng, document))
    if rng.random() < 0.05:
        del files[next(iter(names.values()))]
    pick, first = rng.random(), names["a.weight"]
    if pick > 0.4 or first not in files:
        return files, main
    if pick < 0.2:
        del files[main]
    return files, first


@cache
def packed_seeds() -> list[tuple[Safetensors, object]]:
    """Checkpoints of AWQ, GPTQ and FP8, with their configs."""
    order = ("I32", (64,), (np.arange(64, dtype="<i4") // 32).tobytes())
    spread = ("I32", (64,), SPREAD.permutation(np.arange(64) // 32).astype("<i4").tobytes())
    scales = ("F16", (2, 16), np.full((2, 16), 0.25, "<f2").tobytes())
    awq = {"qweight": noise("I32", (64, 2)), "qzeros": noise("I32", (2, 2)), "scales": scales}
    gptq = {"qweight": noise("I32", (8, 16)), "qzeros": noise("I32", (2, 2)), "scales": noise("BF16", (2, 16))}
    eight = {"qweight": noise("I32", (16, 16)), "qzeros": noise("I32", (2, 4)), "scales": noise("F32", (2, 16))}
    three = {"qweight": noise("I32", (6, 32)), "qzeros": noise("I32", (2, 3)), "scales": noise("F16", (2, 32))}
    middle = ("I32", (2, 2), b"\x77" * 16)
    base = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq", "desc_act": False}
    cases = [
        (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
        (gptq | {"g_idx": order}, base), (gptq | {"g_idx": spread}, {**base, "desc_act": True}),
        (gptq | {"qzeros": middle}, {**base, "sym": True, "checkpoint_format": "gptq"}),
        (eight, {**base, "bits": 8, "checkpoint_format": "gptq_v2"}), (three, {**base, "bits": 3}),
        (awq | {"qzeros": noise("I32", (1, 2)), "scales": noise("F32", (1, 16))}, {"w_bit": 4, "q_group_size": -1}),
    ]  # fmt: skip
    seeds: list[tuple[Safetensors, object]] = []
    for parts, section in cases:
        arrays = {f"layer.{part}": tensor for part, tensor in parts.items()} | {"norm.weight": noise("F16", (16,))}
        document = {"model_type": "llama", "quantization_config": section}
        seeds.append((stored(arrays), tree(json.dumps(document))))
    for kind, scale, block in (("F32", (1, 1), [128, 128]), ("BF16", (2, 2), [2, 32]), ("F16", (4, 1), None)):
        fp8 = {"l.weight": noise("F8_E4M3", (4, 64)), "l.weight_scale_inv": noise(kind, scale)}
        fp8 |= {"m": noise("F8_E5M2", (3, 4, 64)), "m.scale": noise(kind, (3, 1, 1)), "l.input_scale": noise("F32", ())}
        config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}}
        seeds.append((stored(fp8), tree(json.dumps(config))))
    return seeds


def draw_packed(rng: Random) -> tuple[Files, str]:
    """A folder with a config."""
    model, config = rng.choice(packed_seeds())
    for _ in range(rng.choice(CHANGES)):
        if rng.random() < 0.5:
            model = model.changed(rng)
        else:
            config = changed_tree(rng, config)
    where = rng.choice(("config.json",) * 8 + checkpoints.CONFIGS)
    files = {"m.safetensors": finished(rng, model.raw(rng)), where: finished(rng, json_bytes(rng, config))}
    if rng.random() < 0.1:
        section = dict(packed_seeds()[1][1])["quantization_config"]  # type: ignore[call-overload]
        files[rng.choice(checkpoints.CONFIGS)] = json_bytes(rng, changed_tree(rng, section))
    return files, "m.safetensors"


# ---------------------------------------------------------------- NumPy's files, and importance matrices


@cache
def npy_seeds() -> list[Npy]:
    """Arrays of several types and numbers of axes."""
    seeds = []
    for dtype, shape in (
        ("<f4", (2, 3)),
        (">f2", (8,)),
        ("|u1", ()),
        ("<i8", (1, 2, 2)),
        ("|b1", (0, 4)),
        ("<f8", (3,)),
    ):
        header = repr({"descr": dtype, "fortran_order": False, "shape": shape}).encode() + b"   \n"
        seeds.append(Npy(1 + len(seeds) % 3, header, bytes(int(np.prod(shape)) * int(dtype[2]))))
    return seeds


def draw_npy(rng: Random) -> tuple[Files, str]:
    """One array."""
    model = rng.choice(npy_seeds())
    for _ in range(rng.choice(CHANGES)):
        model = model.changed(rng)
    return {"m.npy": finished(rng, model.raw(rng))}, "m.npy"


def draw_npz(rng: Random) -> tuple[Files, str]:
    """An archive."""
    arrays = rng.sample(npy_seeds(), 3)
    model = Npz(
        [(key, array, rng.random() < 0.5) for key, array in zip((b"a.npy", b"b.npy", b"c.npy"), arrays, strict=True)]
    )
    for _ in range(rng.choice(CHANGES)):
        model = model.changed(rng)
    return {"m.npz": finished(rng, model.raw(rng))}, "m.npz"


def draw_imatrix(rng: Random) -> tuple[Files, str]:
    """An importance matrix in .gguf."""
    return {"i.gguf": changed(rng, imatrix_seed())}, "i.gguf"


def draw_legacy(rng: Random) -> tuple[Files, str]:
    """An importance matrix in the old format, in which each number may be changed."""

    def field(value: int) -> bytes:
        return struct.pack("<I", (number(rng, value) if rng.random() < 0.08 else value) % 2**32)

    raw = field(2)
    for key in (b"a.weight", b"b.weight"):
        key = name(rng, key, [b"a.weight"]) if rng.random() < 0.1 else key
        raw += field(len(key)) + key + field(3) + field(8) + np.linspace(0, 1, 8, dtype="<f4").tobytes()
    return {"i.dat": finished(rng, raw)}, "i.dat"


KINDS = {
    "gguf": Kind(draw_gguf, "gguf", reference.gguf),
    "recorded": Kind(draw_recorded, "gguf", reference.gguf),
    "split": Kind(draw_split, "gguf", reference.gguf),
    "safetensors": Kind(draw_safetensors, "source", checkpoints.checkpoint),
    "index": Kind(draw_index, "source", checkpoints.checkpoint),
    "packed": Kind(draw_packed, "source", checkpoints.checkpoint),
    "npy": Kind(draw_npy, "source", lambda files, main: reference.npy(files[main])),
    "npz": Kind(draw_npz, "source", checkpoints.npz),
    "imatrix": Kind(draw_imatrix, "imatrix", reference.imatrix),
    "legacy": Kind(draw_legacy, "imatrix", reference.imatrix),
}

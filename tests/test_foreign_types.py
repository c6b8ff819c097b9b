"""Types of ik_llama.cpp and of old llama.cpp in .gguf files: values of its C code, reading, products, refusals."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from files import model
from gguf_bytes import file_of, refused, saved, tensor
from helpers import DATA

import qgemm
from qgemm.files.gguf import foreign, interleaved
from qgemm.formats import ik

# NUMBER.bytes: rows (or rows that lie together) as a file has them; NUMBER.values: what ik_llama.cpp's C code decodes.
GOLDEN = np.load(DATA / "ik_types.npz")
NUMBERS = sorted({int(name.split(".")[0]) for name in GOLDEN})
K = 256


def opened(path, number: int, raw: np.ndarray, rows: int, k: int = K, axes: tuple[int, ...] = ()):
    """The tensor w of a file with these bytes."""
    content = file_of(tensors=[tensor(b"w", (k, rows, *axes), number)], data=raw.tobytes())
    return qgemm.open(saved(path / "m.gguf", content))["w"]


@pytest.mark.parametrize("number", NUMBERS)
def test_values_of_its_c_code(tmp_path, number):
    """Bit for bit, but iq6_k: its reference decodes by a polynomial whose values its products round to the table."""
    expected = GOLDEN[f"{number}.values"]
    w = opened(tmp_path, number, GOLDEN[f"{number}.bytes"], len(expected))
    values = w.dequantize()
    if number == 141:
        scale = w.format.decode_levels(w.blocks.reshape(-1)).scale.reshape(len(values), -1).repeat(16, axis=1)
        assert (np.abs(values - expected) <= 0.52 * np.abs(scale)).all()
    else:
        np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_gpu_holds_the_same_weights(tmp_path, number):
    w = opened(tmp_path, number, GOLDEN[f"{number}.bytes"], len(GOLDEN[f"{number}.values"]))
    form = w.in_device_form()
    assert form.format.tiled
    np.testing.assert_array_equal(form.dequantize(), w.dequantize())


@pytest.mark.parametrize("number", [144, 137, 155, 206, 340, 399])
@pytest.mark.parametrize("activation", ["a16", "a8"])
def test_products(tmp_path, number, activation):
    w = opened(tmp_path, number, GOLDEN[f"{number}.bytes"], len(GOLDEN[f"{number}.values"]))
    x = np.random.default_rng(0).standard_normal((3, K)).astype(np.float32)
    y = qgemm.matmul(x, w, activation=activation)
    exact = x.astype(np.float64) @ w.dequantize().astype(np.float64).T
    size = np.abs(x).astype(np.float64) @ np.abs(w.dequantize()).astype(np.float64).T
    assert (np.abs(y - exact) <= size * (1e-5 if activation == "a16" else 1e-2)).all()


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("number", [144, 212, 352])
def test_rows_read_apart(tmp_path, number, copy):
    """A range of blocks that begins and ends within rows that lie together; several blocks in a row; experts."""
    raw = GOLDEN[f"{number}.bytes"]
    kind = foreign.TYPES[number]
    rng = np.random.default_rng(0)
    k, rows = 2 * K, 6 * kind.rows
    raw = rng.integers(0, 120, (6, kind.group_bytes(k)), np.uint8)
    content = file_of(tensors=[tensor(b"w", (k, rows // 2, 2), number)], data=raw.tobytes())
    with qgemm.open(saved(tmp_path / "m.gguf", content), copy=copy) as file:
        w = file["w"]
        assert w.shape == (2, rows // 2, k)
        flat = w.blocks.reshape(-1)
        for start, stop in ((0, 1), (3, 9), (5, len(flat)), (0, len(flat)), (4, 4)):
            np.testing.assert_array_equal(w.read(start, stop), flat[start:stop])
        copied = pickle.loads(pickle.dumps(w))
        np.testing.assert_array_equal(copied.blocks, w.blocks)


def repacked(blocks: np.ndarray, rows: int, chunk: int, mask: int = 0) -> bytes:
    """Blocks [rows, count] of 16 bytes of nibbles, `chunk` bytes of a row at a time."""
    parts = blocks["qs"].reshape(rows, -1, 16 // chunk, chunk) ^ np.uint8(mask)
    pieces = []
    for i in range(blocks.shape[1]):
        pieces += [blocks["d"][:, i].tobytes(), parts[:, i].swapaxes(0, 1).tobytes()]
    return b"".join(pieces)


@pytest.mark.parametrize(
    ("number", "name", "rows", "chunk", "mask"),
    [
        (31, "q4_0", 4, 4, 0x88), (32, "q4_0", 4, 8, 0x88), (33, "q4_0", 8, 8, 0x88),
        (36, "iq4_nl", 4, 4, 0), (37, "iq4_nl", 4, 8, 0), (38, "iq4_nl", 8, 8, 0),
    ],
)  # fmt: skip
def test_types_that_ggml_removed(tmp_path, number, name, rows, chunk, mask):
    """Q4_0_4_4 and kin are the blocks of Q4_0 or IQ4_NL before they were repacked."""
    w = qgemm.quantize(np.random.default_rng(number).standard_normal((rows, 96)).astype(np.float32), name)
    raw = np.frombuffer(repacked(w.blocks, rows, chunk, mask), np.uint8)
    read = opened(tmp_path, number, raw, rows, 96)
    assert read.format == w.format
    np.testing.assert_array_equal(read.blocks, w.blocks)


def test_bf16_of_sixteen_rows(tmp_path):
    words = np.arange(16 * 8, dtype="<u2").reshape(16, 8)
    raw = np.ascontiguousarray(words.reshape(16, 4, 2).swapaxes(0, 1))
    np.testing.assert_array_equal(opened(tmp_path, 230, raw, 16, 8).blocks.view("<u2"), words)


def test_mxfp4_of_eight_rows(tmp_path):
    w = qgemm.quantize(np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32), "mxfp4")
    pieces = []
    for i in range(2):
        pieces += [w.blocks["e"][:, i].tobytes(), w.blocks["qs"][:, i].reshape(8, 4, 4).swapaxes(0, 1).tobytes()]
    read = opened(tmp_path, 353, np.frombuffer(b"".join(pieces), np.uint8), 8, 64)
    np.testing.assert_array_equal(read.blocks, w.blocks)


def test_each_layout_has_the_size_of_its_type():
    for number, (name, layout) in interleaved.TYPES.items():
        fmt = qgemm.FORMATS[name]
        assert layout.size + foreign.TYPES[number].head == fmt.block_bytes, number
    assert {number for number, fmt in ik.TYPES.items() if fmt.ggml_type is None} <= foreign.TYPES.keys()


@pytest.mark.parametrize("number", [139, 144, 340])
def test_converted_from(tmp_path, number):
    expected = GOLDEN[f"{number}.values"]
    raw = GOLDEN[f"{number}.bytes"]
    content = file_of(tensors=[tensor(b"w", (K, len(expected)), number)], data=raw.tobytes())
    source, target = saved(tmp_path / "m.gguf", content), tmp_path / "q8.gguf"
    qgemm.convert(source, target, "q8_0", allow_requantize=True)
    with qgemm.open(target) as file:
        np.testing.assert_array_equal(file["w"].blocks, qgemm.quantize(expected, "q8_0").blocks)


def test_a_plain_type_is_written_again(tmp_path):
    w = opened(tmp_path, 139, GOLDEN["139.bytes"], 2)
    with qgemm.open(model(tmp_path / "again.gguf", {"w": w})) as file:
        assert file["w"].format == w.format
        np.testing.assert_array_equal(file["w"].blocks, w.blocks)


def test_a_row_with_a_scale_is_written_in_parts(tmp_path):
    w = opened(tmp_path, 144, GOLDEN["144.bytes"], 2)
    with qgemm.open(model(tmp_path / "again.gguf", {"w": w})) as file:
        assert file["w"].format == w.format
        np.testing.assert_array_equal(file["w"].blocks, w.blocks)


@pytest.mark.parametrize(
    ("number", "ne", "size", "names"),
    [
        (36, (256, 4), 256 * 4 // 4 + 32, ("I2_S of BitNet and ik_llama.cpp", "IQ4_NL_4_4 of llama.cpp")),
        (42, (256, 8), 8 * 42, ("STQ1_0 of Tencent's Hy-MT", "Q2_0 of llama.cpp")),
        (42, (256, 8), 8 * 68, ("Q2_0 of PrismML's llama.cpp", "Q2_0 of llama.cpp")),
    ],
)
@pytest.mark.parametrize("alone", [True, False])
def test_a_number_with_blocks_of_another_size(tmp_path, number, ne, size, names, alone):
    """Both programs are named, whether the tensor is the last of the file or not."""
    padded = -(-size // 32) * 32
    tensors = [tensor(b"w", ne, number)] + ([] if alone else [tensor(b"v", (8,), 0, padded)])
    message = refused(saved(tmp_path / "m.gguf", file_of(tensors=tensors, data=bytes(padded + (0 if alone else 32)))))
    for name in names:
        assert name in message, message


@pytest.mark.parametrize(
    ("number", "ne", "rule"),
    [
        (212, (256, 6), "no multiple of 4 rows, which Q4_K_R4 interleaves"),
        (399, (32, 8), "row length 32 is not a multiple of 256 (Q8_K_R8)"),
        (202, (32,), "no multiple of 8 rows"),
    ],
)
def test_shapes_that_cannot_be(tmp_path, number, ne, rule):
    assert rule in refused(saved(tmp_path / "m.gguf", file_of(tensors=[tensor(b"w", ne, number)], data=bytes(4096))))

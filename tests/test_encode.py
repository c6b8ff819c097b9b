"""Encoding on the GPU: bytes, errors and measured errors of the CPU, and the converter with both."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from strategies import ENCODED_BLOCKS, each, exact

import qgemm
from qgemm.cli import main as cli
from qgemm.codec.format import float_dtype
from qgemm.convert import Options, convert, job, open_source
from qgemm.convert.device import RANGE, Device
from qgemm.convert.encode import encoder, piece
from qgemm.convert.rules import planned
from qgemm.cuda import encode
from qgemm.cuda import upload as transfer

INTEGER = [fmt for fmt in ENCODED_BLOCKS if fmt.integer]
TYPES = ("float32", "float16", "bfloat16")


def cupy():
    import cupy

    return cupy


def values(rng):
    """Rows of 32 that every block holds: ordinary ones, and what rounding, ties and signs of zero depend on."""
    zeros, some = rng.choice([0.0, -0.0], (80, 32)), rng.random((80, 32)) < 0.5
    yield rng.standard_normal((131, 32))
    yield rng.integers(-16, 17, (90, 32)) * 2.0 ** rng.integers(-12, 1, (90, 1))  # ties
    yield zeros
    yield np.where(some, zeros, np.abs(rng.standard_normal((80, 32))))  # the least is a zero of either sign
    yield np.where(some, zeros, -np.abs(rng.standard_normal((80, 32))))
    yield np.repeat(rng.standard_normal((20, 1)), 32, axis=1)
    yield rng.standard_normal((90, 32)) * 2.0 ** rng.integers(-149, -100, (90, 1))  # subnormal scales, 1 / d infinite
    yield rng.standard_normal((90, 32)) * 2.0 ** rng.integers(-126, 14, (90, 32))
    yield rng.standard_normal((20, 32)) * 2.0**13  # minimums near the end of float16
    below = 1 - rng.integers(0, 300, (200, 1)) * 2.0**-24  # just below powers of two, whose logarithm rounds up
    yield below * 2.0 ** rng.integers(-126, 15, (200, 1)) * np.ones((200, 32))


def outcome(x, fmt) -> bytes | str:
    """The blocks, or what is said against them."""
    try:
        made = qgemm.quantize(x, fmt)
    except qgemm.QuantizeError as error:
        return str(error)
    return (made if isinstance(x, np.ndarray) else made.to_host()).blocks.tobytes()


# ---------------------------------------------------------------- qgemm.quantize


@pytest.mark.gpu
@each(INTEGER)
@pytest.mark.parametrize("dtype", TYPES)
def test_bytes_of_the_cpu(fmt, dtype):
    """Of all values at once and in ragged counts of blocks, with the sums of the squares of error and values."""
    rng = np.random.default_rng(7)
    x = np.concatenate(list(values(rng))).astype(np.float32).astype(float_dtype(dtype))
    for rows in (rng.permutation(x), *(x[rng.integers(0, len(x), n)] for n in (1, 7, 8, 15, 16, 17, 129))):
        with np.errstate(over="ignore", invalid="ignore"):  # 1 / d may be infinite
            want = fmt.encode(rows.astype(np.float32))
        blocks, found = encode.encode(cupy().asarray(rows), encode.c_type(rows.dtype), fmt)
        assert blocks.get()[: want.nbytes].tobytes() == want.tobytes()
        found = found.get().view(transfer.FOUND)
        wide = rows.astype(np.float64)
        assert found["error"].sum() == pytest.approx(np.square(fmt.decode(want) - wide).sum(), rel=1e-4)
        assert found["power"].sum() == pytest.approx(np.square(wide).sum(), rel=1e-5)
        assert found["refused"].min() == len(rows)


@pytest.mark.gpu
@each(INTEGER)
@pytest.mark.parametrize("scale", [2.0**-149, 2.0**-130, 1e-30, 1.0])
def test_sums_of_squares_that_float32_has_no_room_for(fmt, scale):
    x = (np.random.default_rng(3).integers(-100, 101, (50, 32)) * scale).astype(np.float32)
    found = encode.encode(cupy().asarray(x), "float", fmt)[1].get().view(transfer.FOUND)
    assert found["power"].sum() == pytest.approx(np.square(x.astype(np.float64)).sum(), rel=1e-5)


@pytest.mark.gpu
@each(INTEGER)
def test_a_matrix_on_the_gpu_becomes_tiles(fmt):
    """Any array of the GPU: ragged, views that are not contiguous or not aligned, float64, torch, nothing."""
    cp = cupy()
    x = cp.random.standard_normal((131, 417), dtype=np.float32)
    for view in (x[:, :416], x[:, 1:], x[::2, 64:128], x[:, :64].astype(np.float64), x[:0, :32]):
        want, got = qgemm.quantize(view.get(), fmt), qgemm.quantize(view, fmt)
        assert (got.shape, got.exponent) == (want.shape, want.to_device().exponent)
        assert got.to_host().blocks.tobytes() == want.blocks.tobytes()
    y = qgemm.matmul(x[:3, :64], qgemm.quantize(x[:, :64], fmt), "a16")
    want = exact(x[:3, :64].get(), qgemm.quantize(x[:, :64].get(), fmt))
    np.testing.assert_allclose(y.get(), want, atol=2.0**-9 * np.abs(want).max())
    torch = pytest.importorskip("torch", reason="torch is not installed")
    t = torch.randn(8, 64, device="cuda").to(torch.bfloat16)
    want = qgemm.quantize(t.float().cpu().numpy(), fmt)
    assert qgemm.quantize(t, fmt).to_host().blocks.tobytes() == want.blocks.tobytes()


@pytest.mark.gpu
@each(INTEGER)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, -2e9, 1e300])
def test_what_a_block_cannot_hold_is_refused_as_on_the_cpu(fmt, value):
    x = np.random.default_rng(5).standard_normal((70, 96)).astype(np.float64 if value == 1e300 else np.float32)
    x[51, 33] = x[51, 2] = x[60, 95] = value
    on_cpu, on_gpu = outcome(x, fmt), outcome(cupy().asarray(x), fmt)
    assert on_gpu == on_cpu
    assert isinstance(on_cpu, bytes) == (fmt.name == "mxfp4" and abs(value) < 1e39)  # an exponent holds it
    assert isinstance(on_cpu, bytes) or "block 0 of row 51" in on_cpu


@pytest.mark.gpu
def test_a_long_array_takes_several_turns(monkeypatch):
    """More blocks than all CTAs take at once, the last turn ragged; the first of several bad blocks is named."""
    monkeypatch.setattr(encode, "CTAS", 1)
    x = cupy().random.standard_normal((132 * 128 * 3 + 5, 32), dtype=np.float32)
    assert qgemm.quantize(x, "q5_1").to_host().blocks.tobytes() == qgemm.quantize(x.get(), "q5_1").blocks.tobytes()
    x[40000:, 3] = np.inf
    with pytest.raises(qgemm.QuantizeError, match="block 0 of row 40000 holds NaN or infinity"):
        qgemm.quantize(x, "q5_1")


@pytest.mark.gpu
def test_errors_name_what_came_and_what_fits():
    cp = cupy()
    for fmt in ("q4_k", "f16"):
        with pytest.raises(qgemm.UnsupportedError, match=f"{fmt.upper()} has no encoder on a GPU"):
            qgemm.quantize(cp.ones((1, 256)), fmt)
    with pytest.raises(qgemm.UnsupportedError, match="row length 33"):
        qgemm.quantize(cp.ones((1, 33)), "q4_0")
    with pytest.raises(qgemm.UnsupportedError, match=r"only a matrix .* shape \(2, 2, 32\)"):
        qgemm.quantize(cp.ones((2, 2, 32)), "q4_0")
    with pytest.raises(TypeError, match="int64"):
        qgemm.quantize(cp.ones((2, 32), np.int64), "q4_0")


# ---------------------------------------------------------------- the converter


def model(path, large=True):
    """Tensors of every kind: plain ones of each type, quantized ones, some that are kept."""
    rng = np.random.default_rng(11)
    x = rng.standard_normal((70, 96)).astype(np.float32)
    tensors = {
        "blk.0.attn_q.weight": x.astype(np.float16),
        "blk.0.attn_k.weight": x.astype(float_dtype("bfloat16")),
        "blk.0.attn_v.weight": rng.standard_normal((2100, 2048) if large else (96, 2048)).astype(np.float32),
        "blk.0.attn_norm.weight": x[0],
        "blk.0.ffn_up.weight": qgemm.quantize(x, "q4_0"),
        "blk.0.ffn_down.weight": qgemm.quantize(x, "q5_1"),
        "blk.0.ffn_gate.weight": x.astype(np.float64),
    }
    qgemm.write(path, tensors)
    return path


def converted(source, target, fmt, backend, **options):
    with open_source(source) as opened:
        own = Options(qgemm.FORMATS[fmt], allow_requantize=True, **options)
        return convert(opened, target, own, backend=backend)


@pytest.mark.gpu
@each(ENCODED_BLOCKS)
def test_converted_files_are_the_same(fmt, tmp_path):
    source = model(tmp_path / "x.gguf")
    made = {name: converted(source, tmp_path / f"{name}.gguf", fmt.name, name) for name in ("cpu", "cuda")}
    assert (tmp_path / "cuda.gguf").read_bytes() == (tmp_path / "cpu.gguf").read_bytes()
    for ours, theirs in zip(made["cuda"], made["cpu"], strict=True):
        assert ours.error == pytest.approx(theirs.error, rel=1e-4)
        assert ours._replace(error=None) == theirs._replace(error=None)


@pytest.mark.gpu
@pytest.mark.parametrize("value", [np.nan, 1e9])
@pytest.mark.parametrize("fmt", ["q4_0", "mxfp4", "kbit3"])
def test_bad_weights_are_refused_in_the_same_words(fmt, value, tmp_path):
    x = np.random.default_rng(1).standard_normal((3000, 1024)).astype(np.float32)
    x[2, 40] = x[2999, 3] = value
    qgemm.write(tmp_path / "x.gguf", {"x.weight": x})
    said = [refusal(tmp_path, fmt, backend) for backend in ("cpu", "cuda")]
    assert said[0] == said[1]
    assert (said[0] == "") == (fmt == "mxfp4" and np.isfinite(value))


def refusal(folder, fmt, backend) -> str:
    """What the converter says against x.gguf, or nothing."""
    try:
        converted(folder / "x.gguf", folder / "y.gguf", fmt, backend)
    except qgemm.QuantizeError as error:
        return str(error)
    return ""


class OnCpu(Device):
    """Stands for a GPU, and notes what it is given."""

    given: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self.given.clear()

    def piece(self, step, start, stop):
        self.given.append(step.weight.name)
        return piece(step, start, stop, encoder(step, Options(step.format)).encode)


@pytest.mark.parametrize(
    ("fmt", "options", "names"),
    [
        ("q4_0", {}, "attn_q attn_k attn_v ffn_down ffn_gate"),  # q4_0 is copied
        ("q5_1", {}, "attn_q attn_k attn_v ffn_gate"),  # from q4_0 by codes
        ("kbit4", {}, "attn_q attn_k attn_v ffn_up ffn_down ffn_gate"),
        ("q5_0", {"search": True}, ""),
        ("f16", {}, ""),
    ],
)
def test_what_goes_to_the_gpu(fmt, options, names, tmp_path, monkeypatch):
    """Weights to be encoded, each range of them once; the file is the same."""
    monkeypatch.setattr(job, "Device", OnCpu)
    source = model(tmp_path / "x.gguf", large=False)
    lines = {name: converted(source, tmp_path / f"{name}.gguf", fmt, name, **options) for name in ("cpu", "cuda")}
    assert sorted(OnCpu.given) == sorted(f"blk.0.{name}.weight" for name in names.split())
    assert lines["cuda"] == lines["cpu"]
    assert (tmp_path / "cuda.gguf").read_bytes() == (tmp_path / "cpu.gguf").read_bytes()


def test_ranges_for_the_gpu_do_not_depend_on_threads(tmp_path):
    with open_source(model(tmp_path / "x.gguf")) as source:
        options = Options(qgemm.FORMATS["q4_0"], allow_requantize=True)
        step = next(step for step in planned(source, options) if step.weight.size > 2**22)
        each = encoder(step, options)
        one, many = (job._maker(step, each, threads, OnCpu())[1] for threads in (1, 16))
    assert one == many
    assert [start for start, _ in one] == [0, RANGE]


@pytest.mark.skipif(qgemm.backends()["cuda"].available, reason="there is a GPU")
def test_without_a_gpu_it_says_why(tmp_path, capsys):
    source = model(tmp_path / "x.gguf", large=False)
    with pytest.raises(qgemm.UnsupportedError, match="there is no GPU to encode on: "):
        converted(source, tmp_path / "y.gguf", "q4_0", "cuda")
    assert (
        cli.main(["convert", str(source), str(tmp_path / "y.gguf"), "q4_0", "--backend", "cuda", "--allow-requantize"])
        == 1
    )
    assert "there is no GPU to encode on" in capsys.readouterr().err
    assert not (tmp_path / "y.gguf").exists()


def test_other_backends(tmp_path, capsys):
    source = model(tmp_path / "x.gguf", large=False)
    with pytest.raises(qgemm.UnsupportedError, match="no backend 'tpu', only 'cpu' and 'cuda'"):
        converted(source, tmp_path / "y.gguf", "q4_0", "tpu")
    assert cli.main(["convert", str(source), str(tmp_path / "y.gguf"), "q4_0", "--backend", "tpu"]) == 2
    assert "invalid choice: 'tpu'" in capsys.readouterr().err

"""Encoding on the GPU: bytes, errors and measured errors of the CPU, and the converter with both."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import check_product, converted, cupy, mixed_model, normal
from strategies import ENCODED_BLOCKS, over_formats

import qgemm
from qgemm.codec.format import float_dtype
from qgemm.cuda import encode
from qgemm.cuda.kernels import transforms
from qgemm.cuda.problem import c_type

ON_GPU = [fmt for fmt in ENCODED_BLOCKS if encode.takes(fmt)]
BY_LANES = [fmt for fmt in ON_GPU if transforms.encodes(fmt)]  # four lanes encode a block of 32 weights
WEIGHTED = [fmt for fmt in ON_GPU if transforms.encodes_weighted(fmt)]
GOLDEN = np.load(Path(__file__).parents[1] / "data" / "ggml_encoders.npz")
TYPES = ("float32", "float16", "bfloat16")


def values(rng):
    """Rows of 32 that every block holds: ordinary ones, and values on which rounding, ties and signs of zero depend."""
    zeros, mask = rng.choice([0.0, -0.0], (80, 32)), rng.random((80, 32)) < 0.5
    yield rng.standard_normal((131, 32))
    yield rng.integers(-16, 17, (90, 32)) * 2.0 ** rng.integers(-12, 1, (90, 1))  # ties
    yield zeros
    yield np.where(mask, zeros, np.abs(rng.standard_normal((80, 32))))  # the least is a zero of either sign
    yield np.where(mask, zeros, -np.abs(rng.standard_normal((80, 32))))
    yield np.repeat(rng.standard_normal((20, 1)), 32, axis=1)
    yield rng.standard_normal((90, 32)) * 2.0 ** rng.integers(-149, -100, (90, 1))  # subnormal scales, 1 / d infinite
    yield rng.standard_normal((90, 32)) * 2.0 ** rng.integers(-126, 14, (90, 32))
    yield rng.standard_normal((20, 32)) * 2.0**13  # minimums near the end of float16
    below = 1 - rng.integers(0, 300, (200, 1)) * 2.0**-24  # just below powers of two, whose logarithm rounds up
    yield below * 2.0 ** rng.integers(-126, 15, (200, 1)) * np.ones((200, 32))


def outcome(x, fmt) -> bytes | str:
    """The bytes of the blocks, or the message of the QuantizeError."""
    try:
        encoded = qgemm.quantize(x, fmt)
    except qgemm.QuantizeError as error:
        return str(error)
    return (encoded if isinstance(x, np.ndarray) else encoded.to_host()).blocks.tobytes()


# ---------------------------------------------------------------- qgemm.quantize


@over_formats(ON_GPU)
@pytest.mark.parametrize("dtype", TYPES)
def test_bytes_of_the_cpu(fmt, dtype):
    """The blocks of all values at once and in ragged counts, with the sums of the squares of error and values."""
    rng = np.random.default_rng(7)
    x = np.concatenate(list(values(rng))).astype(np.float32).astype(float_dtype(dtype))
    x = rng.permutation(x)[: len(x) // (fmt.weights // 32) * (fmt.weights // 32)].reshape(-1, fmt.weights)
    for rows in (rng.permutation(x), *(x[rng.integers(0, len(x), n)] for n in (1, 7, 8, 15, 16, 17, 129))):
        with np.errstate(over="ignore", invalid="ignore"):  # 1 / d may be infinite
            want = fmt.encode(rows.astype(np.float32))
        blocks, stats = encode.encode(cupy().asarray(rows), c_type(rows.dtype), fmt)
        assert blocks.get()[: want.nbytes].tobytes() == want.tobytes()
        stats = stats.get().view(transforms.ENCODE_STATS)
        wide = rows.astype(np.float64)
        assert stats["error"].sum() == pytest.approx(np.square(fmt.decode(want) - wide).sum(), rel=1e-4)
        assert stats["power"].sum() == pytest.approx(np.square(wide).sum(), rel=1e-5)
        assert stats["refused"].min() == len(rows)


@over_formats(BY_LANES)
@pytest.mark.parametrize("scale", [2.0**-149, 2.0**-130, 1e-30, 1.0])
def test_sums_of_squares_that_float32_has_no_room_for(fmt, scale):
    x = (np.random.default_rng(3).integers(-100, 101, (50, 32)) * scale).astype(np.float32)
    stats = encode.encode(cupy().asarray(x), "float", fmt)[1].get().view(transforms.ENCODE_STATS)
    assert stats["power"].sum() == pytest.approx(np.square(x.astype(np.float64)).sum(), rel=1e-5)


@over_formats(ON_GPU)
def test_a_matrix_on_the_gpu_becomes_tiles(fmt):
    """Any array of the GPU: ragged, views that are not contiguous or not aligned, float64, torch, nothing."""
    cp = cupy()
    k, two = 13 * fmt.weights, 2 * fmt.weights
    x = cp.asarray(normal(131, k + 1))
    for view in (x[:, :k], x[:, 1:], x[::2, two : 2 * two], x[:, :two].astype(np.float64), x[:0, :two]):
        want, got = qgemm.quantize(view.get(), fmt), qgemm.quantize(view, fmt)
        assert (got.shape, got.exponent) == (want.shape, want.to_device().exponent)
        assert got.to_host().blocks.tobytes() == want.blocks.tobytes()
    y = qgemm.matmul(x[:3, :two], qgemm.quantize(x[:, :two], fmt), "a16")
    check_product(y.get(), x[:3, :two].get(), qgemm.quantize(x[:, :two].get(), fmt))
    torch = pytest.importorskip("torch", reason="torch is not installed")
    t = torch.randn(8, two, device="cuda").to(torch.bfloat16)
    want = qgemm.quantize(t.float().cpu().numpy(), fmt)
    assert qgemm.quantize(t, fmt).to_host().blocks.tobytes() == want.blocks.tobytes()


@pytest.mark.parametrize(("name", "kind"), [case.split(".") for case in GOLDEN if "." in case])
def test_bytes_of_ggml(name, kind):
    """18 families of weights, with an importance of the columns and without."""
    if not encode.takes(qgemm.FORMATS[name]):
        pytest.skip(f"{name} is encoded on the CPU")
    importance = GOLDEN["imatrix"] if kind == "imatrix" else None
    encoded = qgemm.quantize(cupy().asarray(GOLDEN["x"]), name, imatrix=importance).to_host()
    assert encoded.blocks.tobytes() == GOLDEN[f"{name}.{kind}"].tobytes()


@over_formats(WEIGHTED)
def test_an_importance_of_every_value(fmt):
    """The importance may be on the host or the device; weights that a block cannot hold are refused as on the CPU."""
    cp = cupy()
    x = normal(37, 3 * fmt.weights)
    importance = np.random.default_rng(2).uniform(0, 4, x.shape)
    for kind in ("float32", "float16"):
        want = qgemm.quantize(x.astype(kind), fmt, imatrix=importance).blocks.tobytes()
        for array in (importance, cp.asarray(importance)):
            encoded = qgemm.quantize(cp.asarray(x.astype(kind)), fmt, imatrix=array)
            assert encoded.to_host().blocks.tobytes() == want
    x[30, 5] = 1e20
    for array in (x, cp.asarray(x)):
        with pytest.raises(qgemm.QuantizeError, match="block 0 of row 30 needs a scale beyond float16"):
            qgemm.quantize(array, fmt, imatrix=importance)


@over_formats(ON_GPU)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, -2e9, 1e300])
def test_what_a_block_cannot_hold_is_refused_as_on_the_cpu(fmt, value):
    x = (
        np.random.default_rng(5)
        .standard_normal((70, 3 * fmt.weights))
        .astype(np.float64 if value == 1e300 else np.float32)
    )
    x[51, fmt.weights + 1] = x[51, 2] = x[60, -1] = value
    on_cpu, on_gpu = outcome(x, fmt), outcome(cupy().asarray(x), fmt)
    assert on_gpu == on_cpu
    assert isinstance(on_cpu, bytes) == (fmt.name in ("mxfp4", "nvfp4") and abs(value) < 1e39)  # one byte holds it
    assert isinstance(on_cpu, bytes) or "block 0 of row 51" in on_cpu


def test_a_long_array_takes_several_turns(monkeypatch):
    """More blocks than all CTAs take at once, the last round ragged; the first of several bad blocks is named."""
    monkeypatch.setattr(encode, "CTAS", 1)
    x = cupy().asarray(normal(132 * 128 * 3 + 5, 32))
    assert qgemm.quantize(x, "q5_1").to_host().blocks.tobytes() == qgemm.quantize(x.get(), "q5_1").blocks.tobytes()
    x[40000:, 3] = np.inf
    with pytest.raises(qgemm.QuantizeError, match="block 0 of row 40000 holds NaN or infinity"):
        qgemm.quantize(x, "q5_1")


def test_errors_name_what_came_and_what_fits():
    cp = cupy()
    for fmt in ("tq2_0", "iq3_s", "f16"):
        match = f"{fmt.upper()} has no encoder on a GPU; quantize an array of the host"
        with pytest.raises(qgemm.UnsupportedError, match=match):
            qgemm.quantize(cp.ones((1, 256)), fmt)
    with pytest.raises(qgemm.UnsupportedError, match="Q4_0 has no encoder on a GPU for an importance matrix"):
        qgemm.quantize(cp.ones((1, 32)), "q4_0", imatrix=np.ones(32))
    with pytest.raises(qgemm.ShapeError, match=r"imatrix has shape \(32,\), x of shape \(2, 256\) needs \(256,\)"):
        qgemm.quantize(cp.ones((2, 256)), "q4_k", imatrix=np.ones(32))
    with pytest.raises(qgemm.UnsupportedError, match="negative or not finite"):
        qgemm.quantize(cp.ones((2, 256)), "q4_k", imatrix=cp.full(256, -1.0))
    with pytest.raises(qgemm.ShapeError, match="row length 33"):
        qgemm.quantize(cp.ones((1, 33)), "q4_0")
    with pytest.raises(qgemm.ShapeError, match=r"only a matrix .* shape \(2, 2, 32\)"):
        qgemm.quantize(cp.ones((2, 2, 32)), "q4_0")
    with pytest.raises(TypeError, match="int64"):
        qgemm.quantize(cp.ones((2, 32), np.int64), "q4_0")


@over_formats([fmt for fmt in ENCODED_BLOCKS if fmt in ON_GPU or fmt.tile.bit_planes])
def test_converted_files_are_the_same(fmt, tmp_path):
    source = mixed_model(tmp_path / "x.gguf")
    results = {
        name: converted(source, tmp_path / f"{name}.gguf", fmt.name, backend=name, allow_requantize=True)
        for name in ("cpu", "cuda")
    }
    assert (tmp_path / "cuda.gguf").read_bytes() == (tmp_path / "cpu.gguf").read_bytes()
    for ours, theirs in zip(results["cuda"].values(), results["cpu"].values(), strict=True):
        assert ours.error == pytest.approx(theirs.error, rel=1e-4)
        assert ours._replace(error=None) == theirs._replace(error=None)


@over_formats(WEIGHTED)
def test_files_converted_by_an_importance_matrix_are_the_same(fmt, tmp_path, monkeypatch):
    """The file has a matrix, experts that ranges of values cross, and rows longer than a range."""
    rng, k = np.random.default_rng(5), 2 * fmt.weights
    shapes = {"a.weight": (70, k), "blk.0.ffn_up_exps.weight": (3, 35, k), "long.weight": (3, 40 * k)}
    tensors = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    importance = {name: rng.uniform(0, 4, (*shape[:-2], shape[-1])) for name, shape in shapes.items()}
    importance = {name: array.astype(np.float32) for name, array in importance.items()}
    qgemm.write(tmp_path / "x.gguf", tensors)
    monkeypatch.setattr("qgemm.converter.device.Device.range", 21 * k)
    for name in ("cpu", "cuda"):
        target = tmp_path / f"{name}.gguf"
        converted(tmp_path / "x.gguf", target, fmt.name, backend=name, importance=importance)
    assert (tmp_path / "cuda.gguf").read_bytes() == (tmp_path / "cpu.gguf").read_bytes()


@pytest.mark.parametrize("value", [np.nan, 1e9])
@pytest.mark.parametrize("fmt", ["q4_0", "mxfp4", "kbit3"])
def test_bad_weights_are_refused_in_the_same_words(fmt, value, tmp_path):
    x = np.random.default_rng(1).standard_normal((3000, 1024)).astype(np.float32)
    x[2, 40] = x[2999, 3] = value
    qgemm.write(tmp_path / "x.gguf", {"x.weight": x})
    refusals = [refusal(tmp_path, fmt, backend) for backend in ("cpu", "cuda")]
    assert refusals[0] == refusals[1]
    assert (refusals[0] == "") == (fmt == "mxfp4" and np.isfinite(value))


def refusal(folder, fmt, backend) -> str:
    """The message of the converter that refuses x.gguf, or an empty string."""
    try:
        converted(folder / "x.gguf", folder / "y.gguf", fmt, backend=backend, allow_requantize=True)
    except qgemm.QuantizeError as error:
        return str(error)
    return ""

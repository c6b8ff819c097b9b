"""Checkpoints quantized by AWQ and GPTQ: codes, zeros and scales read as their formulas say, or refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import foreign
import ml_dtypes
import numpy as np
import pytest
from files import pack_awq, pack_down, safetensors
from helpers import converted, expected_sums, left_over, normal
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

import qgemm
from qgemm.cli import main as cli
from qgemm.converter import open_source
from qgemm.errors import CheckpointError

# ---------------------------------------------------------------- AWQ and GPTQ


def checkpoint(
    folder: Path,
    method: str = "gptq",
    *,
    bits: int = 4,
    group: int = 32,
    n: int = 16,
    k: int = 64,
    v2: bool = False,
    zero: int | None = None,
    scales: type = np.float16,
    order: int | None = None,
    seed: int = 0,
    config: dict | None = None,
    change: dict | None = None,
) -> np.ndarray:
    """Write a checkpoint of one matrix and a norm; returns the weights [n, k] by the source's formula.

    order: length of the runs in which GPTQ's groups are spread over k (act-order).
    """
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    groups, size = (1, k) if group == -1 else (-(-k // group), group)
    codes = rng.integers(0, 2**bits, (k, n))
    zeros = rng.integers(0, 2**bits, (groups, n)) if zero is None else np.full((groups, n), zero)
    s = (rng.random((groups, n)) / 50 + 1e-3).astype(scales)
    parts = {"scales": s}
    if method == "awq":
        parts |= {"qweight": pack_awq(codes), "qzeros": pack_awq(zeros)}
    else:
        parts["qweight"] = pack_down(codes, bits)
        stored = zeros if v2 else (zeros - 1) % 2**bits  # a zero of 0 is stored as the largest code
        parts["qzeros"] = np.ascontiguousarray(pack_down(np.ascontiguousarray(stored.T), bits).T)
        parts["g_idx"] = (np.arange(k) // size).astype(np.int32)
    spread = np.arange(k) // size
    if order is not None:
        spread = np.repeat(rng.permutation(np.repeat(np.arange(groups), size // order)), order)
        parts["g_idx"] = spread.astype(np.int32)
    parts |= change or {}
    tensors = {f"layer.q_proj.{part}": array for part, array in parts.items() if array is not None}
    safetensors(folder / "model.safetensors", {**tensors, "layer.norm.weight": np.ones(n, np.float16)})
    quantization = {"quant_method": method, "bits": bits, "group_size": group}
    quantization |= {"checkpoint_format": "gptq_v2" if v2 else "gptq"} if method == "gptq" else {"version": "gemm"}
    (folder / "config.json").write_text(json.dumps({"quantization_config": {**quantization, **(config or {})}}))
    return ((codes - zeros[spread]) * s.astype(np.float32)[spread]).astype(np.float32).T


CASES = {
    # arguments of a checkpoint, then target -> outcome
    "awq": ({"method": "awq"}, {"q4_1": "rounded-scale", "q5_0": "exact", "q8_0": "exact", "f32": "exact"}),
    "awq, symmetric": ({"method": "awq", "zero": 8}, {"q4_0": "exact", "q4_1": "exact", "q5_1": "exact"}),
    "awq, 128": ({"method": "awq", "group": 128, "k": 256, "zero": 8}, {"q4_0": "exact"}),
    "awq, a row": ({"method": "awq", "group": -1}, {"q5_0": "exact"}),
    "awq, bfloat16": ({"method": "awq", "scales": ml_dtypes.bfloat16, "zero": 8}, {"q4_0": "exact"}),
    "awq, float32": ({"method": "awq", "scales": np.float32, "zero": 8}, {"q4_0": "rounded-scale"}),
    "gptq v1": ({}, {"q4_1": "rounded-scale", "q5_0": "exact", "q8_0": "exact"}),
    "gptq v2": ({"v2": True}, {"q5_0": "exact"}),
    "gptq, symmetric": ({"zero": 8, "config": {"sym": True}}, {"q4_0": "exact", "f32": "exact"}),
    "gptq, 8 bits": ({"bits": 8, "zero": 128}, {"q8_0": "exact"}),
    "gptq, group 16": ({"group": 16}, {"f32": "exact"}),
    "gptq, a short last group": ({"group": 128, "k": 672}, {"f32": "exact", "q8_0": "exact", "q5_0": "exact"}),
    "gptq, a last group of 8": ({"group": 128, "k": 392}, {"f32": "exact"}),
    "gptq, a group of 100": ({"group": 100, "k": 128}, {"f32": "exact"}),
    "gptq, wider than a row": ({"group": 128, "k": 96, "zero": 8}, {"q4_0": "exact", "f32": "exact"}),
}


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("name", CASES)
def test_quantized_checkpoints(name, tmp_path):
    options, targets = CASES[name]
    want = checkpoint(tmp_path / "m", **options)
    x = normal(3, want.shape[1], seed=9).astype(np.float64)
    for fmt, how in targets.items():
        line = converted(tmp_path / "m", tmp_path / "y.gguf", fmt)["layer.q_proj.weight"]
        assert (line.how, line.shape) == (how, want.shape)
        with qgemm.open(tmp_path / "y.gguf") as file:
            assert set(file) == {"layer.q_proj.weight", "layer.norm.weight"}
            w = file["layer.q_proj.weight"]
            if how == "exact":
                assert line.error == 0
                assert_array_equal(w.dequantize(), want)
                expected_sums(x, w)._replace(y=x @ want.astype(np.float64).T).check(qgemm.matmul(x, w))
            else:
                assert 0 < line.error < 2**-11 * 16  # a zero of up to 15 scales, or a scale, rounded to float16


@given(
    st.sampled_from(["awq", "gptq"]), st.sampled_from([4, 8]), st.sampled_from([32, 64, -1]),
    st.integers(1, 3), st.integers(1, 3), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_any_checkpoint_reads_as_its_formula(tmp_path_factory, method, bits, group, n, k, v2, seed):
    folder = tmp_path_factory.getbasetemp() / "checkpoint"
    bits = 4 if method == "awq" else bits
    want = checkpoint(folder, method, bits=bits, group=group, n=8 * n, k=64 * k, v2=v2, seed=seed)
    with open_source(folder) as source:
        weight = source.weights["layer.q_proj.weight"]
        got = weight.values(0, want.size).reshape(want.shape)
        assert_array_equal(got, want)
        groups = weight.codes.read(0, want.size)
        assert_array_equal(groups.values(), want.ravel())
        assert (groups.codes >= weight.codes.least).all()
        assert (groups.codes <= weight.codes.greatest).all()
        assert (groups.codes - groups.zero[:, None] >= weight.codes.low).all()
        assert (groups.codes - groups.zero[:, None] <= weight.codes.high).all()


@pytest.mark.parametrize(("bits", "v2"), [(4, False), (8, True)])
def test_act_order(bits, v2, tmp_path):
    """Columns are put in order: plain types and q8_0 take them as they are, other formats where that is asked for."""
    want = checkpoint(tmp_path / "m", bits=bits, v2=v2, k=128, order=1, config={"desc_act": True})
    for fmt, how in {"f32": "exact", "f16": "rounded", "bf16": "rounded", "q8_0": "requantized"}.items():
        line = converted(tmp_path / "m", tmp_path / f"{fmt}.gguf", fmt)["layer.q_proj.weight"]
        assert line.how == how
        with qgemm.open(tmp_path / f"{fmt}.gguf") as file:
            kind = qgemm.FORMATS[fmt]
            assert file["layer.q_proj.weight"].blocks.tobytes() == kind.quantize(want).tobytes()
    with pytest.raises(qgemm.QgemmError, match=r"GPTQ.: quantizing it again, to Q5_0, .* --allow-requantize"):
        converted(tmp_path / "m", tmp_path / "y.gguf", "q5_0")
    converted(tmp_path / "m", tmp_path / "y.gguf", "q5_0", allow_requantize=True)
    with qgemm.open(tmp_path / "y.gguf") as file:
        assert file["layer.q_proj.weight"].blocks.tobytes() == qgemm.FORMATS["q5_0"].quantize(want).tobytes()


def test_act_order_by_32_keeps_codes(tmp_path):
    """Groups in another order, but whole: 32 weights share a scale as they do in q4_0."""
    want = checkpoint(tmp_path / "m", k=256, group=64, order=32, zero=8, config={"desc_act": True})
    assert converted(tmp_path / "m", tmp_path / "y.gguf", "q4_0")["layer.q_proj.weight"].how == "exact"
    with qgemm.open(tmp_path / "y.gguf") as file:
        assert_array_equal(file["layer.q_proj.weight"].dequantize(), want)


REFUSED = {
    "5 bits": ({"config": {"bits": 5}}, "bits: gptq of 5 bits is not read"),
    "another method": ({"config": {"quant_method": "bitnet"}}, "quantized by 'bitnet', which is not read; AWQ, GPTQ,"),
    "marlin": ({"config": {"checkpoint_format": "marlin"}}, "the layout 'marlin' is not read"),
    "gemv": ({"method": "awq", "config": {"version": "gemv"}}, "the layout 'gemv' is not read"),
    "by module": ({"config": {"dynamic": {"-:.*q_proj": {}}}}, "is packed, though the config's dynamic leaves it out"),
    "act-order of no group": (
        {"change": {"g_idx": np.full(64, 2, np.int32)}}, r"'layer\.q_proj': g_idx names groups 2 to 2, but has 0 to 1"
    ),
    "act-order by config": ({"change": {"g_idx": None}, "config": {"desc_act": True}}, r"\(desc_act\) without g_idx"),
    "other group": ({"config": {"group_size": 64}}, "do not fit 4 bits and groups of 64"),
    "other bits": ({"config": {"bits": 8}}, "do not fit 8 bits and groups of 32"),
    "no scales": ({"change": {"scales": None}}, "there is no scales"),
    "other type": ({"change": {"scales": np.ones((2, 16))}}, r"scales is F64 \[2, 16\], not a matrix of F16 or BF16"),
    "not symmetric": ({"config": {"sym": True}}, r"is symmetric by its config \(sym\), but has zeros of"),
    "bits of no kind": ({"config": {"bits": "4"}}, "bits / w_bit: .* is not one int"),
    "a group of 0": ({"config": {"group_size": 0}}, "a group_size of 0 is not read"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_checkpoints_that_are_not_read(name, tmp_path):
    options, message = REFUSED[name]
    checkpoint(tmp_path / "m", **options)
    with pytest.raises(CheckpointError, match=message):
        open_source(tmp_path / "m")


def test_configs(tmp_path):
    """The older file alone does; both must agree; without one nothing is guessed."""
    want = checkpoint(tmp_path / "m", "awq")
    config, old = tmp_path / "m" / "config.json", tmp_path / "m" / "quantize_config.json"
    old.write_text(json.dumps({"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}))
    with pytest.raises(CheckpointError, match=r"quantize_config\.json says .*group=64.*, config\.json says"):
        open_source(tmp_path / "m")
    old.write_text(json.dumps({"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}))
    config.write_text(json.dumps({"architectures": ["x"]}))
    with open_source(tmp_path / "m") as source:
        assert_array_equal(source.weights["layer.q_proj.weight"].values(0, want.size), want.ravel())
    old.unlink()
    with pytest.raises(CheckpointError, match=r"is packed by AWQ or GPTQ, but none of config\.json"):
        open_source(tmp_path / "m")


def test_configs_of_two_minds(tmp_path):
    """A config that does not speak of symmetry contradicts none."""
    checkpoint(tmp_path / "m", zero=8, config={"sym": True})
    other = tmp_path / "m" / "quantize_config.json"
    for settings, agrees in (({}, True), ({"sym": True}, True), ({"sym": False}, False), ({"desc_act": True}, False)):
        other.write_text(json.dumps({"bits": 4, "group_size": 32, **settings}))
        if agrees:
            open_source(tmp_path / "m").close()
        else:
            with pytest.raises(CheckpointError, match=r"quantize_config\.json says"):
                open_source(tmp_path / "m")


@pytest.mark.parametrize("fmt", ["q4_1", "q5_0", "q8_0", "f16"])
def test_verify_prints_the_converters_table(fmt, tmp_path, capsys):
    checkpoint(tmp_path / "m", "awq", n=96, k=512, group=128)
    assert cli.main(["convert", str(tmp_path / "m"), str(tmp_path / "y.gguf"), fmt]) == 0
    table = capsys.readouterr().out.split("\n\n")[0]
    assert cli.main(["verify", str(tmp_path / "y.gguf"), "--against", str(tmp_path / "m")]) == 0
    assert capsys.readouterr().out.endswith(f"\n\n{table}\n")


@pytest.mark.parametrize(("zero", "fits"), [(7, False), (8, True), (9, False)])
def test_codes_are_copied_only_where_all_fit(zero, fits, tmp_path):
    """q4_0 has -8 to 7: a zero of 7 or 9 needs a code more, be it there or not."""
    checkpoint(tmp_path / "m", zero=zero)
    if fits:
        assert converted(tmp_path / "m", tmp_path / "y.gguf", "q4_0")["layer.q_proj.weight"].how == "exact"
    else:
        with pytest.raises(qgemm.QgemmError, match="quantizing it again, to Q4_0"):
            converted(tmp_path / "m", tmp_path / "y.gguf", "q4_0")


def test_quantized_and_not(tmp_path):
    """Quantizing again needs the option; a matrix that is there twice is refused."""
    checkpoint(tmp_path / "m", "awq")
    with pytest.raises(qgemm.QgemmError, match=r"'layer\.q_proj\.weight': is AWQ4: .* --allow-requantize"):
        converted(tmp_path / "m", tmp_path / "y.gguf", "q4_0")
    line = converted(tmp_path / "m", tmp_path / "y.gguf", "q4_0", allow_requantize=True)["layer.q_proj.weight"]
    assert line.how == "requantized"
    assert 0 < line.error < 0.2
    assert left_over(tmp_path) == []
    assert sorted(os.listdir(tmp_path / "m")) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 5), (7, 33), (5, 129), (1, 65)])
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_of_an_odd_number_of_weights(n, k, nested, tmp_path):
    """The last nibble is unused; any range of weights is read, also one that starts in the middle of a byte."""
    want = foreign.bitsandbytes(tmp_path / "m", n=n, k=k, nested=nested)
    with open_source(tmp_path / "m") as source:
        weight = source.weights[f"{foreign.MODULE}.weight"]
        for start, stop in ((0, want.size), (want.size // 2, want.size), (1, max(2, want.size - 1))):
            assert_array_equal(weight.values(start, min(stop, want.size)), want.ravel()[start:stop])
    qgemm.convert(tmp_path / "m", tmp_path / "y.gguf", "f32")
    with qgemm.open(tmp_path / "y.gguf") as file:
        assert_array_equal(file[f"{foreign.MODULE}.weight"].dequantize(), want)
    with (
        qgemm.load(tmp_path / "m") as model,
        pytest.raises(qgemm.QgemmError, match="`qgemm convert` reads them as floats"),
    ):
        model[f"{foreign.MODULE}.weight"]


@pytest.mark.parametrize(
    "options", [{"axis": 0}, {"axis": 0, "group": 32, "bits": 8}, {"group": 256}, {"bits": 2, "group": 256}]
)
def test_groups_of_hqq_that_are_no_runs_of_a_row(options, tmp_path):
    """Groups along columns, and groups of several rows, in ranges of any length."""
    want = foreign.hqq(tmp_path / "m", **options).reshape(-1)
    with open_source(tmp_path / "m") as source:
        weight = next(weight for weight in source.weights.values() if weight.type.startswith("HQQ"))
        for start, stop in ((0, want.size), (0, 128), (128, 640), (want.size - 256, want.size)):
            assert_array_equal(weight.values(start, stop), want[start:stop])

"""The steps that the converter encodes on a GPU, and its error where there is none."""

from __future__ import annotations

from typing import ClassVar

import pytest
from helpers import converted, mixed_model

import qgemm
from qgemm.cli import main as cli
from qgemm.converter import Options, job, open_source
from qgemm.converter.device import RANGE, Device
from qgemm.converter.range_encoding import choose_encoder, encode_range
from qgemm.converter.rules import plan


class OnCpu(Device):
    """Stands for a GPU, and records the tensors that it encodes."""

    encoded: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self.encoded.clear()

    def encode_range(self, step, start, stop, importance=None):
        assert importance is None
        self.encoded.append(step.weight.name)
        return encode_range(step, start, stop, choose_encoder(step, Options(step.format)).encode)


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
    monkeypatch.setattr(job, "_device", OnCpu)
    source = mixed_model(tmp_path / "x.gguf", large=False)
    lines = {
        name: converted(source, tmp_path / f"{name}.gguf", fmt, backend=name, allow_requantize=True, **options)
        for name in ("cpu", "cuda")
    }
    assert sorted(OnCpu.encoded) == sorted(f"blk.0.{name}.weight" for name in names.split())
    assert lines["cuda"] == lines["cpu"]
    assert (tmp_path / "cuda.gguf").read_bytes() == (tmp_path / "cpu.gguf").read_bytes()


def test_ranges_for_the_gpu_do_not_depend_on_threads(tmp_path):
    with open_source(mixed_model(tmp_path / "x.gguf")) as source:
        options = Options(qgemm.FORMATS["q4_0"], allow_requantize=True)
        step = next(step for step in plan(source, options) if step.weight.size > 2**22)
        encoder = choose_encoder(step, options)
        single, many = (job._range_work(step, encoder, threads, OnCpu())[1] for threads in (1, 16))
    assert single == many
    assert [start for start, _ in single] == [0, RANGE]


@pytest.mark.skipif(qgemm.backends()["cuda"].available, reason="there is a GPU")
def test_without_a_gpu_it_says_why(tmp_path, capsys):
    source = mixed_model(tmp_path / "x.gguf", large=False)
    with pytest.raises(qgemm.UnsupportedError, match="there is no GPU to encode on: "):
        converted(source, tmp_path / "y.gguf", "q4_0", backend="cuda", allow_requantize=True)
    assert (
        cli.main(["convert", str(source), str(tmp_path / "y.gguf"), "q4_0", "--backend", "cuda", "--allow-requantize"])
        == 1
    )
    assert "there is no GPU to encode on" in capsys.readouterr().err
    assert not (tmp_path / "y.gguf").exists()


def test_other_backends(tmp_path, capsys):
    source = mixed_model(tmp_path / "x.gguf", large=False)
    with pytest.raises(qgemm.UnsupportedError, match="no backend 'tpu', only 'cpu' and 'cuda'"):
        converted(source, tmp_path / "y.gguf", "q4_0", backend="tpu", allow_requantize=True)
    assert cli.main(["convert", str(source), str(tmp_path / "y.gguf"), "q4_0", "--backend", "tpu"]) == 2
    assert "invalid choice: 'tpu'" in capsys.readouterr().err

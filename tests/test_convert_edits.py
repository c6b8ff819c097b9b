"""Metadata set and removed, and layers left out, while a file is converted."""

from __future__ import annotations

import numpy as np
import pytest
from files import model, safetensors
from helpers import normal

import qgemm
from qgemm.converter.edits import parse_layers, parse_size

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": np.uint32(4),
    "llama.attention.head_count_kv": np.array([1, 2, 3, 4], np.int32),
    "llama.rope.freq_base": np.float32(10000),
    "tokenizer.chat_template": "x",
}


@pytest.fixture
def source(tmp_path):
    tensors = {f"blk.{i}.attn_q.weight": np.full((2, 32), i, np.float32) for i in range(4)}
    return model(tmp_path / "m.gguf", {"token_embd.weight": normal(4, 32), **tensors}, METADATA)


def test_keys_are_set_and_removed(run, source, tmp_path):
    """With the types that llama-quantize gives them; the tensors are copied."""
    options = ["llama.rope.freq_base=float:5e5", "llama.context_length=int:4096", "a.b=bool:true", "c=str:x=y:z"]
    target = tmp_path / "y.gguf"
    flags = [word for option in options for word in ("--override-kv", option)]
    assert run("convert", source, target, "f32", *flags, "--remove-kv", "tokenizer.chat_template")[0] == 0
    with qgemm.open(source) as old, qgemm.open(target) as new:
        values = dict(new.metadata)
        assert "tokenizer.chat_template" not in values
        assert (values["llama.rope.freq_base"], values["llama.rope.freq_base"].dtype) == (5e5, np.float32)
        assert (values["llama.context_length"], values["llama.context_length"].dtype) == (4096, np.uint32)
        assert values["a.b"] is True
        assert values["c"] == "x=y:z"
        assert values["llama.block_count"] == 4
        for name in old:
            assert new[name].blocks.tobytes() == old[name].blocks.tobytes()


def test_layers_are_left_out(source, tmp_path):
    """Those after them move up, and so do the metadata's numbers of each layer."""
    qgemm.convert(source, tmp_path / "y.gguf", "f32", prune_layers=[0, 2])
    with qgemm.open(tmp_path / "y.gguf") as file:
        assert list(file) == ["token_embd.weight", "blk.0.attn_q.weight", "blk.1.attn_q.weight"]
        assert [file[f"blk.{i}.attn_q.weight"].dequantize()[0, 0] for i in range(2)] == [1, 3]
        assert file.metadata["llama.block_count"] == 2
        assert file.metadata["llama.block_count"].dtype == np.uint32
        assert file.metadata["llama.attention.head_count_kv"].tolist() == [2, 4]


def test_layers_of_a_projector_are_not_left_out(tmp_path):
    tensors = {f"v.blk.{i}.attn_q.weight": normal(2, 32) for i in range(2)}
    path = model(tmp_path / "p.gguf", tensors, {"general.architecture": "clip"})
    with pytest.raises(qgemm.QgemmError, match="the layers of a projector feed one"):
        qgemm.convert(path, tmp_path / "y.gguf", "f16", prune_layers=[0])


def test_lists_of_layers():
    assert parse_layers("3,5-7, 6") == (3, 5, 6, 7)


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        (("--override-kv", "a=b"), "is not KEY=TYPE:VALUE"),
        (("--override-kv", "a=int:x"), "is not KEY=TYPE:VALUE"),
        (("--override-kv", "a=int:-1"), "is not KEY=TYPE:VALUE"),
        (("--override-kv", "a=int:4294967296"), "is not KEY=TYPE:VALUE"),
        (("--override-kv", "a=float:1e39"), "is not KEY=TYPE:VALUE"),
        (("--override-kv", "a=float:nan"), "is not KEY=TYPE:VALUE"),
        (("--override-kv", "a=bool:yes"), "is not KEY=TYPE:VALUE"),
        (("--override-kv", "general.alignment=int:64"), "follows from the tensors"),
        (("--override-kv", "split.count=int:2"), "follows from the tensors"),
        (("--remove-kv", "nothing"), "there is no such key"),
        (("--prune-layers", "4"), "there is no layer 4 of 4"),
        (("--prune-layers", "0-3"), "no layer would be left"),
        *(
            (("--prune-layers", text), "is not a list of numbers")
            for text in ("3-1", "9" * 5000, "0-999999999", "\u0661")
        ),
    ],
)
def test_changes_that_are_refused(run, source, tmp_path, flags, rule):
    status, _, err = run("convert", source, tmp_path / "y.gguf", "f32", *flags)
    assert status in (1, 2)
    assert rule in " ".join(err.split())


@pytest.mark.parametrize(("size", "shards"), [(512, 3), (300, 5), ("1M", 1), (1, 5)])
def test_shards_of_a_largest_size(source, tmp_path, size, shards):
    """Tensors in their order; one larger than the size has a shard of its own."""
    qgemm.convert(source, tmp_path / "y.gguf", "f32", split_max_size=size)
    names = sorted(path.name for path in tmp_path.glob("y*.gguf"))
    if shards == 1:
        assert names == ["y.gguf"]
    else:
        assert names == [f"y-{i + 1:05}-of-{shards:05}.gguf" for i in range(shards)]
    with qgemm.open(source) as old, qgemm.open(tmp_path / names[0]) as new:
        assert list(new) == list(old)
        for name in old:
            assert new[name].blocks.tobytes() == old[name].blocks.tobytes()
    if size == 512:
        for name in names:
            with qgemm.open(tmp_path / name, part=True) as part:
                assert sum(tensor.nbytes for tensor in part.values()) <= size


@pytest.mark.parametrize(("size", "nbytes"), [("300", 300), (0, 0), ("3M", 3_000_000), ("2G", 2_000_000_000)])
def test_sizes_of_shards(size, nbytes):
    """M and G are powers of ten, as gguf-split counts them."""
    assert parse_size(size) == nbytes


@pytest.mark.parametrize("size", ["2T", "-1", "0", "x", "9" * 5000, "\u0663M"])
def test_sizes_that_are_none(run, source, tmp_path, size):
    status, _, err = run("convert", source, tmp_path / "y.gguf", "f32", f"--split-max-size={size}")
    assert (status, "is not a number of bytes" in " ".join(err.split())) == (2, True)


def test_only_one_option_chooses_shards(run, source, tmp_path):
    flags = "--keep-split", "--split-max-size", "1M"
    status, _, err = run("convert", source, tmp_path / "y.gguf", "f32", *flags)
    assert (status, "each choose the shards" in " ".join(err.split())) == (1, True)


def test_other_files_have_no_metadata_to_change(run, tmp_path):
    source = safetensors(tmp_path / "x.safetensors", {"w": normal(2, 32)})
    status, _, err = run("convert", source, tmp_path / "y.npz", "f32", "--override-kv", "a=int:1")
    assert (status, "changed only in a .gguf file" in err) == (1, True)

"""File types of llama-quantize: the type of each tensor, as llama-quantize --dry-run prints it for nine models."""

from __future__ import annotations

import json
import lzma
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from files import imatrix
from gguf import GGUFReader

import qgemm
from qgemm.converter.keep_rules import keep_rule
from qgemm.converter.mixture import FILE_TYPES, Model, choose_types
from qgemm.files.gguf.writer import drafting
from qgemm.formats import GGML_TYPES

# For each model its architecture, metadata, shapes, and the type of each tensor in 37 file types, "+imatrix" where that
# differs; written by llama-quantize of llama.cpp 0c1e57098.
GOLDEN = json.loads(lzma.decompress((Path(__file__).parent / "data" / "llama_quantize_types.json.xz").read_bytes()))
CASES = [(model, kind) for model, golden in GOLDEN.items() for kind in golden["types"] if kind not in ("F16", "BF16")]


@pytest.mark.parametrize(("model", "kind"), CASES, ids=lambda case: case)
def test_types_of_llama_quantize(model, kind):
    golden = GOLDEN[model]
    shapes = {name: tuple(shape) for name, shape in golden["tensors"].items()}
    name, _, imatrix = kind.lower().partition("+")
    metadata = {"general.architecture": golden["architecture"], **golden["metadata"]}
    quantized = [
        tensor for tensor, shape in shapes.items() if not keep_rule(tensor, len(shape), golden["architecture"])
    ]
    types = choose_types(name, Model.from_metadata(metadata), shapes, quantized, bool(imatrix))
    want = golden["types"][kind]
    stored_types = {
        tensor: "f32" if len(shape) < 2 else "f16" for tensor, shape in shapes.items()
    }  # as the source has them
    assert {**stored_types, **types} == want


def test_every_file_type_is_held_against_llama_quantize():
    """But for the newest two, which the goldens do not have."""
    assert {kind.lower().partition("+")[0] for _, kind in CASES} == set(FILE_TYPES) - {"q1_0", "q2_0"}


def test_the_newest_file_types(model, tmp_path):
    """Q1_0 and Q2_0 keep their type but for the output, and for the tokens of Q2_0; their blocks fit shorter rows."""
    fits = {"ffn_down": "q4_0"}  # rows of 288, for which llama-quantize has nothing to fall back to from Q1_0
    with pytest.raises(qgemm.QgemmError, match=r"ffn_down\.weight': rows of 288 weights are no whole blocks of Q1_0"):
        qgemm.convert(model, tmp_path / "y.gguf", "q1_0")
    for kind, number, tokens in (("q1_0", 40, "Q1_0"), ("q2_0", 41, "Q4_K")):
        done = qgemm.convert(model, tmp_path / f"{kind}.gguf", kind, tensor_types=fits)
        to = {line.name: line.new for line in done.lines if line.new not in ("F32", "F16")}
        assert (to.pop("output.weight"), to.pop("token_embd.weight")) == ("Q6_K", tokens)
        assert set(to.values()) <= {kind.upper(), "Q4_0"}
        with qgemm.open(tmp_path / f"{kind}.gguf") as file:
            assert file.metadata["general.file_type"] == number
            assert file["blk.0.attn_q.weight"].format.name == kind


# ---------------------------------------------------------------- files


@pytest.fixture
def model(tmp_path):
    """A llama of eight layers, in F16."""
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (64, 256), "output": (64, 256), "output_norm": (256,)}
    for layer in range(8):
        parts = {"attn_q": (256, 256), "attn_k": (64, 256), "attn_v": (64, 256), "attn_norm": (256,)}
        parts |= {"ffn_up": (288, 256), "ffn_down": (256, 288), "ffn_gate_inp": (8, 256)}
        shapes |= {f"blk.{layer}.{part}": shape for part, shape in parts.items()}
    tensors = {}
    for name, shape in shapes.items():
        x = rng.standard_normal(shape).astype(np.float32 if len(shape) < 2 else np.float16)
        tensors[f"{name}.weight"] = qgemm.Tensor("f32" if len(shape) < 2 else "f16", shape, x)
    keys = {"block_count": 8, "attention.head_count": 8, "attention.head_count_kv": 2}
    metadata = {"general.architecture": "llama", **{f"llama.{key}": np.uint32(value) for key, value in keys.items()}}
    qgemm.write(tmp_path / "model.gguf", tensors, metadata)
    return tmp_path / "model.gguf"


@pytest.mark.slow
@pytest.mark.parametrize(("file_type", "number"), [("q4_k_m", 15), ("Q4_K", 15), ("q4_k_s", 14), ("q5_k_m", 17)])
def test_a_mixture_is_written(model, tmp_path, file_type, number):
    """Types by the rule, bytes by each type's encoder, the fallback for other row lengths, the file type's number."""
    done = qgemm.convert(model, tmp_path / "y.gguf", file_type)
    kind = next(name for name, entry in FILE_TYPES.items() if entry.number == number)
    with qgemm.open(model) as source, qgemm.open(tmp_path / "y.gguf") as file:
        shapes = {name: tensor.shape for name, tensor in source.items()}
        quantized = [name for name, shape in shapes.items() if not keep_rule(name, len(shape), "llama")]
        want = choose_types(kind, Model.from_metadata(source.metadata), shapes, quantized, False)
        assert {name: tensor.format.name for name, tensor in file.items() if name in want} == want
        assert len(set(want.values())) > 2
        for name, tensor in file.items():
            x = source[name]
            stored = qgemm.quantize(x.dequantize(), want[name]) if name in want else x
            assert tensor.blocks.tobytes() == stored.blocks.tobytes()
        assert file.metadata["general.file_type"] == number
        assert file.metadata["general.quantization_version"] == 2
    rules = {line.name: line.rule for line in done.lines}
    assert rules["output.weight"] == "output matrix: Q6_K"
    assert rules["blk.0.ffn_down.weight"].startswith("row length not a multiple of 256: ")
    assert rules["blk.0.ffn_gate_inp.weight"] == "router"
    assert rules["blk.3.attn_q.weight"] == ""


def test_an_importance_matrix_reaches_the_k_quants(model, tmp_path):
    importance = np.random.default_rng(1).uniform(0, 4, 256).astype(np.float32)
    sums = (b"blk.0.attn_q.weight", importance)
    entry = struct.pack("<i", len(sums[0])) + sums[0] + struct.pack("<ii", 1, 256) + sums[1].tobytes()
    (tmp_path / "x.dat").write_bytes(struct.pack("<i", 1) + entry)
    qgemm.convert(model, tmp_path / "y.gguf", "q4_k_m", imatrix=tmp_path / "x.dat")
    with qgemm.open(model) as source, qgemm.open(tmp_path / "y.gguf") as file:
        x = source["blk.0.attn_q.weight"].dequantize()
        want = qgemm.quantize(x, "q4_k", imatrix=importance)
        assert file["blk.0.attn_q.weight"].blocks.tobytes() == want.blocks.tobytes()
        assert want.blocks.tobytes() != qgemm.quantize(x, "q4_k").blocks.tobytes()


def test_keys_of_the_importance_matrix(model, tmp_path):
    """As llama-quantize writes them: of a file of either kind, as far as it speaks of itself."""
    names = [f"blk.{i}.attn_q.weight" for i in range(3)]

    def keys(path):
        qgemm.convert(model, tmp_path / "y.gguf", "q4_k_m", imatrix=path, force=True)
        with qgemm.open(tmp_path / "y.gguf") as file:
            stored = {key.removeprefix("quantize.imatrix."): value for key, value in file.metadata.items()}
        return {key: stored[key] for key in stored if key in ("file", "dataset", "entries_count", "chunks_count")}

    path = imatrix(tmp_path / "x.dat", names)
    assert keys(path) == {"file": str(path), "entries_count": 3}
    path = imatrix(tmp_path / "x.dat", names, origin=struct.pack("<ii", 8, 4) + b"data")
    assert keys(path) == {"file": str(path), "dataset": "data", "entries_count": 3, "chunks_count": 8}
    assert isinstance(keys(path)["chunks_count"], np.uint32)
    sums = {f"{name}.in_sum2": np.ones((1, 256), np.float32) for name in names}
    counts = {f"{name}.counts": np.ones((1, 1), np.float32) for name in names}
    origin = {"imatrix.datasets": ["a.txt", "b.txt"], "imatrix.chunk_count": np.uint32(5)}
    long = tmp_path / ("x" * 150 + ".gguf")
    qgemm.write(long, {**sums, **counts}, {"general.type": "imatrix", **origin})
    want = {"file": str(long)[:127], "dataset": "a.txt", "entries_count": 3, "chunks_count": 5}
    assert keys(long) == want


def test_keys_are_in_the_order_of_llama_quantize(model, tmp_path):
    """The source's, but for those that change, then these, each in its order."""
    path = imatrix(tmp_path / "x.dat", ["blk.0.attn_q.weight"], origin=struct.pack("<ii", 8, 4) + b"data")
    qgemm.convert(model, tmp_path / "q8_0.gguf", "q8_0")
    qgemm.convert(tmp_path / "q8_0.gguf", tmp_path / "y.gguf", "q4_0", imatrix=path, allow_requantize=True)
    with qgemm.open(model) as source, qgemm.open(tmp_path / "y.gguf") as file:
        stored = [f"quantize.imatrix.{key}" for key in ("file", "dataset", "entries_count", "chunks_count")]
        last = ["general.quantization_version", "general.file_type", *stored]
        assert list(file.metadata) == [*(key for key in source.metadata if key not in last), *last]


def test_a_copy_is_called_after_the_file_type_that_was_asked_for(model, tmp_path):
    """MXFP4_MOE of a model without experts is Q8_0 throughout."""
    for kind, source, number in (("mxfp4_moe", model, 38), ("q8_0", tmp_path / "mxfp4_moe.gguf", 7)):
        done = qgemm.convert(source, tmp_path / f"{kind}.gguf", kind)
        with qgemm.open(tmp_path / f"{kind}.gguf") as file:
            assert file.metadata["general.file_type"] == number
    assert {line.how for line in done.lines} == {"exact"}


def test_importances_of_another_size(model, tmp_path):
    """They are ignored for a token embedding, and refused for any other tensor, whatever its type."""
    path = imatrix(tmp_path / "x.dat", ["token_embd.weight"], k=64)
    qgemm.convert(model, tmp_path / "y.gguf", "q4_k_m", imatrix=path)
    qgemm.convert(model, tmp_path / "z.gguf", "q4_k_m")
    with qgemm.open(tmp_path / "y.gguf") as file, qgemm.open(tmp_path / "z.gguf") as other:
        name = "token_embd.weight"
        assert file[name].blocks.tobytes() == other[name].blocks.tobytes()
    path = imatrix(tmp_path / "x.dat", ["blk.0.attn_q.weight"], k=64)
    with pytest.raises(qgemm.QgemmError, match=r"attn_q\.weight': its importance has 64 values, not those of 1 x 256"):
        qgemm.convert(model, tmp_path / "y.gguf", "q8_0", imatrix=path, dry_run=True)


def test_types_that_need_an_importance_matrix(model, tmp_path):
    """Before any work, by the tensor's name; not of the ends of a model, nor of q2_k in other file types."""
    with pytest.raises(
        qgemm.QgemmError, match=r"'blk\.\d\.\w+\.weight': Q2_K needs an importance matrix \(--imatrix\)"
    ):
        qgemm.convert(model, tmp_path / "y.gguf", "q2_k_s")
    assert not (tmp_path / "y.gguf").exists()
    path = imatrix(tmp_path / "x.dat", [f"blk.{i}.attn_q.weight" for i in range(8)])
    with pytest.raises(qgemm.QgemmError, match=r"'blk\.0\.attn_k\.weight': Q2_K needs an importance matrix"):
        qgemm.convert(model, tmp_path / "y.gguf", "q2_k_s", imatrix=path, dry_run=True)
    names = [f"blk.{i}.{part}.weight" for i in range(8) for part in ("attn_q", "attn_k", "attn_v", "ffn_up")]
    qgemm.convert(model, tmp_path / "y.gguf", "q2_k_s", imatrix=imatrix(tmp_path / "x.dat", names))
    qgemm.convert(model, tmp_path / "y.gguf", "q2_k", force=True)


def split(path: Path, tmp_path: Path) -> Path:
    """The model in three shards, whose names are those of no layer."""
    with qgemm.open(path) as source:
        names = sorted(source, reverse=True)
        size = -(-len(names) // 3)
        for number in range(3):
            keys = dict(source.metadata) if number == 0 else {}
            keys |= {
                "split.no": np.uint16(number),
                "split.count": np.uint16(3),
                "split.tensors.count": np.int32(len(names)),
            }
            tensors = {name: source[name] for name in names[number * size : (number + 1) * size]}
            with drafting(tmp_path / f"m-0000{number + 1}-of-00003.gguf", tensors, keys, part=True) as draft:
                for name, tensor in tensors.items():
                    draft.append(name, tensor.blocks)
    return tmp_path / "m-00001-of-00003.gguf"


def test_shards_are_kept(model, tmp_path, run):
    """A shard for each, with the tensors of that one in their order; the first has the keys, all say their place."""
    first = split(model, tmp_path)
    status, out, err = run("convert", first, tmp_path / "y.gguf", "q4_k_m", "--keep-split")
    assert (status, err) == (0, "")
    assert not (tmp_path / "y.gguf").exists()
    for number in range(1, 4):
        place = f"0000{number}-of-00003.gguf"
        with (
            qgemm.open(tmp_path / f"m-{place}", part=True) as old,
            qgemm.open(tmp_path / f"y-{place}", part=True) as new,
        ):
            assert list(old) == list(new)
            assert ("general.file_type" in new.metadata) == (number == 1)
        keys = GGUFReader(tmp_path / f"y-{place}").fields
        assert [keys[f"split.{key}"].contents() for key in ("no", "count", "tensors.count")] == [
            number - 1,
            3,
            len(out_names(out)),
        ]
    with qgemm.open(tmp_path / "y-00001-of-00003.gguf") as file, qgemm.open(first) as source:
        shapes = {name: tensor.shape for name, tensor in source.items()}
        quantized = [name for name, shape in shapes.items() if not keep_rule(name, len(shape), "llama")]
        want = choose_types("q4_k_m", Model.from_metadata(source.metadata), shapes, quantized, False, as_stored=True)
        assert {name: file[name].format.name for name in want} == want
        assert want != choose_types("q4_k_m", Model.from_metadata(source.metadata), shapes, quantized, False)
        x, y = source["blk.0.attn_q.weight"], file["blk.0.attn_q.weight"]
        assert y.blocks.tobytes() == qgemm.quantize(x.dequantize(), y.format).blocks.tobytes()
    status, _, err = run("convert", first, tmp_path / "y.gguf", "q4_k_m", "--keep-split")
    assert (status, "y-00001-of-00003.gguf: exists" in err) == (1, True)


def out_names(out: str) -> list[str]:
    return [line.split()[0] for line in out.splitlines() if ".weight" in line]


def test_shards_that_are_not_there_are_not_kept(model, tmp_path):
    with pytest.raises(qgemm.QgemmError, match=r"is no split model: --keep-split is for a \.gguf file"):
        qgemm.convert(model, tmp_path / "y.gguf", "q4_k_m", keep_split=True)
    with pytest.raises(qgemm.QgemmError, match="kbit tensors are not written to shards"):
        qgemm.convert(split(model, tmp_path), tmp_path / "y.gguf", "kbit4", keep_split=True)
    with pytest.raises(qgemm.QgemmError, match=r"which is no \.gguf file: --keep-split"):
        qgemm.convert(split(model, tmp_path), tmp_path / "y.npz", "f16", keep_split=True)
    with pytest.raises(qgemm.QgemmError, match="a file of this very command"):
        qgemm.convert(split(model, tmp_path), tmp_path / "m.gguf", "q4_0", keep_split=True, force=True)


def test_overrides_and_pure(model, tmp_path):
    """Overridden tensors are not counted; pure is one type."""
    done = qgemm.convert(model, tmp_path / "y.gguf", "q4_k_m", tensor_types={"blk.0.attn_v": "q8_0"}, dry_run=True)
    types = {line.name: line.new for line in done.lines}
    assert types["blk.0.attn_v.weight"] == "Q8_0"
    assert types["blk.1.attn_v.weight"] == "Q6_K"  # the first of seven that are counted
    pure = qgemm.convert(model, tmp_path / "y.gguf", "q4_k_m", pure=True, dry_run=True)
    assert {line.new for line in pure.lines if not line.rule} == {"Q4_K"}


def test_types_of_the_ends(model, tmp_path, run):
    """As llama-quantize's options of these names say it, before --tensor-type; from the shell alike."""
    options = {"tensor_types": {"output|embd": "q4_0"}, "token_embedding_type": "q5_0", "output_tensor_type": "q5_1"}
    done = qgemm.convert(model, tmp_path / "y.gguf", "q4_k_m", dry_run=True, **options)
    types = {line.name: line.new for line in done.lines}
    assert (types["token_embd.weight"], types["output.weight"]) == ("Q5_0", "Q5_1")
    left = qgemm.convert(model, tmp_path / "y.gguf", "q4_k_m", dry_run=True, leave_output_tensor=True)
    assert {line.name: line.new for line in left.lines}["output.weight"] == "F16"
    words = "--output-tensor-type", "q8_0", "--token-embedding-type", "q6_k", "--dry-run"
    status, out, err = run("convert", model, tmp_path / "y.gguf", "q4_k_m", *words)
    assert (status, err) == (0, "")
    to = {line.split()[0]: line.split()[3] for line in out.splitlines() if ".weight" in line}
    assert (to["token_embd.weight"], to["output.weight"]) == ("Q6_K", "Q8_0")
    status, out, err = run("convert", model, tmp_path / "y.gguf", "q4_k_m", "--leave-output-tensor", "--dry-run")
    assert {line.split()[0]: line.split()[3] for line in out.splitlines() if ".weight" in line}[
        "output.weight"
    ] == "F16"
    assert run("convert", model, tmp_path / "y.gguf", "q4_k_m", "--output-tensor-type", "q9")[0] == 2


def test_types_without_an_encoder_are_refused_before_any_work(model, tmp_path):
    with pytest.raises(qgemm.QgemmError, match="Q8_K has no encoder; types that can be written"):
        qgemm.convert(model, tmp_path / "y.gguf", GGML_TYPES[15])
    with pytest.raises(qgemm.UnsupportedError, match=r"no format 'q4km'; .*file types that mix them: .*Q4_K_M, "):
        qgemm.convert(model, tmp_path / "y.gguf", "q4km")
    assert not (tmp_path / "y.gguf").exists()


def test_a_plan_shows_types_and_sizes(model, tmp_path, run):
    status, out, err = run("convert", model, tmp_path / "y.gguf", "q4_k_m", "--dry-run")
    assert (status, err) == (0, "")
    head, *rows = [re.split(r" {2,}", row) for row in out.splitlines() if len(re.split(r" {2,}", row)) == 8]
    assert head == ["tensor", "shape", "from", "to", "bpw", "size", "how", "relative RMS"]
    planned = {name: (to, bpw, size) for name, _, _, to, bpw, size, _, _ in rows}
    assert planned["blk.3.attn_q.weight"] == ("Q4_K", "4.5", "36 KiB")
    assert planned["output.weight"] == ("Q6_K", "6.5625", "13.1 KiB")

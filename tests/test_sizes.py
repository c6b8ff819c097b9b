"""qgemm convert --size: the choice is as good as any, the costs are those of whole tensors, the file fits."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qgemm
from benchmarks import off_grid
from qgemm.converter import sizes
from qgemm.converter.api import open_for_conversion
from qgemm.converter.rules import Options, candidate_steps, free_weights
from qgemm.converter.size_choice import Alternative, choose
from qgemm.converter.size_costs import costs
from qgemm.converter.sizes import read_recipe, recipe_text
from qgemm.errors import QgemmError
from qgemm.files.imatrix import read_imatrix
from qgemm.files.imatrix_sums import Sensitivities, Sums, SumsFile
from qgemm.formats import FORMATS

MATRICES = {f"blk.{layer}.{kind}.weight": (32, 256) for layer in range(2) for kind in ("attn_q", "ffn_down", "ffn_up")}
SHAPES = {"token_embd.weight": (96, 256), **MATRICES, "blk.0.attn_norm.weight": (256,), "blk.1.attn_k.weight": (32, 96)}
TYPES = "q4_0,q4_k,q6_k,q8_0"  # few, since each is compiled
ALTERNATIVES = st.lists(
    st.builds(Alternative, st.integers(1, 30), st.floats(0, 100)), min_size=1, max_size=4
)  # fmt: skip


@pytest.fixture
def source(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
    tensors["blk.1.ffn_down.weight"] *= 8  # errors there are 64 times as large
    qgemm.write(tmp_path / "source.gguf", tensors, {"general.architecture": "llama"})
    return tmp_path / "source.gguf"


@pytest.fixture
def imatrix(tmp_path):
    """Sums of all matrices, with sensitivities: that of blk.0.attn_q is large."""
    rng = np.random.default_rng(1)
    sums = {
        name: Sums(
            rng.random((1, shape[1])) * 100,
            np.full(1, 100.0),
            np.full((1, shape[1]), 1e6 if name == "blk.0.attn_q.weight" else 1),
        )
        for name, shape in SHAPES.items()
        if len(shape) > 1
    }
    SumsFile(sums, ["text"], 1, lookups=50.0).write(tmp_path / "imatrix.gguf")
    return tmp_path / "imatrix.gguf"


@given(st.lists(ALTERNATIVES, min_size=1, max_size=5), st.integers(5, 100))
def test_the_choice_is_within_a_tensor_of_the_best(tensors, nbytes):
    """The bound is no more than the best choice's cost; without a byte limit the choice is the best."""
    possible = [
        sum(alternative.cost for alternative in combination)
        for combination in product(*tensors)
        if sum(alternative.nbytes for alternative in combination) <= nbytes
    ]
    if not possible:
        with pytest.raises(qgemm.QgemmError, match="even the smallest types need"):
            choose(tensors, nbytes)
        return
    choice = choose(tensors, nbytes)
    chosen = [tensor[index] for tensor, index in zip(tensors, choice.indices, strict=True)]
    assert choice.nbytes == sum(alternative.nbytes for alternative in chosen) <= nbytes
    assert choice.cost == pytest.approx(sum(alternative.cost for alternative in chosen), abs=1e-9)
    assert choice.bound <= min(possible) + 1e-9
    largest = max(max(a.cost for a in tensor) - min(a.cost for a in tensor) for tensor in tensors)
    assert choice.cost <= min(possible) + largest + 1e-9
    free = choose(tensors, 10**6)
    assert free.cost == pytest.approx(sum(min(a.cost for a in tensor) for tensor in tensors), abs=1e-9)


def test_a_type_that_saves_bytes_and_costs_no_more_is_chosen():
    """Types off the hull fill the bytes that are left."""
    tensors = [[Alternative(1, 8.0), Alternative(2, 7.0), Alternative(4, 0.0)]]
    assert [choose(tensors, nbytes).indices for nbytes in (1, 2, 3, 4)] == [[0], [1], [1], [2]]


def test_a_large_tensor_is_upgraded_though_another_gains_more():
    """The other upgrade saves 6 within 4 bytes, that of the large tensor 13 within 10; both do not fit."""
    tensors = [[Alternative(1, 6.0), Alternative(5, 0.0)], [Alternative(10, 13.0), Alternative(20, 0.0)]]
    assert [choose(tensors, nbytes).indices for nbytes in (20, 22, 25)] == [[1, 0], [0, 1], [1, 1]]


def test_the_bound_has_the_part_of_an_upgrade_that_fits():
    """Half of an upgrade fits, so half of its saving is in the bound."""
    choice = choose([[Alternative(1, 8.0), Alternative(5, 0.0)], [Alternative(1, 1.0)]], 4)
    assert (choice.cost, choice.bound) == (9.0, 5.0)


def test_measured_rows_stand_for_the_whole_tensor(tmp_path):
    """One row of 32 is measured, and the cost is about that of all."""
    w = np.random.default_rng(0).standard_normal((2048, 64), np.float32)
    qgemm.write(tmp_path / "m.gguf", {"blk.0.attn_q.weight": w}, {"general.architecture": "llama"})
    options, fmt = Options(FORMATS["q4_0"]), FORMATS["q4_0"]
    with open_for_conversion(tmp_path / "m.gguf") as opened:
        (weight,) = free_weights(opened, options)
        candidates = {weight.name: candidate_steps(weight, [fmt], options)}
        sensitivities = Sensitivities({weight.name: np.ones((1, 64))})
        measured = costs(candidates, options, "kl", sensitivities)[weight.name][0].cost
    assert measured == pytest.approx(np.square(qgemm.quantize(w, fmt).dequantize() - w).sum() / 2, rel=0.1)


@pytest.mark.parametrize("objective", ["mse", "kl"])
def test_costs_are_those_of_the_decoded_tensors(source, imatrix, objective):
    """Tensors of few rows are measured whole, by the formulas of the module."""
    importances = read_imatrix(imatrix)
    fisher = {name: np.linspace(0, 1, shape[-1])[None] for name, shape in SHAPES.items()}
    options = Options(FORMATS["q4_0"], importance=importances)
    formats = [FORMATS[name] for name in ("q4_0", "q8_0", "q4_k", "f16")]
    with open_for_conversion(source) as opened, qgemm.open(source) as tensors:
        weights = [weight for weight in free_weights(opened, options) if weight.shape[0] <= 32]
        candidates = {weight.name: candidate_steps(weight, formats, options) for weight in weights}
        assert [str(step.format) for step in candidates["blk.1.attn_k.weight"]] == ["Q4_0", "Q8_0", "F16"]
        measured = costs(candidates, options, objective, Sensitivities(fisher, 2.0))
        for name, steps in candidates.items():
            w, h = tensors[name].dequantize().astype(np.float64), importances[name][0].astype(np.float64)
            for step, alternative in zip(steps, measured[name], strict=True):
                w_new = qgemm.quantize(w.astype(np.float32), step.format, imatrix=h).dequantize() if (
                    step.importance is not None
                ) else qgemm.quantize(w.astype(np.float32), step.format).dequantize()  # fmt: skip
                squares = (w_new - w) ** 2
                mse = (h * squares).sum() / (h * w**2).sum()
                expected = mse if objective == "mse" else (fisher[name] * squares).sum() / 2
                assert alternative == (step.nbytes, pytest.approx(expected, 1e-5))


def test_each_expert_has_its_own_importance(tmp_path):
    """The rows of an expert are weighed by its columns; only the first counts here."""
    w, name = np.random.default_rng(0).standard_normal((4, 8, 256), np.float32), "blk.0.ffn_up_exps.weight"
    qgemm.write(tmp_path / "m.gguf", {name: w}, {"general.architecture": "llama"})
    options, fmt = Options(FORMATS["q4_0"]), FORMATS["q4_0"]
    fisher = np.repeat([[1.0], [0.0], [0.0], [0.0]], 256, axis=1)
    with open_for_conversion(tmp_path / "m.gguf") as opened:
        candidates = {name: candidate_steps(opened.weights[name], [fmt], options)}
        (measured,) = costs(candidates, options, "kl", Sensitivities({name: fisher}))[name]
    errors = qgemm.quantize(w[0], fmt).dequantize() - w[0]
    assert measured.cost == pytest.approx(np.square(errors).sum() / 2, rel=1e-5)


def test_types_far_from_the_choice_are_not_measured(source, imatrix, tmp_path, monkeypatch):
    """Each tensor's others are between the neighbours of its type among the first; as many get each type as of all."""
    types = ["q2_k", "q3_k", "q4_k", "q6_k", "q8_0", "iq4_xs", "q4_0", "q5_0"]
    options = {"size": "5bpw", "imatrix": imatrix, "types": types}
    measured = []

    def recorded(candidates, *arguments):
        measured.extend((name, step.format.name) for name, steps in candidates.items() for step in steps)
        return costs(candidates, *arguments)

    monkeypatch.setattr(sizes, "costs", recorded)
    chosen = {line.name: line.new.lower() for line in qgemm.convert(source, tmp_path / "x.gguf", **options).lines}
    assert len(set(measured)) == len(measured)
    assert {name for name, fmt in measured if fmt == "q3_k"} == {*MATRICES, "token_embd.weight"}
    bits = {fmt: FORMATS[fmt].bpw for fmt in types}
    others = [(name, fmt) for name, fmt in measured if fmt not in sizes.FIRST and name != "blk.1.attn_k.weight"]
    assert others
    assert all(abs(bits[fmt] - bits[chosen[name]]) <= 2.1 for name, fmt in others)
    assert len(others) < 3 * (len(MATRICES) + 1)
    monkeypatch.setattr(sizes, "FIRST", ())
    done = qgemm.convert(source, tmp_path / "all.gguf", **options)
    assert Counter(line.new.lower() for line in done.lines) == Counter(chosen.values())


@pytest.mark.parametrize(("k", "names"), [(256, sizes.SUPER_BLOCKS), (96, sizes.BLOCKS)])
def test_candidates_fit_the_rows(tmp_path, monkeypatch, k, names):
    """Types of super-blocks where rows have whole ones, else those of blocks; near the size alone."""
    w = np.random.default_rng(0).standard_normal((32, k), np.float32)
    qgemm.write(tmp_path / "m.gguf", {"blk.0.attn_q.weight": w}, {"general.architecture": "llama"})
    monkeypatch.setattr(sizes, "costs", lambda steps, *_: {n: [Alternative(s.nbytes, 1 / s.nbytes) for s in steps[n]]
                                                          for n in steps})  # fmt: skip
    monkeypatch.setattr(sizes, "FIRST", ())
    done = qgemm.convert(tmp_path / "m.gguf", tmp_path / "x.gguf", size="9bpw", dry_run=True)
    assert [line.new.lower() for line in done.lines] == [max(names, key=lambda name: FORMATS[name].bpw)]
    done = qgemm.convert(tmp_path / "m.gguf", tmp_path / "x.gguf", size="4.9bpw", dry_run=True)
    assert [line.new.lower() for line in done.lines] == ["q4_k" if k == 256 else "iq4_nl"]


def test_a_looked_up_row_costs_besides(source):
    """An embedding that is also the output matrix has both costs; without sensitivities of outputs the one."""
    options, fisher = Options(FORMATS["q4_0"]), np.full((1, 256), 0.5)
    with open_for_conversion(source) as opened:
        (weight,) = [weight for weight in free_weights(opened, options) if weight.name == "token_embd.weight"]
        candidates = {weight.name: candidate_steps(weight, [FORMATS["q4_0"]], options)}
        both, lookups, products = (
            costs(candidates, options, "kl", sensitivities)[weight.name][0].cost
            for sensitivities in (
                Sensitivities({weight.name: fisher}, 3.0),
                Sensitivities({}, 3.0),
                Sensitivities({weight.name: fisher}),
            )
        )
    assert both == pytest.approx(lookups + products)
    assert lookups / products == pytest.approx(3.0 / 0.5 / SHAPES["token_embd.weight"][0])


@pytest.mark.parametrize("size", ["5.25bpw", "60KiB", "70kb", "q4_k_m"])
def test_the_file_has_its_size(run, source, imatrix, tmp_path, size):
    """It is no larger, and a larger type for any tensor would not fit or save nothing."""
    target = tmp_path / "target.gguf"
    assert run("convert", source, target, "--size", size, "--imatrix", imatrix, "--types", TYPES)[0] == 0
    with qgemm.open(target) as model:
        nbytes = sum(tensor.nbytes for tensor in model.values())
        weights = sum(int(np.prod(shape)) for shape in SHAPES.values())
        assert model["blk.0.attn_norm.weight"].format.name == "f32"
    if size.endswith("bpw"):
        limit, actual = float(size[:-3]) * weights / 8, nbytes
    elif size == "q4_k_m":
        done = qgemm.convert(source, tmp_path / "mixture.gguf", size, imatrix=imatrix)
        limit, actual = sum(line.nbytes for line in done.lines), nbytes
    else:
        limit, actual = float(size[:-3]) * 1024 if "i" in size else float(size[:-2]) * 1000, target.stat().st_size
    assert 0.93 * limit < actual <= limit


def test_bits_go_where_errors_cost_most(source, imatrix, tmp_path):
    """By the sensitivity; without one to the relative error, which is alike in all."""
    done = qgemm.convert(source, tmp_path / "kl.gguf", size="4.5bpw", imatrix=imatrix, types=["q2_k", "q4_k", "q6_k"])
    bits = {line.name: line.bpw for line in done.lines}
    assert bits["blk.0.attn_q.weight"] == max(bits[name] for name in MATRICES) > min(bits[name] for name in MATRICES)
    done = qgemm.convert(source, tmp_path / "mse.gguf", size="4.6bpw", types=["q2_k", "q4_k"], objective="mse")
    assert {line.new for line in done.lines} >= {"Q4_K"}


def test_pins_and_rules_hold(source, imatrix, tmp_path):
    options = {"tensor_types": {"ffn_up": "q8_0"}, "keep": ["attn_k"], "imatrix": imatrix, "types": TYPES.split(",")}
    done = qgemm.convert(source, tmp_path / "x.gguf", size="10bpw", **options)
    types = {line.name: line.new for line in done.lines}
    assert {types[f"blk.{layer}.ffn_up.weight"] for layer in (0, 1)} == {"Q8_0"}
    assert types["blk.1.attn_k.weight"] == types["blk.0.attn_norm.weight"] == "F32"
    with pytest.raises(qgemm.QgemmError, match=r"leaves .* for tensors; even the smallest types need .*B$"):
        qgemm.convert(source, tmp_path / "x.gguf", size="2bpw", force=True, **options)


def test_a_size_that_is_too_small_is_refused_before_anything_is_measured(source, tmp_path, monkeypatch):
    """A number without a unit is bytes; quantized tensors, which keep their types, need an option."""
    qgemm.convert(source, tmp_path / "small.gguf", "q8_0")
    monkeypatch.setattr(sizes, "costs", None)
    with pytest.raises(qgemm.QgemmError, match="less than the header, and leaves nothing for tensors"):
        qgemm.convert(source, tmp_path / "x.gguf", size="4.25")
    with pytest.raises(qgemm.QgemmError, match=r"even the smallest types need .* without --allow-requantize"):
        qgemm.convert(tmp_path / "small.gguf", tmp_path / "x.gguf", size="4bpw")


def test_the_bytes_of_the_smallest_types_are_enough(source, tmp_path):
    """And one fewer is not."""
    options = {"types": ["q4_k"], "objective": "mse"}
    done = qgemm.convert(source, tmp_path / "x.gguf", size="16bpw", **options)
    nbytes, weights = sum(line.nbytes for line in done.lines), sum(int(np.prod(shape)) for shape in SHAPES.values())
    qgemm.convert(source, tmp_path / "y.gguf", size=f"{8 * nbytes / weights + 1e-9:.12f}bpw", **options)
    assert (tmp_path / "y.gguf").read_bytes() == (tmp_path / "x.gguf").read_bytes()
    with pytest.raises(qgemm.QgemmError, match="even the smallest types need"):
        qgemm.convert(source, tmp_path / "z.gguf", size=f"{8 * (nbytes - 1) / weights + 1e-9:.12f}bpw", **options)


def test_types_that_need_an_importance_are_left_out_without(source, tmp_path):
    done = qgemm.convert(source, tmp_path / "x.gguf", size="3.5bpw", dry_run=True, types=["iq2_xxs", "q2_k"])
    assert {line.new for line in done.lines} == {"Q2_K", "F16", "F32"}


def test_a_recipe_is_written_and_read(run, source, imatrix, tmp_path):
    """A recipe gives an equal file without a measurement; a dry run writes the recipe alone."""
    words = ["convert", source, tmp_path / "first.gguf", "--size", "6bpw", "--imatrix", imatrix, "--types", TYPES]
    out = run(*words, "--recipe", tmp_path / "recipe.txt", "--dry-run")[1]
    assert "expected KL divergence" in out
    assert not (tmp_path / "first.gguf").exists()
    assert run(*words)[0] == 0
    words = ["convert", source, tmp_path / "second.gguf", "--recipe", tmp_path / "recipe.txt", "--imatrix", imatrix]
    assert "expected KL" not in run(*words)[1]
    assert (tmp_path / "first.gguf").read_bytes() == (tmp_path / "second.gguf").read_bytes()
    recipe = read_recipe(tmp_path / "recipe.txt")
    assert read_recipe(write(tmp_path / "again.txt", recipe_text(recipe, "again"))) == recipe


def test_a_recipe_is_read_at_bounded_cost(tmp_path):
    """A device without an end, and a line whose spaces a regular expression would try in pairs."""
    with pytest.raises(QgemmError, match="zero: has more than 16777216 bytes"):
        read_recipe("/dev/zero")
    with pytest.raises(QgemmError, match="is not NAME = TYPE"):
        read_recipe(write(tmp_path / "x.txt", f"a{' ' * 1_000_000}b"))
    assert read_recipe(write(tmp_path / "x.txt", "a=b=q4_0\n c =d = q8_0")) == {
        "a=b": qgemm.FORMATS["q4_0"], "c =d": qgemm.FORMATS["q8_0"],
    }  # fmt: skip


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("token_embd.weight q4_0", "recipe.txt:1: 'token_embd.weight q4_0' is not NAME = TYPE"),
        ("a = q4_0\n\n# b\na = q4_1", "recipe.txt:4: 'a' has a type already"),
        ("a = q9_9", "recipe.txt:1: there is no format 'q9_9'"),
        ("a = q4_0", "has no tensor 'a'"),
        ("blk.0.attn_norm.weight = f16", "a rule or another option decides the type of 'blk.0.attn_norm.weight'"),
        ("# nothing", "has no type for "),
    ],
)
def test_recipes_are_refused_with_their_line(refused, source, tmp_path, text, rule):
    write(tmp_path / "recipe.txt", text)
    assert rule in refused("convert", source, tmp_path / "x.gguf", "--recipe", tmp_path / "recipe.txt")


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ([], "the types come from one of TYPE, --size and --recipe"),
        (["q4_0", "--size", "4bpw"], "the types come from one of TYPE, --size and --recipe"),
        (["--size", f"{'9' * 5000}bpw"], "is no size: 4.25bpw"),
        (["--size", "small"], "'small' is no size: 4.25bpw, 12GiB, 900MB, or a file type such as q4_k_m"),
        (["q4_0", "--types", "q4_0"], "--objective and --types are for --size"),
        (["--size", "4bpw", "--types", "q9_9"], "there is no format 'q9_9'"),
        (["--size", "4bpw", "--pure"], "--size and --recipe give each tensor of a .gguf file its type"),
    ],
)
def test_usage_errors(refused, source, tmp_path, words, rule):
    assert rule in refused("convert", source, tmp_path / "x.gguf", *words, status=2)


@pytest.mark.parametrize("option", [{"objective": "mse"}, {"objective": "x"}, {"types": ["q4_k"]}])
def test_keywords_of_a_size_are_refused_without_one(source, tmp_path, option):
    with pytest.raises(qgemm.UnsupportedError, match="objective and types are for size"):
        qgemm.convert(source, tmp_path / "x.gguf", "q8_0", **option)


def test_an_objective_without_sensitivities_is_refused(refused, source, tmp_path):
    words = ["convert", source, tmp_path / "x.gguf", "--size", "4.5bpw", "--objective", "kl"]
    assert "--objective kl needs sensitivities" in refused(*words)


def test_moved_weights_are_within_half_a_step(tmp_path):
    """They are those of a model that the type would round to the same codes with the same scales."""
    w = np.random.default_rng(0).standard_normal((8, 64), np.float32)
    tensors = {"blk.0.attn_q.weight": qgemm.quantize(w, "q4_1"), "blk.0.attn_norm.weight": w[0]}
    qgemm.write(tmp_path / "m.gguf", tensors, {"general.architecture": "llama", "general.file_type": np.uint32(3)})
    off_grid.main(str(tmp_path / "m.gguf"), str(tmp_path / "moved.gguf"))
    with qgemm.open(tmp_path / "m.gguf") as before, qgemm.open(tmp_path / "moved.gguf") as after:
        old, new = (model["blk.0.attn_q.weight"] for model in (before, after))
        steps = np.repeat(old.blocks["d"].astype(np.float32).reshape(8, 2), 32, axis=1)
        moves = np.abs(new.dequantize() - old.dequantize())
        assert 0.4 < (moves / steps).max() <= 0.5 + 1e-3
        np.testing.assert_array_equal(after["blk.0.attn_norm.weight"].dequantize(), w[0])
        assert after.metadata["general.file_type"] == 0

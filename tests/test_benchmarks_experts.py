"""Rows of layers of experts in the results file of a GPU, which also has other results."""

from __future__ import annotations

from measured import made_up, row

from benchmarks import command, moe, results, stale


def test_rows_of_a_list_are_replaced_and_all_else_stays():
    """Rows with the sources of the file have no stamp; rows of later sources have one."""
    layer = {"model": "mixtral-8x7b", "types": "q4_0", "M": 1, "skew": 0, "us": 54.0}
    old = made_up(experts=[layer, {**layer, "M": 8}])
    new = made_up(experts=[{**layer, "us": 50.0}, {**layer, "skew": 1}], date="2026-03-01", rows=[])
    both = results.merge_lists(old, new, ["experts"])
    assert both == {**old, "experts": [{**layer, "us": 50.0}, {**layer, "skew": 1}, {**layer, "M": 8}]}
    stamp = {"kernels_sha256": "ghi", "date": "2026-03-01"}
    both = results.merge_lists(old, {**new, **stamp}, ["experts"])
    assert [row.get("kernels_sha256") for row in both["experts"]] == ["ghi", "ghi", None]
    assert results.merge(both, made_up(date="2026-04-01"))["experts"] == both["experts"]
    assert results.merge_lists(made_up(device="NVIDIA L4"), new, ["experts"]) == new


def test_layers_of_experts_are_kept_beside_the_products_of_a_gpu(tmp_path):
    layer = {"model": "mixtral-8x7b", "types": "q4_0", "M": 1, "skew": 0, "us": 54.0}
    measured = {**made_up(rows=[]), "experts": [layer], "experts_host": [{"call": "layer", "us": 9.0}]}
    command.save(tmp_path, True, made_up(rows=[row(m=1)]))
    for out, merging in ((None, True), (tmp_path, True), (tmp_path, False)):
        command.save_experts(out, merging, measured)
    both, written = results.load(tmp_path / "h200.json"), stale.stamped(measured)
    assert ([measured["M"] for measured in both["rows"]], both["experts"]) == ([1], written["experts"])
    assert both["experts"][0]["kernels"]
    assert results.load(tmp_path / "moe.json") == written


def test_no_row_is_begun_once_the_time_is_over():
    progress = moe.Progress(limit=1)
    assert not progress.late
    progress.start -= 2
    left_out = list(moe.rows(None, 4000.0, progress=progress))
    assert left_out == [f"{model.name} {model.format}: left out, 1 s are over" for model in moe.MODELS]


def test_a_row_in_a_line():
    layer = {
        "model": "mixtral-8x7b",
        "types": "q4_0",
        "M": 512,
        "skew": 1,
        "x": "bfloat16",
        "us": 54.04,
        "cublas_us": 99.0,
    }
    assert moe.summary(layer) == "mixtral-8x7b q4_0 bfloat16 T=512 skewed: 54.0 us, cublas 99.0"

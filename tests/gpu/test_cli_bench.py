"""`qgemm bench` on a GPU, beside cuBLAS."""

from __future__ import annotations

import json

from qgemm.cli import timing


def test_products_of_random_weights_beside_cublas(run, monkeypatch):
    monkeypatch.setattr("qgemm.cuda.timing.REST", 0)
    monkeypatch.setattr(timing, "ROTATE", 1 << 20)
    words = ["--gpu", "--formats", "q4_0,f16", "--shapes", "512x512", "--m", "1,64", "--repeats", "3", "--json"]
    status, out, err = run("bench", *words)
    document = json.loads(out)
    assert (status, err, document["dense"]) == (0, "", "cuBLAS float16")
    pairs = [("q4_0", "a16"), ("q4_0", "a8"), ("f16", "a16")]
    assert {(row["format"], row["activation"], row["m"]) for row in document["rows"]} == {
        (*pair, m) for pair in pairs for m in (1, 64)
    }
    assert all(min(row["us"], row["dense_us"], row["gbs"]) > 0 for row in document["rows"])

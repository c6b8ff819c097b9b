"""The GPU ledger: changes that make it stale."""

from __future__ import annotations

import json

import ledger

from benchmarks import results


def test_ledger_notices_a_stale_hash(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "LEDGER", tmp_path / "ledger.json")
    assert "missing" in ledger.problem()
    good = {"sources_sha256": results.sources_sha256(), "passed": 3, "failed": 0, "error": 0, "skipped": 0}
    for facts, wrong in (
        (good, None),
        ({**good, "sources_sha256": "old"}, "changed"),
        ({**good, "sources_sha256": "old", "reason": "no GPU could be had"}, None),
        ({**good, "failed": 1}, "did not pass"),
        ({**good, "passed": 0}, "did not pass"),
    ):
        ledger.LEDGER.write_text(json.dumps(facts))
        assert (ledger.problem() or "") == "" if wrong is None else wrong in ledger.problem()

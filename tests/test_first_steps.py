"""What a user meets first: names with a typo, arguments in the wrong place, operators; each says what to do next."""

from __future__ import annotations

import pickle

import pytest
from helpers import EXCERPT

import qgemm


def test_a_tensor_name_with_a_typo_names_near_ones():
    with qgemm.open(EXCERPT) as model:
        with pytest.raises(
            KeyError, match=r"there is no tensor 'blk.2.atn_q.q4_0'; close are blk\.2\.attn_q\.q4_0, "
        ) as e:
            model["blk.2.atn_q.q4_0"]
        assert str(e.value).startswith(str(EXCERPT))  # no quotes around, as KeyError alone puts them
        assert "close are" in repr(e.value)
        assert str(pickle.loads(pickle.dumps(e.value))) == str(e.value)
        with pytest.raises(qgemm.NameNotFoundError, match=r"'BLK.2.ATTN_Q.Q4_0'; close are blk.2.attn_q.q4_0"):
            model["BLK.2.ATTN_Q.Q4_0"]
        with pytest.raises(qgemm.QgemmError, match=r"no tensor 'a\\x1b\[2J'; `qgemm info` lists the names"):
            model["a\x1b[2J"]
        assert model.get("blk.2.atn_q.q4_0") is None
        assert "blk.2.atn_q.q4_0" not in model

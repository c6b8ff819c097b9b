"""The command line on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import EXCERPT, WEIGHT, lines_of

import qgemm
from qgemm.cuda.kernels.routes import route
from qgemm.cuda.problem import Problem


@pytest.mark.parametrize("activation", ["a16", "a8"])
def test_matmul_on_a_gpu(run, tmp_path, activation):
    command = "matmul", EXCERPT, WEIGHT, "--backend", "cuda", "--activation", activation
    status, out, err = run(*command)
    assert (status, err) == (0, "")
    lines = lines_of(out + "\n", "M")
    sm = int("".join(filter(str.isdigit, qgemm.backends()["cuda"].facts["arch"])))
    problems = (Problem(qgemm.FORMATS["q4_0"], activation, int(m), 96, 384, sm, "float") for m in lines)
    assert [cells[4] for cells in lines.values()] == [route(problem).kernel.name for problem in problems]
    assert all(float(cells[1]) < (1e-3 if activation == "a16" else 2e-2) for cells in lines.values())
    assert run(*command, "--m", 3, "--out", tmp_path / "y.npy")[0] == 0
    assert np.load(tmp_path / "y.npy").shape == (3, 96)

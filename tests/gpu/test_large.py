"""Products whose M, weights or outputs are beyond 32 bits, by every kernel that may serve them: each output is checked.

x and W repeat PERIOD rows each, so that y repeats a small product, which is known in float64.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers import cupy, expected_product, random_tensor
from measured_errors import Expected, of_integer_dots

import qgemm
from qgemm.cli.weights import repeated_rows
from qgemm.cuda.kernels import routes

pytestmark = pytest.mark.xdist_group("large")  # with --dist loadgroup one worker has them: the memory of one at a time
PERIOD = 512
AT_ONCE = 16 * PERIOD  # columns of y that are checked at a time
DECODES, PREFILLS = ("decode", "decode_a8"), ("prefill_sm90", "prefill_sm80", "prefill_sm80_a8", "dequantize")
CASES = [
    *((kernel, (1 << 20) + 1, 72, 64) for kernel in PREFILLS),
    *((kernel, m, (1 << 19) + 8, 4160) for kernel in DECODES for m in (1, 9)),
    *((kernel, 17, (1 << 19) + 8, 4160) for kernel in PREFILLS),
    *((kernel, 16, (1 << 27) + 8, 64) for kernel in DECODES),
    *((kernel, (1 << 16) + 8, (1 << 15) + 64, 64) for kernel in PREFILLS),
]


def weights(n, k, rng):
    """The PERIOD rows that a DeviceTensor of n rows repeats, and it."""
    fmt = qgemm.FORMATS["q4_0"]
    base = random_tensor(fmt, PERIOD, k, rng)
    return base, repeated_rows(base.to_device(), (n, k), 0)


@pytest.mark.parametrize(("kernel", "m", "n", "k"), CASES)
def test_every_output_of_a_large_product(kernel, m, n, k, monkeypatch):
    cp = cupy()
    sm = int(cp.cuda.Device().compute_capability)
    rows = [row for row in routes.ROUTES if row.kernel.name == kernel]
    if kernel == "prefill_sm90" and not any(row.runs_on(sm) for row in rows):
        pytest.skip(f"prefill is not for sm_{sm}")
    monkeypatch.setattr(routes, "ROUTES", [row._replace(least=75, below=routes.ANY) for row in rows])
    rng = np.random.default_rng(m)
    base, w = weights(n, k, rng)
    x = rng.standard_normal((min(m, PERIOD), k)).astype(np.float16)
    if kernel.endswith("a8"):
        expected = of_integer_dots(qgemm.quantize_activations(x).blocks, base)
    else:
        expected = expected_product(x, base, x.dtype)
        expected = expected._replace(bound=2 * expected.bound)
    tiled = Expected(*(cp.tile(cp.asarray(part), AT_ONCE // PERIOD) for part in expected.rounded(np.float16)))

    y = cp.full((m, n), np.nan, np.float16)
    many = cp.take(cp.asarray(x), cp.arange(m) % PERIOD, axis=0)
    qgemm.matmul(many, w, "a8" if kernel.endswith("a8") else "a16", out=y)
    for i in range(0, m, PERIOD):
        for j in range(0, n, AT_ONCE):
            part = y[i : i + PERIOD, j : j + AT_ONCE]
            tiled.only(tuple(slice(size) for size in part.shape)).check(part)

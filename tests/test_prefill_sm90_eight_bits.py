"""prefill_sm90_eight_bits without a GPU: x quantized by its consumer warps on the host, plans, shared memory."""

from __future__ import annotations

import threading
from functools import cache
from types import SimpleNamespace

import harness
import numpy as np
import pytest
from harness import Kernel, device_array, to_device
from helpers import extreme, normal

import qgemm
from qgemm.codec.format import float_dtype
from qgemm.codec.group_activations import GROUP_COLUMNS, INTEGER
from qgemm.cuda.call import plan
from qgemm.cuda.call.arrays import Call, Pointer
from qgemm.cuda.driver.workspace import Workspace
from qgemm.cuda.jit.twins import TYPE_CODES
from qgemm.cuda.kernels import prefill_sm90_eight_bits as prefill
from qgemm.cuda.kernels.sm90_config import WORK_QUEUE
from qgemm.cuda.layout import group_activations
from qgemm.cuda.problem import EIGHT_BITS, Output, Problem

PREFILL = prefill.PREFILL_SM90_EIGHT_BITS
THREADS = 288  # two consumer warpgroups and the leader warp
kernel = cache(Kernel)


def values(m, k, dtype):
    """Ordinary rows, and in the first ones zeros, scales too small, a NaN, an infinity and the largest."""
    x = normal(m, k, seed=6)
    x[0, :300], x[0, 300:] = 0, np.float32(2.0**-20)
    x[m // 2, 5], x[m - 1, k - 1] = np.nan, np.inf
    if m > 20:
        x[:2] = extreme(k)[:2]
    return np.clip(x, -65504, np.where(x == np.inf, np.inf, 65504)).astype(float_dtype(dtype))


@pytest.mark.compiles
@harness.needs_compiler
@pytest.mark.parametrize("kind", INTEGER)
@pytest.mark.parametrize("dtype", TYPE_CODES)
def test_x_is_quantized_whatever_ctas_run_beside_each_other(kind, dtype):
    """CTAs run one after the other, so the first quantizes all of x: bytes of NumPy; the queue ends as it began."""
    for m, k, ctas in ((1, 288, 1), (11, 320, 3), (140, 1120, 2)):
        x, group = values(m, k, dtype), GROUP_COLUMNS[kind]
        room = device_array(WORK_QUEUE + group_activations.nbytes(m, k, group))
        queue, codes = room[:WORK_QUEUE], room[WORK_QUEUE:]
        quantize = kernel("quantize_x_by_cta", CONSUMERS=2, CONSUMER_THREADS=256)
        arguments = to_device(x), room, TYPE_CODES[dtype], k, m, group_activations.rows_of(m)
        want = qgemm.quantize_activations(x, kind).blocks
        for backwards in (False, True):
            codes[...] = 255
            quantize(ctas, THREADS, *arguments, backwards=backwards)
            assert not queue.any()
            blocks = group_activations.blocks_of(codes, m, k, group)
            for name in ("qs", "d"):
                np.testing.assert_array_equal(blocks[name], want[name])


@pytest.mark.parametrize("kind", INTEGER)
@pytest.mark.parametrize(("products", "prepared"), [(1, ""), (1, "prepared"), (2, "")])
def test_one_launch_where_one_product_reads_x(kind, products, prepared, monkeypatch):
    """The product quantizes x itself; several products share the codes of a launch before them, or prepared codes."""
    entered = []

    def launch(kernel, p):
        return lambda stream, x, *pointers: entered.append((kernel.name, p.x, x))

    def quantize(device, source, k, m, activation):
        return lambda stream, x, to: entered.append((source, activation, to))

    monkeypatch.setattr(plan, "launch", launch)
    monkeypatch.setattr(plan, "quantize_groups_launch", quantize)
    monkeypatch.setattr(plan, "workspace", lambda *_: Workspace(4096, threading.Lock(), None))
    library = SimpleNamespace(scratch=lambda nbytes, device: lambda: 4096, pointer=lambda memory: memory)
    served = plan.Served(Problem(qgemm.FORMATS["q4_0"], kind, 256, 4096, 4096, 90, "half"), PREFILL)
    source = plan.Source(256, 4096, "float16", kind if prepared else "")
    call = Call(None, library, 0, 7, [0, 160], [0, 0], [1, 16], True)
    w = SimpleNamespace(pointer=4, format=qgemm.FORMATS["q4_0"], shape=(4096, 4096))
    product = plan.Product(w, 4096)
    plan.launch_products(call, [served] * products, [product] * products, source, Pointer(1))
    if products == 1:
        assert entered == [(prefill.NAME, EIGHT_BITS if prepared else "half", 160)]
    else:
        assert entered == [("half", kind, 4096), *[(prefill.NAME, EIGHT_BITS, 4096)] * products]


def test_x_is_quantized_in_the_kernel_if_no_cta_has_more_than_one_batch():
    """With few CTAs or large x a launch before quantizes x; prepared x is not quantized."""
    for n, k, m, within in (
        (8192, 8192, 256, True),
        (4096, 14336, 128, True),
        (4096, 14336, 256, False),
        (8192, 8192, 512, False),
        (128, 8192, 256, False),
        (4096, 4096, 1, True),
    ):
        p = Problem(qgemm.FORMATS["q4_0"], "a8_g256", m, n, k, 90, "half", (Output(n),), sms=132)
        assert prefill.quantizes(p) == within
        assert PREFILL.reads(p) == (EIGHT_BITS,)
        assert not prefill.quantizes(p._replace(x=EIGHT_BITS))

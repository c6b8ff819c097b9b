"""The choice between the kernels of eight bits on sm_90, by their predicted times."""

from __future__ import annotations

from qgemm.codec.group_activations import E4M3
from qgemm.cuda.problem import Problem

from . import gemm_sm90_s8, prefill_sm80_eight_bits, prefill_sm90_eight_bits

# mma.sync of e4m3 costs 1.9 times as much as of int8: 180.5 instead of 97.3 us with 256 rows of x, 44.1 instead of 22.2
# with 16 (8192x8192).
E4M3_BY_MMA_SYNC = 1.9


def gemm_pays(p: Problem) -> bool:
    """Whether gemm_sm90_s8 is faster than the kernel that converts W in its mainloop."""
    us = gemm_sm90_s8.us_in_a_call(p)
    if p.activation == E4M3:
        return us < E4M3_BY_MMA_SYNC * prefill_sm80_eight_bits.ranked(p)[0][1]
    return us < prefill_sm90_eight_bits.ranked(p)[0][1]

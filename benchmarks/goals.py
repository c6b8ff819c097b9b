"""The project's own goals, as data: `python -m benchmarks --goals` compares a run with them.

A pair is (required, aimed at). Goals of a results file of GPU products are in benchmarks/report/targets.py.
"""

from __future__ import annotations

# Our speed over that of the gguf package, by format: "a16" and one row of x.
OVER_GGUF = {"q4_0": 3.0, "q8_0": 2.0}
CONVERT_OVER_GGUF = 1 / 0.6  # converter over a loop of gguf.quantize, on two cores
ENCODE_GBS = 5.0  # GB/s of weights that a GPU encodes from host memory

# Our speed over that of ggml's faster layout: "a8", 4096 x 4096, by benchmarks.contest.ROWS.
LIKE_Q6_K = ((1.0, 1.1), (0.95, 1.1), (1.3, 1.6), (1.2, 1.4))
LIKE_Q4_1 = ((1.3, 2.0), (1.1, 1.5), (1.5, 2.5), (2.0, 4.0))
OVER_GGML: dict[str, tuple[tuple[float, float], ...]] = {
    "q4_0": ((1.2, 1.4), (1.0, 1.1), (1.4, 1.7), (2.0, 2.5)),
    "q8_0": ((1.1, 1.3), (0.95, 1.1), (1.7, 2.1), (2.5, 3.2)),
    "q4_k": ((0.95, 1.1), (0.85, 1.0), (1.05, 1.2), (1.1, 1.3)),
    **dict.fromkeys(("q6_k", "q5_k"), LIKE_Q6_K),
    **dict.fromkeys(("q4_1", "q5_0", "q5_1", "mxfp4"), LIKE_Q4_1),
}
OVER_GGML_AVX2 = 1.0  # without AVX-512

# Our speed over that of ik_llama.cpp's faster layout on a CPU with AVX2 alone, likewise.
LIKE_Q4 = ((0.95, 1.1), (0.95, 1.05), (0.95, 1.15), (1.1, 1.4))
LIKE_IQ4 = ((0.9, 1.1), (0.95, 0.95), (0.9, 1.1), (1.0, 1.3))
LIKE_GRIDS = ((0.9, 1.2), (0.9, 0.9), (0.85, 1.0), (1.0, 1.2))
OVER_IK: dict[str, tuple[tuple[float, float], ...]] = {
    **dict.fromkeys(("q4_0", "q4_k", "q5_k", "q6_k", "q8_0"), LIKE_Q4),
    **dict.fromkeys(("iq4_xs", "iq4_nl", "mxfp4"), LIKE_IQ4),
    **dict.fromkeys(("iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s"), LIKE_GRIDS),
}
OVER_NUMPY = {16: (1.7, 2.4), 512: (1.05, 1.2)}  # "a16" over NumPy on dense weights, by M
A16_OVER_A8 = 1.6  # largest time of "a16" for one row of x, in times of "a8"
HOST_US = 15.0  # host time of a call on the CPU, without its kernel
FIRST_S, WARM_MS = 3.0, 30.0  # first product: with an empty cache of compiled code, with a filled one

# Our speed a thread over that of ggml's encoder, by kind of format.
ENCODE_OVER_GGML, ENCODE_OVER_GGML_GRIDS = 0.5, 0.25
FITTED = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs")  # formats that ENCODE_OVER_GGML applies to

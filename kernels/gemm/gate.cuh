// Gates, functions by which one product multiplies another, as in SwiGLU and GEGLU. Twin of qgemm/gating.py.
#pragma once

#include "host.cuh"
#include "ptx/ex2.cuh"

namespace qgemm {

// min(x, 7), the limit of gpt-oss's gate; NaN stays NaN.
__device__ inline float at_most_7(float x) { return x > 7 ? 7 : x; }

// x / (1 + exp(-z)).
__device__ inline float logistic(float x, float z) { return x / (1 + expf(-z)); }
// logistic in a few instructions, with a relative error of 2^-16: below half of the last place of 16-bit types.
__device__ inline float logistic_16(float x, float z) { return x * reciprocal(1 + ex2_approx_ftz(-1.44269504f * z)); }

// function: a GateCode. LOGISTIC: logistic, or logistic_16 if the result is rounded to 16 bits.
template <float (*LOGISTIC)(float, float) = logistic>
__device__ inline float gated(int function, float x, float up) {
    switch (function) {
        case SILU:
            return LOGISTIC(x, x) * up;
        case GELU:
            return 0.5f * x * (1 + erff(0.70710678f * x)) * up;
        case GELU_TANH:  // x / 2 * (1 + tanh(z)) is x / (1 + exp(-2 z))
            return LOGISTIC(x, 1.59576912f * (x + 0.044715f * x * x * x)) * up;
        case SWIGLU_OAI:
            x = at_most_7(x);
            return LOGISTIC(x, 1.702f * x) * (1 - at_most_7(-at_most_7(up)));
        default:
            return x;
    }
}

}  // namespace qgemm

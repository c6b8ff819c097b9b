// Gates: what one product makes of another, as in SwiGLU and GEGLU. Twin of qgemm/gating.py.
#pragma once

#include "host.cuh"

namespace qgemm {

// Within the limit of gpt-oss; NaN stays.
__device__ inline float at_most_7(float x) { return x > 7 ? 7 : x; }

// function: a GateCode.
__device__ inline float gated(int function, float x, float up) {
    switch (function) {
        case SILU:
            return x / (1 + expf(-x)) * up;
        case GELU:
            return 0.5f * x * (1 + erff(0.70710678f * x)) * up;
        case GELU_TANH:  // x / 2 * (1 + tanh(z)) is x / (1 + exp(-2 z))
            return x / (1 + expf(-1.59576912f * (x + 0.044715f * x * x * x))) * up;
        case SWIGLU_OAI:
            x = at_most_7(x);
            return x / (1 + expf(-1.702f * x)) * (1 - at_most_7(-at_most_7(up)));
        default:
            return x;
    }
}

}  // namespace qgemm

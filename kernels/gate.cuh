// Gates: functions of one product that multiply another, as in SwiGLU and GEGLU.
#pragma once

#include "host.cuh"

namespace qgemm {

// function: a GateCode.
__device__ inline float gate(int function, float x) {
    switch (function) {
        case SILU:
            return x / (1 + expf(-x));
        case GELU:
            return 0.5f * x * (1 + erff(0.70710678f * x));
        case GELU_TANH:  // x / 2 * (1 + tanh(z)) is x / (1 + exp(-2 z))
            return x / (1 + expf(-1.59576912f * (x + 0.044715f * x * x * x)));
        default:
            return x;
    }
}

}  // namespace qgemm

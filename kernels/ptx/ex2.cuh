// ex2.approx.ftz.f32: 2^value, with an error of at most two units in the last place. Subnormal numbers count as 0.
#pragma once

namespace qgemm {

__device__ inline float ex2_approx_ftz(float value) {
    float result;
#ifdef __CUDA_ARCH__
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
#else
    result = exp2f(value);
    if (result < 0x1p-126f) result = 0;
#endif
    return result;
}

}  // namespace qgemm

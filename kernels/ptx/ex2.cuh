// ex2.approx.ftz.f32: 2^value, two places off at most; subnormal numbers count as 0.
#pragma once

namespace qgemm {

__device__ inline float ex2_approx_ftz(float value) {
    float found;
#ifdef __CUDA_ARCH__
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(value));
#else
    found = exp2f(value);
    if (found < 0x1p-126f) found = 0;
#endif
    return found;
}

}  // namespace qgemm

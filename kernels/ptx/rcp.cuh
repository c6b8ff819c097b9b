// rcp.approx.ftz.f32: 1 / value, with an error of at most one unit in the last place. Subnormal numbers count as 0.
#pragma once

namespace qgemm {

__device__ inline float rcp_approx_ftz(float value) {
    float result;
#ifdef __CUDA_ARCH__
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
#else
    result = 1 / (fabsf(value) < 0x1p-126f ? copysignf(0, value) : value);
    if (fabsf(result) < 0x1p-126f) result = copysignf(0, result);
#endif
    return result;
}

}  // namespace qgemm

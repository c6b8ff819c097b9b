// rcp.approx.ftz.f32: 1 / value, one place off at most; subnormal numbers count as 0.
#pragma once

namespace qgemm {

__device__ inline float rcp_approx_ftz(float value) {
    float found;
#ifdef __CUDA_ARCH__
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(value));
#else
    found = 1 / (fabsf(value) < 0x1p-126f ? copysignf(0, value) : value);
    if (fabsf(found) < 0x1p-126f) found = copysignf(0, found);
#endif
    return found;
}

}  // namespace qgemm

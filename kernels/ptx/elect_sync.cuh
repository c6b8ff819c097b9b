// elect.sync (sm_90 and later): elects one lane of the warp. Unlike lane == 0, the condition is known to be true in one
// lane, so that ptxas does not build a loop over lanes around a copy.
#pragma once

#include "types.cuh"

namespace qgemm {

// True in the elected lane.
__device__ inline bool elect_sync() {
#ifdef __CUDA_ARCH__
    u32 elected;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(elected));
    return elected;
#else
    return threadIdx.x % 32 == 0;
#endif
}

}  // namespace qgemm

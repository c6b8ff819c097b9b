// %laneid: the lane of a thread in its warp. ptxas would recompute threadIdx.x % 32 at every use.
#pragma once

namespace qgemm {

__device__ inline unsigned laneid() {
#ifdef __CUDA_ARCH__
    unsigned lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
#else
    return threadIdx.x % 32;
#endif
}

}  // namespace qgemm

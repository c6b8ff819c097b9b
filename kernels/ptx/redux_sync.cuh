// redux.sync: the largest value over the lanes of the warp; by shuffles before sm_80.
#pragma once

#include "types.cuh"

namespace qgemm {

__device__ inline u32 redux_sync_max(u32 value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    u32 largest;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(largest) : "r"(value));
    return largest;
#else
    for (int apart = 16; apart; apart /= 2) value = max(value, __shfl_xor_sync(~0u, value, apart));
    return value;
#endif
}

}  // namespace qgemm

// Flags in global memory between CTAs of a grid: fence.acq_rel.gpu, st.relaxed.gpu, ld.acquire.gpu (sm_70 and later).
#pragma once

#include "../types.cuh"

namespace qgemm {

__device__ inline void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

__device__ inline void st_relaxed_gpu(u32* to, u32 value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ inline u32 ld_acquire_gpu(const u32* from) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

}  // namespace qgemm

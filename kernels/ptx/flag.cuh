// Flags and counters in global memory for the CTAs of a grid: fence.acq_rel.gpu, st.relaxed.gpu, st.release.gpu,
// ld.acquire.gpu, atom.inc.relaxed.gpu, red.add.relaxed.gpu (sm_70 and later).
#pragma once

#include "types.cuh"

namespace qgemm {

__device__ inline void fence_acq_rel_gpu() {
#ifdef __CUDA_ARCH__
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
}

__device__ inline void st_relaxed_gpu(u32* to, u32 value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ inline void st_release_gpu(u32* to, u32 value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ inline u32 ld_acquire_gpu(const u32* from) {
#ifdef __CUDA_ARCH__
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
#else
    return *from;
#endif
}

// atom.inc: increments a counter, which returns to 0 after `last`, and returns its old value. ptxas would combine the
// atom.add of several lanes into one, followed by a shuffle that waits for it at once. It does the same to an atom.inc
// whose limit is the largest u32.
__device__ inline u32 atom_inc_relaxed_gpu(u32* to, u32 last) {
#ifdef __CUDA_ARCH__
    u32 before;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(last) : "memory");
#else
    const u32 before = *to;
    *to = before >= last ? 0 : before + 1;
#endif
    return before;
}

// red.add: adds without returning the old value.
__device__ inline void red_add_relaxed_gpu(u32* to, u32 value) {
#ifdef __CUDA_ARCH__
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
#else
    *to += value;
#endif
}

}  // namespace qgemm

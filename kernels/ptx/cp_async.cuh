// cp.async (sm_80 and later): each thread copies 16 bytes from global to shared memory.
#pragma once

#include "types.cuh"

namespace qgemm {

// Copies 16 bytes; writes zeros if not `inside`.
__device__ inline void cp_async_16(u32 to, const void* from, bool inside) {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
#else
    host_cp_async_16(to, from, inside);
#endif
}

// cp.async.mbarrier.arrive.noinc (sm_90): one arrival when the thread's earlier cp_async_16 are complete.
__device__ inline void cp_async_mbarrier_arrive(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// cp.async.commit_group: the thread's copies since its last commit become a group.
__device__ inline void cp_async_commit() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.commit_group;" ::: "memory");
#else
    host_cp_async_commit();
#endif
}

// cp.async.wait_group: waits until at most N of the thread's groups are pending.
template <int N>
__device__ inline void cp_async_wait() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#else
    host_cp_async_wait(N);
#endif
}

}  // namespace qgemm

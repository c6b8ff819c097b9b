// cp.async.bulk (sm_90 and later): copies from global to shared memory and back. Addresses and sizes are multiples of
// 16 bytes.
#pragma once

#include "types.cuh"

namespace qgemm {

// Called by one thread. The bytes complete at the mbarrier.
__device__ inline void cp_async_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Copies from shared to global memory, in a bulk group of the thread. Stores to the source must be made visible to
// asynchronous copies by fence_proxy_async_shared.
__device__ inline void cp_async_bulk_store(void* to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}

// cp.async.bulk.commit_group: the thread's bulk stores since its last commit become a group.
__device__ inline void cp_async_bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// cp.async.bulk.wait_group: waits until at most N of the thread's groups are pending; the stores of the others are
// visible.
template <int N>
__device__ inline void cp_async_bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// cp.async.bulk.wait_group.read: waits until the other groups have read their sources.
template <int N>
__device__ inline void cp_async_bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// fence.proxy.async: orders accesses to global memory, or to the CTA's shared memory, with asynchronous copies. Without
// a state space it would wait until the thread's stores are visible to the GPU.
__device__ inline void fence_proxy_async_global() {
#ifdef __CUDA_ARCH__
    asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}
__device__ inline void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// cp.async.bulk.prefetch.L2: fetches the bytes into the L2 cache, without a completion signal.
__device__ inline void cp_async_bulk_prefetch(const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

}  // namespace qgemm

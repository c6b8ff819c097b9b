// cp.async.bulk (sm_90 and later): global -> shared memory and back, both and the size multiples of 16 bytes.
#pragma once

#include "types.cuh"

namespace qgemm {

// Started by one thread; its bytes complete at the mbarrier.
__device__ inline void cp_async_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// The same from shared to global memory, in a bulk group of the thread. What was stored to shared memory before must be
// visible to asynchronous copies: fence_proxy_async_shared.
__device__ inline void cp_async_bulk_store(void* to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}

// cp.async.bulk.commit_group: the thread's bulk stores since the last commit are one group.
__device__ inline void cp_async_bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// cp.async.bulk.wait_group: at most N of the thread's groups are still under way, what the others wrote is there.
template <int N>
__device__ inline void cp_async_bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// The same, until what the others store is read from shared memory.
template <int N>
__device__ inline void cp_async_bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// fence.proxy.async: accesses to global memory, or to the CTA's shared memory, are ordered with asynchronous copies.
// Without the name of a memory it waits until the thread's stores are visible to the GPU.
__device__ inline void fence_proxy_async_global() {
#ifdef __CUDA_ARCH__
    asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}
__device__ inline void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// cp.async.bulk.prefetch.L2: the same bytes only to the L2 cache; nothing says when they are there.
__device__ inline void cp_async_bulk_prefetch(const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

}  // namespace qgemm

// cp.async.bulk (sm_90 and later): global -> shared memory, both and the size multiples of 16 bytes.
#pragma once

#include "../types.cuh"

namespace qgemm {

// Started by one thread; its bytes complete at the mbarrier.
__device__ inline void cp_async_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// cp.async.bulk.prefetch.L2: the same bytes only to the L2 cache; nothing says when they are there.
__device__ inline void cp_async_bulk_prefetch(const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

}  // namespace qgemm

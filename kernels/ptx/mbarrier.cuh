// mbarrier (sm_90 and later): barriers in shared memory that count arrivals and the bytes of copies.
#pragma once

#include "../types.cuh"

namespace qgemm {

// mbarrier.arrive: one arrival.
__device__ inline void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// mbarrier.try_wait.parity.acquire.cluster: until the phase of this parity completes; what a peer CTA stored is visible.
__device__ inline void mbarrier_wait_parity_cluster(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// fence.mbarrier_init: barriers initialised before are visible to asynchronous copies.
__device__ inline void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

}  // namespace qgemm

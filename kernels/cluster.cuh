// Pairs of CTAs (clusters of two; sm_90 and later), and stores from one to the shared memory of the other.
#pragma once

#include "types.cuh"

// A barrier of all threads of a pair but those that have ended. It says that one has read what the other may now replace,
// and orders no stores: a release waits until all of them are visible to the GPU.
__device__ inline void pair_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ inline void pair_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Where the other CTA has what lies at `address` here, for store_to_other.
__device__ inline u32 address_in_other(u32 address) {
    u32 found;
    asm volatile(
        "{ .reg .u32 rank;\n"
        "mov.u32 rank, %%cluster_ctarank;\n"
        "xor.b32 rank, rank, 1;\n"
        "mapa.shared::cluster.u32 %0, %1, rank; }"
        : "=r"(found)
        : "r"(address));
    return found;
}

// Its bytes report to a barrier of the other CTA, which waits for them by wait_for_other.
__device__ inline void store_to_other(u32 address, const float4& value, u32 barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
        "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
        : "memory");
}
__device__ inline void wait_for_other(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

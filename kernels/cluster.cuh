// Pairs of CTAs (clusters of two; sm_90 and later), and stores from one to the shared memory of the other.
#pragma once

#include "types.cuh"

// A barrier of all threads of a pair but those that have ended. It says that one has read what the other may now
// replace,
// and orders no stores: a release waits until all of them are visible to the GPU.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Where the other CTA has what lies at `address` here, for st_async_peer.
__device__ inline u32 mapa_peer(u32 address) {
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

// Its bytes report to a barrier of the other CTA, which waits for them by mbarrier_wait_parity_cluster.
__device__ inline void st_async_peer(u32 address, const float4& value, u32 barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
        "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
        : "memory");
}
__device__ inline void mbarrier_wait_parity_cluster(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

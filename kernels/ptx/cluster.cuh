// Clusters of CTAs (sm_90 and later): barrier.cluster, and stores to another CTA's shared memory (DSMEM); the peer is
// the other CTA of a cluster of two.
#pragma once

#include "types.cuh"

namespace qgemm {

// barrier.cluster.arrive.relaxed: orders no stores. It tells the peer that this CTA has read a buffer, which needs no
// release. A release would wait until all stores of the CTA are visible to the GPU.
__device__ inline void barrier_cluster_arrive() {
#ifdef __CUDA_ARCH__
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

// barrier.cluster.arrive.release: threads that wait see the earlier stores of this thread.
__device__ inline void barrier_cluster_arrive_release() {
#ifdef __CUDA_ARCH__
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

// barrier.cluster.wait: waits until all threads of the cluster that have not exited have arrived.
__device__ inline void barrier_cluster_wait() {
#ifdef __CUDA_ARCH__
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    host_barrier_cluster_wait();
#endif
}

// mapa: maps an address in this CTA's shared memory to the same place in the peer's.
__device__ inline u32 mapa_peer(u32 address) {
    u32 mapped;
    asm volatile(
        "{ .reg .u32 rank;\n"
        "mov.u32 rank, %%cluster_ctarank;\n"
        "xor.b32 rank, rank, 1;\n"
        "mapa.shared::cluster.u32 %0, %1, rank; }"
        : "=r"(mapped)
        : "r"(address));
    return mapped;
}

// st.shared::cluster: stores to the place in CTA `rank`'s shared memory that `address` is in this CTA's.
__device__ inline void st_shared_cluster(u32 address, int rank, float value) {
#ifdef __CUDA_ARCH__
    asm volatile(
        "{ .reg .u32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "st.shared::cluster.f32 [there], %2; }" ::"r"(address),
        "r"(rank), "f"(value)
        : "memory");
#else
    host_st_shared_cluster(address, rank, value);
#endif
}

// st.async: stores to the peer. The bytes complete at an mbarrier of the peer, which must wait by
// mbarrier_wait_parity_cluster.
__device__ inline void st_async_peer(u32 address, const float4& value, u32 barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
        "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
        : "memory");
}

// mbarrier.arrive: one arrival at the peer's mbarrier of this address. It is relaxed: it tells the peer that this
// thread has read a buffer. A release would wait until its stores are visible to the whole GPU, about 1000 clocks.
__device__ inline void mbarrier_arrive_peer(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapa_peer(barrier)) : "memory");
}

}  // namespace qgemm

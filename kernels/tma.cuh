// Boxes of a matrix -> shared memory by the tensor memory accelerator, sm_90 and later.
#pragma once

#include "pipeline.cuh"

// CUtensorMap, encoded by the host (qgemm/cuda/driver/tensor_map.py).
struct alignas(64) TensorMap {
    unsigned long long opaque[16];
};

// Fetches the map itself, so that the first copy does not wait for it.
__device__ inline void prefetch_tensormap(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The box whose first element is (row, column) -> shared memory, zeros beyond the matrix; its bytes report to the
// barrier.
__device__ inline void tma_load_2d(u32 to, const TensorMap* map, int row, int column, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            to),
        "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

__device__ inline void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Wait for `threads` threads of the CTA that name the same barrier, 0 to 15, by one and the same instruction.
__device__ inline void bar_sync(int name, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
// The same by instructions in several places, or be waited for.
__device__ inline void barrier_sync(int name, int threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
__device__ inline void barrier_arrive(int name, int threads) {
    asm volatile("barrier.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

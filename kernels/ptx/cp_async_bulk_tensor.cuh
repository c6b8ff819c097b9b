// cp.async.bulk.tensor (sm_90 and later): TMA, boxes of a matrix in global memory -> shared memory.
#pragma once

#include "host.cuh"

namespace qgemm {

// prefetch.tensormap: fetches the map itself, so that the first copy does not wait for it.
__device__ inline void prefetch_tensormap(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies the box whose first element is (row, column), zeros beyond the matrix. Its bytes complete at the mbarrier.
__device__ inline void tma_load_2d(u32 to, const TensorMap* map, int row, int column, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            to),
        "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

}  // namespace qgemm

// cp.async.bulk.tensor (sm_90 and later): TMA copies boxes of a matrix from global to shared memory.
#pragma once

#include "host.cuh"

namespace qgemm {

// prefetch.tensormap: fetches the map, so that the first copy does not wait for it.
__device__ inline void prefetch_tensormap(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies the box whose first element is (row, column), with zeros beyond the matrix. The bytes complete at the
// mbarrier.
__device__ inline void tma_load_2d(u32 to, const TensorMap* map, int row, int column, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            to),
        "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

// Copies the box to the same address in several CTAs of the cluster, and completes it at the mbarrier of each. ctas:
// mask of these CTAs.
__device__ inline void tma_load_2d_multicast(u32 to, const TensorMap* map, int row, int column, u32 barrier, u16 ctas) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(ctas)
        : "memory");
}

}  // namespace qgemm

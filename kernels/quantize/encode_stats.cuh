// Reduction of EncodeStats over a CTA: sums of squares of the error and of the values, and the first refused block.
#pragma once

#include "host.cuh"

namespace qgemm {

// The sum of squares, in float; in double where float overflows or underflows.
template <int SIZE>
__device__ inline double squares(const float (&values)[SIZE]) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < SIZE; ++j) sum += values[j] * values[j];
    if (1e-20f < sum && !isinf(sum)) return sum;
    double exact = 0;
    for (int j = 0; j < SIZE; ++j) exact += double(values[j]) * values[j];
    return exact;
}

__device__ inline void gather(EncodeStats& stats, const EncodeStats& other) {
    stats.error += other.error;
    stats.power += other.power;
    stats.refused = min(stats.refused, other.refused);
}

// Adds up the statistics of all threads of a CTA in a fixed order and stores them.
template <int WARPS_OF_CTA>
__device__ inline void store_stats(EncodeStats* __restrict__ stats, EncodeStats own) {
    __shared__ EncodeStats of_warps[WARPS_OF_CTA];
    for (int lanes = 16; lanes; lanes /= 2)
        gather(own, {__shfl_xor_sync(~0u, own.error, lanes), __shfl_xor_sync(~0u, own.power, lanes),
                     __shfl_xor_sync(~0u, own.refused, lanes)});
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = own;
    __syncthreads();
    if (threadIdx.x) return;
    for (int other = 1; other < WARPS_OF_CTA; ++other) gather(own, of_warps[other]);
    stats[blockIdx.x] = own;
}

}  // namespace qgemm

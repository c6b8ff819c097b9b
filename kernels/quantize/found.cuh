// What a CTA of an encoder finds: sums of squares of the error and of the values, and the first block that is refused.
#pragma once

#include "host.cuh"

namespace qgemm {

// The sum of squares, in float; in double where float overflows.
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

__device__ inline void gather(Found& found, const Found& other) {
    found.error += other.error;
    found.power += other.power;
    found.refused = min(found.refused, other.refused);
}

// Adds what all threads of a CTA found, in order.
template <int WARPS_OF_CTA>
__device__ inline void store_found(Found* __restrict__ found, Found mine) {
    __shared__ Found of_warps[WARPS_OF_CTA];
    for (int lanes = 16; lanes; lanes /= 2)
        gather(mine, {__shfl_xor_sync(~0u, mine.error, lanes), __shfl_xor_sync(~0u, mine.power, lanes),
                      __shfl_xor_sync(~0u, mine.refused, lanes)});
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = mine;
    __syncthreads();
    if (threadIdx.x) return;
    for (int other = 1; other < WARPS_OF_CTA; ++other) gather(mine, of_warps[other]);
    found[blockIdx.x] = mine;
}

}  // namespace qgemm

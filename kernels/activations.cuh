// Quantized activations of one token and one tile, in the order of the weights' codes. Twin of
// qgemm/cuda/layout/activations.py.
#pragma once

#include "host.cuh"
#include "types.cuh"

namespace qgemm {

struct Activations {
    signed char q[X_COLUMNS];  // of each block: lane t's columns 2t, 2t + 8, 2t + 1, 2t + 9 of its two steps
    half2 ds[X_COLUMNS / 32];  // of each block: its scale d, and s = d * sum(q)
    u32 padding[2];            // zero, to a multiple of 16 bytes: kernels copy it as well
};
static_assert(sizeof(Activations) == ACTIVATION_BYTES, "Activations differs from its dtype");

// Where column `column` of a block lies among its codes.
__device__ inline int code_offset(int column) {
    const int step = column / 16, half_step = column / 8 % 2, t = column / 2 % 4, odd = column % 2;
    return 8 * t + 4 * step + half_step + 2 * odd;
}

// Whether x comes as such.
template <class In>
constexpr bool PREPARED = false;
template <>
constexpr bool PREPARED<Activations> = true;

}  // namespace qgemm

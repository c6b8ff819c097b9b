// Quantized activations (qgemm::Activations of host.cuh), in the order of the weights' codes:
// qgemm/cuda/layout/q8_1_k_blocks.py.
#pragma once

#include "host.cuh"
#include "types.cuh"

namespace qgemm {

// The index of column `column` among the codes of a block.
__device__ inline int code_offset(int column) {
    const int step = column / 16, half_step = column / 8 % 2, t = column / 2 % 4, odd = column % 2;
    return 8 * t + 4 * step + half_step + 2 * odd;
}

// Whether x is quantized activations.
template <class In>
constexpr bool PREPARED = false;
template <>
constexpr bool PREPARED<Activations> = true;

}  // namespace qgemm

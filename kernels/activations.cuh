// Quantized activations (qgemm::Activations of host.cuh): their order is that of the weights' codes,
// qgemm/cuda/layout/activations.py.
#pragma once

#include "host.cuh"
#include "types.cuh"

namespace qgemm {

// Where column `column` of a block lies among its codes.
__device__ inline int code_offset(int column) {
    const int step = column / 16, half_step = column / 8 % 2, t = column / 2 % 4, odd = column % 2;
    return 8 * t + 4 * step + half_step + 2 * odd;
}

// Whether x comes as quantized activations.
template <class In>
constexpr bool PREPARED = false;
template <>
constexpr bool PREPARED<Activations> = true;

}  // namespace qgemm

// Signed codes of eight bits with a float32 scale of each block: a family whose formats/NAME.cuh are generated
// (qgemm/cuda/jit/codegen.py). Twin of qgemm/formats/i8_levels.py.
#pragma once

#include "codes/signed_bytes.cuh"

namespace qgemm {

template <class Fields>
struct FloatScales : SignedBytes<Fields> {
    static constexpr bool HAS_MINIMUM = false, GROUP_ZERO = false;

    __device__ float2 scale(int m16, int g, int index) const {
        return *reinterpret_cast<const float2*>(this->d[m16][g][index]);
    }
    __device__ float2 minimum(int, int, int) const { return {}; }
};

}  // namespace qgemm

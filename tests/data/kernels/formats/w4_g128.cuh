// w4_g128:  w = d * (q - z),  q in 0..15, z an integer a group of 128.       Twin of tests/formats_of_tests.py.
#pragma once

#include "codes/half_scales.cuh"
#include "codes/nibbles.cuh"
#include "tiles/w4_g128.cuh"

namespace qgemm {

template <int M16_TILES>
struct w4_g128 : Nibbles<HalfScales<w4_g128_fields<M16_TILES>>, 0> {
    static constexpr bool HAS_MINIMUM = true;  // -d * z: a zero of each group is a minimum

    __device__ float2 minimum(int m16, int g, int index) const {
        const u8(&z)[2] = this->z[m16][g][index];
        const float2 d = this->scale(m16, g, index);
        return multiply_rounded({-d.x, -d.y}, {float(z[0]), float(z[1])});
    }
};

}  // namespace qgemm

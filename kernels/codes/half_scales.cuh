// Scales that are halves in a field d, minimums that are halves in a field m.
#pragma once

#include "fragment.cuh"

namespace qgemm {

// The halves of rows g and g + 8.
__device__ inline half2 half_pair(const half (&pair)[2]) { return *reinterpret_cast<const half2*>(pair); }
__device__ inline float2 row_pair(const half (&pair)[2]) { return __half22float2(half_pair(pair)); }

// a * b, each product rounded once, as NumPy rounds float32 products.
__device__ inline float2 multiply_rounded(float2 a, float2 b) { return {__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y)}; }

template <class Fields>
struct HalfScales : Fields {
    static constexpr bool HAS_MINIMUM = false;
    static constexpr bool GROUP_ZERO = false;  // the minimum is not -d times a half_zero(m16, g, index) of each group

    __device__ half2 half_scale(int m16, int g, int index) const { return half_pair(this->d[m16][g][index]); }
    __device__ half2 half_minimum(int, int, int) const { return {}; }
    __device__ float2 scale(int m16, int g, int index) const { return row_pair(this->d[m16][g][index]); }
    __device__ float2 minimum(int, int, int) const { return {}; }
};

template <class Fields>
struct HalfMinimums : HalfScales<Fields> {
    static constexpr bool HAS_MINIMUM = true;

    __device__ half2 half_minimum(int m16, int g, int index) const { return half_pair(this->m[m16][g][index]); }
    __device__ float2 minimum(int m16, int g, int index) const { return row_pair(this->m[m16][g][index]); }
};

// d of a super-block times an integer of each group, sub_scale() of Fields; no minimums.
template <class Fields>
struct SuperScales : Fields {
    static constexpr bool HAS_MINIMUM = false;

    __device__ half2 half_scale(int m16, int g, int) const { return half_pair(this->d[m16][g][0]); }
    __device__ float2 scale(int m16, int g, int index) const {
        return multiply_rounded(__half22float2(half_scale(m16, g, index)),
                                __half22float2(this->sub_scale(m16, g, index, __float2half2_rn(1))));
    }
    __device__ float2 minimum(int, int, int) const { return {}; }
    __device__ half2 half_minimum(int, int, int) const { return {}; }
    __device__ half2 sub_minimum(int, int, int, half2) const { return {}; }
};

// d and dmin of a super-block times integers of each group, sub_scale() and sub_minimum() of Fields:
// w = d * sc * level - dmin * m.
template <class Fields>
struct SuperMinimums : Fields {
    static constexpr bool HAS_MINIMUM = true;

    __device__ half2 half_scale(int m16, int g, int) const { return half_pair(this->d[m16][g][0]); }
    __device__ half2 half_minimum(int m16, int g, int) const { return __hneg2(half_pair(this->dmin[m16][g][0])); }
    __device__ float2 scale(int m16, int g, int index) const {
        return multiply_rounded(__half22float2(half_scale(m16, g, index)),
                                __half22float2(this->sub_scale(m16, g, index, __float2half2_rn(1))));
    }
    __device__ float2 minimum(int m16, int g, int index) const {
        return multiply_rounded(super_minimum(m16, g),
                                __half22float2(this->sub_minimum(m16, g, index, __float2half2_rn(1))));
    }
    __device__ float2 super_minimum(int m16, int g) const { return __half22float2(half_minimum(m16, g, 0)); }
};

// Integers m below 128 of groups 2 p and 2 p + 1, bytes 0 and 1 of row g, 2 and 3 of row g + 8 -> bf16 pairs of row g
// and of row g + 8.
__device__ inline void minimum_pairs(u32 (&pairs)[2], u32 minimums) {
#pragma unroll
    for (int row = 0; row < 2; ++row) pairs[row] = bf16_numbers(__byte_perm(minimums, 0, row ? 0x4342 : 0x4140), 0);
}

}  // namespace qgemm
